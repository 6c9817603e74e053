"""What models of text have in common: the tokenizer, which a run keeps in its folder."""

import shutil
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from gpipe.data import Tokenizer
from gpipe.durable_files import replacing
from gpipe.programs.workloads.workload import Workload

TOKENIZER_FILE = "tokenizer.model"


@dataclass(frozen=True)
class TextWorkload(Workload):
    """A model of tokens, which mean nothing without their tokenizer."""

    @property
    @abstractmethod
    def _tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None for ids without one."""

    def replaced(self, layers: nn.ModuleDict, saved: Mapping[str, tuple[int, ...]]) -> Collection[str]:
        """Return none: the checkpoint must have the same tokenizer, so tokens keep their meaning."""
        return ()

    def keep(self, folder: Path | None) -> dict[str, str]:
        """Copy the tokenizer into the run's folder; checkpoints store its SHA-256."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return {}
        if folder is not None:
            with replacing(folder / TOKENIZER_FILE) as copy:
                shutil.copyfile(tokenizer.path, copy)
        return {"tokenizer_sha256": tokenizer.sha256}
