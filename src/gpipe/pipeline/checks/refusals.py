"""What a pipeline would ignore, and so refuses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import SyncBatchNorm

from gpipe.pipeline._compat import AnyBatchNorm, is_compiled
from gpipe.pipeline.batch_norm import MicroBatchNorm
from gpipe.pipeline.checks.loss_function import refuse_loss
from gpipe.pipeline.layers.initialization import is_meta
from gpipe.pipeline.microbatch import Payload
from gpipe.pipeline.schedule import Kind, StepSchedule
from gpipe.pipeline.step_end.gradient_scaler import GradientScaler

_LONGEST_TIMEOUT = 10**6  # seconds, twelve days: Gloo and NCCL count milliseconds in 32 bits
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def check_numbers(
    num_microbatches: Any, output_dimension: Any, seed: Any, stages_per_device: Any, timeout_seconds: Any
) -> None:
    """Refuse settings of a pipeline that are not valid numbers."""
    whole = {
        "num_microbatches": (num_microbatches, 1),
        "output_dimension": (output_dimension, 0),
        "stages_per_device": (stages_per_device, 1),
    }
    for name, (value, least) in whole.items():
        if type(value) is not int or value < least:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    if not isinstance(seed, int):
        raise TypeError(f"seed is {seed!r}; it must be a whole number")
    if not isinstance(timeout_seconds, (int, float)) or not 0 < timeout_seconds <= _LONGEST_TIMEOUT:
        raise ValueError(
            f"timeout_seconds is {timeout_seconds!r}; it must be a number above 0, at most {_LONGEST_TIMEOUT:,}"
        )


def refuse_gradient_types(parameters: Iterable[tuple[str, Parameter]], why: str) -> None:
    """Refuse gradients of another type where processes combine them; `why` tells how: "which replicas average"."""
    for name, parameter in parameters:
        if parameter.requires_grad and parameter.grad_dtype is not parameter.dtype:
            raise ValueError(
                f"{name} has the type {parameter.dtype}, but its gradient, {why}, has {parameter.grad_dtype}; do not "
                "change its grad_dtype"
            )


def refuse_model(layers: Any, loss: Any, loss_weight: Any, prepare_inputs: Any) -> None:
    """Refuse layers and a loss that a pipeline would not run or train as expected, and functions that are none."""
    for name, function in (("loss_weight", loss_weight), ("prepare_inputs", prepare_inputs)):
        if not (function is None or callable(function)):
            raise TypeError(f"{name} is of type {type(function).__name__}; it must be a function")
    refuse_loss(loss)
    _refuse_own_behaviour(layers)
    refuse_unconverted(layers)
    for index, layer in enumerate(layers):
        if any(hasattr(parameter, "to_local") for parameter in layer.parameters()):
            raise ValueError(
                f"layer {index} has parameters that fully_shard has sharded; give the pipeline the layer as it was "
                "before, and set shard_replicas=True"
            )


def _refuse_own_behaviour(layers: Any) -> None:
    """Refuse what is not a sequence, or does more than run its layers: a stage runs only some of them."""
    name = type(layers).__name__
    if not (isinstance(layers, nn.Module) and is_compiled(layers)):
        refuse_no_sequence(layers)
    _refuse_additions(layers)
    is_plain = type(layers).forward is nn.Sequential.forward and type(layers).__call__ is nn.Sequential.__call__
    if not is_plain or "forward" in layers.__dict__:
        raise TypeError(
            f"{name} has a forward of its own, but stages run its layers one after the other; put what it does into "
            "layers, and give nn.Sequential(*layers)"
        )
    own = {**layers._parameters, **layers._buffers}
    if name_of_own := next((key for key, value in own.items() if value is not None), None):
        raise ValueError(f"{name} has {name_of_own} of its own, which no stage would hold; put it into a layer")


def refuse_no_sequence(layers: Any) -> None:
    """Refuse what is not a sequence of layers."""
    if not isinstance(layers, nn.Sequential):
        raise TypeError(
            f"layers is of type {type(layers).__name__}; it must be an nn.Sequential of the model's layers, which "
            "gpipe.as_layers makes from any module"
        )


def _refuse_additions(layers: nn.Module) -> None:
    """Refuse a compiled model and hooks on it, at any time: stages run only the layers."""
    name = type(layers).__name__
    if is_compiled(layers):
        raise ValueError(
            f"{name} is compiled by torch.compile, but stages run its layers alone; give the layers as they were "
            "before, and call pipeline.compile()"
        )
    if any(getattr(layers, kind) for kind in _HOOKS):
        raise ValueError(f"{name} has hooks, but stages run its layers alone; register them on a layer")


def refuse_leaves_of_loss(loss: Tensor, outputs: Payload, known: Collection[Tensor]) -> None:
    """Refuse a loss that depends on a trainable tensor elsewhere, such as in a closure or in another module.

    loss: of a micro-batch, with its graph down to the `outputs`.
    known: this process's parameters.
    """
    own = set(map(id, (*known, *outputs.tensors)))
    for leaf in _find_leaves([loss.grad_fn], [tensor.grad_fn for tensor in outputs.tensors]):
        # An empty leaf has nothing to train: a stage's graph begins at one.
        if id(leaf) not in own and leaf.numel() > 0:
            raise ValueError(
                f"the loss depends on a tensor of shape {tuple(leaf.shape)} that requires a gradient and belongs to no "
                "layer of the last stage, so the pipeline would not train it; put it into the last layer, or freeze it "
                "(requires_grad_(False))"
            )


def _find_leaves(roots: Iterable[Any], ends: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the leaves of a graph, which `ends` and what is behind them do not belong to."""
    stack = [node for node in roots if node is not None]
    seen = {*stack, *ends}
    while stack:
        node = stack.pop()
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        following = [edge for edge, _ in node.next_functions if edge is not None and edge not in seen]
        seen.update(following)
        stack += following


