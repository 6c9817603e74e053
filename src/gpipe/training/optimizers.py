"""Optimisers whose state is keyed by parameter names, so that it saves and loads with any partitioning."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import gpipe._compat.torchvision  # noqa: F401  (must come before timm, which imports torchvision)

from timm.optim.rmsprop_tf import RMSpropTF  # isort: skip

Groups = list[dict[str, Any]]


def _rmsprop(
    groups: Groups, lr: float, at_once: bool, *, decay: float = 0.9, momentum: float = 0.9, epsilon: float = 1.0
) -> torch.optim.Optimizer:
    """Build TensorFlow's RMSProp: epsilon is inside the root, and the mean square starts at one.

    The learning rate is part of the momentum buffer. Source: the public AmoebaNet TPU code (momentum 0.9, epsilon 1.0).
    """
    for group in groups:  # not an argument, because timm before 1.0.31 lacks it and updates parameter by parameter
        group["foreach"] = at_once
    return RMSpropTF(groups, lr=lr, alpha=decay, eps=epsilon, momentum=momentum)


def _sgd(groups: Groups, lr: float, at_once: bool, *, momentum: float = 0.9) -> torch.optim.Optimizer:
    """Build stochastic gradient descent with Nesterov momentum (plain descent when `momentum` is 0); fused on GPUs."""
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=momentum > 0, fused=at_once)


def _adamw(
    groups: Groups, lr: float, at_once: bool, *, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8
) -> torch.optim.Optimizer:
    """Build Adam with decoupled weight decay; fused on GPUs."""
    return torch.optim.AdamW(groups, lr=lr, betas=(beta1, beta2), eps=epsilon, fused=at_once)


def _adafactor(
    groups: Groups, lr: float, at_once: bool, *, decay: float = 0.8, epsilon: float = 1e-3, clip_threshold: float = 1.0
) -> torch.optim.Optimizer:
    """Build Adafactor (Shazeer and Stern 2018), which keeps a row and a column of mean squares for each kernel.

    The step size is min(lr, 1 / sqrt(steps)) x max(epsilon, root mean square of the parameter). `decay` is the exponent
    of the mean squares' decay. An update with a root mean square above `clip_threshold` is scaled down to it.
    """
    # Without `foreach`, torch updates parameter by parameter even on GPUs.
    return torch.optim.Adafactor(
        groups, lr=lr, beta2_decay=-decay, eps=(None, epsilon), d=clip_threshold, foreach=at_once
    )


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "rmsprop": _rmsprop, "sgd": _sgd, "adamw": _adamw, "adafactor": _adafactor,
}  # fmt: skip


def build_optimizer(
    name: str,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    lr: float,
    *,
    weight_decay: float = 0.0,
    on_gpus: bool | None = None,
    **settings: float,
) -> torch.optim.Optimizer:
    """Build the optimiser called `name`, one of OPTIMIZERS.

    Frozen parameters (requires_grad False) are left out. Kernels decay, but not one-dimensional biases and norms. With
    `on_gpus`, few kernels update all parameters; None means whether they are on GPUs. `settings` are the other keyword
    arguments of the function in OPTIMIZERS.
    """
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    kernels = [(name, parameter) for name, parameter in trained if parameter.ndim > 1]
    others = [(name, parameter) for name, parameter in trained if parameter.ndim <= 1]
    groups: Groups = [
        {"params": part, "weight_decay": decay} for part, decay in ((kernels, weight_decay), (others, 0.0)) if part
    ]
    # torch refuses an empty list, and an empty group beside others; a stage without parameters still has an optimiser.
    groups = groups or [{"params": [], "weight_decay": 0.0}]
    at_once = bool(trained) and all(parameter.is_cuda for _, parameter in trained) if on_gpus is None else on_gpus
    return OPTIMIZERS[name](groups, lr, at_once, **settings)


def named_parameters_of(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the parameters of an optimiser that was built from (name, parameter) pairs, by name."""
    return {name: parameter for name, parameter, _ in _list_parameters(optimizer)}


def _list_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Yield the name, the parameter and its group."""
    for group in optimizer.param_groups:
        names = group.get("param_names", [])
        if len(names) != len(group["params"]):
            raise TypeError(
                f"this {type(optimizer).__name__} does not know its parameters' names: "
                "build it from (name, parameter) pairs such as pipeline.named_parameters()."
            )
        for name, parameter in zip(names, group["params"], strict=True):
            yield name, parameter, group


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state as tensors named `<parameter name>/<slot>`.

    Numbers become 0-dimensional tensors in slots called `number.<slot>`. Counters of a group of parameters, which some
    of timm's optimisers have, are in the slots `group.<key>` of each of its parameters. A parameter that never had a
    gradient has no state and does not appear.
    """
    state: dict[str, Tensor] = {}
    for name, parameter, group in _list_parameters(optimizer):
        if own := optimizer.state.get(parameter, {}):
            counted = {_OF_GROUP + key: group[key] for key in _find_counters(optimizer, group)}
            for slot, value in {**own, **counted}.items():
                if isinstance(value, Tensor):
                    state[f"{name}/{slot}"] = value.detach()
                elif value is not None:
                    kind = torch.float64 if isinstance(value, float) else None  # Python's own precision
                    state[f"{name}/{_NUMBER}{slot}"] = torch.tensor(value, dtype=kind)
    return state


_NUMBER, _OF_GROUP = "number.", "group."


def _find_counters(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> list[str]:
    """Return the keys of a group that are not settings, but counters of its steps."""
    return [key for key in ("step",) if key in group and key not in optimizer.defaults]


@torch.no_grad()
def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]) -> None:
    """Replace the whole state by what `optimizer_state` returned for this optimiser's parameters.

    0-dimensional tensors (step counts) stay on the CPU, as in torch and timm, except those of fused optimisers; the
    rest goes to its parameter's device.

    Raises:
        KeyError: the optimiser lacks a parameter.
    """
    places = {name: (parameter, group) for name, parameter, group in _list_parameters(optimizer)}
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for key in _find_counters(optimizer, group):
            del group[key]
    for key, value in state.items():
        name, slot = key.rsplit("/", 1)
        parameter, group = places[name]
        device = parameter.device if value.ndim > 0 or group.get("fused") else torch.device("cpu")
        is_number = slot.startswith(_NUMBER)
        slot = slot.removeprefix(_NUMBER)
        place = group if slot.startswith(_OF_GROUP) else optimizer.state[parameter]
        place[slot.removeprefix(_OF_GROUP)] = value.item() if is_number else value.to(device, copy=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
