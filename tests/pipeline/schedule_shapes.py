"""Schedules for property tests, and tasks as they are drawn."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from gpipe.pipeline.schedule import Kind, Rematerialization, Rematerialize, StepSchedule, Task, inference
from gpipe.pipeline.schedules.choice import SCHEDULES, place_stages

LETTERS = dict(zip("FRBIW", Kind, strict=True))
STAGES_PER_DEVICE = {"interleaved_1f1b": (2, 4), "zb_v": (2, 2)}


@dataclass(frozen=True)
class Shape:
    """A schedule of P devices with v stages each, and M micro-batches."""

    name: str
    num_devices: int
    stages_per_device: int
    num_microbatches: int
    mode: Rematerialization

    @property
    def num_stages(self) -> int:
        return self.num_devices * self.stages_per_device

    def schedule(self) -> StepSchedule:
        return SCHEDULES[self.name](self.num_stages, self.num_microbatches, self.mode, self.stages_per_device)

    def inference(self) -> StepSchedule:
        return inference(self.placement, self.num_microbatches)

    @property
    def placement(self) -> tuple[int, ...]:
        return place_stages(self.name, self.num_stages, self.stages_per_device)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Draw a schedule of up to 6 devices."""
    name = draw(st.sampled_from(list(SCHEDULES)))
    stages_per_device = draw(st.integers(*STAGES_PER_DEVICE.get(name, (1, 1))))
    mode = draw(st.sampled_from(Rematerialize))
    return Shape(name, draw(st.integers(1, 6)), stages_per_device, draw(st.integers(1, 14)), mode)


def tasks(text: str, stage: int, num_devices: int = 0) -> list[Task]:
    """Read tasks as they are drawn: F0 R0 B0; small letters are the device's second stage."""
    return [
        Task(LETTERS[word[0].upper()], stage + num_devices * word[0].islower(), int(word[1:])) for word in text.split()
    ]