def refuse_hidden_parameters(outputs: Payload, parameters: Mapping[str, Tensor]) -> None:
    """Refuse to capture a layer that reads parameters elsewhere than in its attributes, where a capture replaces them.

    parameters: of the layer, by name; its `outputs` must not depend on them.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    for leaf in _find_leaves([tensor.grad_fn for tensor in outputs.tensors], []):
        if id(leaf) in names:
            raise ValueError(
                f"the layer reads its parameter {names[id(leaf)]} elsewhere than in the attribute of that name, and as "
                "a CUDA graph it would not train it; read the attribute, or set trainer.cuda_graphs=false"
            )


def refuse_history(value: Any, what: str) -> None:
    """Refuse inputs or targets that require gradients: none would reach them."""
    if any(tensor.requires_grad for tensor in Payload.of_mini_batch(value, what)[0].tensors):
        raise ValueError(
            f"the {what} require gradients, and a training step computes none for them; detach the {what} (.detach()), "
            "and make what computes them a layer"
        )


def refuse_replaced_layers(layers: nn.ModuleDict, own: Mapping[int, nn.Module]) -> None:
    """Refuse layers that replaced those that the stages run, or were added to them."""
    _refuse_other_layers(layers, own, len(own), "pipeline.layers")


def refuse_changed_model(layers: nn.Sequential, own: Mapping[int, nn.Module], num_layers: int) -> None:
    """Refuse hooks on the model after it was cut, and layers that replaced those of the stages, or were appended."""
    _refuse_additions(layers)
    _refuse_other_layers(layers, own, num_layers, "the model")


def _refuse_other_layers(layers: nn.Module, own: Mapping[int, nn.Module], num_layers: int, where: str) -> None:
    for index, layer in own.items():
        if layers._modules.get(str(index)) is not layer:
            raise ValueError(
                f"layer {index} of {where} is not the one that the pipeline was made with, so it would not be trained; "
                "change that layer in place, or make a new Pipeline"
            )
    if added := list(layers._modules)[num_layers:]:
        raise ValueError(
            f"layer {added[0]} of {where} was added after the pipeline was made, so it would not be trained; make a "
            "new Pipeline from all layers"
        )


def refuse_cuda_graphs(options: Mapping[str, Any]) -> None:
    """Refuse to compile into CUDA graphs: a graph's next run overwrites its outputs and what it keeps for backward.

    Meanwhile an output may still be on its way to the next stage, and other micro-batches wait for their backward.
    Torch begins to reuse that memory with the first forward after a backward, which in 1F1B is in mid-step.
    """
    asked = {
        "mode": options.get("mode") in ("reduce-overhead", "max-autotune"),
        "backend": options.get("backend") == "cudagraphs",
        "options": (options.get("options") or {}).get("triton.cudagraphs", False),
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise ValueError(
                f"{name} is {options[name]!r}, which makes CUDA graphs, and these overwrite what other micro-batches "
                "still need; use mode='default' or 'max-autotune-no-cudagraphs', or Pipeline.use_cuda_graphs without "
                "compile"
            )


def refuse_unconverted(layers: nn.Module) -> None:
    """Refuse a batch norm whose moving averages would move once per micro-batch, and again in each recomputation."""
    for name, module in layers.named_modules():
        if isinstance(module, AnyBatchNorm) and not isinstance(module, MicroBatchNorm):
            remedy = (
                "use nn.BatchNorm, gpipe.convert_batch_norm(layers) and Pipeline(synchronize_batch_norm=True) instead"
                if isinstance(module, SyncBatchNorm)
                else "call gpipe.convert_batch_norm(layers) first"
            )
            raise ValueError(
                f"layers.{name} ({type(module).__name__}) would count every micro-batch as a mini-batch; {remedy}"
            )


def refuse_embeddings(layers: nn.Module, num_replicas: int, tied: Collection[str]) -> None:
    """Refuse embeddings whose gradients or weights depend on all examples of a mini-batch at once, or on other layers.

    tied: the full names of the parameters that several layers share.
    """
    for name, module in layers.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            if module.scale_grad_by_freq:
                raise ValueError(
                    f"layers.{name} has scale_grad_by_freq=True, but it would count the tokens of a micro-batch, not "
                    "of the mini-batch; set it to False"
                )
            if module.max_norm is not None and (num_replicas > 1 or f"layers.{name}.weight" in tied):
                raise ValueError(
                    f"layers.{name} has max_norm={module.max_norm}, but its copies in other replicas, and in layers "
                    "that share its weight, would not be scaled alike; set it to None, or use one replica and tie no "
                    "weights"
                )


def refuse_late_parameters(layers: nn.Module) -> None:
    """Refuse parameters that fully_shard does not know, because they were added after the pipeline was made."""
    for name, parameter in layers.named_parameters():
        if not hasattr(parameter, "to_local"):
            raise ValueError(
                f"layers.{name} was added after the pipeline was made, and shard_replicas is True, so replicas would "
                "not average its gradient; make a new Pipeline from all layers"
            )


def refuse_to_shard(layers: nn.Sequential, schedule: str, tasks: StepSchedule, tied: Sequence[str]) -> None:
    """Refuse to shard weights over replicas where fully_shard cannot.

    tied: names of parameters that several layers share.
    """
    if any(task.kind is Kind.WEIGHT_GRADIENTS for own in tasks for task in own):
        raise ValueError(
            f"schedule is {schedule} and shard_replicas is True, but fully_shard frees a layer's weights and averages "
            "their gradients within one backward; choose a schedule that does not split backwards, such as gpipe or "
            "1f1b, or set shard_replicas=False"
        )
    for index, layer in enumerate(layers):
        if is_meta(layer):
            raise ValueError(
                f"layer {index} is on the meta device and shard_replicas is True; build the layers on the CPU"
            )
    for name, parameter in layers.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"layers.{name} has a hook and shard_replicas is True, but fully_shard replaces the parameter; "
                "register hooks after the pipeline is made"
            )
    if tied:
        raise ValueError(
            f"{tied[0]} is shared by several layers and shard_replicas is True, but their gradients are added up in "
            "full; give each layer its own parameter, or set shard_replicas=False"
        )


def unpack_mini_batch(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and targets of a mini-batch; refuse anything else."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        found = f"{len(batch)} entries" if isinstance(batch, tuple | list) else f"the type {type(batch).__name__}"
        raise TypeError(f"the mini-batch has {found}; it must be (inputs, targets)")
    inputs, targets = batch
    return inputs, targets


def refuse_inference_mode() -> None:
    """Refuse to train where torch lets no tensor have a graph, even within `torch.enable_grad`."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "train_step was called within torch.inference_mode(), where nothing can train; leave that mode first"
        )


