"""What a pipeline would ignore is refused in one sentence, which says what to do."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.pipeline.checks.refusals import refuse_different, refuse_embeddings
from tests.support import tied_model


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3), torch.arange(4) % 3


def build(layers: nn.Sequential | None = None, loss: Any = F.cross_entropy, **options: Any) -> gpipe.Pipeline:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) if layers is None else layers
    return gpipe.Pipeline(layers, loss, [1, len(layers) - 1], 2, **options)


class Doubled(nn.Sequential):
    """Does more than its layers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Named(nn.Sequential):
    """Adds nothing but a name."""


class Cast(nn.Module):
    """Changes the type of its input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class Temperature(nn.Module):
    """A loss that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs * self.scale, targets)


def refused(message: str) -> Any:
    return pytest.raises((ValueError, TypeError, gpipe.PipelineError), match=f"^{re.escape(message)}[^\n]*$")


def test_a_sequence_with_a_forward_of_its_own_is_refused() -> None:
    with refused("Doubled has a forward of its own, but stages run its layers one after the other; put"):
        build(Doubled(nn.Linear(3, 3), nn.Linear(3, 3)))
    build(Named(nn.Linear(3, 3), nn.Linear(3, 3))).train_step(batch())


def test_a_sequence_with_a_forward_put_on_it_is_refused() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    layers.forward = layers[1].forward
    with refused("Sequential has a forward of its own, but stages run its layers one after the other; put"):
        build(layers)


def test_a_sequence_that_is_called_in_its_own_way_is_refused() -> None:
    class Called(nn.Sequential):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) * 2

    with refused("Called has a forward of its own, but stages run its layers one after the other; put"):
        build(Called(nn.Linear(3, 3), nn.Linear(3, 3)))


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
        "register_state_dict_post_hook", "register_load_state_dict_post_hook",
    ],
)  # fmt: skip
def test_a_sequence_with_a_hook_is_refused(register: str) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    pipeline = build(layers)
    getattr(layers, register)(lambda *_: None)
    message = "Sequential has hooks, but stages run its layers alone; register them on a layer"
    with refused(message):
        pipeline.train_step(batch())
    with refused(message):
        pipeline.evaluate(batch()[0])
    with refused(message):
        build(layers)


def test_what_is_no_sequence_is_refused_as_such_even_with_a_hook() -> None:
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, match="layers is of type Linear; it must be an nn"):
        gpipe.Pipeline(layer, F.cross_entropy, [1], 2)  # type: ignore[arg-type]


def test_a_sequence_that_is_compiled_is_refused() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    pipeline = build(layers)
    layers.compile(backend="eager")
    message = (
        "{} is compiled by torch.compile, but stages run its layers alone; give the layers as they were before, and "
        "call pipeline.compile()"
    )
    with refused(message.format("Sequential")):
        pipeline.train_step(batch())
    with refused(message.format("Sequential")):
        build(layers)
    with refused(message.format("OptimizedModule")):
        build(torch.compile(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), backend="eager"))


def test_a_sequence_with_a_parameter_or_buffer_of_its_own_is_refused() -> None:
    for register in ("register_parameter", "register_buffer"):
        layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        getattr(layers, register)("scale", nn.Parameter(torch.ones(3)))
        with refused("Sequential has scale of its own, which no stage would hold; put it into a layer"):
            build(layers)


def test_a_loss_that_learns_is_refused() -> None:
    with refused("the loss has the parameter scale, which the pipeline would not train; put it into the last layer"):
        build(loss=Temperature())
    build(loss=Temperature().requires_grad_(False)).train_step(batch())


@pytest.mark.parametrize("mode", ["always", "never"])
def test_a_loss_that_hides_what_it_learns_is_refused_in_its_first_step(mode: str) -> None:
    temperature = Temperature()
    for loss in (temperature.forward, lambda outputs, targets: temperature(outputs * 2, targets)):
        pipeline = build(loss=loss, rematerialize=mode)
        place = f"stage 1, micro-batch {1 if mode == 'always' else 0}, the loss, loss"
        with refused(f"{place}: ValueError: the loss depends on a tensor of shape () that requires a gradient and"):
            pipeline.train_step(batch())
    temperature.requires_grad_(False)
    pipeline = build(loss=temperature.forward, rematerialize=mode)
    assert pipeline.train_step(batch()).step == 0


def test_a_loss_may_depend_on_weights_of_layers() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    pipeline = build(layers, lambda outputs, targets: F.cross_entropy(outputs, targets) + layers[1].weight.sum())
    pipeline.train_step(batch())
    alone = build(layers, lambda _, __: layers[1].weight.sum())
    assert alone.train_step(batch()).loss == pytest.approx(layers[1].weight.sum().item())


