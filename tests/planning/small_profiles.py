"""Profiles made up for tests: what planning does with them can be followed by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

from gpipe.planning.ledger import Work
from gpipe.planning.observed_model import Arrival, Input, PerPass, WaitingGradient
from gpipe.planning.profile import LayerProfile

LOSS = LayerProfile(
    parameters=0,
    parameter_bytes=0,
    trainable_sizes=(),
    buffer_bytes=0,
    statistics_bytes=0,
    forward=(),
    backward=(),
    weight_gradients=(),
    deferred_bytes=0,
    waiting_gradients=(),
    input_bytes=10,
    boundary_bytes=10,
    inputs=(Input(10, -1, 0, None),),
    arrivals=(Arrival(10, 10, -1),),
    kept_bytes=0,
    heights=PerPass(*[(0,)] * 8),
)


def layer(parameter_bytes: int = 0, kept: int = 100, flops: int = 1_000) -> LayerProfile:
    """Return a layer that takes 10 bytes and keeps some more; its backward computes twice as much as its forward."""
    backward, first_backward = (20,), (20 + parameter_bytes,)
    return replace(
        LOSS,
        parameters=parameter_bytes // 4,
        parameter_bytes=parameter_bytes,
        trainable_sizes=(parameter_bytes,),
        forward=(Work(flops, 1),),
        backward=(Work(2 * flops, 1),),
        weight_gradients=(Work(flops, 1),),
        deferred_bytes=kept // 2,
        waiting_gradients=(WaitingGradient(parameter_bytes, parameter_bytes, parameter_bytes, is_added=True),),
        inputs=(Input(10, -1, None, 0),),
        kept_bytes=kept,
        heights=PerPass((10,), (kept,), *[backward, first_backward] * 2, backward, backward),
    )


def all_cuts(num_layers: int, num_stages: int) -> Iterator[list[int]]:
    """Yield the numbers of layers of the stages of every cut."""
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield [end - start for start, end in pairwise([0, *inner, num_layers])]


def with_quiet_peak(profile: LayerProfile, size: int) -> LayerProfile:
    """Return a profile with another peak of a forward that keeps nothing."""
    return replace(profile, heights=profile.heights._replace(quiet=(size,)))
