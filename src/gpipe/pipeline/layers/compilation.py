"""The layers of a process through torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from gpipe.pipeline._compat import noting_compilation
from gpipe.pipeline.job.activity import Activity
from gpipe.pipeline.layers.structure import structure


class Compilation:
    """Runs layers compiled, and reports which one is being compiled: each takes seconds to minutes.

    Layers that do the same work share compiled code, which takes their weights as arguments.

    A request to stop cannot wait until the remaining layers are compiled. They then run uncompiled, so that all
    processes reach the end of the step, and the step is abandoned: its numbers are not those of compiled layers.

    Args:
        layers: by their index in the model.
        activity: told of the layer that is being compiled.
        asked_to_stop: returns something true once training is to stop.
        options: of torch.compile.

    Attributes:
        is_abandoned: whether layers ran uncompiled since `start`.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        num_layers: int,
        activity: Activity,
        asked_to_stop: Callable[[], Any],
        options: Mapping[str, Any],
    ) -> None:
        shared: dict[Hashable, Callable[[nn.Module, Any], Any]] = {}
        self._compiled: dict[nn.Module, Callable[[Any], Any]] = {}
        for index, layer in layers.items():
            if (kind := structure(layer)) not in shared:
                shared[kind] = _compile(index, options)
            doing = f"compiling layer {index + 1} of {num_layers}"
            self._compiled[layer] = partial(self._run, shared[kind], layer, doing)
        self._activity, self._asked_to_stop = activity, asked_to_stop
        self.start()

    def start(self) -> None:
        """Prepare for a step or an evaluation."""
        self._has_compiled = self.is_abandoned = False

    def compiled(self, layer: nn.Module) -> Callable[[Any], Any]:
        """Return a layer compiled; as it is if the step is abandoned, or if it is a substitute, such as an average."""
        if layer not in self._compiled:
            return layer
        self.is_abandoned = self.is_abandoned or bool(self._has_compiled and self._asked_to_stop())
        return layer if self.is_abandoned else self._compiled[layer]

    def _run(self, run: Callable[[nn.Module, Any], Any], layer: nn.Module, doing: str, value: Any) -> Any:
        with noting_compilation(lambda begins: self._note(doing if begins else None)):
            return run(layer, value)

    def _note(self, doing: str | None) -> None:
        self._has_compiled = True
        self._activity.compiling = doing


def _compile(index: int, options: Mapping[str, Any]) -> Callable[[nn.Module, Any], Any]:
    """Return what runs a layer of one kind through torch.compile; the model's own layers stay as they are.

    `nn.Module.compile` silently compiles nothing if the layer's class is one of torch's own. And torch.compile counts
    variants per code object, which layers of all kinds would share: each kind gets its own.
    """

    def run(layer: nn.Module, value: Any) -> Any:
        return layer(value)

    run.__code__ = run.__code__.replace(co_name=f"layer_{index}")
    compiled: Callable[[nn.Module, Any], Any] = torch.compile(run, **options)
    return compiled
