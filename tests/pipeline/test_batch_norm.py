"""A converted batch norm ends each step as one update of the plain layer on all that it saw would."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import gpipe
import gpipe._compat.torchvision
from gpipe.pipeline.batch_norm import MicroBatchNorm, microbatch_phase
from tests.support.ghost_batch_norm import Ghost

from timm.layers import BatchNormAct2d  # isort: skip

MODES = ("always", "except_last", "never")
NORMS = {
    "1d": (nn.BatchNorm1d, (3,)),
    "1d of sequences": (nn.BatchNorm1d, (3, 5)),
    "2d": (nn.BatchNorm2d, (3, 4, 4)),
    "3d": (nn.BatchNorm3d, (3, 2, 2, 2)),
    "timm": (BatchNormAct2d, (3, 4, 4)),
}
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Twice(nn.Module):
    """Uses one batch norm for two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.norm(x * 3 + 1)


class Unreached(nn.Module):
    """Has a batch norm that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3).double()

    def forward(self, x: Tensor) -> Tensor:
        return x


class Fragile(nn.Module):
    """Fails when told to."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and len(x) == 1:
            raise OSError("told to")
        return x


class Bend(nn.Module):
    """Makes micro-batches differ from each other in more than their examples."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean()).square()


def images(batch_size: int, shape: Sequence[int] = (3, 4, 4), seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch_size, *shape, generator=generator, dtype=torch.float64) * 2 + 5


def square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1).mean(1) - targets).square().mean()


def pipeline_of(layers: Sequence[nn.Module], partitions: Sequence[int] | None = None, **options: Any) -> gpipe.Pipeline:
    converted = gpipe.convert_batch_norm(nn.Sequential(*layers).double())
    assert isinstance(converted, nn.Sequential)
    return gpipe.Pipeline(converted, square, partitions or [len(layers)], **options)


def statistics(norm: nn.Module) -> dict[str, Tensor]:
    return {name: getattr(norm, name).clone() for name in STATISTICS}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-13) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=rtol, atol=1e-15, msg=lambda text, name=name: f"{name}: {text}"
        )


def update_plain(norm: nn.Module, *batches: Tensor) -> dict[str, Tensor]:
    """Return the plain layer's moving averages after one update per batch: the oracle."""
    plain = copy.deepcopy(norm).train()
    for batch in batches:
        plain(batch)
    return statistics(plain)


@pytest.mark.parametrize(("batch_size", "num_microbatches"), [(8, 1), (8, 4), (7, 3), (5, 4), (2, 4)])
@pytest.mark.parametrize("mode", MODES)
def test_the_moving_averages_are_those_of_one_update_on_all_inputs(
    batch_size: int, num_microbatches: int, mode: str
) -> None:
    for partitions in ([5], [1, 4], [2, 1, 2], [1, 1, 1, 2]):
        norms = [nn.BatchNorm2d(3).double(), nn.BatchNorm2d(3, momentum=0.7).double(), nn.BatchNorm2d(3).double()]
        plain = copy.deepcopy(norms)
        seen: list[list[Tensor]] = [[], [], []]
        pipeline = pipeline_of(
            [norms[0], nn.Conv2d(3, 3, 1), norms[1], Bend(), norms[2]],
            partitions,
            num_microbatches=num_microbatches,
            rematerialize=mode,
        )
        for norm, inputs in zip(norms, seen, strict=True):
            norm.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0].detach().clone()))
        for step in range(2):
            for inputs in seen:
                inputs.clear()
            pipeline.train_step((images(batch_size, seed=step), torch.zeros(batch_size)))
            for k, (norm, inputs) in enumerate(zip(norms, seen, strict=True)):
                once = torch.cat(inputs[: min(batch_size, num_microbatches)])  # a recomputation comes after them
                assert len(once) == batch_size
                plain[k](once)
                assert_close(statistics(norm), statistics(plain[k]))


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_each_kind_of_batch_norm_and_the_cumulative_average(kind: str, momentum: float | None) -> None:
    make, shape = NORMS[kind]
    norm = make(3, momentum=momentum).double()
    plain = copy.deepcopy(norm)
    pipeline = pipeline_of([norm], num_microbatches=3)
    batches = [images(n, shape, seed=n) for n in (9, 7, 8)]
    for batch in batches:
        pipeline.train_step((batch, torch.zeros(len(batch))))
    assert_close(statistics(norm), update_plain(plain, *batches))


