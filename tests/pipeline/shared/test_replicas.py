"""Replicas of a pipeline train what one model trains on all their mini-batches together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gpipe
from tests.support.gate import Gate
from tests.support.ghost_batch_norm import Ghost
from tests.support.process_pool import ProcessPool

PADDING = -100
MODES = ("always", "except_last", "never")


@dataclass(frozen=True)
class Layout:
    """Two replicas of a pipeline, and its number of processes."""

    num_devices: int
    partitions: tuple[int, ...]
    schedule: str = "gpipe"

    @property
    def stages_per_device(self) -> int:
        return len(self.partitions) // self.num_devices

    def run(self, processes: ProcessPool, cases: list[Case]) -> list[list[Outcome]]:
        return processes.run(2 * self.num_devices, train, self, cases)


LAYOUTS = (
    Layout(1, (5,)),
    Layout(2, (2, 3)),
    Layout(2, (1, 1, 1, 2), "interleaved_1f1b"),
    Layout(2, (1, 1, 1, 2), "zb_v"),
)


def plain_layers(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(Gate(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 5)).double()


def normalized_layers() -> nn.Sequential:
    """Return layers whose batch norms each come first, so that they see what they see in the plain model."""
    _, *rest = plain_layers()
    return nn.Sequential(nn.BatchNorm1d(6, momentum=None).double(), *rest)


def normalized_in_the_middle() -> nn.Sequential:
    layers = plain_layers()
    layers[2] = nn.BatchNorm1d(8, momentum=0.3).double()
    return layers


def ghostly() -> nn.Sequential:
    """Return layers whose first batch norm has more averages than features, and whose second is not used."""
    _, *rest = plain_layers()
    rest[1].idle = nn.BatchNorm1d(6).double()
    return nn.Sequential(Ghost(6).double(), *rest)


def dropped() -> nn.Sequential:
    layers = plain_layers()
    layers[0], layers[2] = nn.Dropout(0.4), nn.Sequential(nn.Tanh(), nn.Dropout(0.2))
    return layers


@dataclass(frozen=True)
class Case:
    """What replicas train on.

    Attributes:
        sizes: examples of each replica.
        gated: the examples, counted over all replicas, that use the gate's weight.
        weighted: whether targets are tokens with padding, each counting alike.
        zero_grad: whether gradients are cleared between steps.
    """

    sizes: tuple[int, ...]
    mode: str = "always"
    num_microbatches: int = 4
    gated: tuple[int, ...] = ()
    weighted: bool = False
    num_steps: int = 1
    zero_grad: bool = True
    frozen_at_first: tuple[int, ...] = ()
    layers: Callable[[], nn.Sequential] = plain_layers


@dataclass
class Outcome:
    """What one process has after its steps; by name."""

    losses: list[float]
    metrics: list[dict[str, float]]
    gradients: list[dict[str, np.ndarray | None]]
    state: dict[str, np.ndarray]


def gates_alone() -> nn.Sequential:
    """Return layers whose first stages own a gate and nothing else."""
    gate, first, _, second, third = plain_layers()
    return nn.Sequential(nn.Identity(), gate, first, second, third)


class Pair(nn.Module):
    """Returns, beside the tensor, one that its own weight makes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6,), 0.3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x * self.weight


class First(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0]


def output_that_nobody_uses() -> nn.Sequential:
    gate, first, _, second, third = plain_layers()
    return nn.Sequential(gate, Pair().double(), First(), nn.Sequential(first, second), third)


def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    kept = targets != PADDING
    right = (outputs.argmax(-1) == targets)[kept].double().mean()
    return nn.functional.cross_entropy(outputs[kept], targets[kept]), {"right": right}


def num_tokens(targets: Tensor) -> float:
    return float((targets != PADDING).sum())


