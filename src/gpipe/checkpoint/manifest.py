"""The manifest of a checkpoint: what the run was, which files there are, and which tensor lies in which file."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from reprlib import repr as short
from typing import Any

from gpipe.checkpoint.entries import Position, TensorEntry
from gpipe.checkpoint.errors import CheckpointError, DamagedCheckpoint
from gpipe.checkpoint.files import FileEntry, open_regular
from gpipe.checkpoint.header import Form, check_header
from gpipe.checkpoint.parsing import parse_fields, parse_files, parse_tensors, read_json

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
STEP_FOLDER = re.compile(r"step-(\d{8,18})")
MAX_MANIFEST_BYTES = 2**26  # about 400,000 tensors


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but the numbers themselves.

    `tensors` maps "weights", "ema" and "optimizer" to {name: entry}: `layers.<i>.<name>` in the first two,
    `layers.<i>.<name>/<slot>` in the last. `results` is what the run wants back when it resumes (JSON).
    """

    position: Position
    num_layers: int
    optimizer: str | None
    config: dict[str, Any]
    results: dict[str, Any]
    files: dict[str, FileEntry] = field(default_factory=dict)
    tensors: dict[str, dict[str, TensorEntry]] = field(default_factory=dict)

    def to_json(self) -> str:
        """Write as JSON text, sorted, so that equal checkpoints have equal manifests."""
        try:
            content = sealed({"format_version": FORMAT_VERSION, **asdict(self)})
            return json.dumps(content, indent=1, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"The settings or results of step {self.position.step} cannot be saved ({error}), expected finite "
                "numbers and text: correct the setting, or go back to an earlier checkpoint with a lower learning rate."
            ) from None

    def add(self, part: Mapping[str, Any]) -> None:
        """Add the files and tensors of one process, in the form that they have in the JSON text."""
        files = parse_files(part["files"])
        self.files.update(files)
        for kind, entries in parse_tensors(part["tensors"], files, self.num_layers).items():
            self.tensors.setdefault(kind, {}).update(entries)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read and check the manifest of the checkpoint in `folder`; raises CheckpointError with the reason."""
        path = folder / MANIFEST
        try:
            file = open_regular(path)
        except DamagedCheckpoint:
            if os.path.lexists(path):
                raise
            raise DamagedCheckpoint(
                f"{folder} has no {MANIFEST}, so it is no complete checkpoint: choose another."
            ) from None
        with file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_MANIFEST_BYTES:
                raise DamagedCheckpoint(f"{path} has {size} bytes, too many to be a manifest: choose another.")
            text = file.read(size)
        try:
            content = read_json(text)
            if not isinstance(content, dict):
                raise ValueError("it is no object")
            if "sha256" in content and content != sealed(content):
                raise ValueError("its content does not have its SHA-256")
            if (version := content.get("format_version")) != FORMAT_VERSION:
                raise CheckpointError(
                    f"{path} has format version {short(version)}, but this program reads {FORMAT_VERSION}: "
                    "use the program that wrote it."
                )
            manifest = cls(**parse_fields(content))
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpoint(f"{path} is not a good manifest ({error}): choose another.") from None
        manifest._refuse_other_name(folder)
        return manifest

    def _refuse_other_name(self, folder: Path) -> None:
        """Raise DamagedCheckpoint where a folder is called after another step than its checkpoint's."""
        named = STEP_FOLDER.fullmatch(folder.absolute().name)
        if named is not None and int(named[1]) != self.position.step:
            raise DamagedCheckpoint(
                f"{folder} has the checkpoint of step {self.position.step}: give it its own name back, or choose "
                "another."
            )

    def check_file(self, folder: Path, name: str) -> None:
        """Compare a file with its size, its SHA-256 and its tensors; raises DamagedCheckpoint naming what differs."""
        self.files[name].check(folder / name)
        check_header(folder / name, self.forms_in(name))

    def forms_in(self, file: str) -> Mapping[str, Form]:
        """Return the tensors that a file has, by name."""
        return {
            name: entry.form
            for entries in self.tensors.values()
            for name, entry in entries.items()
            if entry.file == file
        }


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest's JSON with the SHA-256 of the rest of it: what guards the files must be guarded itself."""
    rest = {key: value for key, value in content.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, allow_nan=False)
    return {**rest, "sha256": hashlib.sha256(text.encode()).hexdigest()}
