"""The manifest of a checkpoint: what the run was, which files there are, and which file has each tensor."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from reprlib import repr as short
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, WrapValidator

from gpipe.checkpoint.errors import CheckpointError, DamagedCheckpoint
from gpipe.checkpoint.format import DTYPES, TensorSpec, check_header, open_regular, parse_layer, read_specs, shorten
from gpipe.durable_files import write_flushed

MANIFEST = "manifest.json"
STEP_FOLDER = re.compile(r"step-(\d{8,18})")
MAX_MANIFEST_BYTES = 2**26  # about 400,000 tensors
_FORMAT_VERSION = 2
_KINDS = ("weights", "ema", "optimizer")
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}\.safetensors")
_MAX_NATURAL = 2**63 - 1
_MAX_DIMENSIONS = 64  # as in torch
_MAX_FAULTS = 100
_EXPECTED = {"dataclass_type": "an object", "dict_type": "an object", "tuple_type": "a list", "string_type": "text"}


def _expect(expected: str, is_valid: Callable[[Any], object]) -> AfterValidator:
    """Return a check of a value; the message of its failure says what is expected."""

    def check(value: Any) -> Any:
        if not is_valid(value):
            raise ValueError(expected)
        return value

    return AfterValidator(check)


def _parse_one_by_one(value: Any, parse: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Parse an object's entries up to the first fault: pydantic's list of a million faults would fill the memory."""
    if not isinstance(value, dict):
        return parse(value)
    return {name: entry for item in value.items() for name, entry in parse(dict([item])).items()}


_Natural = Annotated[int, Field(strict=True, ge=0, le=_MAX_NATURAL)]
_Name = Annotated[
    str, _expect("1 to 1000 printable characters", lambda text: 0 < len(text) <= 1000 and text.isprintable())
]
_FileName = Annotated[str, _expect("a file name of the form <letters>.safetensors", _FILE_NAME.fullmatch)]
_Sha256 = Annotated[str, _expect("64 hexadecimal digits", re.compile(r"[0-9a-f]{64}").fullmatch)]
_Kind = Annotated[str, _expect(", ".join(_KINDS), _KINDS.__contains__)]
_Dtype = Annotated[str, _expect(f"one of {', '.join(DTYPES)}", DTYPES.__contains__)]
_Shape = Annotated[
    tuple[_Natural, ...],
    _expect(f"at most {_MAX_DIMENSIONS} sizes", lambda shape: len(shape) <= _MAX_DIMENSIONS),
    _expect("fewer numbers than any file has", lambda shape: prod(max(size, 1) for size in shape) <= _MAX_NATURAL),
]


class _Closed:
    """A record that allows no other fields; types are checked when it is parsed, not when it is constructed."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Position(_Closed):
    """Where a run stands: `step` finished steps, `batch` of them in the unfinished `epoch` (both from 0)."""

    step: _Natural
    epoch: _Natural
    batch: _Natural
    seed: _Natural


@dataclass(frozen=True)
class FileEntry(_Closed):
    """A file: its size in bytes and the SHA-256 of its content in hexadecimal."""

    size: _Natural
    sha256: _Sha256


@dataclass(frozen=True)
class TensorEntry(_Closed, TensorSpec):
    """A tensor: its dtype and shape, and the file that has it."""

    dtype: _Dtype
    shape: _Shape
    file: str


@dataclass(frozen=True)
class Manifest(_Closed):
    """Everything about a checkpoint except the tensors' values.

    Attributes:
        position: where the run stood.
        num_layers: the number of layers of the whole model.
        optimizer: the name of its class; None if its state was not saved.
        config: the run's settings, as JSON.
        results: what the run needs to resume, as JSON.
        files: entries by name.
        tensors: "weights", "ema" and "optimizer", each with entries by name: `layers.<i>.<name>` in the first two,
            `layers.<i>.<name>/<slot>` in the last.
    """

    position: Position
    num_layers: _Natural
    optimizer: _Name | None
    config: dict[str, Any]
    results: dict[str, Any]
    files: Annotated[dict[_FileName, FileEntry], WrapValidator(_parse_one_by_one)]
    tensors: dict[_Kind, Annotated[dict[_Name, TensorEntry], WrapValidator(_parse_one_by_one)]]

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Parse and validate the untrusted manifest of the checkpoint in `folder`.

        Raises:
            DamagedCheckpoint: it is missing, or is not what was saved.
            CheckpointError: another version of this program wrote it.
        """
        path = folder / MANIFEST
        with open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_MANIFEST_BYTES:
                raise DamagedCheckpoint(f"{path} has {size} bytes, too many to be a manifest: choose another.")
            text = file.read(size)
        try:
            manifest = _parse(text, path)
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpoint(f"{path} is not a valid manifest ({error}): choose another.") from None
        named = STEP_FOLDER.fullmatch(folder.absolute().name)
        if named is not None and int(named[1]) != manifest.position.step:
            raise DamagedCheckpoint(
                f"{folder} has the checkpoint of step {manifest.position.step}: rename the folder back, or choose "
                "another."
            )
        return manifest

    def check_file(self, folder: Path, name: str) -> None:
        """Compare a file with its SHA-256 and its tensors."""
        path = folder / name
        with open_regular(path) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != self.files[name].sha256:
                raise DamagedCheckpoint(
                    f"{path} does not match the SHA-256 in its manifest: it is damaged, choose another."
                )
        check_header(path, self.specs_in(name))

    def specs_in(self, file: str) -> Mapping[str, TensorSpec]:
        """Return the tensors that a file has, by name."""
        entries = (item for entries in self.tensors.values() for item in entries.items())
        return {name: entry for name, entry in entries if entry.file == file}


