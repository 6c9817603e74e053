"""The tokenizer that a run keeps in its folder."""

import shutil
from pathlib import Path

from gpipe.data import Tokenizer
from gpipe.durable_files import replacing

TOKENIZER_FILE = "tokenizer.model"


def keep_tokenizer(tokenizer: Tokenizer | None, folder: Path | None) -> dict[str, str]:
    """Copy a tokenizer into a run's folder, if both are given; return what checkpoints store about it."""
    if tokenizer is None:
        return {}
    if folder is not None:
        with replacing(folder / TOKENIZER_FILE) as copy:
            shutil.copyfile(tokenizer.path, copy)
    return {"tokenizer_sha256": tokenizer.sha256}