@pytest.mark.parametrize("mode", MODES)
def test_a_subclass_may_have_moving_averages_of_another_length(mode: str) -> None:
    layers = nn.Sequential(nn.Identity(), Ghost(3)).double()
    plain = copy.deepcopy(layers)
    gpipe.convert_batch_norm(layers)
    pipeline = gpipe.Pipeline(layers, lambda outputs, _: outputs.square().mean(), [1, 1], 2, rematerialize=mode)
    for seed in range(2):
        pipeline.train_step((images(8, seed=seed), torch.zeros(8)))
        plain(images(8, seed=seed))
    for found, expected in zip(layers[1].buffers(), plain[1].buffers(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_a_layer_used_twice_in_a_forward_counts_all_its_inputs_once() -> None:
    layer = Twice().double()
    plain = copy.deepcopy(layer.norm)
    x = images(7)
    pipeline_of([layer], num_microbatches=3).train_step((x, torch.zeros(7)))
    assert_close(statistics(layer.norm), update_plain(plain, torch.cat([x, x * 3 + 1])))


def test_small_deviations_from_a_large_mean_do_not_cancel() -> None:
    x = 300 + 0.01 * torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    norm = gpipe.convert_batch_norm(nn.BatchNorm2d(3, momentum=1.0))
    gpipe.Pipeline(nn.Sequential(norm), square, [1], 16).train_step((x, torch.zeros(64)))
    expected = x.double().var((0, 2, 3))
    torch.testing.assert_close(norm.running_var.double(), expected, rtol=2e-3, atol=0)  # float32 at 300: 3e-5 a number
    torch.testing.assert_close(norm.running_mean.double(), x.double().mean((0, 2, 3)), rtol=1e-7, atol=0)


def test_outputs_are_normalised_by_the_micro_batch() -> None:
    outputs: list[Tensor] = []
    layers = [nn.BatchNorm2d(3), nn.Identity()]
    layers[1].register_forward_hook(lambda _, args, output: outputs.append(output))
    x = images(7)
    pipeline_of(layers, num_microbatches=2, rematerialize="never").train_step((x, torch.zeros(7)))
    for found, part in zip(outputs, x.split([4, 3]), strict=True):
        assert torch.equal(found, F.batch_norm(part, None, None, layers[0].weight, layers[0].bias, training=True))


def test_evaluation_and_analysis_leave_the_moving_averages() -> None:
    norm = nn.BatchNorm2d(3)
    pipeline = pipeline_of([norm], num_microbatches=2)
    pipeline.train_step((images(4), torch.zeros(4)))
    before = statistics(norm)
    pipeline.evaluate(images(3, seed=1))
    gpipe.analyze_layers(nn.Sequential(norm), images(3, seed=1))
    gpipe.measure_layers(nn.Sequential(norm), images(3, seed=1), repeats=1)
    assert_close(statistics(norm), before, rtol=0)
    assert not norm.seen


def test_evaluation_normalises_by_the_moving_averages() -> None:
    norm = nn.BatchNorm2d(3)
    pipeline = pipeline_of([norm], num_microbatches=2)
    pipeline.train_step((images(4), torch.zeros(4)))
    x = images(3, seed=1)
    expected = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    assert torch.equal(pipeline.evaluate(x), expected)


@pytest.mark.parametrize("partitions", [[1, 1], [2]])
@pytest.mark.parametrize("mode", MODES)
def test_a_failed_step_leaves_nothing_behind(partitions: list[int], mode: str) -> None:
    norm, fragile = nn.BatchNorm2d(3).double(), Fragile()
    plain = copy.deepcopy(norm)
    pipeline = pipeline_of([norm, fragile], partitions, num_microbatches=2, rematerialize=mode)
    fragile.fails = True
    with pytest.raises(gpipe.PipelineError, match="told to"):
        pipeline.train_step((images(3), torch.zeros(3)))
    assert_close(statistics(norm), statistics(plain), rtol=0)
    fragile.fails = False
    pipeline.train_step((images(5, seed=1), torch.zeros(5)))
    assert_close(statistics(norm), update_plain(plain, images(5, seed=1)))


def test_a_subclass_that_fails_has_its_averages_back() -> None:
    norm = gpipe.convert_batch_norm(Ghost(3)).double()
    averages = list(norm.buffers())
    with pytest.raises(gpipe.PipelineError):
        pipeline_of([norm], num_microbatches=2).train_step((images(2), torch.zeros(2)))  # which have no halves
    assert all(found is before for found, before in zip(norm.buffers(), averages, strict=True))
    assert norm.momentum == 0.1


def test_an_evaluation_that_failed_leaves_no_statistics_in_others_layers() -> None:
    pipeline = pipeline_of([nn.BatchNorm2d(3).double(), fragile := Fragile()], num_microbatches=2)
    others = copy.deepcopy(pipeline.layers)
    others["1"].fails = fragile.fails = True
    with pytest.raises(gpipe.PipelineError, match="told to"):
        pipeline.evaluate(images(3), layers=others, move_statistics=True)
    assert not others["0"].seen and not others["0"].fresh


def test_a_step_whose_loss_is_not_finite_leaves_nothing_behind() -> None:
    norm = nn.BatchNorm2d(3).double()
    plain = copy.deepcopy(norm)
    pipeline = pipeline_of([norm], num_microbatches=2)
    with pytest.raises(gpipe.NonFiniteError):
        pipeline.train_step((images(4), torch.full((4,), torch.inf)))
    assert_close(statistics(norm), statistics(plain), rtol=0)
    norm.zero_grad()
    pipeline.train_step((images(4, seed=1), torch.zeros(4)))
    assert_close(statistics(norm), update_plain(plain, images(4, seed=1)))


def test_a_layer_kept_in_evaluation_mode_stays_as_it_is() -> None:
    norm = nn.BatchNorm2d(3).double()
    before = statistics(norm)
    pipeline = pipeline_of([norm], num_microbatches=2)
    norm.eval()
    pipeline.train_step((images(4), torch.zeros(4)))
    assert_close(statistics(norm), before, rtol=0)


def test_a_layer_that_the_step_did_not_reach_stays_as_it_is() -> None:
    norm, unreached = nn.BatchNorm2d(3).double(), Unreached()
    before = statistics(unreached.norm)
    pipeline_of([norm, unreached], num_microbatches=4).train_step((images(4), torch.zeros(4)))
    assert norm.num_batches_tracked.item() == 1
    assert_close(statistics(unreached.norm), before, rtol=0)


def test_one_value_per_channel_is_refused_with_the_remedy() -> None:
    layers = gpipe.convert_batch_norm(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)))
    pipeline = gpipe.Pipeline(layers, nn.CrossEntropyLoss(), [2], num_microbatches=4)
    batch = torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(gpipe.PipelineError, match=r"layer 0 \(MicroBatchNorm1d\).*input of \(1, 3\).*lower num_micro"):
        pipeline.train_step(batch)
    assert pipeline.evaluate(batch[0]).shape == (4, 2)
    gpipe.Pipeline(layers, nn.CrossEntropyLoss(), [2], num_microbatches=2).train_step(batch)


