"""JSON text -> the fields of a manifest, of which nothing is believed that was not looked at."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from reprlib import repr as short
from typing import Any

from gpipe.checkpoint.entries import Position, TensorEntry
from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.files import FileEntry
from gpipe.checkpoint.header import DTYPES
from gpipe.checkpoint.names import layer_of

KINDS = ("weights", "ema", "optimizer")
_KEYS = {"format_version", "position", "num_layers", "optimizer", "config", "results", "files", "tensors", "sha256"}
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_NATURAL = 2**63 - 1
_MAX_DIMENSIONS = 64  # as in torch
_MAX_NAME = 1000


def read_json(text: bytes) -> Any:
    """Read JSON as the standard has it: a key once, no NaN. Raises ValueError, RecursionError where it is nested."""
    return json.loads(text, object_pairs_hook=_object_of, parse_constant=_refuse_constant)


def parse_fields(content: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest's fields; raises ValueError, with the value and what was expected, for whatever is wrong."""
    if set(content) != _KEYS:
        raise ValueError(f"it has the keys {short(sorted(content))}, expected {', '.join(sorted(_KEYS))}")
    optimizer = content["optimizer"]
    if not (optimizer is None or (isinstance(optimizer, str) and _is_name(optimizer))):
        raise ValueError(f"optimizer is {short(optimizer)}, expected a name or null")
    num_layers = _natural(content["num_layers"], "num_layers")
    files = parse_files(content["files"])
    return {
        "position": Position(**_record(content["position"], "position", _POSITION)),
        "num_layers": num_layers,
        "optimizer": optimizer,
        "config": _object(content["config"], "config"),
        "results": _object(content["results"], "results"),
        "files": files,
        "tensors": parse_tensors(content["tensors"], files, num_layers),
    }


def parse_files(content: object) -> dict[str, FileEntry]:
    """Return the entries of files by name; none of them can lie outside of the folder."""
    files = {}
    for name, entry in _object(content, "files").items():
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"the file name {short(name)} is not of the form <letters>.safetensors")
        files[name] = FileEntry(**_record(entry, name, {"size": _natural, "sha256": _sha256}))
    return files


def parse_tensors(content: object, files: dict[str, FileEntry], num_layers: int) -> dict[str, dict[str, TensorEntry]]:
    """Return the entries of tensors by kind and name, all of which fit into the files that they say they lie in."""
    tensors: dict[str, dict[str, TensorEntry]] = {}
    room = {name: entry.size for name, entry in files.items()}
    owners: dict[str, str] = {}
    for kind, entries in _object(content, "tensors").items():
        if kind not in KINDS:
            raise ValueError(f"tensors has {short(kind)}, expected {', '.join(KINDS)}")
        tensors[kind] = {}
        for name, value in _object(entries, kind).items():
            tensors[kind][name] = entry = _tensor(name, value, kind, num_layers)
            if entry.file not in files:
                raise ValueError(f"{name} lies in {short(entry.file)}, which is not listed")
            if owners.setdefault(entry.file, kind) != kind:
                raise ValueError(f"{entry.file} has tensors of {owners[entry.file]} and of {kind}, expected one kind")
            room[entry.file] -= entry.num_bytes
            if room[entry.file] < 0:
                raise ValueError(f"the tensors in {entry.file} are larger than its {files[entry.file].size} bytes")
    if unused := set(files) - set(owners):
        raise ValueError(f"{min(unused)} has no tensors")
    return tensors


def _tensor(name: str, value: object, kind: str, num_layers: int) -> TensorEntry:
    """Return a tensor's entry."""
    parameter, slash, slot = name.partition("/")
    if not _is_name(name) or bool(slash) != (kind == "optimizer") or (slash and (not slot or "/" in slot)):
        raise ValueError(f"{short(name)} is not a name of {kind}")
    try:
        layer = layer_of(parameter)
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    if layer >= num_layers:
        raise ValueError(f"{name} is of layer {layer}, but there are {num_layers} layers")
    return TensorEntry(**_record(value, name, {"file": _text, "dtype": _dtype, "shape": _shape}))


def _record(value: object, what: str, fields: Mapping[str, Callable[[object, str], Any]]) -> dict[str, Any]:
    """Return an object that has exactly these fields, each looked at by its function."""
    found = _object(value, what)
    if set(found) != set(fields):
        raise ValueError(f"{what} has {short(sorted(found))}, expected {', '.join(fields)}")
    return {name: parse(found[name], name) for name, parse in fields.items()}


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {short(value)}, expected an object")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {short(value)}, expected text")
    return value


def _natural(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_NATURAL:
        raise ValueError(f"{name} is {short(value)}, not a whole number from 0")
    return value


def _sha256(value: object, name: str) -> str:
    if not _SHA256.fullmatch(_text(value, name)):
        raise ValueError(f"{name} is {short(value)}, expected 64 hexadecimal digits")
    return _text(value, name)


def _dtype(value: object, name: str) -> str:
    if _text(value, name) not in DTYPES:
        raise ValueError(f"{name} is {short(value)}, expected one of {', '.join(DTYPES)}")
    return _text(value, name)


def _shape(value: object, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        raise ValueError(f"{name} is {short(value)}, expected a list of sizes")
    sizes = tuple(_natural(size, name) for size in value)
    num_elements = 1
    for size in sizes:  # step by step: the product of 64 such numbers is not small
        num_elements *= max(size, 1)
        if num_elements > _MAX_NATURAL:
            raise ValueError(f"{name} is {short(value)}, larger than any file")
    return sizes


def _is_name(text: str) -> bool:
    return 0 < len(text) <= _MAX_NAME and text.isprintable()


def _object_of(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {short(key)} stands twice")
        found[key] = value
    return found


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


_POSITION = dict.fromkeys(("step", "epoch", "batch", "seed"), _natural)
