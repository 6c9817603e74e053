"""1F1B and its interleaved form: a device alternates forwards and backwards, and holds fewer micro-batches.

In the drawings F is a forward, R a recomputation, B a backward. A column is a moment.
"""

from __future__ import annotations

from gpipe.pipeline.schedule import (
    Kind,
    Rematerialization,
    Rematerialize,
    StepSchedule,
    check_stages_per_device,
    in_rounds,
    with_recomputations,
)


def one_forward_one_backward(
    num_stages: int,
    num_microbatches: int,
    rematerialize: Rematerialization = Rematerialize.ALWAYS,
    stages_per_device: int = 1,
) -> StepSchedule:
    """Return 1F1B: once a stage can run a backward, it alternates forwards and backwards (PipeDream-flush).

        stage 0   F0 F1 F2 R0       B0 F3 R1 B1 R2    B2 R3    B3
        stage 1      F0 F1 R0    B0 F2 R1 B1 F3 R2 B2 R3    B3
        stage 2         F0 R0 B0 F1 R1 B1 F2 R2 B2 F3 R3 B3

    The bubble is GPipe's, but stage k holds at most K - k micro-batches instead of M (Narayanan et al., 2021,
    "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2.1).
    """
    check_stages_per_device("1f1b", num_stages, stages_per_device)
    return _in_turns(num_stages, num_microbatches, rematerialize, num_devices=num_stages, eagerness=1)


def interleaved_one_forward_one_backward(
    num_stages: int,
    num_microbatches: int,
    rematerialize: Rematerialization = Rematerialize.ALWAYS,
    stages_per_device: int = 2,
) -> StepSchedule:
    """Return interleaved 1F1B: with v stages per device, the bubble is v times smaller (the same paper, section 2.2.2).

    K = 4 stages on P = 2 devices, M = 4, no recomputation; small letters are the devices' second stages, 2 and 3:

        device 0   F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1    b2    b3 B2 B3
        device 1      F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3

    Micro-batches go in rounds of at most P: each device runs a round through its first stage, then through its second.
    If M is not a multiple of P, the last round is smaller, and a device runs fewer forwards ahead: Megatron's number
    assumes full rounds, and devices would wait for each other for ever.
    """
    check_stages_per_device("interleaved_1f1b", num_stages, stages_per_device)
    num_devices = num_stages // stages_per_device
    # Running ahead hides the transfers, at the cost of memory.
    eagerness = 2 if num_microbatches % num_devices == 0 else 1
    return _in_turns(num_stages, num_microbatches, rematerialize, num_devices=num_devices, eagerness=eagerness)


def _in_turns(
    num_stages: int, num_microbatches: int, rematerialize: Rematerialization, *, num_devices: int, eagerness: int
) -> StepSchedule:
    """Return each device's first forwards, then forwards and backwards in turn, then the remaining backwards.

    The last device runs ahead through all its stages but one; each earlier device runs `eagerness` more forwards ahead.
    """
    schedule = []
    for device in range(num_devices):
        stages = range(device, num_stages, num_devices)
        forwards = in_rounds(Kind.FORWARD, stages, num_microbatches, num_devices)
        backwards = in_rounds(Kind.BACKWARD, stages[::-1], num_microbatches, num_devices)
        ahead = (len(stages) - 1) * num_devices + eagerness * (num_devices - 1 - device)
        tasks = forwards[:ahead]
        for position, backward in enumerate(backwards, ahead):
            tasks += [*forwards[position : position + 1], backward]
        schedule.append(with_recomputations(tasks, rematerialize))
    return schedule