@pytest.mark.parametrize("options", [{"track_running_stats": False}, {"affine": False}])
def test_a_layer_without_statistics_or_without_weights_trains(options: dict[str, bool]) -> None:
    norm = nn.BatchNorm2d(3, **options).double()
    plain = copy.deepcopy(norm)
    x = images(7)
    pipeline_of([norm], num_microbatches=3).train_step((x, torch.zeros(7)))
    if norm.track_running_stats:
        assert_close(statistics(norm), update_plain(plain, x))
    else:
        assert norm.running_mean is None


@pytest.mark.parametrize("kind", NORMS)
def test_outside_of_a_pipeline_it_is_the_plain_layer(kind: str) -> None:
    make, shape = NORMS[kind]
    plain = make(3).double()
    norm = gpipe.convert_batch_norm(copy.deepcopy(plain))
    x = images(6, shape)
    assert torch.equal(norm(x), plain(x))
    assert_close(statistics(norm), statistics(plain), rtol=0)
    assert torch.equal(norm.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("kind", NORMS)
def test_conversion_keeps_the_class_the_weights_and_the_names(kind: str) -> None:
    make, _ = NORMS[kind]
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"norm": make(3)}))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    norm = model[1]["norm"]
    assert gpipe.convert_batch_norm(model) is model
    assert model[1]["norm"] is norm
    assert isinstance(norm, make) and isinstance(norm, MicroBatchNorm)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_converting_twice_changes_nothing_more() -> None:
    norm = nn.BatchNorm2d(3)
    once = type(gpipe.convert_batch_norm(norm))
    assert type(gpipe.convert_batch_norm(norm)) is once
    assert type(gpipe.convert_batch_norm(nn.BatchNorm2d(5))) is once


def test_a_synchronised_batch_norm_is_left_alone() -> None:
    norm = nn.SyncBatchNorm(3)
    assert type(gpipe.convert_batch_norm(norm)) is nn.SyncBatchNorm


def test_copies_train_on_their_own() -> None:
    norm = gpipe.convert_batch_norm(nn.BatchNorm2d(3).double())
    stream = io.BytesIO()
    torch.save(norm, stream)
    stream.seek(0)
    before = statistics(norm)
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm)), torch.load(stream, weights_only=False)):
        assert type(other) is type(norm)
        pipeline_of([other], num_microbatches=3).train_step((images(7), torch.zeros(7)))
        assert_close(statistics(other), update_plain(nn.BatchNorm2d(3).double(), images(7)))
    assert_close(statistics(norm), before, rtol=0)


