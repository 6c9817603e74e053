"""Models as plain sequences of layers; importing this package also registers the AmoebaNets with timm.

amoebanet.py      the sequence of layers. Its parts: amoebanet_cells.py, amoebanet_operations.py,
                  amoebanet_heads.py (stem and heads), amoebanet_genotypes.py (the cells as a table)
transformer.py    the language model. Its parts: transformer_layers.py, attention.py
translation.py    encoder and decoder as one sequence. Its parts: translation_layers.py, attention.py

Models of other libraries: timm_models.py, transformers_models.py. AmoebaNets in timm: amoebanet_timm.py. All use
linear.py and checks.py.
"""

import gpipe._compat.torchvision  # first, because timm imports torchvision
import gpipe.models.amoebanet_timm  # noqa: F401  (registers the models)
from gpipe.models.amoebanet import AmoebaNet, amoebanet_a, amoebanet_b, amoebanet_c, amoebanet_d
from gpipe.models.amoebanet_cells import set_drop_path
from gpipe.models.amoebanet_heads import count_auxiliary_parameters
from gpipe.models.linear import softmax_names
from gpipe.models.transformer import transformer_lm
from gpipe.models.translation import translation_transformer

__all__ = [
    "AmoebaNet",
    "amoebanet_a",
    "amoebanet_b",
    "amoebanet_c",
    "amoebanet_d",
    "count_auxiliary_parameters",
    "set_drop_path",
    "softmax_names",
    "transformer_lm",
    "translation_transformer",
]
