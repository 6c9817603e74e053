"""Schedules that split backwards, so that gradients of weights fill the bubble.

In the drawings F is a forward. I makes the gradients of a stage's inputs, for which the stage before waits; W makes
those of its weights. A column is a moment.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipe.pipeline.schedule import (
    Kind,
    Rematerialization,
    Rematerialize,
    StepSchedule,
    Task,
    check_stages_per_device,
    gpipe,
    with_recomputations,
)


def split_gpipe(
    num_stages: int,
    num_microbatches: int,
    rematerialize: Rematerialization = Rematerialize.ALWAYS,
    stages_per_device: int = 1,
) -> StepSchedule:
    """Return GPipe's schedule with split backwards: gradients of weights are made while those of inputs travel.

        stage 0   F0 F1 F2             I2 W2 I1 W1 I0 W0
        stage 1      F0 F1 F2       I2 W2 I1 W1 I0 W0
        stage 2         F0 F1 F2 I2 W2 I1 W1 I0 W0

    It needs as much memory as GPipe. The bubble is smaller: gradients go down the stages in half the time.
    """
    check_stages_per_device("split_gpipe", num_stages, stages_per_device)
    whole = gpipe(num_stages, num_microbatches, rematerialize)
    return [[part for task in tasks for part in _split(task)] for tasks in whole]


def zero_bubble_h1(
    num_stages: int,
    num_microbatches: int,
    rematerialize: Rematerialization = Rematerialize.ALWAYS,
    stages_per_device: int = 1,
) -> StepSchedule:
    """Return ZB-H1: 1F1B with split backwards; gradients of weights wait until a stage would otherwise be idle.

        stage 0   F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
        stage 1      F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        stage 2         F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Its bubble is a third of 1F1B's if the three parts take equally long. Each stage holds at most K micro-batches, as
    1F1B's first stage does (Qi et al., 2024, "Zero Bubble Pipeline Parallelism", section 2.1).
    """
    check_stages_per_device("zb_h1", num_stages, stages_per_device)
    later = num_microbatches - num_stages  # letters below 0 times are none
    schedule = []
    for stage in range(num_stages):
        after = num_stages - stage
        letters = "F" * after + "IF" * stage + "IWF" * later + "IW" * after + "W" * stage
        schedule.append(with_recomputations(_read(letters, [stage], num_microbatches), rematerialize))
    return schedule


def zero_bubble_v(
    num_stages: int,
    num_microbatches: int,
    rematerialize: Rematerialization = Rematerialize.ALWAYS,
    stages_per_device: int = 2,
) -> StepSchedule:
    """Return ZB-V: two stages per device, which go down the devices and back up in a V; nearly no bubble.

    K = 4 stages on P = 2 devices, M = 4; small letters are the devices' second stages, 3 on device 0 and 2 on device 1:

        device 0   F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3
        device 1      F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3

    The last stage is on device 0, where the first backward directly follows its forward. A device holds at most 2 P
    micro-batches, each of half its layers: as much as 1F1B's first stage (the same paper, section 6). It is made for at
    least 2 P - 1 micro-batches; with fewer, devices wait where the others would run.
    """
    check_stages_per_device("zb_v", num_stages, stages_per_device)
    num_devices = num_stages // 2
    num_planned = max(num_microbatches, 2 * num_devices - 1)
    schedule = []
    for device in range(num_devices):
        after = num_devices - device  # with itself
        letters = "F" * (2 * after - 1) + "fF" * device + "fiw" * after
        letters += "FIWfiw" * (num_planned - num_devices - after + 1) + "IWfiw" * (after - 1)
        letters += "Ii" * device + "IW" * after
        letters += "".join(letter * (num_planned - letters.count(letter)) for letter in "wW")
        tasks = _read(letters, [device, num_stages - 1 - device], num_microbatches)
        schedule.append(with_recomputations(tasks, rematerialize))
    return schedule


def _split(task: Task) -> list[Task]:
    """Return the two parts of a backward; any other task as it is."""
    if task.kind is not Kind.BACKWARD:
        return [task]
    return [task._replace(kind=Kind.INPUT_GRADIENTS), task._replace(kind=Kind.WEIGHT_GRADIENTS)]


_LETTERS = {"F": Kind.FORWARD, "I": Kind.INPUT_GRADIENTS, "W": Kind.WEIGHT_GRADIENTS}


def _read(letters: str, stages: Sequence[int], num_microbatches: int) -> list[Task]:
    """Return a device's tasks from a drawing without numbers: the n-th of a letter is for micro-batch n.

    Small letters are of the second stage. Letters beyond the last micro-batch are left out.
    """
    tasks = [
        Task(_LETTERS[letter.upper()], stages[letter.islower()], letters[:position].count(letter))
        for position, letter in enumerate(letters)
    ]
    return [task for task in tasks if task.micro_batch < num_microbatches]
