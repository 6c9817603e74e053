"""An encoder-decoder Transformer on pairs of sentences."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from gpipe.config import ConfigError, TranslationDataConfig, TranslationModelConfig
from gpipe.data import ParallelCorpus, Tokenizer, TranslationLoader, open_corpus, open_tokenizer
from gpipe.data.text.tokenizer import PADDING
from gpipe.models import translation_transformer
from gpipe.pipeline.engine import Pipeline
from gpipe.pipeline.loss import LossFunction, LossWeight
from gpipe.programs.workloads.text_workload import TextWorkload
from gpipe.training.evaluation import Metrics, TokenMetrics
from gpipe.training.losses import TokenLoss, count_tokens


@dataclass(frozen=True)
class Translation(TextWorkload):
    """T(L, H, A) on pairs of sentences; every target token except padding has the same weight in the loss."""

    model: TranslationModelConfig
    data: TranslationDataConfig
    _languages: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False)
    _warnings: dict[str, list[str]] = field(default_factory=dict, init=False)
    examples = "sentences"
    varies_in_length = True

    @property
    def loss_weight(self) -> LossWeight:
        """The number of target tokens of a micro-batch, without padding."""
        return partial(count_tokens, padding_index=PADDING)

    @property
    def num_examples(self) -> int:
        """The number of longest sentences in a mini-batch, which need most memory: trainer.batch_size counts tokens.

        Each replica is planned with the first one's number.
        """
        num_replicas = self.run.launch.num_replicas
        return -(-self._count_longest(self.run.trainer.batch_size) // num_replicas) * num_replicas

    @property
    def num_evaluated_examples(self) -> int:
        """The number of longest sentences in an evaluation's mini-batch."""
        return self._count_longest(self.run.trainer.evaluation.batch_size)

    def _count_longest(self, num_tokens: int) -> int:
        return max(1, num_tokens // self.data.max_tokens)

    def layers(self) -> nn.Sequential:
        """Describe the whole model on the meta device."""
        sizes = self.model.values_but("family")
        with torch.device("meta"):
            return translation_transformer(vocabulary_size=self.data.vocabulary_size, padding_index=PADDING, **sizes)

    def inputs(self, num_examples: int) -> tuple[Tensor, Tensor]:
        """Describe sentences of the greatest length, and what the decoder reads, on the meta device."""
        source = torch.empty(num_examples, self.data.max_tokens, dtype=torch.int64, device="meta")
        return source, torch.empty_like(source)

    def targets(self, num_examples: int) -> dict[str, Tensor]:
        """Describe the targets of sentences of the greatest length on the meta device."""
        tokens = torch.empty(num_examples, self.data.max_tokens, dtype=torch.int64, device="meta")
        return {"tokens": tokens, "language": torch.empty(num_examples, dtype=torch.int64, device="meta")}

    def loss(self) -> LossFunction:
        """Return the loss of a micro-batch."""
        smoothing, model = self.run.trainer.label_smoothing, self.model
        return TokenLoss(smoothing, padding_index=PADDING, logit_limit=model.logit_limit, soft=model.soft_limit)

    def make_metrics(self) -> Metrics:
        """Return the metrics of an evaluation, in total and, once `evaluation_loaders` has run, per language."""
        return TokenMetrics(self._languages.get("valid", self.data.languages or ()), PADDING)

    def train_loader(self, pipeline: Pipeline, *, pin_memory: bool) -> TranslationLoader:
        """Return the loader of the training sentences; they are too small for pinning to matter."""
        return self._loader(
            "train",
            pipeline,
            self.run.trainer.batch_size,
            shuffle=True,
            temperature=self.data.temperature,
            replica_index=pipeline.job.replica_index,
            num_replicas=pipeline.job.num_replicas,
        )

    def evaluation_loaders(self, pipeline: Pipeline, *, pin_memory: bool) -> dict[str, TranslationLoader]:
        """Return the loader of the validation sentences."""
        return {"valid": self._loader("valid", pipeline, self.run.trainer.evaluation.batch_size, shuffle=False)}

    def _loader(self, split: str, pipeline: Pipeline, batch_size: int, **options: Any) -> TranslationLoader:
        """Return a loader; only the processes of the first and the last stage hold sentences."""
        corpus = self._open(split)  # only the loader keeps it, if it needs it
        self._languages[split] = corpus.languages
        self._warnings[split] = [f"{split}: {found}" for found in corpus.warnings()]
        return TranslationLoader(
            corpus,
            batch_size,
            self.run.seed,
            load_inputs=pipeline.is_first,
            load_targets=pipeline.is_last,
            **options,
        )

    def warnings(self) -> Sequence[str]:
        """Report the pairs that the loaders left out."""
        return [sentence for of_split in self._warnings.values() for sentence in of_split]

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        return open_tokenizer(self.data.name, self.data.tokenizer)

    def _open(self, split: str) -> ParallelCorpus:
        data = self.data
        corpus = open_corpus(
            data.name,
            split,
            data.root,
            tokenizer=self._tokenizer,
            languages=data.languages,
            max_tokens=data.max_tokens,
            max_pairs=data.max_pairs,
            cache=data.cache,
        )
        if (found := corpus.vocabulary_size) != data.vocabulary_size:
            raise ConfigError(
                f"data.vocabulary_size is {data.vocabulary_size}, but {data.name} has {found} tokens: set "
                f"data.vocabulary_size={found}."
            )
        return corpus
