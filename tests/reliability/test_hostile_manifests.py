"""A manifest from elsewhere: whatever it says, only CheckpointError comes, and nothing big is allocated."""

import copy
import json
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from hydra import compose
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from gpipe.checkpoint import format as files
from gpipe.checkpoint.__main__ import describe
from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, Position, seal
from gpipe.checkpoint.read import find_damage, load_layers
from gpipe.config import ConfigError, to_plain, to_run
from gpipe.config.saved import from_plain
from tests.training.small_run import small_layers, small_run

pytestmark = pytest.mark.reliability
MOST_BYTES = 4 * 2**20  # of Python's memory; the manifests here have a hundredth of that
RELAXED = settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(
        ["../weights.safetensors", "/etc/passwd", "weights-0.safetensors\0", "int4", "layers.99.weight", "\ud800"]
    ),
    st.lists(st.integers(-2, 2**62), max_size=70),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = small_run((3, 3))
    run.train(1)
    return run.save(tmp_path_factory.mktemp("good"), Position(1, 0, 1, 0), config={"model": {"width": 8}})


@pytest.fixture
def plain(composer: None) -> dict[str, Any]:
    """The settings of a run as a manifest has them."""
    return json.loads(json.dumps(to_plain(to_run(compose("train")))))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every value in JSON."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def mutated(content: Any, data: st.DataObject) -> Any:
    """Change, remove, add or rename something, once or a few times."""
    content = copy.deepcopy(content)
    for _ in range(data.draw(st.integers(1, 3))):
        way = data.draw(st.sampled_from(list(places(content))))
        if not way:
            return data.draw(odd_values)
        holder = content
        for key in way[:-1]:
            holder = holder[key]
        match data.draw(st.sampled_from(["change", "remove", "rename", "copy"])):
            case "change":
                holder[way[-1]] = data.draw(odd_values)
            case "remove":
                del holder[way[-1]]
            case "rename" if isinstance(holder, dict):
                holder[str(data.draw(odd_values))] = holder.pop(way[-1])
            case "copy" if isinstance(holder, dict):
                holder[data.draw(st.text(max_size=8))] = copy.deepcopy(holder[way[-1]])
    return content


class Watched:
    """Notes which files are opened, and how much memory Python takes meanwhile."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened: list[Path] = []
        opens = files.os.open
        patch.setattr(
            files.os, "open", lambda path, *rest, **more: self.opened.append(Path(path)) or opens(path, *rest, **more)
        )

    def __enter__(self) -> Self:
        tracemalloc.start()
        return self

    def __exit__(self, *error: object) -> None:
        _, self.peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()


def read_all(checkpoint: Path, patch: pytest.MonkeyPatch) -> None:
    """Read a checkpoint in each way there is; only CheckpointError may come, and no file outside is opened."""
    with Watched(patch) as watched:
        found = find_damage(checkpoint)
        for read in (lambda: list(describe(checkpoint)), lambda: load_layers(checkpoint, small_layers())):
            try:
                read()
            except CheckpointError as error:
                found.append(str(error))
    for message in found:
        assert "\n" not in message and len(message) < 1000
        message.encode()  # no surrogates, which could not be printed
    assert watched.peak < MOST_BYTES
    assert {path.parent for path in watched.opened} <= {checkpoint}


@given(data=st.data(), is_sealed=st.booleans())
@RELAXED
def test_a_changed_manifest(good: Path, tmp_path: Path, data: st.DataObject, is_sealed: bool) -> None:
    checkpoint = tmp_path / "step-00000001"
    checkpoint.mkdir(exist_ok=True)
    for file in good.glob("*.safetensors"):
        if not (checkpoint / file.name).exists():
            os.link(file, checkpoint / file.name)
    content = mutated(json.loads((good / MANIFEST).read_bytes()), data)
    if is_sealed and isinstance(content, dict):
        content = seal(content)
    (checkpoint / MANIFEST).write_text(json.dumps(content), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        read_all(checkpoint, patch)


@given(text=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace"))))
@RELAXED
def test_bytes_that_are_no_manifest(tmp_path: Path, text: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(text)
    with pytest.raises(CheckpointError):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 100_000,
        '{"format_version": NaN}',
        '{"format_version": 2, "format_version": 2}',
        '{"format_version": ' + "[" * 900 + "]" * 900 + "}",
        '{"format_version": 1e999}',
        '{"sha256": "\\ud800"}',
        "\ufeff{}",
    ],
)
def test_json_that_is_odd(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError) as raised:
        Manifest.read(tmp_path)
    assert len(str(raised.value)) < 1000


def test_a_huge_manifest_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / MANIFEST).open("wb") as file:
        file.truncate(2 * MAX_MANIFEST_BYTES)  # takes no room on the disk
    with pytest.raises(CheckpointError, match="too many to be a manifest"):
        Manifest.read(tmp_path)


@given(data=st.data())
@RELAXED
def test_settings_that_were_changed(plain: dict[str, Any], data: st.DataObject) -> None:
    """The settings in a manifest: those of a run, which come back as they are, or one sentence."""
    content, said = mutated(plain, data), ""
    try:
        run = from_plain(content)
    except ConfigError as error:
        said = str(error)
    else:
        OmegaConf.structured(run)  # the types are those of the schema
        assert from_plain(json.loads(json.dumps(to_plain(run)))) == run
    assert "\n" not in said
