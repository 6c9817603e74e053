"""A lower bound of a step's seconds, for any cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from gpipe.pipeline.schedule import Kind, Rematerialize
from gpipe.pipeline.schedules.choice import SPLIT_SCHEDULES
from gpipe.planning.accelerator import LayerSeconds, Speed
from gpipe.planning.profile import LayerProfile
from gpipe.planning.step import Setting

_ROUNDS = 30  # of bisection; then the bound is exact to nine digits


def bound_step(
    profiles: Sequence[LayerProfile], seconds: Sequence[LayerSeconds], setting: Setting, speed: Speed
) -> float:
    """Return the lower bound; profiles and seconds are of each layer and the loss, with the largest micro-batch.

    A device cannot begin before a micro-batch has passed the stages before it, and after its last backward the gradient
    has to go back through them; in between it does all of its tasks. Gradients of weights may be made on that way back.
    Transfers, and recomputations that memory forces, are not counted.
    """
    num_devices = setting.num_stages // setting.stages_per_device
    merged = [*seconds[:-2], LayerSeconds.add_up(seconds[-2:])]
    is_split = setting.schedule in SPLIT_SCHEDULES
    backward = Kind.INPUT_GRADIENTS if is_split else Kind.BACKWARD
    again = Kind.RECOMPUTE if setting.rematerialize is Rematerialize.ALWAYS else None
    there = [layer.forward for layer in merged]
    back = [layer.of(backward) for layer in merged]
    early = [layer.forward + layer.of(backward) + (layer.of(again) if again else 0.0) for layer in merged]
    late = [layer.weights if is_split else 0.0 for layer in merged]
    tasks = setting.num_microbatches * (sum(early) + sum(late))
    least = max(tasks / num_devices, sum(there) + sum(back))
    if setting.stages_per_device == 1:
        least = _balance(there, back, early, late, setting.num_microbatches, num_devices, least)
    return least + _bound_ends(profiles, setting, speed, num_devices)


def _balance(
    there: Sequence[float],
    back: Sequence[float],
    early: Sequence[float],
    late: Sequence[float],
    num_microbatches: int,
    num_devices: int,
    least: float,
) -> float:
    """Return the least time, to nine digits, in which consecutive stages can do their tasks if links took no time."""
    sums = [list(accumulate(values, initial=0.0)) for values in (there, back, early, late)]

    def suffices(limit: float) -> bool:
        """Return whether all layers fit when each stage gets as many as it can do in time."""
        end = 0
        for _ in range(num_devices):
            start = end
            before, after, done, left = (values[start] for values in sums)
            while end < len(there):
                own = num_microbatches * (sums[2][end + 1] - done)
                waiting = num_microbatches * (sums[3][end + 1] - left)
                if before + own + max(waiting, after) > limit:
                    break
                end += 1
        return end == len(there)

    if suffices(least):
        return least
    good = num_microbatches * (sums[2][-1] + sums[3][-1]) + sums[0][-1] + sums[1][-1]
    bad = least
    for _ in range(_ROUNDS):
        middle = (good + bad) / 2
        good, bad = (middle, bad) if suffices(middle) else (good, middle)
    return bad


def _bound_ends(profiles: Sequence[LayerProfile], setting: Setting, speed: Speed, num_devices: int) -> float:
    """Return the least seconds of the update, if devices share the parameters evenly, and of what replicas send.

    With several devices per replica, averaging is left out: a device may average while others work.
    """
    trainable = sum(profile.trainable_bytes for profile in profiles)
    kept = sum(profile.parameter_bytes + profile.buffer_bytes for profile in profiles)
    ratios = setting.ratios
    state = int(trainable * (ratios.kept + ratios.shared / ratios.num_sharers))
    updated = (kept + trainable + state) / num_devices
    sent = 2 * (setting.num_replicas - 1) / setting.num_replicas * trainable if num_devices == 1 else 0.0
    if ratios.num_sharers > 1:
        sent += trainable / num_devices
    return 2 * updated / speed.bytes_per_second + sent / speed.link_bytes_per_second