def whole_batch(case: Case, step: int) -> tuple[Tensor, Tensor]:
    """Return the examples of all replicas in order."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(sum(case.sizes), 6, generator=generator, dtype=torch.float64)
    inputs[list(case.gated), 0] = 11.0
    targets = torch.randint(5, (sum(case.sizes),), generator=generator)
    if case.weighted:
        targets[1::3] = PADDING
    return inputs, targets


def train(rank: int, layout: Layout, cases: list[Case]) -> list[Outcome]:
    mesh = init_device_mesh("cpu", (2, layout.num_devices), mesh_dim_names=("replica", "stage"))
    return [_train(case, mesh, layout) for case in cases]


def _train(case: Case, mesh: Any, layout: Layout) -> Outcome:
    layers = gpipe.convert_batch_norm(case.layers())
    pipeline = gpipe.Pipeline(
        layers, loss, layout.partitions, case.num_microbatches, rematerialize=case.mode, mesh=mesh,
        schedule=layout.schedule, stages_per_device=layout.stages_per_device,
        loss_weight=num_tokens if case.weighted else None, timeout_seconds=10,
    )  # fmt: skip
    for index in case.frozen_at_first:
        layers[index].requires_grad_(False)
    optimizer = torch.optim.SGD([*pipeline.parameters(), torch.zeros(1, requires_grad=True)], lr=0.1)
    outcome = Outcome([], [], [], {})
    for step in range(case.num_steps):
        inputs, targets = (part.split(case.sizes)[pipeline.job.replica_index] for part in whole_batch(case, step))
        report = pipeline.train_step((inputs if pipeline.is_first else None, targets if pipeline.is_last else None))
        outcome.losses.append(report.loss)
        outcome.metrics.append(report.metrics)
        outcome.gradients.append(
            {name: None if p.grad is None else p.grad.numpy().copy() for name, p in pipeline.named_parameters()}
        )
        if case.zero_grad:
            optimizer.step()
            optimizer.zero_grad()
        layers.requires_grad_()
    outcome.state = {f"layers.{name}": value.numpy() for name, value in pipeline.layers.state_dict().items()}
    pipeline.close()
    return outcome


def train_dropped(rank: int, num_replicas: int) -> list[np.ndarray | None]:
    """Train layers with dropout for two steps, with a micro-batch of 3 for each of 4 parts; return the gradients."""
    mesh = init_device_mesh("cpu", (num_replicas, 1), mesh_dim_names=("replica", "stage")) if num_replicas > 1 else None
    pipeline = gpipe.Pipeline(dropped(), loss, (5,), 4 // num_replicas, mesh=mesh, timeout_seconds=10)
    for step in range(2):
        part = (part.chunk(num_replicas)[pipeline.job.replica_index] for part in whole_batch(Case((12,)), step))
        pipeline.train_step(tuple(part))
    pipeline.close()
    return [parameter.grad.numpy() for parameter in pipeline.parameters()]


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_replicas_have_the_masks_of_one_pipeline_with_all_their_micro_batches(
    num_replicas: int, processes: ProcessPool
) -> None:
    expected = train_dropped(0, 1)
    for found in processes.run(num_replicas, train_dropped, num_replicas):
        for gradient, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(gradient, other, rtol=1e-12, atol=1e-14)


def assigned(rank: int) -> list[np.ndarray]:
    """Train two replicas on other mini-batches, then again with other parameter objects; return the gradients."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "stage"))
    pipeline = gpipe.Pipeline(plain_layers(), loss, (5,), 2, mesh=mesh, timeout_seconds=10)
    batch = tuple(part.split((3, 5))[rank] for part in whole_batch(Case((3, 5)), 0))
    found = []
    for _ in range(2):
        pipeline.train_step(batch)
        found.append(np.concatenate([p.grad.numpy().ravel() for p in pipeline.parameters() if p.grad is not None]))
        pipeline.layers.load_state_dict({k: v.clone() for k, v in pipeline.layers.state_dict().items()}, assign=True)
    pipeline.close()
    return found


def test_gradients_are_averaged_also_of_parameters_that_came_later(processes: ProcessPool) -> None:
    (first, second), (first_of_other, second_of_other) = processes.run(2, assigned)
    assert np.array_equal(first, second) and np.array_equal(first, first_of_other)
    assert np.array_equal(second, second_of_other)