class Keeping(nn.Linear):
    """Keeps a number for the loss."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        self.kept = outputs.square().mean()
        return outputs


@pytest.mark.parametrize("mode", ["always", "never"])
def test_a_loss_may_read_what_a_layer_of_the_last_stage_keeps(mode: str) -> None:
    torch.manual_seed(0)
    layers, (inputs, targets) = nn.Sequential(nn.Linear(3, 3), Keeping(3, 3), nn.Linear(3, 3)), batch()
    plain = copy.deepcopy(layers)
    build(
        layers, lambda outputs, targets: F.cross_entropy(outputs, targets) + layers[1].kept, rematerialize=mode
    ).train_step((inputs, targets))
    for begin in (2, 0):
        outputs = plain(inputs[begin : begin + 2])
        ((F.cross_entropy(outputs, targets[begin : begin + 2]) + plain[1].kept) / 2).backward()
    for (name, parameter), twin in zip(layers.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, twin.grad), name


def test_a_loss_that_reads_what_a_layer_of_another_stage_keeps_is_told_to_let_it_travel() -> None:
    layers = nn.Sequential(Keeping(3, 3), nn.Linear(3, 3))
    pipeline = build(layers, lambda outputs, targets: F.cross_entropy(outputs, targets) + layers[0].kept)
    with pytest.raises(gpipe.PipelineError, match=r"layer of an earlier stage computed and kept; return it along with"):
        pipeline.train_step(batch())


def test_a_graph_of_another_stage_that_a_loss_has_used_up_is_told_to_travel() -> None:
    layers = nn.Sequential(Keeping(3, 3), nn.Linear(3, 3))
    loss = lambda outputs, targets: F.cross_entropy(outputs, targets) + layers[0].kept  # noqa: E731
    with pytest.raises(gpipe.PipelineError, match=r"layer 0 \(Keeping\), backward: .* the loss or a later micro-batch"):
        build(layers, loss, rematerialize="never").train_step(batch())


def test_inputs_and_targets_that_require_gradients_are_refused() -> None:
    inputs, targets = torch.randn(4, 3), torch.randn(4, 3)
    pipeline = build(loss=F.mse_loss)
    with refused("the inputs require gradients, and a training step computes none for them; detach the inputs"):
        pipeline.train_step((inputs.requires_grad_(), targets))
    with refused("the targets require gradients, and a training step computes none for them; detach the targets"):
        pipeline.train_step((inputs.detach(), targets.requires_grad_()))
    pipeline.evaluate(inputs)
    assert pipeline.train_step((inputs.detach(), targets.detach())).step == 0


def test_outputs_without_the_examples_first_are_refused_in_an_evaluation() -> None:
    pipeline = build(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5), Turned()))
    with refused(
        "an output has the shape (5, 2) for a micro-batch of 2 examples; outputs are concatenated along dimension"
    ):
        pipeline.evaluate(batch()[0])


def test_outputs_without_the_examples_first_are_refused_before_anything_has_moved() -> None:
    norm = nn.BatchNorm1d(3)
    pipeline = build(
        gpipe.convert_batch_norm(nn.Sequential(norm, nn.Linear(3, 5), Turned())), loss=lambda y, _: y.sum()
    )
    with refused("an output has the shape (5, 2) for a micro-batch of 2 examples; outputs are"):
        pipeline.train_step(batch(), return_outputs=True)
    assert pipeline.step == 0 and norm.num_batches_tracked == 0 and not norm.running_mean.any()


class Turned(nn.Module):
    """Returns the examples last."""

    def forward(self, x: Tensor) -> Tensor:
        return x.t()


def test_a_layer_that_was_replaced_is_refused() -> None:
    pipeline = build()
    pipeline.layers["1"] = nn.Linear(3, 3)
    for run in (lambda: pipeline.train_step(batch()), lambda: pipeline.evaluate(batch()[0])):
        with refused("layer 1 of pipeline.layers is not the one that the pipeline was made with, so it would not"):
            run()


def test_a_layer_that_was_added_is_refused() -> None:
    pipeline = build()
    pipeline.layers["2"] = nn.Linear(3, 3)
    for run in (lambda: pipeline.train_step(batch()), lambda: pipeline.evaluate(batch()[0])):
        with refused("layer 2 of pipeline.layers was added after the pipeline was made, so it would not be trained"):
            run()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_a_tied_parameter_is_refused_before_and_after(register: str) -> None:
    message = "layers.{} has a hook, and other layers share this parameter: the hook would see the gradient of one"
    layers = tied_model.tied_layers()
    getattr(layers[0].weight, register)(lambda _: None)
    with refused(message.format("0.weight")):
        gpipe.Pipeline(layers, tied_model.loss, [2, 4], 2)
    layers = tied_model.tied_layers()
    pipeline = gpipe.Pipeline(layers, tied_model.loss, [2, 4], 2)
    getattr(layers[3].table, register)(lambda _: None)
    with refused(message.format("3.table")):
        pipeline.train_step(tied_model.mini_batch(0))


def test_a_sparse_gradient_is_refused_by_its_parameters_name() -> None:
    layers = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 3))
    with refused("the gradient of layers.0.weight is sparse, and only dense ones can be added up and clipped alike"):
        build(layers).train_step((torch.arange(4), torch.arange(4) % 3))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_that_depend_on_how_often_a_token_occurs_are_refused(kind: type[nn.Module]) -> None:
    with refused(
        "layers.0 has scale_grad_by_freq=True, but it would count the tokens of a micro-batch, not of the mini"
    ):
        build(nn.Sequential(kind(7, 3, scale_grad_by_freq=True), nn.Linear(3, 3)))
    build(nn.Sequential(kind(7, 3, max_norm=1.0), nn.Linear(3, 3)))
    message = "layers.0 has max_norm=1.0, but its copies in other replicas, and in layers that share its weight, would"
    with refused(message):
        refuse_embeddings(nn.Sequential(kind(7, 3, max_norm=1.0)), 2, [])
    tied = nn.Sequential(kind(7, 3, max_norm=1.0), nn.Linear(3, 7, bias=False))
    tied[1].weight = tied[0].weight
    with refused(message):
        build(tied)


@pytest.mark.parametrize("lazy", [nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d])
def test_a_lazy_batch_norm_is_refused_until_it_knows_its_size(lazy: type[nn.Module]) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Sequential(lazy(), nn.Flatten()))
    with refused(f"1.0 ({lazy.__name__}) does not know its size yet; run the model on an example first, or give"):
        gpipe.convert_batch_norm(layers)
    with refused(f"layers.1.0 ({lazy.__name__}) would count every micro-batch as a mini-batch; call gpipe."):
        build(layers)


def test_a_lazy_batch_norm_that_knows_its_size_is_a_batch_norm() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.LazyBatchNorm1d())
    layers(torch.randn(4, 3))
    gpipe.convert_batch_norm(layers)
    build(layers).train_step(batch())
    assert int(layers[1].num_batches_tracked) == 2


def test_a_lazy_norm_of_another_kind_is_left_as_it_is() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.LazyInstanceNorm2d())
    assert type(gpipe.convert_batch_norm(layers)[1]) is nn.LazyInstanceNorm2d


class Centre(nn.Module):
    """Subtracts a moving mean, which may be another layer's too."""

    def __init__(self, mean: Tensor, *, moves: bool) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.moves = moves

    def forward(self, x: Tensor) -> Tensor:
        if self.moves:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


