"""An error says where it happened, wrong settings are refused in one sentence, and the pipeline can go on."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.pipeline.job.errors import LostPeer, NonFiniteError, PeerFailure, StepAbandoned
from gpipe.pipeline.layers.split_backward import DeferredProduct

MODES = ("always", "except_last", "never")
PARTITIONS = ([4], [1, 3], [2, 2], [1, 1, 1, 1])
M = 3


class Trap(nn.Module):
    """Fails in forward or backward, as told, for the micro-batch whose first number is 1."""

    def __init__(self, where: str | None = None) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward" and float(x.detach()[0, 0]) == 1:
            raise OSError("the disk is full")
        return FailsBackward.apply(x) if self.where == "backward" else x


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.number = float(x[0, 0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if ctx.number == 1:
            raise OSError("the disk is full")
        return gradient


class Keep(nn.Module):
    """Keeps the first number of each example, which is that of its micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Beside(nn.Module):
    """Returns a new tensor behind one that passes by."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, FailsBackward.apply(x)


class Add(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


def batch() -> tuple[Tensor, Tensor]:
    """Return two examples per micro-batch, which hold its number."""
    numbers = torch.arange(M).repeat_interleave(2)
    return numbers.float()[:, None].expand(-1, 3).clone(), numbers


def pipeline_of(
    *layers: nn.Module, partitions: Any = None, loss: Any = F.cross_entropy, **options: Any
) -> gpipe.Pipeline:
    return gpipe.Pipeline(nn.Sequential(*layers), loss, partitions or [len(layers)], M, **options)


def stage_of_layer_1(partitions: list[int]) -> int:
    return 1 if partitions[0] == 1 else 0


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("partitions", PARTITIONS)
@pytest.mark.parametrize("mode", MODES)
def test_an_error_names_stage_micro_batch_and_layer_and_the_pipeline_goes_on(
    where: str, partitions: list[int], mode: str
) -> None:
    trap = Trap(where)
    pipeline = pipeline_of(Keep(), trap, nn.Identity(), Keep(), partitions=partitions, rematerialize=mode)
    stage = stage_of_layer_1(partitions)
    message = f"stage {stage}, micro-batch 1, layer 1 (Trap), {where}: OSError: the disk is full"
    with pytest.raises(gpipe.PipelineError, match=f"^{re.escape(message)}$") as error:
        pipeline.train_step(batch())
    assert (error.value.stage, error.value.micro_batch, error.value.layer) == (stage, 1, 1)
    assert isinstance(error.value.__cause__, OSError)
    assert pipeline.step == 0

    trap.where = None
    pipeline.layers.zero_grad()
    pipeline.train_step(batch())
    untroubled = pipeline_of(Keep(), Trap(), nn.Identity(), Keep(), partitions=partitions, rematerialize=mode)
    untroubled.train_step(batch())
    for (name, found), expected in zip(pipeline.named_parameters(), untroubled.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad), name
    assert pipeline.step == 1


class Refused(Exception):
    """An error that cannot be made without arguments."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code


class Strict(Exception):
    """One that cannot even be allocated without."""

    def __new__(cls, *args: Any, reason: str) -> Any:
        return super().__new__(cls, *args, reason)

    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)


