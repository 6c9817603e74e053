"""Translate text with a trained model and score it; needs fairseq and sacreBLEU, but no pipeline."""