@pytest.mark.parametrize("partitions", [[3], [1, 2]])
def test_a_buffer_of_two_layers_may_be_constant_and_nothing_else(partitions: list[int]) -> None:
    def train(*, moves: bool) -> None:
        mean = torch.zeros(4)
        layers = nn.Sequential(Centre(mean, moves=False), nn.Linear(4, 4), Centre(mean, moves=moves))
        gpipe.Pipeline(layers, F.mse_loss, partitions, 2).train_step((torch.ones(4, 4), torch.ones(4, 4)))
        assert torch.equal(mean, torch.zeros(4))

    train(moves=False)
    with pytest.raises(ValueError, match=r"a forward changed the buffer layers\.[02]\.mean, which another layer"):
        train(moves=True)


def test_a_batch_norm_without_parameters_of_two_layers_is_refused() -> None:
    norm = nn.BatchNorm1d(4, affine=False)
    layers = gpipe.convert_batch_norm(nn.Sequential(norm, nn.Linear(4, 4), norm))
    with pytest.raises(ValueError, match=r"^layers\.0 and layers\.2 are one batch norm, "):
        gpipe.Pipeline(layers, F.mse_loss, [1, 2], 2)


@pytest.mark.parametrize(
    "loss",
    [lambda x, y: F.mse_loss(x.detach(), y), lambda x, y: (x.argmax(-1) == y.argmax(-1)).float().mean()],
)
def test_a_loss_without_a_gradient_is_refused(loss: Any) -> None:
    pipeline = gpipe.Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), loss, [1, 1], 2)
    with pytest.raises(ValueError, match=r"^the loss has no gradient with respect to the outputs"):
        pipeline.train_step((torch.ones(4, 4), torch.ones(4, 4)))
    assert pipeline.step == 0


