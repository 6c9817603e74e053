"""Settings as the command line composes them, or the message with which they are refused."""

from functools import cache

import pytest
from hydra import compose
from hydra.errors import HydraException
from omegaconf import DictConfig

from gpipe.config import (
    ConfigError,
    RunConfig,
    to_run,
)


def composed(*overrides: str) -> DictConfig:
    return compose("train", overrides=list(overrides))


@cache
def run_of(*overrides: str) -> RunConfig:
    return to_run(composed(*overrides))


def refusal_of(*overrides: str) -> str:
    """Return the message with which a setting is refused, at composition or when the dataclasses are made."""
    with pytest.raises((HydraException, ConfigError)) as caught:
        run_of(*overrides)
    return f"{caught.value} {caught.value.__cause__ or ''}"
