"""The settings of plan.py: those of a run, an accelerator, and what to look for."""

from dataclasses import dataclass
from enum import StrEnum

from omegaconf import MISSING

from gpipe.config.checks import MOST_PROCESSES, ConfigError, positive, share, within
from gpipe.config.run import RunConfig

# What plan.py looks for: the largest model that fits, by one of its sizes.
Find = StrEnum("Find", ["num_layers", "num_filters"])


@dataclass
class PlanConfig(RunConfig):
    """A run, and the accelerators that its stages would have.

    device: the name of an accelerator; auto is the one at hand, for which train.py plans.
    memory_gib, link_gb_per_second: replace the maker's figures; null keeps them.
    efficiency: the share of the maker's peak arithmetic and memory speeds that real work reaches.
    find: null plans the run as it is.
    calibrate: measure the layers on this machine first, and keep the seconds for later plans and runs.
    num_devices: the devices of all replicas together, for pipeline=auto; null is the number on this machine.
    """

    device: str = MISSING
    memory_gib: float | None = positive()
    link_gb_per_second: float | None = positive()
    efficiency: float = share("a share")
    find: Find | None = MISSING
    num_devices: int | None = within(1, MOST_PROCESSES)
    calibrate: bool = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.calibrate and self.device != "auto":
            raise ConfigError(
                f"calibrate is true, but device is {self.device}: measure on a machine that has one, with device=auto."
            )