def test_a_loss_may_be_constant_in_some_micro_batches_and_layers_may_be_frozen() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    batch = torch.ones(4, 4), torch.tensor([0.0, 0.0, 1.0, 1.0])
    pipeline = gpipe.Pipeline(layers, lambda x, y: x.sum() if y.sum() > 0 else torch.zeros(()), [1, 1], 2)
    assert pipeline.train_step(batch).step == 0
    layers.requires_grad_(False)
    assert pipeline.train_step(batch).step == 1


def test_a_complex_loss_is_refused() -> None:
    pipeline = gpipe.Pipeline(nn.Sequential(nn.Linear(4, 4)), lambda x, _: torch.complex(x, x).mean(), [1], 2)
    with pytest.raises(TypeError, match="the loss is a complex number; return a real one"):
        pipeline.train_step((torch.ones(4, 4), torch.ones(4, 4)))


@pytest.mark.parametrize("max_norm", [-1.0, float("nan"), "1"])
def test_a_norm_to_clip_at_is_a_number_and_not_negative(max_norm: Any) -> None:
    pipeline = gpipe.Pipeline(nn.Sequential(nn.Linear(4, 4)), F.mse_loss, [1], 2)
    batch = torch.ones(4, 4), torch.ones(4, 4)
    with pytest.raises(ValueError, match=rf"^the maximum norm of the gradients is {max_norm!r}; it must be"):
        pipeline.train_step(batch, max_gradient_norm=max_norm)
    pipeline.train_step(batch)
    with pytest.raises(ValueError, match=rf"^the maximum norm of the gradients is {max_norm!r}; it must be"):
        pipeline.clip_gradients(max_norm)


@pytest.mark.parametrize("mode", [True, None, 2])
def test_a_mode_of_rematerialisation_is_a_word_or_numbers(mode: Any) -> None:
    with refused(f"rematerialize is {mode}; it must be one of always, except_last, never, or 2 whole numbers"):
        build(rematerialize=mode)


@pytest.mark.parametrize("seed", [None, "a", 1.5])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with refused(f"seed is {seed!r}; it must be a whole number"):
        build(seed=seed)


def test_the_scaler_is_ours() -> None:
    with refused("scaler is of type GradScaler; give a gpipe.GradientScaler"):
        build().train_step(batch(), scaler=torch.amp.GradScaler("cpu"))  # type: ignore[arg-type]


def test_a_scaler_needs_gradients_of_more_than_float16() -> None:
    half = nn.Linear(3, 3).half()
    pipeline = build(nn.Sequential(Cast(torch.float16), half, Cast(torch.float32), nn.Linear(3, 3)))
    with refused("the gradient of layers.1.weight is in torch.float16, where what the scaler saves vanishes"):
        pipeline.train_step(batch(), scaler=gpipe.GradientScaler())
    half.requires_grad_(False)
    assert pipeline.train_step(batch(), scaler=gpipe.GradientScaler()).loss > 0


@pytest.mark.parametrize(("weight", "said"), [(lambda y: y, "the shape (2,)"), (lambda _: None, "the type NoneType")])
def test_the_weight_of_a_loss_is_a_number(weight: Any, said: str) -> None:
    with refused(f"loss_weight returned {said}; return one number per micro-batch"):
        build(loss_weight=weight).train_step(batch())


def test_a_step_beside_an_evaluation_is_refused() -> None:
    with refused("step is 1 in replica 0 and None in replica 1; give every process the same"):
        refuse_different([{"step": 1}, {}], "replica {}")


def test_a_pipeline_without_a_mesh_among_as_many_processes_as_devices_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(
        UserWarning, match=r"^2 processes were started, but this pipeline has no mesh.*all 2 stages"
    ) as said:
        gpipe.Pipeline(layers, F.mse_loss, [1, 1], 2)
    assert said[0].filename == __file__
    gpipe.Pipeline(layers, F.mse_loss, [1, 1], 2, devices="cpu")
    gpipe.Pipeline(layers, F.mse_loss, [2], 2)


def test_a_note_that_no_other_process_could_get_is_refused_in_one_process_too() -> None:
    pipeline = build()
    with refused("note returned set (Object of type set is not JSON serializable), which cannot be sent"):
        pipeline.train_step(batch(), note=lambda: {1, 2})
    assert pipeline.train_step(batch(), note=lambda: [None, "text"]).notes == [[None, "text"]]