def plain(case: Case) -> Outcome:
    """Train the plain model on everything at once."""
    layers = case.layers()
    for index in case.frozen_at_first:
        layers[index].requires_grad_(False)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    outcome = Outcome([], [], [], {})
    for step in range(case.num_steps):
        inputs, targets = whole_batch(case, step)
        value, metrics = loss(layers(inputs), targets)
        value.backward()
        outcome.losses.append(value.item())
        outcome.metrics.append({name: metric.item() for name, metric in metrics.items()})
        outcome.gradients.append(
            {
                f"layers.{name}": None if p.grad is None else p.grad.numpy().copy()
                for name, p in layers.named_parameters()
            }
        )
        if case.zero_grad:
            optimizer.step()
            optimizer.zero_grad()
        layers.requires_grad_()
    outcome.state = {f"layers.{name}": value.numpy() for name, value in layers.state_dict().items()}
    return outcome


def assert_equal_to_plain(processes: ProcessPool, layout: Layout, cases: list[Case]) -> None:
    answers = layout.run(processes, cases)
    for number, case in enumerate(cases):
        expected = plain(case)
        for rank, outcomes in enumerate(answers):
            found, where = outcomes[number], f"rank {rank}, {case}"
            assert found.losses == pytest.approx(expected.losses, rel=1e-12), where
            assert found.metrics == [pytest.approx(metrics, rel=1e-12) for metrics in expected.metrics], where
            for step, gradients in enumerate(found.gradients):
                for name, gradient in gradients.items():
                    _close(gradient, expected.gradients[step][name], f"{where}, step {step}, gradient of {name}")
            for name, value in found.state.items():
                _close(value, expected.state[name], f"{where}, {name}")


def _close(found: np.ndarray | None, expected: np.ndarray | None, what: str) -> None:
    if found is None or expected is None:
        assert found is expected, f"{what} is {'missing' if found is None else 'there'}"
    else:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12, err_msg=what)


@pytest.fixture(params=LAYOUTS, ids=lambda layout: f"{layout.schedule}-{layout.partitions}")
def layout(request: pytest.FixtureRequest) -> Layout:
    layout: Layout = request.param
    return layout


Value = TypeVar("Value")


def with_modes(layout: Layout, values: Iterable[Value]) -> list[tuple[Value, str]]:
    """Return each value with one of the modes: any three layouts in a row have all pairs."""
    turn = LAYOUTS.index(layout)
    return [(value, MODES[(turn + place) % len(MODES)]) for place, value in enumerate(values)]


def test_gradients_are_those_of_all_mini_batches_together(layout: Layout, processes: ProcessPool) -> None:
    sizes = ((8, 8), (7, 2), (1, 4))  # even; uneven in sum and in parts; fewer than micro-batches
    values = [(each, weighted) for weighted in (False, True) for each in sizes]
    cases = [Case(each, mode, weighted=weighted) for (each, weighted), mode in with_modes(layout, values)]
    assert_equal_to_plain(processes, layout, cases)


def test_gradients_are_those_of_all_mini_batches_under_1f1b(processes: ProcessPool) -> None:
    cases = [Case(sizes, mode) for sizes in ((7, 2), (1, 4)) for mode in MODES]
    assert_equal_to_plain(processes, Layout(2, (2, 3), "1f1b"), cases)


def test_a_parameter_may_be_unused_in_a_replica_or_a_micro_batch(layout: Layout, processes: ProcessPool) -> None:
    # Of 8 examples a replica, in micro-batches of 2: used in one replica's last, first, and middle micro-batch; in the
    # last of one and the first of the other; nowhere.
    used = ((7,), (0,), (10,), (6, 8), (0, 15), ())
    cases = [Case((8, 8), mode, gated=gated, num_steps=2) for gated, mode in with_modes(layout, used)]
    assert_equal_to_plain(processes, layout, cases)


