"""The pipeline gives the plain model's gradients, norms and outputs, whatever the mini-batches are."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.pipeline.schedules.choice import SCHEDULES
from gpipe.pipeline.stage import Stage
from gpipe.pipeline.step_end import gradient_norm
from tests.support.calling_backward import CallingBackward

MODES = ("always", "except_last", "never")
PARTITIONS = ([5], [2, 3], [1, 3, 1], [1, 1, 2, 1])
LAYOUTS = [
    *((name, partitions, 1) for name in ("gpipe", "1f1b", "split_gpipe", "zb_h1") for partitions in PARTITIONS),
    *((name, cut, 2) for name in ("interleaved_1f1b", "zb_v") for cut in PARTITIONS if len(cut) % 2 == 0),
]
PADDING = -1


def build(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = (
            nn.Linear(4, 6),
            nn.Tanh(),
            nn.Linear(6, 6),
            nn.Sequential(nn.Tanh(), nn.LayerNorm(6)),
            nn.Linear(6, 3),
        )
        return nn.Sequential(*layers).to(dtype)


def batch(batch_size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(batch_size, 4, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.randint(3, (batch_size,), generator=generator)


def pipeline_of(layers: nn.Sequential, partitions: Sequence[int] = (2, 3), **options: Any) -> gpipe.Pipeline:
    return gpipe.Pipeline(layers, options.pop("loss", F.cross_entropy), partitions, **{"num_microbatches": 3} | options)


def assert_same_gradients(found: nn.Module, expected: nn.Module, atol: float = 1e-13) -> None:
    for (name, parameter), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        if other.grad is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, other.grad, rtol=0, atol=atol, msg=lambda t, n=name: f"{n}: {t}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("schedule", "partitions", "stages_per_device"), LAYOUTS)
def test_gradients_and_sgd_updates_are_the_plain_models(
    schedule: str, partitions: list[int], stages_per_device: int, mode: str
) -> None:
    layers, plain = build(), build()
    settings = {"rematerialize": mode, "schedule": schedule, "stages_per_device": stages_per_device}
    pipeline = pipeline_of(layers, partitions, **settings)
    optimizers = [torch.optim.SGD(parameters, lr=0.3) for parameters in (pipeline.parameters(), plain.parameters())]
    for step, batch_size in enumerate((9, 2, 11, 1, 7)):  # also below M, and larger than the first
        inputs, targets = batch(batch_size, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        report = pipeline.train_step((inputs, targets))
        loss = F.cross_entropy(plain(inputs), targets)
        loss.backward()
        assert math.isclose(report.loss, loss.item(), rel_tol=1e-13)
        assert (report.step, report.num_examples, report.num_microbatches) == (step, batch_size, min(batch_size, 3))
        assert_same_gradients(layers, plain)
        for optimizer in optimizers:
            optimizer.step()
    assert pipeline.step == 5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("schedule", "stages_per_device", "most"),
    [
        ("gpipe", 1, [8, 8, 8, 8]),
        ("1f1b", 1, [4, 3, 2, 1]),
        ("interleaved_1f1b", 2, [4, 3, 2, 1]),
        ("zb_v", 2, [4, 3, 2, 1]),
    ],
)
def test_a_stage_holds_as_many_micro_batches_as_its_schedule_needs(
    schedule: str, stages_per_device: int, most: list[int], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, found = Stage.forward, [0] * 4

    def watched(stage: Stage, *args: Any, **options: Any) -> Any:
        outputs = forward(stage, *args, **options)
        found[stage.index] = max(found[stage.index], len(stage._kept))
        return outputs

    monkeypatch.setattr(Stage, "forward", watched)
    settings = {"rematerialize": mode, "schedule": schedule, "stages_per_device": stages_per_device}
    pipeline_of(build(), [1, 1, 2, 1], num_microbatches=8, **settings).train_step(batch(8))
    assert found == most


def four_stages(schedule: str) -> dict[str, Any]:
    """Return the settings of a schedule with four stages."""
    return {"schedule": schedule, "stages_per_device": 2 if schedule in ("interleaved_1f1b", "zb_v") else 1}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_steps_without_zeroing_add_up(schedule: str) -> None:
    layers, plain, one_stage = build(), build(), build()
    pipeline = pipeline_of(layers, [1, 1, 2, 1], **four_stages(schedule))
    # 1F1B's order of backwards is that of all schedules but GPipe's.
    order = "gpipe" if schedule in ("gpipe", "split_gpipe") else "1f1b"
    oracle = pipeline_of(one_stage, [5], schedule=order, rematerialize="never")
    for step, batch_size in enumerate((7, 4)):
        inputs, targets = batch(batch_size, step)
        pipeline.train_step((inputs, targets))
        oracle.train_step((inputs, targets))
        F.cross_entropy(plain(inputs), targets).backward()
    assert_same_gradients(layers, plain)
    for found, expected in zip(layers.parameters(), one_stage.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


def test_shapes_may_change_from_step_to_step() -> None:
    def model() -> nn.Sequential:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = (nn.Embedding(9, 4), nn.GRU(4, 4, batch_first=True), Last(), nn.Linear(4, 3))
            return nn.Sequential(*layers).double()

    layers, plain = model(), model()
    pipeline = pipeline_of(layers, [1, 1, 2])
    for length, batch_size in ((5, 4), (9, 4), (2, 7), (6, 1)):
        inputs, targets = torch.randint(9, (batch_size, length)), torch.arange(batch_size) % 3
        pipeline.train_step((inputs, targets))
        F.cross_entropy(plain(inputs), targets).backward()
        assert_same_gradients(layers, plain)
        assert torch.equal(pipeline.evaluate(inputs[:, 1:]).argmax(1), plain(inputs[:, 1:]).argmax(1))


class Last(nn.Module):
    """Takes the last time step of a recurrent layer's (outputs, state)."""

    def forward(self, payload: tuple[Tensor, Tensor]) -> Tensor:
        return payload[0][:, -1]