CAUSES = [
    ValueError("no"),
    KeyError("no"),
    OSError(28, "no space"),
    UnicodeDecodeError("utf-8", b"", 0, 1, "no"),
    RuntimeError("no"),
    torch.OutOfMemoryError("no"),
    Refused(7, reason="no"),
    Strict(reason="no"),
]


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: type(cause).__name__)
@pytest.mark.parametrize("partitions", PARTITIONS)
def test_a_users_error_is_caught_by_its_type_and_says_where(cause: Exception, partitions: list[int]) -> None:
    class Raise(nn.Module):
        def forward(self, _: Tensor) -> Tensor:
            raise cause

    pipeline = pipeline_of(Keep(), Raise(), nn.Identity(), Keep(), partitions=partitions)
    kind = gpipe.PipelineError if isinstance(cause, Strict) else type(cause)
    with pytest.raises(kind) as error:
        pipeline.train_step(batch())
    assert isinstance(error.value, gpipe.PipelineError)
    stage = stage_of_layer_1(partitions)
    assert (
        str(error.value) == f"stage {stage}, micro-batch 0, layer 1 (Raise), forward: {type(cause).__name__}: {cause}"
    )
    assert (error.value.stage, error.value.micro_batch, error.value.layer) == (stage, 0, 1)
    assert error.value.__cause__ is cause
    assert getattr(error.value, "code", None) == getattr(cause, "code", None)
    copied = pickle.loads(pickle.dumps(error.value))
    assert type(copied) is gpipe.PipelineError and str(copied) == str(error.value)
    assert (copied.stage, copied.micro_batch, copied.layer) == (stage, 0, 1)


def test_errors_of_our_own_keep_their_type_for_another_process() -> None:
    for error in (
        NonFiniteError("the loss is nan", stage=1),
        StepAbandoned(3, ["note"]),
        PeerFailure("lost", told=True),
    ):
        copied = pickle.loads(pickle.dumps(error))
        assert type(copied) is type(error) and str(copied) == str(error) and vars(copied) == vars(error)


