"""Any classification model of timm on labelled images."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from gpipe.config import ConfigError, TimmConfig
from gpipe.models.timm_models import head_names, make_timm_model
from gpipe.programs.workloads.image_classification import ImageClassification
from gpipe.programs.workloads.traced_model import TracedModel


@dataclass(frozen=True)
class TimmClassification(TracedModel, ImageClassification):
    """A model of timm."""

    model: TimmConfig

    @property
    def _key(self) -> str:
        return repr((self.model, self.num_classes, self.data.channels, self.image_size, self.model_seed))

    def _make(self, *, may_fetch: bool) -> nn.Module:
        try:
            return make_timm_model(
                self.model.name,
                num_classes=self.num_classes,
                channels=self.data.channels,
                image_size=self.image_size,
                pretrained=self.model.pretrained and may_fetch,
                arguments=self.model.arguments,
                seed=self.model_seed,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _refuse(self, reason: str) -> ConfigError:
        return ConfigError(
            f"model.name is {self.model.name}, which does not become layers for images of "
            f"data.image_size={self.image_size} ({reason}): set another size, or another model."
        )

    def replaced(self, layers: nn.ModuleDict, saved: Mapping[str, tuple[int, ...]]) -> Collection[str]:
        """Return the names of the softmax layer's tensors if the saved layer has another number of classes."""
        heads = head_names(self.model.name)
        shapes = {name: tuple(tensor.shape) for name, tensor in layers.state_dict().items()}
        return {
            f"layers.{own}"
            for own, name in self.model_names.items()
            if name.rpartition(".")[0] in heads and own in shapes and saved.get(name) != shapes[own]
        }
