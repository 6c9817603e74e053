"""Explain what is wrong with a file of the user's own for a group of settings.

A file for `data`, `model` or `optimizer` has the settings of one kind only: of images or of text, for example. It
inherits them from a file of that kind. Without that, Hydra would refuse correct settings as unknown.
"""

from typing import Any

from hydra.errors import ConfigCompositionException
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from gpipe.config.checks import why
from gpipe.config.data import DataConfig
from gpipe.config.model import ModelConfig
from gpipe.config.training import OptimizerConfig

_PARENTS: dict[Any, str] = {
    DataConfig: "image_folder or parallel_text",
    ModelConfig: "amoebanet_d",
    OptimizerConfig: "adamw",
}


def explain_file(error: ConfigCompositionException) -> ConfigCompositionException:
    """Return Hydra's error about a file as one sentence; it says what the file should inherit, where that helps."""
    fault = error.__context__
    if not isinstance(fault, OmegaConfBaseException):
        return error
    place, _, _ = str(error).partition(": ")
    parents = _PARENTS.get(fault.object_type) if isinstance(fault, ConfigKeyError) else None
    if parents is None:
        return ConfigCompositionException(f"{place}: {fault.full_key or 'the file'}: {why(fault)}: correct it there.")
    return ConfigCompositionException(
        f"{place}: {fault.full_key} is known only in a file that inherits from another one of its kind: begin it with "
        f"`defaults: [<parent>, _self_]`, where <parent> is a file such as {parents}."
    )