@pytest.mark.parametrize("frozen", [(0,), (0, 2), (2,), (4,), (0, 2, 3, 4)])
def test_frozen_layers_and_stages_get_no_gradient_and_cost_the_others_none(frozen: Sequence[int]) -> None:
    for partitions, mode in itertools.product(PARTITIONS, MODES):
        layers, plain = build(), build()
        for model, index in itertools.product((layers, plain), frozen):
            model[index].requires_grad_(False)
        inputs, targets = batch(7)
        pipeline_of(layers, partitions, rematerialize=mode).train_step((inputs, targets))
        loss = F.cross_entropy(plain(inputs), targets)
        if loss.requires_grad:
            loss.backward()
        assert_same_gradients(layers, plain)


def test_a_layer_may_be_frozen_between_two_steps() -> None:
    layers, plain = build(), build()
    pipeline = pipeline_of(layers, [1, 1, 1, 1, 1])
    for index, wanted in ((0, False), (2, False), (0, True)):
        for model in (layers, plain):
            model.zero_grad()
            model[index].requires_grad_(wanted)
        inputs, targets = batch(7, index)
        pipeline.train_step((inputs, targets))
        F.cross_entropy(plain(inputs), targets).backward()
        assert_same_gradients(layers, plain)


def test_a_layer_that_stops_the_gradient_stops_it() -> None:
    class Stop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach()

    for partitions, mode in itertools.product(([4], [1, 1, 2], [2, 2]), MODES):
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Stop(), nn.Linear(4, 3)).double()
        pipeline_of(layers, partitions, rematerialize=mode).train_step(batch(6))
        assert layers[0].weight.grad is layers[1].weight.grad is None
        assert layers[3].weight.grad is not None


