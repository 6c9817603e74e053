"""Fill in the null settings that the data or the model determines."""

from dataclasses import replace
from typing import Any, TypeVar

from gpipe.config import (
    ConfigError,
    ImagesConfig,
    ImageTableConfig,
    Interpolation,
    OwnImagesConfig,
    RunConfig,
    TextFolderConfig,
    TimmConfig,
)
from gpipe.data import DataMissing, check_data, count_classes, open_text_tokenizer, tell_several_labels

_Run = TypeVar("_Run", bound=RunConfig)


def check_run_data(run: RunConfig) -> None:
    """Refuse a run's data if they are missing or wrong, in well under a second."""
    data = run.data
    share = data.validation_share if isinstance(data, OwnImagesConfig | TextFolderConfig) else None
    check_data(data.name, data.root, getattr(data, "num_classes", None), share, getattr(data, "languages", None))


def refuse_too_few_images(run: RunConfig) -> None:
    """Refuse to train on fewer images than a mini-batch has, without looking at the data."""
    most = run.data.max_images if isinstance(run.data, ImagesConfig) else None
    if most is not None and most < run.trainer.batch_size:
        raise ConfigError(
            f"data.max_images is {most}, expected {run.trainer.batch_size} or more, which is trainer.batch_size: raise "
            "it, or lower trainer.batch_size."
        )


def complete(run: _Run) -> _Run:
    """Return the settings with the number of classes or tokens, and with what a timm model expects of images.

    timm takes seconds to load, and is loaded for its own models only.
    """
    data = run.data
    if isinstance(data, TextFolderConfig) and data.vocabulary_size is None:
        size = open_text_tokenizer(data.tokenizer).vocabulary_size
        return replace(run, data=replace(data, vocabulary_size=size))
    if not isinstance(data, ImagesConfig):
        return run
    found: dict[str, Any] = {}
    if data.num_classes is None:
        try:
            found["num_classes"] = count_classes(data.name, data.root)
        except DataMissing as error:
            first, _, _ = str(error).partition("\n")
            raise ConfigError(
                f"data.num_classes is null, and the classes cannot be counted ({first}): set it."
            ) from None
    if isinstance(data, ImageTableConfig) and data.several_labels is None:
        found["several_labels"] = tell_several_labels(data.name, data.root)
    if isinstance(run.model, TimmConfig):
        found |= _timm_settings(run.model.name, data)
    return replace(run, data=replace(data, **found)) if found else run


def without_fetching(run: RunConfig) -> RunConfig:
    """Return the settings for a model whose weights come from a checkpoint, so that timm downloads none."""
    if isinstance(run.model, TimmConfig):
        return replace(run, model=replace(run.model, pretrained=False))
    return run


def _timm_settings(name: str, data: ImagesConfig) -> dict[str, Any]:
    from gpipe.models.timm_models import check_timm_name, data_settings

    try:
        check_timm_name(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    own = data_settings(name, data.channels)
    own["interpolation"] = Interpolation(own["interpolation"])
    return {key: value for key, value in own.items() if getattr(data, key) is None}