def test_a_stage_may_have_no_parameter_that_is_used(layout: Layout, processes: ProcessPool) -> None:
    used = ((7,), (0,), (8,), ())
    pairs = with_modes(layout, used)
    cases = [Case((8, 8), mode, gated=gated, num_steps=2, layers=gates_alone) for gated, mode in pairs]
    assert_equal_to_plain(processes, layout, cases)


def test_a_boundary_output_may_have_no_use(layout: Layout, processes: ProcessPool) -> None:
    cases = [Case((4, 3), mode, gated=(0, 5), num_steps=2, layers=output_that_nobody_uses) for mode in MODES]
    assert_equal_to_plain(processes, layout, cases)


def test_two_steps_without_zeroing_add_up(layout: Layout, processes: ProcessPool) -> None:
    cases = [Case((4, 3), mode, gated=(0,), num_steps=3, zero_grad=False) for mode in MODES]
    assert_equal_to_plain(processes, layout, cases)


@pytest.mark.parametrize(
    ("split", "whole"),
    [
        (Layout(2, (2, 3), "split_gpipe"), Layout(1, (5,), "gpipe")),
        (Layout(2, (2, 3), "zb_h1"), Layout(1, (5,), "1f1b")),
        (Layout(2, (1, 1, 1, 2), "zb_v"), Layout(1, (5,), "1f1b")),
    ],
    ids=lambda layout: layout.schedule,
)
def test_split_backwards_have_the_bits_of_whole_ones(split: Layout, whole: Layout, processes: ProcessPool) -> None:
    cases = [
        Case((7, 4), mode, 2, num_steps=2, zero_grad=(place % 2 == 0) == (layers is dropped), layers=layers)
        for place, mode in enumerate(MODES)
        for layers in (dropped, normalized_in_the_middle)
    ]
    answers, expected = split.run(processes, cases), whole.run(processes, cases)
    for rank, outcomes in enumerate(answers):
        for found, other in zip(outcomes, expected[rank // 2], strict=True):
            assert found.losses == other.losses
            for step, gradients in enumerate(found.gradients):
                for name, gradient in gradients.items():
                    assert np.array_equal(gradient, other.gradients[step][name]), (rank, step, name)
            for name, value in found.state.items():
                assert np.array_equal(value, other.state[name]), (rank, name)


def test_a_layer_may_be_unfrozen_between_steps(layout: Layout, processes: ProcessPool) -> None:
    some = [Case((4, 3), mode, num_steps=3, frozen_at_first=(1, 4)) for mode in MODES]
    whole_stage = Case((4, 3), num_steps=3, frozen_at_first=(0, 1, 2))
    assert_equal_to_plain(processes, layout, [*some, whole_stage])


def test_weights_stay_bitwise_equal_across_replicas(layout: Layout, processes: ProcessPool) -> None:
    cases = [Case((5, 2), mode, gated=(1, 6), num_steps=4) for mode in MODES]
    answers = layout.run(processes, cases)
    for rank in range(layout.num_devices):
        for first, second in zip(answers[rank], answers[layout.num_devices + rank], strict=True):
            assert first.state.keys() == second.state.keys()
            for name, value in first.state.items():
                assert np.array_equal(value, second.state[name]), name


@pytest.mark.parametrize("layers", [normalized_layers, normalized_in_the_middle])
def test_moving_averages_are_those_of_one_update_on_everything(
    layers: Callable[[], nn.Sequential], layout: Layout, processes: ProcessPool
) -> None:
    cases = [Case(sizes, mode, 2, layers=layers) for sizes in ((8, 8), (7, 4)) for mode in MODES]
    answers = layout.run(processes, cases)
    for number, case in enumerate(cases):
        expected = plain(case).state
        for outcomes in answers:
            for name, value in outcomes[number].state.items():
                if "running" in name or "tracked" in name:
                    _close(value, expected[name], f"{case}, {name}")


def test_a_batch_norm_may_have_more_averages_than_features_beside_an_unused_one(processes: ProcessPool) -> None:
    case = Case((8, 8), num_microbatches=2, layers=ghostly)
    expected = plain(case).state
    for (outcome,) in Layout(1, (5,)).run(processes, [case]):
        for name in ("layers.0.running_mean", "layers.0.running_var"):
            _close(outcome.state[name], expected[name], name)


class Sometimes(nn.Module):
    """Normalises where its process wants it to."""

    def __init__(self, *, normalizes: bool) -> None:
        super().__init__()
        self.norm, self.normalizes = nn.BatchNorm1d(6).double(), normalizes

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.normalizes else x


def normalize_in_one_replica(rank: int) -> list[np.ndarray]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "stage"))
    layers = gpipe.convert_batch_norm(nn.Sequential(Sometimes(normalizes=rank == 1), *plain_layers()))
    pipeline = gpipe.Pipeline(layers, loss, [6], 2, mesh=mesh, timeout_seconds=10)
    pipeline.train_step(whole_batch(Case((4,)), rank))
    pipeline.close()
    return [average.numpy() for average in pipeline.layers["0"].buffers()]