def refuse_max_norm(max_norm: float | None) -> None:
    """Refuse to clip gradients to an invalid norm."""
    if max_norm is not None and not (isinstance(max_norm, Real) and max_norm >= 0):
        raise ValueError(f"the maximum norm of the gradients is {max_norm!r}; it must be a number of at least 0")


def refuse_scaler(scaler: Any, parameters: Iterable[tuple[str, Parameter]]) -> None:
    """Refuse a scaler on which the processes would not agree, such as torch's; and one that float16 weights defeat."""
    if not isinstance(scaler, GradientScaler | None):
        raise TypeError(f"scaler is of type {type(scaler).__name__}; give a gpipe.GradientScaler")
    for name, parameter in parameters if scaler is not None else ():
        if parameter.requires_grad and parameter.grad_dtype is torch.float16:
            raise ValueError(
                f"the gradient of {name} is in torch.float16, where what the scaler saves vanishes again when the "
                "gradient is divided; keep weights in float32, and call train_step under torch.autocast('cuda', "
                "torch.float16)"
            )


def refuse_different(given: Sequence[Mapping[str, Any]], where: str) -> None:
    """Refuse what differs between processes, each named by its number in `where`: "replica {}"."""
    for process, other in enumerate(given[1:], 1):
        for name in {**given[0], **other}:
            if (value := given[0].get(name)) != (there := other.get(name)):
                raise ValueError(
                    f"{name} is {value} in {where.format(0)} and {there} in {where.format(process)}; give every "
                    "process the same"
                )


