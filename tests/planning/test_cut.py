"""The chosen partitions, beside all that there are."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe.pipeline.schedule import Rematerialize
from gpipe.planning import cut
from gpipe.planning.accelerator import LayerSeconds, Speed, find_accelerator
from gpipe.planning.cut import Cutter, partition_by_memory
from gpipe.planning.evaluation import Evaluation
from gpipe.planning.exact_cut import partition_layers
from gpipe.planning.profile import LayerProfile, profile_layers
from gpipe.planning.step import Setting, plan_memory, plan_step
from tests.planning.small_profiles import LOSS, all_cuts, layer, with_quiet_peak

KIB = 2**10
LAYERS = st.builds(layer, st.integers(0, 500).map(lambda n: n * KIB), st.integers(10, 500).map(lambda n: n * KIB))


ONE_STAGE = ["gpipe", "1f1b", "split_gpipe", "zb_h1"]  # on each device


def peak(profiles: list[LayerProfile], partitions: list[int], setting: Setting) -> int:
    return max(memory.peak_bytes for memory in plan_memory(profiles, partitions, setting))


@given(st.lists(LAYERS, min_size=3, max_size=8), st.integers(1, 3), st.sampled_from(ONE_STAGE))
def test_no_other_partition_has_a_lower_peak(layers: list[LayerProfile], num_stages: int, schedule: str) -> None:
    profiles = [*layers, LOSS]
    setting = Setting(num_stages, 4, Rematerialize.ALWAYS, schedule)
    found = partition_by_memory(profiles, setting)
    assert sum(found) == len(layers) and len(found) == num_stages and min(found) >= 1
    best = min(peak(profiles, partitions, setting) for partitions in all_cuts(len(layers), num_stages))
    assert peak(profiles, found, setting) == best


class Skip(nn.Module):
    """Change the newest tensor of a payload, and keep it for later, or add one that was kept."""

    def __init__(self, width: int, new_width: int, deed: str) -> None:
        super().__init__()
        self.layer, self.deed = nn.Linear(width, new_width), deed

    def forward(self, payload: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        *kept, newest = payload
        changed = self.layer(newest).relu()
        if self.deed == "keep":
            kept.append(changed)
        elif self.deed == "add" and kept:
            changed = changed + kept.pop().sum(dim=1, keepdim=True)
        return *kept, changed


def sum_of_all(payload: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    return sum((tensor.sum() for tensor in payload), targets.sum())


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from([4, 32, 256]), st.sampled_from(["keep", "add", ""])), min_size=3, max_size=8),
    st.integers(1, 4),
    st.sampled_from(ONE_STAGE),
    st.sampled_from(Rematerialize),
)
def test_networks_with_skips_are_cut_with_the_lowest_peak(
    plan: list[tuple[int, str]], num_stages: int, schedule: str, mode: Rematerialize
) -> None:
    """A longer stage of theirs may need less: what has been added up does not travel on."""
    widths = [16, *(width for width, _ in plan)]
    layers = nn.Sequential(*(Skip(*both, deed) for both, (_, deed) in zip(pairwise(widths), plan, strict=True)))
    profiles = profile_layers(layers, sum_of_all, ((torch.empty(8, 16),), torch.empty(8)))
    setting = Setting(min(num_stages, len(plan)), 3, mode, schedule)
    found = partition_by_memory(profiles, setting)
    every = all_cuts(len(plan), setting.num_stages)
    assert peak(profiles, found, setting) == min(peak(profiles, other, setting) for other in every)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^num_partitions is 3, but 2 layers can make from 1 to 2 non-empty"):
        partition_by_memory([layer(), layer(), LOSS], Setting(3, 4))


SPEED = Speed(2e3, 1e3, 1e9, 1e3, hop_seconds=0.1, task_seconds=0.05)
SETTINGS = st.one_of(
    st.builds(Setting, st.integers(1, 4), st.integers(1, 5), st.sampled_from(Rematerialize), st.just("gpipe")),
    st.builds(Setting, st.integers(1, 4), st.integers(1, 5), st.sampled_from(Rematerialize), st.just("1f1b")),
    st.builds(Setting, st.integers(1, 4), st.integers(1, 5), st.sampled_from(Rematerialize), st.just("zb_h1")),
    st.builds(Setting, st.just(4), st.integers(1, 5), st.sampled_from(Rematerialize), st.just("zb_v"), st.just(2)),
    st.just(Setting(4, 4, schedule="interleaved_1f1b", stages_per_device=2)),
)
WORKING = st.lists(
    st.builds(layer, st.integers(0, 4_000), st.integers(10, 4_000), st.integers(0, 5_000)), min_size=4, max_size=7
)


def step_seconds(profiles: list[LayerProfile], partitions: list[int], setting: Setting) -> float:
    return plan_step(profiles, SPEED.seconds(profiles), partitions, setting, SPEED).step_seconds


@given(WORKING, SETTINGS)
def test_no_other_cut_has_a_shorter_step(layers: list[LayerProfile], setting: Setting) -> None:
    profiles = [*layers, LOSS]
    found = Cutter("seconds", "step", SPEED)(profiles, setting)
    every = all_cuts(len(layers), setting.num_stages)
    assert step_seconds(profiles, found, setting) == min(step_seconds(profiles, other, setting) for other in every)


@given(WORKING, SETTINGS)
def test_a_step_is_never_below_its_bound(layers: list[LayerProfile], setting: Setting) -> None:
    profiles = [*layers, LOSS]
    bound = cut._StepBound(profiles, SPEED.seconds(profiles), setting, SPEED)
    for partitions in all_cuts(len(layers), setting.num_stages):
        assert bound(partitions)[0] <= step_seconds(profiles, partitions, setting) * (1 + 1e-9)


@given(WORKING, SETTINGS, st.sampled_from(["seconds", "flops", "parameter_bytes"]), st.sampled_from(["max", "step"]))
def test_the_limit_is_one_of_the_peak_and_the_best_cut_within_it_is_taken(
    layers: list[LayerProfile], setting: Setting, partition_by: str, objective: str
) -> None:
    profiles = [*layers, LOSS]
    every = list(all_cuts(len(layers), setting.num_stages))
    peaks = sorted(peak(profiles, other, setting) for other in every)
    limit = peaks[len(peaks) // 2] + 64 * KIB * (setting.stages_per_device == 1)  # the step of the search by memory
    cutter = Cutter(partition_by, objective, SPEED, memory_limit_bytes=limit)
    found = cutter(profiles, setting)
    assert peak(profiles, found, setting) <= limit
    within = [other for other in every if peak(profiles, other, setting) <= limit]
    if (partition_by, objective) == ("seconds", "step"):
        assert step_seconds(profiles, found, setting) == min(step_seconds(profiles, one, setting) for one in within)
    else:
        costs = cutter._costs(profiles, SPEED.seconds(profiles))
        largest = [cut._spread(one, costs, "max")[0] for one in (found, *within)]
        assert largest[0] == pytest.approx(min(largest))


SHARED = [Setting(4, 4, schedule=name, stages_per_device=2) for name in ("interleaved_1f1b", "zb_v")]


@given(st.lists(LAYERS, min_size=4, max_size=8), st.sampled_from(SHARED))
def test_stages_that_share_a_device_have_the_lowest_peak_of_all_devices(
    layers: list[LayerProfile], setting: Setting
) -> None:
    profiles = [*layers, LOSS]
    every = all_cuts(len(layers), setting.num_stages)
    found = partition_by_memory(profiles, setting)
    assert peak(profiles, found, setting) == min(peak(profiles, other, setting) for other in every)


@pytest.mark.parametrize("setting", SHARED, ids=lambda setting: setting.schedule)
def test_a_cut_within_the_limit_is_found_where_cuts_cannot_be_listed(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layers take no time, and all the memory: stages of equal seconds exceed a limit far from others."""
    profiles = [*[layer(1_000_000, flops=1)] * 12, *[layer(1_000, flops=100_000)] * 12, LOSS]
    monkeypatch.setattr(cut, "_MOST_CUTS", 0)
    equal = Cutter("seconds", "max", SPEED)(profiles, setting)
    limit = peak(profiles, partition_by_memory(profiles, setting), setting)
    assert peak(profiles, equal, setting) > 1.5 * limit
    for objective in ("max", "step"):
        found = Cutter("seconds", objective, SPEED, memory_limit_bytes=limit)(profiles, setting)
        assert peak(profiles, found, setting) <= limit