def test_a_batch_norm_may_be_unused_in_a_replica(processes: ProcessPool) -> None:
    norm = nn.BatchNorm1d(6).double()
    norm(whole_batch(Case((4,)), 1)[0])
    for averages in processes.run(2, normalize_in_one_replica):
        for found, expected in zip(averages, norm.buffers(), strict=True):
            _close(found, expected.numpy(), "an average")


def start_from_different_weights(rank: int) -> list[np.ndarray]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "stage"))
    pipeline = gpipe.Pipeline(plain_layers(seed=rank), loss, [5], 2, mesh=mesh, timeout_seconds=10)
    inputs, targets = whole_batch(Case((4,)), 0)
    pipeline.train_step((inputs, targets))
    pipeline.close()
    return [parameter.detach().numpy() for parameter in pipeline.parameters()]


def test_replicas_begin_with_the_weights_of_the_first(processes: ProcessPool) -> None:
    for weights in processes.run(2, start_from_different_weights):
        for found, expected in zip(weights, plain_layers(seed=0).parameters(), strict=True):
            assert np.array_equal(found, expected.detach().numpy())


def lose_one_replica_s_example(rank: int) -> tuple[str, float]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "stage"))
    pipeline = gpipe.Pipeline(plain_layers(), loss, [5], 2, mesh=mesh, timeout_seconds=10)
    inputs, targets = whole_batch(Case((4,)), 0)
    spoiled = inputs / 0 if rank == 1 else inputs
    with pytest.raises(gpipe.NonFiniteError) as error:
        pipeline.train_step((spoiled, targets))
    for parameter in pipeline.parameters():
        parameter.grad = None
    report = pipeline.train_step((inputs, targets))
    pipeline.close()
    return str(error.value), report.loss


def test_a_loss_that_is_not_finite_in_one_replica_stops_the_step_in_all(processes: ProcessPool) -> None:
    inputs, targets = whole_batch(Case((4,)), 0)
    expected = loss(plain_layers()(inputs), targets)[0].item()
    for message, next_loss in processes.run(2, lose_one_replica_s_example):
        assert "the loss of step 0 is nan in stage 0" in message
        assert next_loss == pytest.approx(expected, rel=1e-12)


def odd_layers(seed: int) -> nn.Sequential:
    """Return a frozen layer with buffers of all kinds, and one that is trained."""
    torch.manual_seed(seed)
    first = nn.Linear(3, 3).requires_grad_(False)
    values = torch.randn(2, 3)
    for name, dtype in (("whole", torch.int16), ("tiny", torch.float8_e4m3fn), ("wide", torch.uint16)):
        first.register_buffer(name, (values.abs() * 9).to(dtype))
    first.register_buffer("strided", torch.randn(4, 2, dtype=torch.float64).t())
    first.register_buffer("expanded", torch.randn(1).expand(5))
    first.register_buffer("single", torch.randn(()))
    first.register_buffer("empty", torch.zeros(0))
    return nn.Sequential(first, nn.Linear(3, 1))