@pytest.mark.parametrize(
    ("partitions", "schedule"),
    [([5], "gpipe"), ([1, 3, 1], "gpipe"), *(([2, 1, 1, 1], schedule) for schedule in SCHEDULES)],
)
def test_a_layer_may_be_used_in_two_places(partitions: list[int], schedule: str) -> None:
    def model() -> nn.Sequential:
        first, *_, last = build()
        shared = nn.Linear(6, 6).double()
        torch.nn.init.eye_(shared.weight)
        torch.nn.init.zeros_(shared.bias)
        return nn.Sequential(first, shared, nn.Tanh(), shared, last)

    layers, plain = model(), model()
    inputs, targets = batch(7)
    pipeline = pipeline_of(layers, partitions, **(four_stages(schedule) if len(partitions) == 4 else {}))
    pipeline.train_step((inputs, targets))
    F.cross_entropy(plain(inputs), targets).backward()
    for layer, other in zip(pipeline.layers.values(), plain, strict=True):
        assert_same_gradients(layer, other)
    assert pipeline.ties == (("layers.1.weight", "layers.3.weight"), ("layers.1.bias", "layers.3.bias"))


class Bias(nn.Module):
    """Returns its weight beside its input, which a function of its own makes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return CallingBackward.apply(x, int), self.weight


class Add(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_a_stage_may_return_a_parameter_and_what_a_function_of_its_own_makes(schedule: str, mode: str) -> None:
    layers = nn.Sequential(nn.Linear(4, 4).double(), Bias(), Add(), build())
    plain, (inputs, targets) = copy.deepcopy(layers), batch(7)
    pipeline_of(layers, [2, 2], schedule=schedule, rematerialize=mode).train_step((inputs, targets))
    F.cross_entropy(plain(inputs), targets).backward()
    assert_same_gradients(layers, plain)


def test_channels_last_reaches_every_stage() -> None:
    def model() -> nn.Sequential:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten())
            return layers.to(memory_format=torch.channels_last)

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, 3, 7, 7, generator=generator).contiguous(memory_format=torch.channels_last)
    layers, plain = model(), model()
    seen: list[bool] = []
    for layer in layers[:4]:
        layer.register_forward_pre_hook(
            lambda _, args: seen.append(args[0].is_contiguous(memory_format=torch.channels_last))
        )
    targets = torch.arange(4)
    pipeline_of(layers, [1, 1, 1, 2], num_microbatches=1).train_step((inputs, targets))
    F.cross_entropy(plain(inputs), targets).backward()
    assert_same_gradients(layers, plain, atol=0)
    assert seen == [True] * 8


def tokens_of(batch_size: int) -> tuple[Tensor, Tensor]:
    """Return sequences of which some are padded, and a micro-batch that is padding only."""
    inputs = torch.randn(batch_size, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.arange(batch_size * 5).view(batch_size, 5) % 3
    for example in range(batch_size):
        targets[example, 1 + example :] = PADDING
    targets[-1] = PADDING
    return inputs, targets


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=PADDING)


@pytest.mark.parametrize("mode", MODES)
def test_a_token_weighted_loss_has_the_mini_batchs_gradient(mode: str) -> None:
    inputs, targets = tokens_of(5)
    plain = build()
    expected = token_loss(plain(inputs), targets)
    expected.backward()
    for num_microbatches in (1, 2, 5):
        layers = build()
        pipeline = pipeline_of(
            layers,
            [2, 2, 1],
            loss=token_loss,
            loss_weight=lambda part: int((part != PADDING).sum()),
            num_microbatches=num_microbatches,
            rematerialize=mode,
        )
        report = pipeline.train_step((inputs, targets))
        assert math.isclose(report.loss, expected.item(), rel_tol=1e-13)
        assert_same_gradients(layers, plain)


def test_metrics_are_those_of_the_mini_batch() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return F.cross_entropy(outputs, targets), {"accuracy": (outputs.argmax(1) == targets).double().mean()}

    inputs, targets = batch(7)
    report = pipeline_of(build(), loss=loss).train_step((inputs, targets))
    assert report.metrics == pytest.approx({"accuracy": float((build()(inputs).argmax(1) == targets).double().mean())})


def test_a_loss_may_draw_random_numbers_too() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.dropout(outputs, 0.5), targets)

    found = []
    for partitions, mode in itertools.product(PARTITIONS, MODES):
        layers = build()
        pipeline_of(layers, partitions, loss=loss, rematerialize=mode).train_step(batch(7))
        found.append(layers)
    for layers in found[1:]:
        assert_same_gradients(layers, found[0], atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_names_the_step_and_updates_nothing(value: float) -> None:
    layers = gpipe.convert_batch_norm(nn.Sequential(nn.BatchNorm1d(4), *build()).double())
    assert isinstance(layers, nn.Sequential)
    pipeline = pipeline_of(layers, [2, 2, 2])
    pipeline.train_step(batch(7))
    before = {name: tensor.clone() for name, tensor in layers.state_dict().items()}
    inputs, targets = batch(7)
    inputs[3] = value
    with pytest.raises(
        gpipe.NonFiniteError, match=r"^the loss of step 1 is nan in stage 2; nothing was updated:"
    ) as error:
        pipeline.train_step((inputs, targets))
    assert error.value.stage == 2
    assert pipeline.step == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in layers.state_dict().items())
    layers.zero_grad()
    assert math.isfinite(pipeline.train_step(batch(7)).loss)
    assert pipeline.step == 2


def test_after_a_loss_that_is_not_finite_a_step_is_as_if_nothing_had_been() -> None:
    def model() -> nn.Sequential:
        converted = gpipe.convert_batch_norm(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), *build()).double())
        assert isinstance(converted, nn.Sequential)
        return converted

    layers, untroubled = model(), model()
    pipelines = [pipeline_of(model, [3, 4]) for model in (layers, untroubled)]
    inputs, targets = batch(7)
    with pytest.raises(gpipe.NonFiniteError):
        pipelines[0].train_step((inputs * math.inf, targets))
    layers.zero_grad()
    for pipeline in pipelines:
        pipeline.train_step((inputs, targets))
    assert_same_gradients(layers, untroubled, atol=0)
    for found, expected in zip(layers.buffers(), untroubled.buffers(), strict=True):
        assert torch.equal(found, expected)


def masks(**settings: Any) -> list[Tensor]:
    """Return what dropout lets through in each of two steps."""
    layers = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    kept: list[Tensor] = []
    pipeline = gpipe.Pipeline(
        layers,
        lambda outputs, targets: (kept.append(outputs.detach()), outputs.mean())[1],
        [1, 1],
        2,
        seed=settings.get("seed", 0),
    )
    pipeline.step = settings.get("step", 0)
    for _ in range(2):
        pipeline.train_step((torch.ones(2, 64), torch.zeros(2)))
    return kept


def test_masks_depend_on_the_seed_the_step_the_micro_batch_and_the_layer_alone() -> None:
    first = masks()
    torch.manual_seed(99)
    assert all(torch.equal(a, b) for a, b in zip(masks(), first, strict=True))
    different = [*first, *masks(seed=1), *masks(step=7)]
    for a, b in itertools.combinations(different, 2):
        assert not torch.equal(a, b)
    assert {value for mask in first for value in mask.unique().tolist()} == {0.0, 4.0}  # two masks, not one twice


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_prepares_inputs_draws_other_numbers_in_each_step_and_micro_batch(schedule: str) -> None:
    def draw(partitions: list[int], step: int = 0) -> list[float]:
        drawn: list[float] = []

        def prepare(x: Tensor) -> Tensor:
            drawn.append(torch.rand(()).item())
            return x

        layers = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1), nn.Dropout(0.5))
        pipeline = gpipe.Pipeline(
            layers, lambda x, _: x.mean(), partitions, 2, schedule=schedule, prepare_inputs=prepare
        )
        pipeline.step = step
        for _ in range(2):
            pipeline.train_step((torch.ones(4, 4), torch.zeros(4)))
        return drawn

    drawn = draw([3])
    assert len({*drawn}) == 4
    assert draw([1, 2]) == drawn and draw([3], step=1)[:2] == drawn[2:]


def test_a_resumed_training_has_the_masks_of_an_uninterrupted_one() -> None:
    assert all(torch.equal(a, b) for a, b in zip(masks(step=1)[:2], masks()[2:], strict=True))


@pytest.mark.parametrize("partitions", PARTITIONS)
def test_names_follow_the_layer_and_not_the_partition(partitions: list[int]) -> None:
    layers = build()
    named = list(pipeline_of(layers, partitions).named_parameters())
    assert [name for name, _ in named] == [f"layers.{name}" for name, _ in layers.named_parameters()]
    assert all(parameter is other for (_, parameter), other in zip(named, layers.parameters(), strict=True))


@pytest.mark.parametrize("max_norm", [0.01, 0.3, 1e6])
def test_clipping_is_the_plain_models(max_norm: float) -> None:
    layers, plain = build(), build()
    inputs, targets = batch(7)
    pipeline = pipeline_of(layers)
    pipeline.train_step((inputs, targets))
    F.cross_entropy(plain(inputs), targets).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    assert math.isclose(pipeline.clip_gradients(max_norm), expected.item(), rel_tol=1e-13)
    assert_same_gradients(layers, plain)


@pytest.mark.parametrize("partitions", PARTITIONS)
def test_the_first_layer_takes_prepared_inputs(partitions: list[int]) -> None:
    layers, others = build(), build()
    inputs, targets = batch(7)
    pipeline = pipeline_of(layers, partitions, prepare_inputs=lambda x: x.double() / 8)
    coarse = (8 * inputs).round().to(torch.int16)
    other = pipeline_of(others, partitions)
    reports = pipeline.train_step((coarse, targets)), other.train_step((coarse.double() / 8, targets))
    assert reports[0].loss == reports[1].loss
    assert_same_gradients(layers, others, atol=0)
    assert torch.equal(pipeline.evaluate(coarse), other.evaluate(coarse.double() / 8))


def test_prepared_inputs_have_no_history() -> None:
    prepare = nn.Linear(4, 4).double()
    layers = build()
    had_history: list[bool] = []
    layers[0].register_forward_pre_hook(lambda _, args: had_history.append(args[0].requires_grad))
    pipeline_of(layers, prepare_inputs=prepare).train_step(batch(7))
    assert not any(had_history) and prepare.weight.grad is None


@pytest.mark.parametrize("max_norm", [0.01, 0.3, 1e6])
def test_a_step_that_clips_is_a_step_and_a_clipping(max_norm: float, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, others = build(), build()
    pipeline, other = pipeline_of(layers, [2, 3]), pipeline_of(others, [2, 3])
    other.train_step(batch(7))
    expected = other.clip_gradients(max_norm)
    counts: list[int] = []
    compute = gradient_norm.compute_norms

    def count(named: Any) -> Any:
        counts.append(1)
        return compute(named)

    monkeypatch.setattr(gradient_norm, "compute_norms", count)
    assert pipeline.train_step(batch(7), max_gradient_norm=max_norm).gradient_norm == expected
    assert len(counts) == 1
    assert_same_gradients(layers, others, atol=0)


def test_clipping_is_bitwise_the_same_for_every_number_of_stages() -> None:
    norms, found = set(), []
    for partitions, mode in itertools.product(PARTITIONS, MODES):
        layers = build(torch.float32)
        pipeline = pipeline_of(layers, partitions, rematerialize=mode)
        pipeline.train_step(batch(7, dtype=torch.float32))
        norms.add(pipeline.clip_gradients(0.01))
        found.append(layers)
    assert len(norms) == 1
    for layers in found[1:]:
        assert_same_gradients(layers, found[0], atol=0)


def test_a_gradient_that_is_not_finite_is_named_and_nothing_is_scaled() -> None:
    layers = build()
    pipeline = pipeline_of(layers)
    pipeline.train_step(batch(7))
    before = layers[0].weight.grad.clone()
    layers[2].bias.grad[1] = math.nan
    with pytest.raises(gpipe.NonFiniteError, match=r"^step 0: the gradient of layers\.2\.bias has the norm nan;"):
        pipeline.clip_gradients(1e-3)
    assert torch.equal(layers[0].weight.grad, before)
    layers.zero_grad()
    pipeline.train_step(batch(7))


@pytest.mark.parametrize("partitions", PARTITIONS)
@pytest.mark.parametrize("batch_size", [1, 2, 7, 20])
def test_evaluation_gives_the_plain_models_outputs_before_any_training(partitions: list[int], batch_size: int) -> None:
    layers = nn.Sequential(*build()[:4], nn.Sequential(nn.Dropout(0.5), build()[4]))
    inputs, _ = batch(batch_size)
    outputs = pipeline_of(layers, partitions).evaluate(inputs)
    assert not outputs.requires_grad
    torch.testing.assert_close(outputs, layers.eval()(inputs), rtol=0, atol=1e-14)


def test_an_evaluation_may_be_in_inference_mode() -> None:
    class Double(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return 2 * pair[0], pair[1]

    inputs, shift = torch.randn(5, 4), torch.randn(4)
    with torch.inference_mode():
        outputs = pipeline_of(nn.Sequential(Double(), Add()), [1, 1]).evaluate((inputs, gpipe.replicated(shift)))
    assert torch.equal(outputs, 2 * inputs + shift)


class Merging(nn.Module):
    """Adds its second weight to the first one for evaluation, as layers with low-rank updates do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(0.5))
        self.first.requires_grad_(False)
        self.is_merged = False

    def train(self, mode: bool = True) -> Merging:
        if self.is_merged is mode:
            self.first.data += -self.second.data if mode else self.second.data
            self.is_merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.first if self.is_merged else self.first + self.second)


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_layer_that_changes_itself_for_evaluation_is_changed_back(is_trained: bool) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Merging())).double()
    layers[1][0].train(is_trained)
    pipeline = gpipe.Pipeline(layers, nn.functional.cross_entropy, [1, 1], 2)
    pipeline.evaluate(batch(6)[0][:, :4])
    assert layers[1].training and layers[1][0].training is is_trained
    assert layers[1][0].is_merged is not is_trained and layers[1][0].first == (1.0 if is_trained else 1.5)