def test_an_error_in_a_recomputation_says_so() -> None:
    class Second(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if gpipe.is_recomputing():
                raise OSError("not again")
            return x

    message = r"^stage 0, micro-batch 2, layer 1 \(Second\), recompute: OSError: not again$"
    with pytest.raises(gpipe.PipelineError, match=message):
        pipeline_of(Keep(), Second(), Keep(), partitions=[2, 1]).train_step(batch())


def test_an_error_in_weight_gradients_names_the_layer_and_the_next_step_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    pipeline = gpipe.Pipeline(layers, nn.functional.cross_entropy, [1, 4], M, schedule="zb_h1")
    prepare, calls = DeferredProduct.prepare, 0

    def failing(product: DeferredProduct, inputs: Tensor) -> Callable[[Tensor], Any]:
        differentiate, num_inputs = prepare(product, inputs), inputs.shape[-1]

        def fail(gradient: Tensor) -> Any:
            nonlocal calls
            calls += (num_inputs, gradient.shape[-1]) == (4, 4)  # layer 2 alone
            if calls == 2:
                raise OSError("the disk is full")
            return differentiate(gradient)

        return fail

    monkeypatch.setattr(DeferredProduct, "prepare", failing)
    inputs, labels = torch.randn(2 * M, 3), torch.arange(2 * M) % 3
    with pytest.raises(gpipe.PipelineError) as raised:
        pipeline.train_step((inputs, labels))
    message = "stage 1, micro-batch 1, layer 2 (Linear), weight gradients: OSError: the disk is full"
    assert (str(raised.value), raised.value.layer) == (message, 2)
    monkeypatch.undo()
    layers.zero_grad()
    assert pipeline.train_step((inputs, labels)).step == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_whose_first_output_only_passes_by_is_blamed_itself(mode: str) -> None:
    pipeline = pipeline_of(Keep(), Beside(), Add(), Keep(), rematerialize=mode)
    with pytest.raises(gpipe.PipelineError, match=r"^stage 0, micro-batch 1, layer 1 \(Beside\), backward: OSError"):
        pipeline.train_step(batch())


@pytest.mark.parametrize("mode", MODES)
def test_an_error_in_the_loss_says_so(mode: str) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if int(targets[0]) == 1:
            raise OSError("the disk is full")
        return F.cross_entropy(outputs, targets)

    pipeline = pipeline_of(Keep(), Keep(), partitions=[1, 1], loss=loss, rematerialize=mode)
    message = r"^stage 1, micro-batch 1, the loss, loss: OSError: the disk is full$"
    with pytest.raises(gpipe.PipelineError, match=message) as error:
        pipeline.train_step(batch())
    assert (error.value.stage, error.value.micro_batch, error.value.layer) == (1, 1, None)


@pytest.mark.parametrize("result", [torch.zeros(2), 2.5])
def test_a_loss_that_is_no_scalar_is_refused(result: Any) -> None:
    pipeline = pipeline_of(Keep(), loss=lambda outputs, targets: result)
    with pytest.raises(gpipe.PipelineError, match=r"^stage 0, micro-batch \d, the loss, loss: TypeError: the loss"):
        pipeline.train_step(batch())


class Number(nn.Module):
    """Returns a number beside the tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        return x, 0.5


class First(nn.Module):
    def forward(self, pair: tuple[Tensor, float]) -> Tensor:
        return pair[0]


@pytest.mark.parametrize("partitions", [[3], [1, 2], [2, 1]])
@pytest.mark.parametrize("mode", MODES)
def test_a_value_that_cannot_travel_is_refused_wherever_the_boundaries_are(partitions: list[int], mode: str) -> None:
    pipeline = pipeline_of(Keep(), Number(), First(), partitions=partitions, rematerialize=mode)
    stage = stage_of_layer_1(partitions)
    message = r"layer 1 \(Number\), {}: PayloadError: the payload\[1\] is of type float \(0\.5\); keep it inside one"
    for doing, run in (
        ("forward", lambda: pipeline.train_step(batch())),
        ("evaluation", lambda: pipeline.evaluate(batch()[0])),
    ):
        with pytest.raises(gpipe.PipelineError, match=rf"^stage {stage}, micro-batch 0, {message.format(doing)}"):
            run()


def build(partitions: Any = (1, 1), **options: Any) -> gpipe.Pipeline:
    arguments = {"layers": nn.Sequential(Keep(), Keep()), "num_microbatches": 2} | options
    return gpipe.Pipeline(arguments.pop("layers"), F.cross_entropy, partitions, **arguments)


NOT_PARTITIONS = "; give positive whole numbers that sum to the 2 layers, as partition_layers returns them."


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: build(gpipe.partition_layers([1, 1], 3)),
            "num_partitions is 3, but 2 layers can make from 1 to 2 non-empty partitions",
        ),
        (lambda: build([2, 0]), f"partitions is [2, 0]{NOT_PARTITIONS}"),
        (lambda: build([]), f"partitions is []{NOT_PARTITIONS}"),
        (lambda: build([1, 2]), f"partitions is [1, 2], which covers 3 layers{NOT_PARTITIONS}"),
        (lambda: build(2), f"partitions is 2{NOT_PARTITIONS}"),
        (lambda: build(None), f"partitions is None{NOT_PARTITIONS}"),
        (lambda: build([1.0, 1.0]), f"partitions is [1.0, 1.0]{NOT_PARTITIONS}"),
        (lambda: build(num_microbatches=0), "num_microbatches is 0; it must be a whole number of at least 1"),
        (lambda: build(num_microbatches=-1), "num_microbatches is -1; it must be a whole number of at least 1"),
        (lambda: build(num_microbatches=2.0), "num_microbatches is 2.0; it must be a whole number of at least 1"),
        (lambda: build(num_microbatches=True), "num_microbatches is True; it must be a whole number of at least 1"),
        (
            lambda: build(rematerialize="sometimes"),
            "rematerialize is 'sometimes'; it must be one of always, except_last, never",
        ),
        (
            lambda: build(rematerialize=[1]),
            "rematerialize is [1]; it must be one of always, except_last, never, or 2 whole numbers, one per stage",
        ),
        (
            lambda: build(rematerialize=[1, -1]),
            "rematerialize is [1, -1]; it must be one of always, except_last, never, or 2 whole numbers, one per",
        ),
        (lambda: build(schedule=None), "schedule is None; it must be one of gpipe, 1f1b, interleaved_1f1b"),
        (lambda: build(stages_per_device=2.0), "stages_per_device is 2.0; it must be a whole number of at least 1"),
        (lambda: build(timeout_seconds=math.inf), "timeout_seconds is inf; it must be a number above 0, at most 1,000"),
        (lambda: build(timeout_seconds="5"), "timeout_seconds is '5'; it must be a number above 0, at most 1,000,000"),
        (lambda: build(loss_weight=3), "loss_weight is of type int; it must be a function"),
        (lambda: build(prepare_inputs=3), "prepare_inputs is of type int; it must be a function"),
        (
            lambda: build(schedule="2f2b"),
            "schedule is '2f2b'; it must be one of gpipe, 1f1b, interleaved_1f1b",
        ),
        (
            lambda: build(stages_per_device=2),
            "stages_per_device is 2, but the schedule gpipe needs 1; change it, or use another schedule: zb_v needs 2",
        ),
        (
            lambda: build(schedule="interleaved_1f1b"),
            "stages_per_device is 1, but the schedule interleaved_1f1b needs 2 or more; change it, or use another",
        ),
        (
            lambda: build(schedule="interleaved_1f1b", stages_per_device=3),
            "2 partitions cannot be shared evenly by devices with stages_per_device=3; choose a multiple of",
        ),
        (lambda: build(devices=["cpu"] * 3), "3 devices for 2 stages; give one per stage (the same one may appear"),
        (
            lambda: build(layers=nn.ModuleList([Keep(), Keep()])),
            "layers is of type ModuleList; it must be an nn.Sequential of the model's layers, which gpipe.as_layers",
        ),
        (
            lambda: build(layers=[Keep(), Keep()]),
            "layers is of type list; it must be an nn.Sequential of the model's layers, which gpipe.as_layers",
        ),
        (lambda: build(mesh="cpu"), "mesh is 'cpu'; give what init_device_mesh(device_type, (R, K), mesh_dim_names=("),
        (
            lambda: gpipe.Pipeline(nn.Sequential(Keep()), "cross_entropy", [1], 2),
            "loss is of type str; it must be a function of (outputs, targets)",
        ),
        (
            lambda: gpipe.Pipeline(nn.Sequential(Keep()), nn.MSELoss, [1], 2),
            "loss is the class MSELoss; give an instance of it, MSELoss()",
        ),
        (
            lambda: gpipe.Pipeline(nn.Sequential(Keep()), nn.MSELoss(reduction="sum"), [1], 2),
            "loss has reduction='sum', but the mean of the micro-batches' sums is not the mini-batch's; set reduction=",
        ),
        (lambda: copy.deepcopy(build()), "a pipeline has threads and connections, which cannot be copied or saved;"),
        (lambda: pickle.dumps(build()), "a pipeline has threads and connections, which cannot be copied or saved;"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}") as error:
        make()
    assert str(error.value).count("\n") == 0


ONE_ROW = torch.zeros(1, 3)
NO_BATCH = "; every tensor needs the mini-batch's examples, at least one, as its first dimension"


@pytest.mark.parametrize(
    ("mini_batch", "message"),
    [
        ((torch.zeros(4, 3), torch.zeros(3)), "the mini-batch has 4 inputs and 3 targets; give as many of both, and"),
        ((torch.zeros(0, 3), torch.zeros(0)), f"the inputs have the shapes (0, 3){NO_BATCH}"),
        ((torch.tensor(1.0), torch.zeros(1)), f"the inputs have the shapes (){NO_BATCH}"),
        ((ONE_ROW, torch.tensor(1.0)), f"the targets have the shapes (){NO_BATCH}"),
        ((None, torch.zeros(1)), f"the inputs have no tensor{NO_BATCH}"),
        ((ONE_ROW, None), f"the targets have no tensor{NO_BATCH}"),
        (((ONE_ROW, torch.zeros(2)), torch.zeros(1)), f"the inputs have the shapes (1, 3), (2,){NO_BATCH}"),
        (({"x": ONE_ROW, "n": 1}, torch.zeros(1)), "inputs['n'] is of type int (1); give only tensors, None, and"),
        ((ONE_ROW, [0]), "targets[0] is of type int (0); give only tensors, None, and"),
        ((ONE_ROW.numpy(), torch.zeros(1)), "inputs is of type ndarray (array("),
        (ONE_ROW, "the mini-batch has the type Tensor; it must be (inputs, targets)"),
        ((ONE_ROW, ONE_ROW, ONE_ROW), "the mini-batch has 3 entries; it must be (inputs, targets)"),
    ],
)
def test_a_wrong_mini_batch_is_refused_and_the_next_one_trains(mini_batch: Any, message: str) -> None:
    pipeline = build()
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}"):
        pipeline.train_step(mini_batch)
    assert pipeline.train_step(batch()).step == 0


def test_layers_to_evaluate_must_be_all_of_them() -> None:
    pipeline = build()
    for layers, given in ((nn.ModuleDict({"0": Keep()}), "0"), (nn.Sequential(Keep(), Keep()), "Sequential")):
        message = f"the layers to evaluate are ['{given}']; give a ModuleDict of this process's ['0', '1']"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            pipeline.evaluate(batch()[0], layers=layers)


def test_one_device_may_serve_every_stage() -> None:
    pipeline = build(devices=["cpu", torch.device("cpu")])
    assert pipeline.train_step(batch()).num_microbatches == 2
    assert build(devices="cpu").train_step(batch()).num_microbatches == 2


def test_an_error_in_what_prepares_inputs_says_so() -> None:
    def prepare(x: Tensor) -> Tensor:
        if float(x[0, 0]) == 1:
            raise OSError("the disk is full")
        return x

    pipeline = gpipe.Pipeline(nn.Sequential(Keep(), Keep()), lambda x, _: x.sum(), [1, 1], M, prepare_inputs=prepare)
    inputs = torch.arange(M).float().repeat_interleave(3).view(M, 3)
    with pytest.raises(
        gpipe.PipelineError,
        match=r"^stage 0, micro-batch 1, prepare_inputs, forward: OSError: the disk is full$",
    ):
        pipeline.train_step((inputs, torch.zeros(M)))


@pytest.mark.parametrize("schedule", ["gpipe", "split_gpipe"])
def test_an_error_in_the_backward_of_the_loss_says_so(schedule: str) -> None:
    pipeline = gpipe.Pipeline(
        nn.Sequential(Keep(), Keep()), lambda x, _: FailsBackward.apply(x).sum(), [1, 1], M, schedule=schedule
    )
    inputs = torch.arange(M).float().repeat_interleave(3).view(M, 3)
    doing = "backward" if schedule == "gpipe" else "input gradients"
    with pytest.raises(gpipe.PipelineError, match=rf"^stage 1, micro-batch 1, the loss, {doing}: OSError: the disk"):
        pipeline.train_step((inputs, torch.zeros(M)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda layers: layers.append(nn.Linear(3, 3)), "layer 2 of the model was added after the pipeline was made"),
        (
            lambda layers: layers.__setitem__(1, Keep()),
            "layer 1 of the model is not the one that the pipeline was made",
        ),
    ],
    ids=["added", "replaced"],
)
def test_a_model_that_was_changed_afterwards_is_refused(change: Callable[[nn.Sequential], Any], said: str) -> None:
    layers = nn.Sequential(Keep(), Keep())
    pipeline = build(layers=layers)
    change(layers)
    with pytest.raises(ValueError, match=rf"^{said}"):
        pipeline.train_step((torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)))


def test_nothing_trains_in_inference_mode() -> None:
    pipeline = build()
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match=r"^train_step was called within torch\."),
    ):
        pipeline.train_step((torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^devices has cuda, but torch sees no GPU here"):
        build(devices="cuda")


@pytest.mark.parametrize("error", [gpipe.PipelineError("as it is"), LostPeer([0], "as it is")])
def test_what_says_where_it_happened_is_raised_as_it_is(error: Exception) -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise error

    with pytest.raises(type(error), match=r"^as it is$"):
        pipeline_of(Raises()).train_step(batch())