def refuse_changed_inputs(inputs: Payload, versions: Sequence[int], *, is_stored: bool) -> None:
    """Refuse a layer that changed its stage's input in place, if something else, or a recomputation, starts from it.

    versions: those that its tensors had before.
    """
    changed = [tensor._version != version for tensor, version in zip(inputs.tensors, versions, strict=True)]
    if any(is_changed and is_shared for is_changed, is_shared in zip(changed, inputs.shared, strict=False)):
        raise ValueError(
            "the layer changed in place a tensor of the stage's input that shares memory with another one, such as a "
            "view of it or the same tensor of another micro-batch; across a boundary the other one would not change: "
            "use the layer's out-of-place form (inplace=False), or return a copy of one of the two (.clone()) from the "
            "layer that makes them"
        )
    if is_stored and any(changed):
        raise ValueError(
            "the layer changed the stage's stored input in place, and the recomputation would start from the "
            "changed input; use the layer's out-of-place form (inplace=False) or rematerialize='never'"
        )


def refuse_changed_later(inputs: Payload, versions: Sequence[int]) -> None:
    """Refuse to recompute from an input that another stage has changed in place, as it can within one process.

    versions: those that its tensors had after the stage's forward.
    """
    if [tensor._version for tensor in inputs.tensors] != versions:
        raise ValueError(
            "a later stage changed in place a tensor that this stage passed on and recomputes from; use the layer's "
            "out-of-place form (inplace=False), return a copy (.clone()), or set rematerialize='never'"
        )