def test_evaluation_leaves_modes_gradients_and_the_counter_as_they_were() -> None:
    layers = build()
    pipeline = pipeline_of(layers)
    pipeline.train_step(batch(7))
    layers[3].eval()
    modes = [module.training for module in layers.modules()]
    gradients = [parameter.grad.clone() for parameter in layers.parameters()]
    pipeline.evaluate(batch(5)[0])
    assert [module.training for module in layers.modules()] == modes
    assert all(torch.equal(p.grad, g) for p, g in zip(layers.parameters(), gradients, strict=True))
    assert pipeline.step == 1


class Smoothed(nn.Module):
    """Smooths the labels in training alone."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, label_smoothing=0.5 if self.training else 0.0)


def test_a_loss_is_in_evaluation_mode_in_evaluation_too() -> None:
    layers, loss = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), Smoothed()
    inputs, targets = torch.randn(4, 3), torch.arange(4) % 3
    found = gpipe.Pipeline(layers, loss, [1, 1], 2).evaluate(inputs, targets)["loss"]
    assert found == pytest.approx(F.cross_entropy(layers(inputs), targets).item())
    assert loss.training


def test_modes_are_restored_after_an_error_in_evaluation() -> None:
    layers = build()
    layers[3].eval()
    modes = [module.training for module in layers.modules()]
    with pytest.raises(gpipe.PipelineError, match=r"^stage 0, micro-batch 0, layer 0 \(Linear\), evaluation: Runtime"):
        pipeline_of(layers).evaluate(torch.zeros(2, 5))
    assert [module.training for module in layers.modules()] == modes


def test_other_layers_can_stand_in_for_evaluation() -> None:
    layers = build()
    pipeline = pipeline_of(layers)
    average = copy.deepcopy(pipeline.layers)
    for parameter in average.parameters():
        parameter.data.mul_(0.5)
    modes = [module.training for module in average.modules()]
    inputs, _ = batch(7)
    expected = functools.reduce(lambda value, layer: layer(value), average.values(), inputs)
    torch.testing.assert_close(pipeline.evaluate(inputs, layers=average), expected, rtol=0, atol=1e-14)
    assert not torch.equal(pipeline.evaluate(inputs), pipeline.evaluate(inputs, layers=average))
    assert [module.training for module in average.modules()] == modes


def test_nested_outputs_are_concatenated() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"x": x, "more": [x * 2, None]}

    inputs, _ = batch(7)
    outputs = gpipe.Pipeline(nn.Sequential(nn.Identity(), Two()), F.cross_entropy, [1, 1], 3).evaluate(inputs)
    assert torch.equal(outputs["x"], inputs)
    assert torch.equal(outputs["more"][0], 2 * inputs)
    assert outputs["more"][1] is None


def test_to_look_for_a_fault_draws_what_the_step_drew() -> None:
    drawn: list[float] = []

    def loss(outputs: Tensor, _: Tensor) -> Tensor:
        drawn.append(float(torch.rand(())))
        return outputs.mean() * torch.inf

    pipeline = gpipe.Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), loss, [1, 1], 2, rematerialize="never")
    mini_batch = torch.ones(2, 4), torch.zeros(2)
    with pytest.raises(gpipe.NonFiniteError):
        pipeline.train_step(mini_batch)
    found = pipeline.first_non_finite(mini_batch)
    assert found is not None and found.name == "the loss"
    assert drawn[2:] == drawn[:2]


class DrawsAlways(nn.Module):
    """Draws in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


