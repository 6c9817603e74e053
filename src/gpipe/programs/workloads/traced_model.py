"""What models of other libraries have in common: they become layers, in memory, in every process."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

from gpipe.pipeline.batch_norm import convert_batch_norm, converted_batch_norms
from gpipe.programs.workloads.workload import Workload
from gpipe.tracing.segments import TracedLayers


class _Facts(NamedTuple):
    """What is known of a model when its layers are gone."""

    model_names: Mapping[str, str]
    has_batch_norm: bool


# Tracing takes seconds, and the planner and the pipeline take the same layers: they are kept while somebody holds them.
_LAYERS: WeakValueDictionary[str, TracedLayers] = WeakValueDictionary()
_FACTS: dict[str, _Facts] = {}


@dataclass(frozen=True)
class TracedModel(Workload):
    """A model that another library makes by name, cut into layers."""

    @property
    @abstractmethod
    def _key(self) -> str:
        """What the layers follow from."""

    @abstractmethod
    def _trace(self) -> TracedLayers:
        """Make the model on the CPU, and layers of it."""

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
            ConfigError: the library does not make it, or it does not become layers.
        """
        found = _LAYERS.get(self._key)
        if found is None:
            found = _LAYERS[self._key] = self._trace()
            convert_batch_norm(found)
            _FACTS[self._key] = _Facts(found.model_names, bool(converted_batch_norms(found)))
        return found

    @property
    def _facts(self) -> _Facts:
        if self._key not in _FACTS:
            self.layers()
        return _FACTS[self._key]
