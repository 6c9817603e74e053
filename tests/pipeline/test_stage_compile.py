"""Compiled layers train as the others do, and are compiled as seldom as possible."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.callback import CallbackTrigger, on_compile_start
from torch.nn import functional as F

import gpipe
from gpipe.models import amoebanet_d, set_drop_path, transformer_lm
from gpipe.pipeline.job.errors import StepAbandoned

MODES = ("except_last", "never")  # the first has every kind of run that there is


def compilable() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3)),
            nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
        )
    converted = gpipe.convert_batch_norm(layers)
    assert isinstance(converted, nn.Sequential)
    return converted


class Graphs:
    """A backend of torch.compile that counts what it is given, and runs it as it is."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.count += 1
        return graph

    def boxed(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        """Do the same for a graph of one pass."""
        return make_boxed_func(self(graph, inputs))


def pipeline_of(layers: nn.Sequential, *, loss: Any = F.cross_entropy, **options: Any) -> gpipe.Pipeline:
    return gpipe.Pipeline(layers, loss, [1] * len(layers), **{"num_microbatches": 3} | options)


def transformer(num_layers: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformer_lm(
            num_layers, vocabulary_size=24, model_size=8, feedforward_size=16, num_heads=2, dropout=0.2
        )


def of_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def cells(num_layers: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = amoebanet_d(num_layers, 16, 10, image_size=32, auxiliary_head=False, drop_path=0.4)
    converted = gpipe.convert_batch_norm(layers)
    assert isinstance(converted, nn.Sequential)
    return converted


def of_cells(payload: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(payload[0].mean((2, 3)), targets)


# torch.compile looks at the .grad of every input, also between two layers of a plain model.
about_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@about_grad
@pytest.mark.parametrize("mode", MODES)
def test_compiled_layers_train_and_evaluate_as_the_others_do(mode: str) -> None:
    torch._dynamo.reset()
    inputs = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    plain, layers = compilable(), compilable()
    pipelines = [pipeline_of(model, rematerialize=mode) for model in (plain, layers)]
    pipelines[1].compile(backend="aot_eager", fullgraph=True)
    for _, pipeline in itertools.product(range(2), pipelines):
        pipeline.train_step((inputs, torch.arange(8) % 3))
    for found, expected in zip(layers.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)
    for found, expected in zip(layers.buffers(), plain.buffers(), strict=True):
        assert torch.equal(found, expected)
    assert list(layers.state_dict()) == list(plain.state_dict())
    assert torch.equal(pipelines[1].evaluate(inputs), pipelines[0].evaluate(inputs))


class DirectBatchNorm(nn.Module):
    """Normalises by torch's function itself, which moves averages of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("averages", torch.stack([torch.zeros(4), torch.ones(4)]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.batch_norm(x, None, None, *self.averages, self.training, 0.1, 1e-5, False)


@about_grad
def test_averages_that_compiled_layers_move_in_later_steps_only_are_moved_as_by_the_others() -> None:
    torch._dynamo.reset()
    inputs, found = torch.randn(8, 4), []
    for is_compiled in (False, True):
        layers = nn.Sequential(DirectBatchNorm(), nn.Linear(4, 3))
        pipeline = gpipe.Pipeline(layers, F.cross_entropy, [1, 1], 2)
        if is_compiled:
            pipeline.compile(backend="aot_eager", fullgraph=True)
        for is_training in (False, True, True):
            layers[0].train(is_training)
            pipeline.train_step((inputs, torch.arange(8) % 3))
        found.append(layers[0].averages)
    assert torch.equal(*found)


@about_grad
def test_more_micro_batches_and_more_steps_compile_nothing_more() -> None:
    counts = set()
    for num_microbatches in (3, 6):
        torch._dynamo.reset()
        pipeline = pipeline_of(compilable(), num_microbatches=num_microbatches, rematerialize="except_last")
        pipeline.compile(backend=(graphs := Graphs()))
        for _ in range(2):
            pipeline.train_step((torch.randn(2 * num_microbatches, 3, 6, 6), torch.arange(2 * num_microbatches) % 3))
            counts.add(graphs.count)
    assert len(counts) == 1, counts


@about_grad
def test_every_layer_is_compiled_however_many_are_of_one_class() -> None:
    torch._dynamo.reset()
    widths = [4, *range(5, 17), 3]  # torch.compile would give up after 8 variants of the same code
    pipeline = pipeline_of(nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths))))
    pipeline.compile(backend=(graphs := Graphs()))
    pipeline.evaluate(torch.zeros(3, 4))
    assert graphs.count == len(widths) - 1


@about_grad
def test_equal_layers_share_what_was_compiled_and_train_as_the_others_do() -> None:
    counts = set()
    for num_layers in (3, 48):
        plain, layers = (transformer(num_layers) for _ in range(2))
        pipelines = [pipeline_of(model, loss=of_tokens, rematerialize="always") for model in (plain, layers)]
        torch._dynamo.reset()
        graphs = Graphs()
        pipelines[1].compile(backend=aot_autograd(fw_compiler=graphs.boxed, bw_compiler=graphs.boxed))
        tokens = torch.arange(24).view(3, 8)
        for pipeline in pipelines:
            pipeline.train_step((tokens, tokens))
        for found, expected in zip(layers.parameters(), plain.parameters(), strict=True):
            assert torch.equal(found.grad, expected.grad)
        counts.add(graphs.count)
    assert counts == {6}  # three kinds of layers, forward and backward


@about_grad
def test_layers_are_compiled_for_any_length_of_text_once_there_is_a_second_one() -> None:
    torch._dynamo.reset()
    pipeline = pipeline_of(transformer(4), loss=of_tokens, num_microbatches=1)
    pipeline.compile(backend=(graphs := Graphs()), dynamic=None)
    counts = []
    for length in (7, 9, 12, 8, 31):
        tokens = torch.arange(4 * length).view(4, length) % 24
        pipeline.train_step((tokens, tokens))
        counts.append(graphs.count)
    assert counts == [3, 6, 6, 6, 6]


@about_grad
def test_a_drop_path_rate_that_changes_compiles_nothing_more() -> None:
    torch._dynamo.reset()
    plain, layers = (cells(3)[:4] for _ in range(2))  # with one cell of each kind
    options: dict[str, Any] = {"loss": of_cells, "num_microbatches": 2, "rematerialize": "always"}
    pipelines = [pipeline_of(model, **options) for model in (plain, layers)]
    pipelines[1].compile(backend=(graphs := Graphs()), dynamic=False)
    inputs, counts = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)), set()
    for rate in (0.0, 0.2, 0.4):
        for pipeline in pipelines:
            set_drop_path(pipeline.layers, rate)
            pipeline.train_step((inputs, torch.arange(4)))
        counts.add(graphs.count)
    assert len(counts) == 1, counts
    for found, expected in zip(layers.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


@pytest.mark.slow
@about_grad
def test_equal_cells_share_what_was_compiled() -> None:
    torch._dynamo.reset()
    layers = cells(12)[:12]  # up to the second block's end
    pipeline = pipeline_of(layers, loss=of_cells, num_microbatches=1, rematerialize="never")
    pipeline.compile(backend=(graphs := Graphs()), dynamic=False)
    pipeline.train_step((torch.randn(2, 3, 32, 32), torch.arange(2)))
    # Of the four cells in each block, the last two are equal.
    assert graphs.count == len(layers) - 2


@about_grad
def test_the_layer_that_is_compiled_is_told_forward_and_backward_together() -> None:
    torch._dynamo.reset()
    pipeline = pipeline_of(compilable())
    told: list[str | None] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        told.append(pipeline.job.compiling)
        assert str(pipeline.job.activity).endswith(str(pipeline.job.compiling))
        return make_boxed_func(graph)

    pipeline.compile(backend=aot_autograd(fw_compiler=backend, bw_compiler=backend))
    pipeline.train_step((torch.randn(6, 3, 6, 6), torch.arange(6) % 3))
    # Layer 2 has a batch norm, which does less in a recomputation; the other layers need no second variant.
    expected = [layer for layer in (1, 2, 3, 2) for _ in ("forward", "backward")]
    assert told == [f"compiling layer {layer} of 3" for layer in expected]
    assert pipeline.job.compiling is None


@about_grad
@pytest.mark.parametrize("asked_in", [1, 2, 3, 4])
def test_a_stop_while_a_layer_is_compiled_abandons_the_step_and_compiles_no_further_layer(asked_in: int) -> None:
    torch._dynamo.reset()
    layers = compilable()
    before = {name: tensor.clone() for name, tensor in layers.state_dict().items()}
    pipeline = pipeline_of(layers)
    graphs = Graphs()
    pipeline.compile(lambda: graphs.count >= asked_in, backend=graphs)
    with pytest.raises(StepAbandoned) as caught:
        pipeline.train_step((torch.randn(6, 3, 6, 6), torch.arange(6) % 3), note=lambda: "why")
    assert (graphs.count, caught.value.notes, pipeline.step) == (asked_in, ["why"], 0)
    for name, tensor in layers.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@about_grad
def test_a_stop_when_everything_is_compiled_lets_the_step_finish() -> None:
    torch._dynamo.reset()
    pipeline = pipeline_of(compilable())
    asked: list[bool] = []
    pipeline.compile(lambda: asked, backend=Graphs())
    batch = torch.randn(6, 3, 6, 6), torch.arange(6) % 3
    pipeline.train_step(batch)
    asked.append(True)
    pipeline.train_step(batch)
    assert pipeline.step == 2


class Masked(nn.Module):
    """Draws masks of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        one, other = F.dropout(self.first(x), 0.5), F.dropout(torch.tanh(self.second(x)), 0.3)
        return x + one * other * x.new_empty(len(x), 1).bernoulli_(0.7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@about_grad
@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_inductor_draws_the_masks_of_the_layers_as_they_are(mode: str) -> None:
    torch._dynamo.reset()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = nn.Sequential(Masked(), Masked(), nn.Linear(16, 3))
    layers = copy.deepcopy(plain)
    pipelines = [pipeline_of(model, num_microbatches=2, rematerialize=mode) for model in (plain, layers)]
    pipelines[1].compile(dynamic=False)
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    for _, pipeline in itertools.product(range(2), pipelines):
        pipeline.train_step((inputs, torch.arange(8) % 3))
    for (name, found), expected in zip(layers.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=1e-6, msg=name)


@about_grad
def test_a_layer_that_needs_too_many_variants_is_an_error_with_a_remedy() -> None:
    torch._dynamo.reset()
    pipeline = pipeline_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), num_microbatches=1, rematerialize="never")
    pipeline.compile(backend=Graphs(), dynamic=False)

    def train() -> None:
        for batch_size in range(2, 36):
            pipeline.train_step((torch.randn(batch_size, 4), torch.arange(batch_size) % 3))

    with pytest.raises(gpipe.PipelineError, match=r"layer 0 \(Linear\), .*: TooManyVariants: .* in 32 variants"):
        train()
    assert pipeline.step == 32


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "reduce-overhead"},
        {"mode": "max-autotune"},
        {"backend": "cudagraphs"},
        {"options": {"triton.cudagraphs": True}},
    ],
    ids=str,
)
def test_cuda_graphs_are_refused_by_name(options: dict[str, Any]) -> None:
    pipeline = pipeline_of(compilable())
    with pytest.raises(
        ValueError, match=rf"^{next(iter(options))} is .*, which makes CUDA graphs, and these overwrite"
    ):
        pipeline.compile(**options)