def test_to_look_for_a_fault_a_layer_may_change_the_input_of_its_stage() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.ELU(inplace=True), nn.Linear(4, 3))
    pipeline = pipeline_of(layers, [1, 2], rematerialize="never")
    pipeline.train_step(batch(7, dtype=torch.float32))
    assert pipeline.first_non_finite(batch(7, dtype=torch.float32)) is None


class Differentiates(nn.Linear):
    """Differentiates in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return super().forward(x) + torch.autograd.grad(super().forward(x).square().sum(), x)[0]


@pytest.mark.parametrize("mode", ["always", "never"])
def test_to_look_for_a_fault_a_layer_may_differentiate_in_its_forward(mode: str) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), Differentiates(4, 4), nn.Linear(4, 3))
    pipeline = pipeline_of(layers, [1, 2], rematerialize=mode)
    pipeline.train_step(batch(7, dtype=torch.float32))
    assert pipeline.first_non_finite(batch(7, dtype=torch.float32)) is None


def test_evaluation_draws_what_that_of_a_resumed_training_does() -> None:
    trained, resumed = (pipeline_of(build().insert(1, DrawsAlways()), [2, 4]) for _ in range(2))
    inputs, _ = batch(7)
    for step in range(2):
        trained.train_step(batch(7, seed=step))
    resumed.layers.load_state_dict(trained.layers.state_dict())
    resumed.step = trained.step
    assert torch.equal(trained.evaluate(inputs), resumed.evaluate(inputs))
