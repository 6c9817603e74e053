"""Translate with a trained model and score the result; needs fairseq and sacreBLEU, but no pipeline."""