def test_compiled_layers_do_not_run_as_cuda_graphs() -> None:
    pipeline = pipeline_of(compilable())
    pipeline.use_cuda_graphs()  # changes nothing on a CPU, and neither does the next one
    pipeline.use_device_threads()
    pipeline.compile(backend="eager")
    with pytest.raises(
        ValueError, match=r"^the layers already run with torch\.compile; use either torch\.compile or CUDA "
    ):
        pipeline.use_cuda_graphs()
    with pytest.raises(ValueError, match=r"; use either torch\.compile or a thread per device$"):
        pipeline.use_device_threads()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_inductor_compiles_a_layers_backward_together_with_its_forward() -> None:
    torch._dynamo.reset()
    layers = nn.Sequential(nn.Linear(4, 3))
    pipeline = pipeline_of(layers, num_microbatches=1, rematerialize="never")
    pipeline.compile(dynamic=False)
    triggers: list[CallbackTrigger] = []
    on_compile_start(lambda compilation: triggers.append(compilation.callback_trigger))
    inputs, targets = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)), torch.arange(2)
    for _ in range(2):
        pipeline.train_step((inputs, targets))
    assert triggers == [CallbackTrigger.DYNAMO]
    found = [parameter.grad for parameter in layers.parameters()]
    expected = torch.autograd.grad(2 * F.cross_entropy(layers(inputs), targets), list(layers.parameters()))
    torch.testing.assert_close(found, list(expected))
