"""Build timm's models by name, with the image settings that they expect and errors that say what to set."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import timm
import torch
from timm.data.config import resolve_data_config
from timm.models import get_pretrained_cfg
from torch import nn


def check_timm_name(name: str) -> None:
    """Raise ValueError for a model, or a tag of pre-trained weights, that timm does not have."""
    model = name.partition(".")[0]
    if not timm.is_model(name):
        close = get_close_matches(model, timm.list_models(), n=3)
        such_as = ", ".join(close or ["resnet50", "vit_small_patch16_224"])
        raise ValueError(
            f"model.name is {name}, which timm {timm.__version__} does not have: choose another, such as {such_as}."
        )
    tags = timm.list_pretrained(f"{model}.*")
    if "." in name and name not in tags:
        choice = f"one of {', '.join(tags)}, or " if tags else ""
        raise ValueError(
            f"model.name is {name}, but timm has no such pre-trained weights: set {choice}model.name={model}."
        )


def data_settings(name: str, channels: int) -> dict[str, Any]:
    """Return the settings of images, by their names in conf/data, that a model expects for this number of channels.

    Without keep_aspect, timm squashes the image. Grey images get the averages over the colours.
    """
    found = resolve_data_config(pretrained_cfg=_describe(name).to_dict(), verbose=False)  # type: ignore[no-untyped-call]  # timm's
    moments = {
        key: list(found[key]) if len(found[key]) == channels else [sum(found[key]) / len(found[key])] * channels
        for key in ("mean", "std")
    }
    return {
        "image_size": found["input_size"][-1],
        "center_crop": found["crop_pct"],
        "keep_aspect": found["crop_mode"] != "squash",
        "interpolation": "bilinear" if found["interpolation"] == "bilinear" else "bicubic",
        **moments,
    }


def _describe(name: str) -> Any:
    found = get_pretrained_cfg(name)
    assert found is not None, name  # check_timm_name has refused unknown names
    return found


def make_timm_model(
    name: str,
    *,
    num_classes: int,
    channels: int,
    image_size: int,
    pretrained: bool,
    arguments: Mapping[str, Any],
    seed: int,
) -> nn.Module:
    """Make a model on the CPU, with the same initial weights in every process; the global generator stays as it was.

    Args:
        name: timm's name.
        num_classes: the data's. If pre-trained weights are for another number of classes, the softmax layer is new.
        channels: the data's.
        image_size: pixels per side, for models of a fixed size.
        pretrained: let timm download weights.
        arguments: further arguments for timm.
        seed: the seed of the initial weights.

    Raises:
        ValueError: timm refuses it, or cannot download the weights.
    """
    options: dict[str, Any] = {"num_classes": num_classes, "in_chans": channels, **arguments}
    if _describe(name).fixed_input_size:
        options["img_size"] = image_size
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # hides its retries; its errors are reported below
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: nn.Module = timm.create_model(name, pretrained=pretrained, **options)
        except Exception as error:  # architectures, and the hub, may raise anything
            reason = (str(error) or type(error).__name__).partition("\n")[0]
            if pretrained and isinstance(error, OSError | RuntimeError):
                raise ValueError(
                    f"model.pretrained is true, but timm cannot fetch weights of {name} ({reason}): set "
                    "model.pretrained=false, and init_from=<file>.safetensors for weights that you have."
                ) from error
            raise ValueError(
                f"model.name is {name}, which timm cannot build for data.image_size={image_size}, "
                f"data.channels={channels} and model.arguments={dict(arguments)} ({reason}): set one of them."
            ) from error
    return model


def head_names(name: str) -> tuple[str, ...]:
    """Return the names of a model's modules whose size is the number of classes."""
    head = _describe(name).classifier or ()
    return (head,) if isinstance(head, str) else tuple(head)
