"""From a trained translation model to text and its scores; needs fairseq, sacreBLEU, and nothing of the pipeline."""
