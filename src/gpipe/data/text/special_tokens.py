"""The tokens that every vocabulary begins with, in the order of fairseq's Dictionary.

So the ids of a SentencePiece model trained here are the ids of the fairseq Dictionary with the same pieces.
"""

BEGIN = 0
PADDING = 1
END = 2
UNKNOWN = 3
NUM_SPECIAL = 4
