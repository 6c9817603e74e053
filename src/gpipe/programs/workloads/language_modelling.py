"""Models that predict the next token: our Transformer-L, and any language model of transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from gpipe.config import (
    ConfigError,
    RandomTokensConfig,
    TextFolderConfig,
    TokensConfig,
    TransformerLMConfig,
    TransformersConfig,
)
from gpipe.data import RandomTokens, Tokenizer, TokenLoader, TokenSet, open_text_folder, open_text_tokenizer
from gpipe.data.text.tokenizer import BEGIN, END, PADDING
from gpipe.durable_files import write_flushed
from gpipe.models import transformer_lm
from gpipe.models.transformers_models import (
    check_transformers_type,
    config_text,
    make_transformers_config,
    make_transformers_model,
)
from gpipe.pipeline.engine import Pipeline
from gpipe.pipeline.loss import LossFunction, LossWeight
from gpipe.programs.workloads.text_workload import TextWorkload
from gpipe.programs.workloads.traced_model import TracedModel
from gpipe.training.losses import ClassificationLoss

MODEL_FILE = "config.json"
"""What transformers' `from_pretrained` reads beside the weights."""


@dataclass(frozen=True)
class LanguageModelling(TextWorkload):
    """Any model on sequences of tokens; every token has the same weight in the loss."""

    data: TokensConfig
    examples = "sequences"

    @property
    def loss_weight(self) -> LossWeight:
        """The number of tokens of a micro-batch."""
        return torch.numel

    @property
    def vocabulary_size(self) -> int:
        """The number of different tokens."""
        assert self.data.vocabulary_size is not None  # `complete` has asked the tokenizer
        return self.data.vocabulary_size

    def inputs(self, num_examples: int) -> Tensor:
        """Describe `num_examples` sequences on the meta device."""
        return torch.empty(num_examples, self.data.sequence_length, dtype=torch.int64, device="meta")

    def targets(self, num_examples: int) -> Tensor:
        """Describe the next tokens of `num_examples` sequences on the meta device."""
        return self.inputs(num_examples)

    def loss(self) -> LossFunction:
        """Return the loss of a micro-batch."""
        return ClassificationLoss(self.run.trainer.label_smoothing)

    def train_loader(self, pipeline: Pipeline, *, pin_memory: bool) -> TokenLoader:
        """Return the loader of the training sequences; they are too small for pinning to matter."""
        run = self.run
        return TokenLoader(
            self._open("train"),
            run.trainer.batch_size // run.launch.num_replicas,
            run.seed,
            shuffle=True,
            replica_index=pipeline.job.replica_index,
            num_replicas=pipeline.job.num_replicas,
            drop_last=True,  # all steps have the same number of tokens
        )

    def evaluation_loaders(self, pipeline: Pipeline, *, pin_memory: bool) -> dict[str, TokenLoader]:
        """Return the loader of the test sequences."""
        batch_size = self.run.trainer.evaluation.batch_size
        return {"test": TokenLoader(self._open("test"), batch_size, self.run.seed, shuffle=False)}

    def _open(self, split: str) -> TokenSet:
        data = self.data
        if isinstance(data, TextFolderConfig):
            assert self._tokenizer is not None
            return open_text_folder(data.root, split, self._tokenizer, data.sequence_length, data.validation_share)
        assert isinstance(data, RandomTokensConfig)
        num_sequences = data.num_train if split == "train" else data.num_test
        return RandomTokens(split, num_sequences, data.sequence_length, self.vocabulary_size)

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        return open_text_tokenizer(self.data.tokenizer) if isinstance(self.data, TextFolderConfig) else None


@dataclass(frozen=True)
class TransformerLMModelling(LanguageModelling):
    """Transformer-L on sequences of tokens."""

    model: TransformerLMConfig

    def layers(self) -> nn.Sequential:
        """Describe the whole model on the meta device."""
        with torch.device("meta"):
            return transformer_lm(vocabulary_size=self.vocabulary_size, **self.model.values_but("family"))


@dataclass(frozen=True)
class TransformersModelling(TracedModel, LanguageModelling):
    """A language model of transformers on sequences of tokens."""

    model: TransformersConfig

    @property
    def _key(self) -> str:
        return repr((self.model, self.vocabulary_size, self.data.sequence_length, self.model_seed))

    @cached_property
    def _config(self) -> object:
        special = {"bos_token_id": BEGIN, "pad_token_id": PADDING, "eos_token_id": END}
        return make_transformers_config(self.model.name, self.model.arguments, self.vocabulary_size, special)

    def _make(self, *, may_fetch: bool) -> nn.Module:
        try:
            check_transformers_type(self.model.name)
            return make_transformers_model(self._config, self.data.sequence_length, self.model_seed)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _refuse(self, reason: str) -> ConfigError:
        return ConfigError(
            f"model.name is {self.model.name}, which does not become layers ({reason}): set another one."
        )

    @property
    def model_names(self) -> Mapping[str, str]:
        """The name that each tensor has in transformers, by its name among the layers."""
        return {own: name.removeprefix("model.") for own, name in super().model_names.items()}

    def keep(self, folder: Path | None) -> dict[str, str]:
        """Keep the tokenizer, and what transformers reads beside the weights."""
        if folder is not None:
            write_flushed(folder / MODEL_FILE, config_text(self._config))
        return super().keep(folder)