def evaluate_before_any_step(rank: int, num_stages: int) -> tuple[Any, list[bytes]]:
    mesh = init_device_mesh("cpu", (2, num_stages), mesh_dim_names=("replica", "stage"))
    layers = odd_layers(seed=rank // num_stages)
    partitions = [2 // num_stages] * num_stages
    pipeline = gpipe.Pipeline(layers, nn.functional.mse_loss, partitions, 2, mesh=mesh, timeout_seconds=10)
    outputs = pipeline.evaluate(torch.ones(4, 3))
    pipeline.close()
    state = [tensor for layer in pipeline.layers.values() for tensor in layer.state_dict().values()]
    return None if outputs is None else outputs.tolist(), [describe_bytes(tensor) for tensor in state]


def describe_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("num_stages", [1, 2])
def test_replicas_are_equal_before_the_first_step_whatever_is_trained(num_stages: int, processes: ProcessPool) -> None:
    layers = odd_layers(seed=0)
    expected = [[describe_bytes(tensor) for tensor in layer.state_dict().values()] for layer in layers]
    for rank, (outputs, state) in enumerate(processes.run(2 * num_stages, evaluate_before_any_step, num_stages)):
        if outputs is not None:
            assert outputs == layers(torch.ones(4, 3)).tolist()
        assert state == (expected[rank % 2] if num_stages == 2 else [*expected[0], *expected[1]])


def note_in_one_replica(rank: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    pipeline = gpipe.Pipeline(plain_layers(), loss, [2, 3], 2, mesh=mesh, timeout_seconds=10)
    report = pipeline.train_step(whole_batch(Case((4,)), 0), note=(lambda: "why") if rank == 2 else None)
    pipeline.close()
    return report.notes


def test_a_note_of_one_process_reaches_all(processes: ProcessPool) -> None:
    assert processes.run(4, note_in_one_replica) == [[None, None, "why", None]] * 4


def find_error(rank: int, what: str) -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "stage"))
    layers: list[nn.Module] = [nn.Linear(3, 1)]
    inputs = torch.ones(4, 3)
    if what == "sparse":
        layers.insert(0, nn.Embedding(5, 3, sparse=True))
        inputs = torch.arange(4)
    if what == "grad_dtype":
        layers[0].to(torch.bfloat16).weight.grad_dtype = torch.float32

    def named_loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        error = nn.functional.mse_loss(outputs, targets)
        return error, {f"of {rank}" if what == "metrics" else "error": error}

    pipeline = gpipe.Pipeline(nn.Sequential(*layers), named_loss, [len(layers)], 2, mesh=mesh, timeout_seconds=10)
    try:
        pipeline.train_step((inputs, torch.ones(4, 1)))
        pipeline.clip_gradients(2.0 - rank if what == "clip" else 1.0)
    except (ValueError, gpipe.PipelineError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("sparse", "a gradient is sparse, and replicas average only dense ones; set sparse=False in its layer"),
        ("grad_dtype", "layers.0.weight has the type torch.bfloat16, but its gradient, which replicas average, has"),
        ("metrics", "the list of metrics is ['of 0'] in replica 0 and ['of 1'] in replica 1; give every process the"),
        ("clip", "max_norm is 2.0 in replica 0 and 1.0 in replica 1; give every process the same"),
    ],
)
def test_what_replicas_cannot_agree_on_is_refused(what: str, message: str, processes: ProcessPool) -> None:
    assert all(message in found for found in processes.run(2, find_error, what))


def fail_in_an_exchange(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "stage"))
    pipeline = gpipe.Pipeline(nn.Sequential(nn.Linear(3, 1)), nn.functional.mse_loss, [1], 1, mesh=mesh)
    try:
        with pipeline.job.replicas.exchange():
            raise RuntimeError("on purpose")
    except Exception as error:  # noqa: BLE001 - which one it is, is the test
        return f"{type(error).__name__}: {error}"
    finally:
        pipeline.close()


def test_an_error_in_an_exchange_is_not_taken_for_a_lost_replica(processes: ProcessPool) -> None:
    assert processes.run(2, fail_in_an_exchange) == ["RuntimeError: on purpose"] * 2
