"""Any classification model of timm on labelled images."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn

from gpipe.config import ConfigError, TimmConfig
from gpipe.models.timm_models import head_names, make_timm_model
from gpipe.pipeline.batch_norm import convert_batch_norm, converted_batch_norms
from gpipe.programs.workloads.image_classification import ImageClassification
from gpipe.tracing.segments import TracedLayers, as_layers
from gpipe.tracing.tracer import TracingError


class _Facts(NamedTuple):
    """What is known of a model when its layers are gone."""

    model_names: Mapping[str, str]
    has_batch_norm: bool


# Tracing takes seconds, and the planner and the pipeline take the same layers: they are kept while somebody holds them.
_LAYERS: WeakValueDictionary[str, TracedLayers] = WeakValueDictionary()
_FACTS: dict[str, _Facts] = {}


@dataclass(frozen=True)
class TimmClassification(ImageClassification):
    """A model of timm, cut into layers; it has memory and initial weights in every process."""

    model: TimmConfig

    @property
    def has_batch_norm(self) -> bool:  # type: ignore[override]  # other families know without building the model
        """Whether the model has batch norms."""
        return self._facts.has_batch_norm

    def layers(self) -> TracedLayers:
        """Build the whole model on the CPU.

        Raises:
            ConfigError: timm does not make it, or it does not become layers.
        """
        found = _LAYERS.get(self._key)
        if found is None:
            found = _LAYERS[self._key] = self._trace()
            _FACTS[self._key] = _Facts(found.model_names, bool(converted_batch_norms(found)))
        return found

    @property
    def _key(self) -> str:
        return repr((self.model, self.num_classes, self.data.channels, self.image_size, self.run.seed))

    @property
    def _facts(self) -> _Facts:
        if self._key not in _FACTS:
            self.layers()
        return _FACTS[self._key]

    def _trace(self) -> TracedLayers:
        name = self.model.name
        try:
            model = make_timm_model(
                name,
                num_classes=self.num_classes,
                channels=self.data.channels,
                image_size=self.image_size,
                pretrained=self.model.pretrained,
                arguments=self.model.arguments,
                seed=self.run.seed,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        try:
            layers = as_layers(model, torch.empty_like(self.inputs(2), device="cpu"))
        except TracingError as error:
            raise ConfigError(
                f"model.name is {name}, which does not become layers for images of data.image_size={self.image_size} "
                f"({error.reason}): set another size, or another model."
            ) from None
        convert_batch_norm(layers)
        return layers

    @property
    def model_names(self) -> Mapping[str, str]:
        """The name that each tensor has in timm, by its name among the layers."""
        return self._facts.model_names

    def replaced(self, layers: nn.ModuleDict, saved: Mapping[str, tuple[int, ...]]) -> Collection[str]:
        """Return the names of the tensors of the softmax layer, where the saved one is for other classes."""
        heads = head_names(self.model.name)
        shapes = {name: tuple(tensor.shape) for name, tensor in layers.state_dict().items()}
        return {
            f"layers.{own}"
            for own, name in self.model_names.items()
            if name.rpartition(".")[0] in heads and own in shapes and _saved_shape(own, name, saved) != shapes[own]
        }


def _saved_shape(own: str, name: str, saved: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the shape in a checkpoint, which has our names, or in a file, which has the model's."""
    return saved.get(f"layers.{own}", saved.get(name))