def test_steps_and_modes_and_partitions_end_at_the_same_bits() -> None:
    found = []
    for partitions, mode in itertools.product(([3], [1, 2], [2, 1], [1, 1, 1]), MODES):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = [nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)]
        pipeline = pipeline_of(layers, partitions, num_microbatches=3, rematerialize=mode)
        for step in range(2):
            pipeline.train_step((images(7, seed=step), torch.zeros(7)))
        found.append(pipeline.layers.state_dict())
    for state in found[1:]:
        assert all(torch.equal(state[name], value) for name, value in found[0].items())


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4)])
def test_a_pipeline_refuses_a_batch_norm_that_was_not_converted(norm: nn.Module) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Sequential(norm))
    with pytest.raises(ValueError, match=r"layers\.1\.0 \(\w+\) would count every micro-batch"):
        gpipe.Pipeline(layers, nn.functional.mse_loss, [1, 1])


@pytest.mark.parametrize("mode", ["always", "never"])
def test_a_norm_that_is_put_into_a_layer_later_is_trained_or_refused(mode: str) -> None:
    def make(norm: nn.Module) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Sequential(nn.Linear(3, 3), norm), nn.Linear(3, 3))

    batch = torch.randn(6, 3), torch.arange(6) % 3
    plain = make(nn.BatchNorm1d(3))
    F.cross_entropy(plain(batch[0]), batch[1])
    for first in (nn.Identity(), gpipe.convert_batch_norm(nn.BatchNorm1d(3))):
        layers = make(first)
        pipeline = gpipe.Pipeline(layers, F.cross_entropy, [1, 1], 2, rematerialize=mode)
        pipeline.train_step(batch)
        layers[0][1] = gpipe.convert_batch_norm(nn.BatchNorm1d(3))
        pipeline.train_step(batch)
        assert layers[0][1].num_batches_tracked == 1
        torch.testing.assert_close(layers[0][1].running_mean, plain[0][1].running_mean)
        torch.testing.assert_close(layers[0][1].running_var, plain[0][1].running_var)
        layers[0][1] = nn.BatchNorm1d(3)
        with pytest.raises(ValueError, match=r"^layers.0.1 \(BatchNorm1d\) would count every micro-batch"):
            pipeline.train_step(batch)


def test_a_weight_that_is_computed_trains() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    parametrize.register_parametrization(plain[1], "weight", nn.Softplus())
    layers = gpipe.convert_batch_norm(copy.deepcopy(plain))
    inputs = torch.randn(6, 3, dtype=torch.float64)
    gpipe.Pipeline(layers, lambda x, _: x.square().mean(), [1, 2], 1).train_step((inputs, torch.zeros(6)))
    plain(inputs).square().mean().backward()
    for found, expected in zip(layers.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)
    assert torch.equal(layers[1].running_mean, plain[1].running_mean)


class Shifted(nn.BatchNorm1d):
    """Takes an argument beside its input, as conditional batch norms do."""

    def forward(self, input: Tensor, *, shift: Tensor) -> Tensor:  # noqa: A002 - the name that torch gave it
        return super().forward(input) + shift


class Conditional(nn.Module):
    """Shifts by the first feature."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Shifted(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, shift=x[:, :1])


def test_a_batch_norm_may_take_arguments_by_their_names() -> None:
    plain = nn.Sequential(Conditional())
    layers = gpipe.convert_batch_norm(copy.deepcopy(plain))
    batch = torch.randn(6, 3), torch.randn(6, 3)
    assert torch.equal(copy.deepcopy(layers)(batch[0]), copy.deepcopy(plain)(batch[0]))
    gpipe.Pipeline(layers, F.mse_loss, [1], 1).train_step(batch)
    F.mse_loss(plain(batch[0]), batch[1]).backward()
    assert torch.allclose(layers[0].norm.running_mean, plain[0].norm.running_mean)
    assert torch.equal(layers[0].norm.weight.grad, plain[0].norm.weight.grad)


def test_a_phase_ends_as_the_one_around_it_goes_on() -> None:
    with microbatch_phase([], recompute=True):
        with microbatch_phase([], recompute=False):
            assert not gpipe.is_recomputing()
        assert gpipe.is_recomputing()


def test_an_input_without_channels_is_refused_in_torchs_words() -> None:
    norm = gpipe.convert_batch_norm(nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        norm(torch.zeros(3))
    with pytest.raises(gpipe.PipelineError, match="expected 2D or 3D input"):
        pipeline_of([norm], num_microbatches=1).train_step((torch.zeros(2, 3, 1, 1), torch.zeros(2)))


def test_averages_move_whatever_the_default_device_is() -> None:
    averages = []
    for default in ("cpu", "meta"):
        norm, batch = nn.BatchNorm1d(3), (torch.arange(12.0).view(4, 3), torch.zeros(4, 3))
        pipeline = gpipe.Pipeline(gpipe.convert_batch_norm(nn.Sequential(norm)), F.mse_loss, [1], 2)
        with torch.device(default):
            pipeline.train_step(batch)
        averages.append([*norm.buffers()])
    assert all(map(torch.equal, *averages))