def write_manifest(folder: Path, fields: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Write the manifest of a checkpoint, sorted, so that equal checkpoints have equal manifests.

    It has the fields that every process knows, and the files, as JSON; their headers say which tensors they have.

    Raises:
        CheckpointError: the manifest cannot be written as JSON, or could not be read again.
    """
    tensors: dict[str, dict[str, Any]] = {}
    for file in files:
        own = tensors.setdefault(file.rpartition("-")[0], {})
        for name, spec in read_specs(folder / file).items():
            own[name] = {"file": file, "dtype": spec.dtype, "shape": spec.shape}
    content = {"format_version": _FORMAT_VERSION, **fields, "files": files, "tensors": tensors}
    try:
        text = json.dumps(seal(content), indent=1, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"The settings or results of step {fields['position']['step']} cannot be saved ({error}), expected finite "
            "numbers and text: correct the setting, or go back to an earlier checkpoint with a lower learning rate."
        ) from None
    try:
        _parse(text.encode(), folder / MANIFEST)
    except ValueError as error:
        raise CheckpointError(f"No checkpoint can be saved, because none could be read again: {error}") from None
    write_flushed(folder / MANIFEST, text)


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest's JSON with the SHA-256 of the rest: what protects the files needs protection itself."""
    rest = {key: value for key, value in content.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, allow_nan=False)
    return {**rest, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _parse(text: bytes, path: Path) -> Manifest:
    """Validate a manifest's JSON; a ValueError names the first fault: its place, the value and what was expected."""
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("it is not an object")
    if "sha256" in content and content != seal(content):
        raise ValueError("its content does not match its SHA-256")
    if (version := content.pop("format_version", None)) != _FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {short(version)}, but this program reads {_FORMAT_VERSION}: use the program "
            "that wrote it."
        )
    if content.pop("sha256", None) is None:
        raise ValueError("sha256 is missing")
    try:
        manifest = _adapter().validate_python(content)
    except ValidationError as error:
        raise ValueError(_explain(error)) from None
    for kind, entries in manifest.tensors.items():
        for name, entry in entries.items():
            _check_name(name, kind, manifest.num_layers)
            if entry.file not in manifest.files:
                raise ValueError(f"{name} is in {short(entry.file)}, which is not listed")
    return manifest


@cache
def _adapter() -> TypeAdapter[Manifest]:
    """Return the parser of manifests, created at first use, because not every program reads one."""
    return TypeAdapter(Manifest)


def _explain(error: ValidationError) -> str:
    """Return the first fault that pydantic found: its place, the value and what was expected."""
    if error.error_count() > _MAX_FAULTS:  # their list would fill the memory
        return f"it has {error.error_count()} faults"
    fault = error.errors(include_url=False)[0]
    kind, value = fault["type"], shorten(short(fault["input"]), 100)
    places = [shorten(part, 100) for part in fault["loc"] if isinstance(part, str)]
    if kind == "missing":
        return f"{'.'.join(places)} is missing"
    if kind == "unexpected_keyword_argument":
        return f"{'.'.join(places)} is unknown"
    expected = _EXPECTED.get(kind) or re.sub("^(Value error,|Input should be) ", "", fault["msg"])
    if places[-1:] == ["[key]"]:
        return f"{'.'.join(places[:-2])} has the key {value}, expected {expected}"
    return f"{'.'.join(places) or 'a key'} is {value}, expected {expected}"


def _check_name(name: str, kind: str, num_layers: int) -> None:
    parameter, slash, slot = name.partition("/")
    if bool(slash) != (kind == "optimizer") or (slash and (not slot or "/" in slot)):
        raise ValueError(f"{short(name)} is not a name of {kind}")
    try:
        layer = parse_layer(parameter)
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    if layer >= num_layers:
        raise ValueError(f"{name} is of layer {layer}, but there are {num_layers} layers")
