"""Translate with a trained model, and score the result. This needs fairseq and sacreBLEU, but no pipeline."""
