"""The manifest of a checkpoint: what the run was, which files there are, and which tensor lies in which file."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]+\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class CheckpointError(Exception):
    """A checkpoint that is damaged, incomplete, or of another model; the message says what to do."""


@dataclass(frozen=True)
class Position:
    """Where a run stands: `step` finished steps, `batch` of which lie in the unfinished `epoch` (both from 0)."""

    step: int
    epoch: int
    batch: int
    seed: int


@dataclass(frozen=True)
class FileEntry:
    """One file: its size in bytes and the SHA-256 of its content in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: the file that has it, its dtype as in torch ("float32") and its shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


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
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=1, sort_keys=True, allow_nan=False)

    def add(self, part: Mapping[str, Any]) -> None:
        """Add the files and tensors of one stage, in the form that they have in the JSON text."""
        self.files.update({_file_name(name): _parse_file(entry) for name, entry in part["files"].items()})
        for kind, entries in part["tensors"].items():
            parsed = {name: _parse_tensor(name, entry, self.files) for name, entry in entries.items()}
            self.tensors.setdefault(kind, {}).update(parsed)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read and check the manifest of the checkpoint in `folder`; raises CheckpointError with the reason."""
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} has no {MANIFEST}, so it is no complete checkpoint: choose another."
            ) from None
        except ValueError as error:
            raise CheckpointError(f"{path} is not valid JSON ({error}): the file is damaged, choose another.") from None
        version = content.get("format_version") if isinstance(content, dict) else None
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format version {version}, but this program reads {FORMAT_VERSION}: "
                "use the program that wrote it."
            )
        try:
            return _parse(content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is not a manifest ({type(error).__name__}: {error}): choose another."
            ) from None

    def check_file(self, folder: Path, name: str) -> None:
        """Compare a file with its size and SHA-256; raises CheckpointError naming what differs."""
        entry, path = self.files[name], folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: the checkpoint is incomplete, choose another.")
        found = describe_file(path)
        if found.size != entry.size:
            raise CheckpointError(
                f"{path} has {found.size} bytes instead of {entry.size}: it is damaged, choose another."
            )
        if found.sha256 != entry.sha256:
            raise CheckpointError(f"{path} does not have the SHA-256 of its manifest: it is damaged, choose another.")


def describe_file(path: Path) -> FileEntry:
    """Measure the size and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(path.stat().st_size, digest)


def _parse(content: Mapping[str, Any]) -> Manifest:
    """Build a Manifest from JSON, refusing wrong types and file names that leave the folder."""
    position = Position(**{key: _natural(value, key) for key, value in content["position"].items()})
    optimizer = content["optimizer"]
    if not (optimizer is None or isinstance(optimizer, str)):
        raise TypeError(f"optimizer is {optimizer!r}")
    manifest = Manifest(
        position=position,
        num_layers=_natural(content["num_layers"], "num_layers"),
        optimizer=optimizer,
        config=dict(content["config"]),
        results=dict(content["results"]),
    )
    manifest.add(content)
    return manifest


def _parse_file(entry: Mapping[str, Any]) -> FileEntry:
    if not _SHA256.fullmatch(entry["sha256"]):
        raise ValueError(f"SHA-256 {entry['sha256']!r}")
    return FileEntry(_natural(entry["size"], "size"), entry["sha256"])


def _parse_tensor(name: str, entry: Mapping[str, Any], files: Mapping[str, FileEntry]) -> TensorEntry:
    if entry["file"] not in files:
        raise ValueError(f"{name} lies in {entry['file']!r}, which is not listed")
    if not isinstance(entry["dtype"], str):
        raise TypeError(f"dtype {entry['dtype']!r}")
    return TensorEntry(entry["file"], entry["dtype"], tuple(_natural(size, "shape") for size in entry["shape"]))


def _file_name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"file name {name!r}")
    return name


def _natural(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {value!r}, not a whole number from 0")
    return value