@given(WORKING, SETTINGS, st.lists(st.integers(0, 40_000), min_size=8, max_size=8), st.sampled_from(["step", "max"]))
def test_an_evaluation_is_within_the_limit_too(
    layers: list[LayerProfile], setting: Setting, quiet: list[int], objective: str
) -> None:
    profiles = [*layers, LOSS]
    evaluated = [with_quiet_peak(one, size) for one, size in zip(profiles, quiet, strict=False)]
    evaluation = Evaluation(evaluated, 3)
    every = list(all_cuts(len(layers), setting.num_stages))
    peaks = {tuple(one): cut.peak_bytes(profiles, one, setting, evaluation) for one in every}
    by_memory = partition_by_memory(profiles, setting, evaluation)
    assert peaks[tuple(by_memory)] == min(peaks.values())
    limit = sorted(peaks.values())[len(peaks) // 2]
    found = Cutter("seconds", objective, SPEED, memory_limit_bytes=limit)(profiles, setting, evaluation)
    assert peaks[tuple(found)] <= limit
    if objective == "step":
        within = (step_seconds(profiles, one, setting) for one in every if peaks[tuple(one)] <= limit)
        assert step_seconds(profiles, found, setting) == min(within)


def test_an_evaluation_that_no_cut_brings_within_the_limit_is_named() -> None:
    profiles = [layer(4_000), layer(4_000), LOSS]
    evaluation = Evaluation([*profiles[:2], with_quiet_peak(LOSS, 50_000)], 4)
    cutter = Cutter("seconds", "step", SPEED, memory_limit_bytes=40_000)
    with pytest.raises(
        ValueError,
        match=r" needs \d+ \(.* GiB\) in an evaluation: raise .*, or lower trainer.evaluation.batch_size.$",
    ):
        cutter(profiles, Setting(2, 2), evaluation)


def test_cuts_that_exceed_the_limit_are_not_among_those_that_may_be_simulated() -> None:
    """Of the 220 cuts more exceed it, with better bounds, than may be simulated."""
    sizes = [23, 4, 10, 32, 2, 1, 21, 4, 28, 14, 10, 12, 27]
    kept = [74, 94, 46, 82, 32, 30, 10, 46, 18, 58, 46, 84, 50]
    flops = [35, 41, 2, 4, 3, 42, 53, 43, 58, 28, 20, 22, 1]
    rows = zip(sizes, kept, flops, strict=True)
    profiles = [*(layer(100 * size, 10 * graph, 10 * work) for size, graph, work in rows), LOSS]
    setting = Setting(4, 96, Rematerialize.NEVER)
    every = list(all_cuts(len(sizes), 4))
    limit = min(peak(profiles, other, setting) for other in every) * 105 // 100
    slow = Speed(10.0, 10.0, 1e4, 1e3, 5.0, hop_seconds=2.0, task_seconds=1.0)
    found = Cutter("seconds", "step", slow, memory_limit_bytes=limit)(profiles, setting)
    seconds = {
        tuple(other): plan_step(profiles, slow.seconds(profiles), other, setting, slow).step_seconds
        for other in every
        if peak(profiles, other, setting) <= limit
    }
    assert seconds[tuple(found)] == min(seconds.values())


def test_a_limit_that_no_cut_is_within_is_refused_with_what_is_needed() -> None:
    profiles = [layer(4_000), layer(4_000), LOSS]
    for partition_by, given_cut in (("seconds", None), ("flops", None), ("memory", None), ("seconds", [1, 1])):
        cutter = Cutter(partition_by, "step", SPEED, memory_limit_bytes=10_000, partitions=given_cut)
        message = (
            r"^pipeline\.memory_limit_bytes is 10000, but the fullest device of the partitions \[1, 1\] needs \d+ "
        )
        with pytest.raises(ValueError, match=message):
            cutter(profiles, Setting(2, 2))


def test_given_partitions_are_taken_for_settings_with_as_many_stages() -> None:
    profiles = [*[layer()] * 4, LOSS]
    cutter = Cutter("seconds", "step", SPEED, partitions=[3, 1])
    assert cutter(profiles, Setting(2, 2)) == [3, 1]
    assert len(cutter(profiles, Setting(4, 2))) == 4
    with pytest.raises(ValueError, match=r"^partitions is \[3, 1\], which covers 4 layers"):
        cutter([*[layer()] * 5, LOSS], Setting(2, 2))


def test_the_papers_rule_is_the_least_variance_of_the_costs() -> None:
    flops = [9, 1, 8, 2, 7, 3, 6]
    profiles = [*(layer(flops=value) for value in flops), LOSS]
    assert Cutter("flops", "variance", SPEED)(profiles, Setting(3, 4)) == partition_layers(
        flops, 3, objective="variance"
    )


def test_seconds_that_were_measured_take_the_place_of_planned_ones() -> None:
    profiles = [*[layer()] * 4, LOSS]
    measured = [LayerSeconds(1.0, 1.0, 2.0)] * 3 + [LayerSeconds(3.0, 3.0, 6.0)] * 2
    planned, found = (
        Cutter("seconds", "step", SPEED, seconds)(profiles, Setting(2, 8)) for seconds in (None, lambda _: measured)
    )
    assert (planned, found) == ([2, 2], [3, 1])


def whole_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.float(), targets)


