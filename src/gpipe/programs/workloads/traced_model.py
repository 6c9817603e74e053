"""Models of other libraries: each process builds the whole model in memory and cuts it into layers."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn

from gpipe.config import ConfigError
from gpipe.pipeline.batch_norm import convert_batch_norm, converted_batch_norms
from gpipe.programs.workloads.workload import Workload
from gpipe.tracing.errors import TracingError
from gpipe.tracing.traced_layers import TracedLayers, as_layers


class _Facts(NamedTuple):
    """What remains known about a model after its layers are freed."""

    model_names: Mapping[str, str]
    has_batch_norm: bool
    versions: list[int]  # of the untrained layers' tensors


# Tracing takes seconds, so the planner and the pipeline share the layers while either holds them. Trained layers are
# not reused: another run in this process must begin with the initial weights.
_LAYERS: WeakValueDictionary[str, TracedLayers] = WeakValueDictionary()
_FACTS: dict[str, _Facts] = {}


@dataclass(frozen=True)
class TracedModel(Workload):
    """A model that another library makes by name, cut into layers."""

    @property
    @abstractmethod
    def _key(self) -> str:
        """Identifies all that determines the layers."""

    @abstractmethod
    def _make(self, *, may_fetch: bool) -> nn.Module:
        """Make the model on torch's default device; with `may_fetch`, weights may be downloaded."""

    @abstractmethod
    def _refuse(self, reason: str) -> ConfigError:
        """Return the error for a model that does not become layers."""

    def check(self) -> None:
        """Refuse a model that its library does not have, or that does not take the data.

        If the model can run on the meta device, nothing else is computed.
        """
        try:
            with torch.device("meta"):
                self._make(may_fetch=False)(self.inputs(2))
        except Exception:  # noqa: BLE001 - a wrong model, or code that needs real tensors: building layers tells which
            self.layers()

    @property
    def has_batch_norm(self) -> bool:  # type: ignore[override]  # other families know without building the model
        """Whether the model has batch norms."""
        return self._facts.has_batch_norm

    @property
    def model_names(self) -> Mapping[str, str]:
        """The name that each tensor has in the library's model, by its name among the layers."""
        return self._facts.model_names

    def layers(self) -> TracedLayers:
        """Build the whole model on the CPU.

        Raises:
            ConfigError: the library does not have it, or it cannot be cut into layers.
        """
        found = _LAYERS.get(self._key)
        if found is None or _versions(found) != self._facts.versions:
            model = self._make(may_fetch=True)
            try:
                found = _LAYERS[self._key] = as_layers(model, torch.empty_like(self.inputs(2), device="cpu"))
            except TracingError as error:
                raise self._refuse(error.reason) from None
            convert_batch_norm(found)
            _FACTS[self._key] = _Facts(found.model_names, bool(converted_batch_norms(found)), _versions(found))
        return found

    @property
    def _facts(self) -> _Facts:
        if self._key not in _FACTS:
            self.layers()
        return _FACTS[self._key]


def _versions(layers: nn.Module) -> list[int]:
    """Return how often each tensor was changed."""
    return [tensor._version for tensor in (*layers.parameters(), *layers.buffers())]
