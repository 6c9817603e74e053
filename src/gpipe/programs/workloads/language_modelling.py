"""A Transformer that tells the next token of sequences."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gpipe.config import TokensConfig, TransformerLMConfig
from gpipe.data import RandomTokens, TokenLoader, TokenSet
from gpipe.models import transformer_lm
from gpipe.pipeline.engine import Pipeline
from gpipe.pipeline.loss import LossFunction, LossWeight
from gpipe.programs.workloads.workload import Workload
from gpipe.training.losses import ClassificationLoss


@dataclass(frozen=True)
class LanguageModelling(Workload):
    """Transformer-L on sequences of tokens: every token is an example of the loss, and counts alike."""

    model: TransformerLMConfig
    data: TokensConfig
    examples = "sequences"

    @property
    def loss_weight(self) -> LossWeight:
        """The number of tokens of a micro-batch."""
        return torch.numel

    def layers(self) -> nn.Sequential:
        """Describe the whole model on the meta device."""
        model = self.model
        with torch.device("meta"):
            return transformer_lm(
                model.num_layers,
                vocabulary_size=self.data.vocabulary_size,
                model_size=model.model_size,
                feedforward_size=model.feedforward_size,
                num_heads=model.num_heads,
                dropout=model.dropout,
            )

    def inputs(self, num_examples: int) -> Tensor:
        """Describe so many sequences on the meta device."""
        return torch.empty(num_examples, self.data.sequence_length, dtype=torch.int64, device="meta")

    def targets(self, num_examples: int) -> Tensor:
        """Describe the next tokens of so many sequences on the meta device."""
        return self.inputs(num_examples)

    def loss(self) -> LossFunction:
        """Return the loss of a micro-batch."""
        return ClassificationLoss(self.run.trainer.label_smoothing)

    def loaders(self, pipeline: Pipeline, *, pin_memory: bool) -> tuple[TokenLoader, dict[str, TokenLoader]]:
        """Return the loaders of the training and the test sequences; they are small, pinned or not."""
        run, data = self.run, self.data
        train_loader = TokenLoader(
            self._open("train", data.num_train),
            run.trainer.batch_size // run.launch.num_replicas,
            run.seed,
            shuffle=True,
            replica_index=pipeline.job.replica_index,
            num_replicas=pipeline.job.num_replicas,
            drop_last=True,  # all steps have the same number of tokens
        )
        test_set = self._open("test", data.num_test)
        test_loader = TokenLoader(test_set, run.trainer.evaluation.batch_size, run.seed, shuffle=False)
        return train_loader, {"test": test_loader}

    def _open(self, split: str, num_sequences: int) -> TokenSet:
        return RandomTokens(split, num_sequences, self.data.sequence_length, self.data.vocabulary_size)
