"""Translate with a trained model, and score translations.

beam_search.py       fairseq's search; fairseq_model.py shows it our layers, cached_layer.py decodes one position
scores.py            BLEU and chrF; resource_groups.py groups languages by their number of training pairs
"""