def first_logit(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs[:, 0].sum()


@pytest.mark.parametrize("objective", ["step", "max"])
def test_a_dearer_loss_leaves_its_stage_fewer_layers(objective: str) -> None:
    body = (nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(31))
    layers = nn.Sequential(*body, nn.Linear(64, 4096))
    example = torch.empty(256, 64), torch.empty(256, dtype=torch.int64)
    speed = Speed.of(find_accelerator("cpu"), "float32")
    cheap, dear = (
        Cutter("seconds", objective, speed)(profile_layers(layers, loss, example), Setting(2, 8))
        for loss in (first_logit, whole_loss)
    )
    assert dear[-1] < cheap[-1]


def test_one_process_is_cut_as_one_process_per_stage() -> None:
    profiles = [*(layer(flops=value) for value in (9, 1, 8, 2, 7, 3, 6)), LOSS]
    setting = Setting(3, 4)
    cutter = Cutter("seconds", "step", SPEED)
    assert cutter(profiles, replace(setting, is_sequential=True)) == cutter(profiles, setting)


def test_more_cuts_than_can_be_listed_are_searched_from_equal_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    flops = [500, 100, 3_000, 100, 700, 2_000, 100, 400, 900]
    profiles = [*(layer(flops=value) for value in flops), LOSS]
    setting = Setting(4, 3)
    exact = step_seconds(profiles, Cutter("seconds", "step", SPEED)(profiles, setting), setting)
    monkeypatch.setattr(cut, "_MOST_CUTS", 0)
    start = Cutter("seconds", "max", SPEED)(profiles, setting)
    found = Cutter("seconds", "step", SPEED)(profiles, setting)
    assert exact <= step_seconds(profiles, found, setting) <= step_seconds(profiles, start, setting)
    assert Cutter("seconds", "step", SPEED)(profiles, setting) == found


def test_a_giant_is_cut_after_a_few_simulations() -> None:
    simulated: list[list[int]] = []

    def score(partitions: list[int]) -> tuple[float]:
        simulated.append(partitions)
        return (max(partitions),)

    found = cut._search([100] * 30, lambda _: (0.0,), score, 7)
    assert (len(simulated), len(found), sum(found)) == (8, 30, 3_000)


@pytest.mark.parametrize(("words", "name"), [(("time", "step"), "partition_by"), (("flops", "sum"), "objective")])
def test_a_cutter_knows_its_words(words: tuple[str, str], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is '{words[name == 'objective']}', expected one of "):
        Cutter(*words, SPEED)


def test_a_setting_may_name_its_mode() -> None:
    assert Setting(2, 4, "never") == Setting(2, 4, Rematerialize.NEVER)  # type: ignore[arg-type]
    assert Setting(2, 4, "never").walks == Setting(2, 4, Rematerialize.NEVER).walks  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sometimes"):
        Setting(2, 4, "sometimes")  # type: ignore[arg-type]
