"""Every setting of a run, declared and checked; the values are in conf/. Nothing here imports torch.

A field that can change a result has no default in Python (MISSING): every such value stands in conf/. Hydra refuses
unknown keys and wrong types while it composes; `to_run` refuses wrong values when it builds the dataclasses.

    run.py               a whole run: data.py, model.py, pipeline.py and training.py have its parts
    plan.py, predict.py, translate.py    the other programs
    checks.py            one sentence per error
    gate.py              no file or code is named, no secret read; endless_files.py, no file without an end
    group_files.py       a chosen file of a group replaces what was set before
    literally.py         words that Hydra must not interpret
    folders.py           names of the folders of runs
    composed.py          settings without a run
    saved.py             those of an earlier run; evaluated.py, those of its evaluation
"""

from gpipe.config.checks import ConfigError as ConfigError
from gpipe.config.composed import compose_plain as compose_plain
from gpipe.config.composed import name_sources as name_sources
from gpipe.config.data import ImagesConfig as ImagesConfig
from gpipe.config.data import ImageTableConfig as ImageTableConfig
from gpipe.config.data import Interpolation as Interpolation
from gpipe.config.data import OwnImagesConfig as OwnImagesConfig
from gpipe.config.data import RandomTokensConfig as RandomTokensConfig
from gpipe.config.data import TextFolderConfig as TextFolderConfig
from gpipe.config.data import TokensConfig as TokensConfig
from gpipe.config.data import TranslationDataConfig as TranslationDataConfig
from gpipe.config.model import AmoebaNetConfig as AmoebaNetConfig
from gpipe.config.model import ModelConfig as ModelConfig
from gpipe.config.model import TiedTables as TiedTables
from gpipe.config.model import TimmConfig as TimmConfig
from gpipe.config.model import TransformerLMConfig as TransformerLMConfig
from gpipe.config.model import TransformersConfig as TransformersConfig
from gpipe.config.model import TranslationModelConfig as TranslationModelConfig
from gpipe.config.pipeline import Device as Device
from gpipe.config.pipeline import PartitionBy as PartitionBy
from gpipe.config.pipeline import RematerializeChoice as RematerializeChoice
from gpipe.config.run import RunConfig as RunConfig
from gpipe.config.run import read_yaml as read_yaml
from gpipe.config.run import register_schemas as register_schemas
from gpipe.config.run import to_plain as to_plain
from gpipe.config.run import to_run as to_run
from gpipe.config.run import to_yaml as to_yaml
from gpipe.config.training import Autocast as Autocast
from gpipe.config.training import Decay as Decay
from gpipe.config.training import OptimizerConfig as OptimizerConfig
from gpipe.config.training import Resume as Resume
from gpipe.config.training import TrainerConfig as TrainerConfig
