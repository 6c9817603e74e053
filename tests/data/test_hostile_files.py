"""Files from elsewhere that want to run code, fill the memory, or trip their reader up."""

import gzip
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from scipy.io import savemat

from gpipe._compat.fairseq import import_fairseq
from gpipe.data import Tokenizer, open_image_set
from gpipe.data.images import torchvision_sets
from gpipe.data.images.memory_sets import read_idx
from gpipe.data.images.torchvision_sets import check_unpacked_size
from gpipe.data.text import binarized as binarized_text
from gpipe.data.text.message_catalogue import read_mo
from tests.data.images.small_sets import write_stanford_cars
from tests.data.text.small_text import write_mo


class Trap:
    """Leave a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def save_with_torch(path: Path, trap: Trap) -> None:
    torch.save({"layers.0.weight": trap}, path)


def save_as_array(path: Path, trap: Trap) -> None:
    with path.open("wb") as stream:
        np.save(stream, np.array([trap], object), allow_pickle=True)


def save_as_archive(path: Path, trap: Trap) -> None:
    with path.open("wb") as stream:
        np.savez(stream, train_images=np.array([trap], object))


def save_as_pickle(path: Path, trap: Trap) -> None:
    path.write_bytes(pickle.dumps(trap, protocol=2))


def save_as_zipped_pickle(path: Path, trap: Trap) -> None:
    path.write_bytes(gzip.compress(pickle.dumps(trap)))


SAVERS = (save_with_torch, save_as_array, save_as_archive, save_as_pickle, save_as_zipped_pickle)


def spring(path: Path) -> None:
    """Read a trap as a careless program would."""
    try:
        torch.load(path, weights_only=False)
    except (pickle.UnpicklingError, ValueError, RuntimeError):
        try:
            loaded = np.load(path, allow_pickle=True)
            [loaded[name] for name in getattr(loaded, "files", ())]
        except (pickle.UnpicklingError, OSError):
            pickle.loads(gzip.decompress(path.read_bytes()))


def read_model(path: Path) -> object:
    with safe_open(path, framework="pt") as reader:
        return list(reader.keys())


READERS: dict[str, Callable[[Path], object]] = {
    "safetensors": read_model,
    "idx": lambda path: read_idx(path, (28, 28), 60_000),
    "catalogue": read_mo,
    "tokenizer": Tokenizer,
    "matlab": lambda path: open_image_set("stanford_cars", "train", path.parents[2]),
    "dictionary": lambda path: binarized_text.read_dictionary(path.parent, []),
    "index": lambda path: list(binarized_text.read_binarized_blocks(path.parent, "train", "de", 10)),
}
NAMES = {
    "matlab": "stanford_cars/devkit/cars_train_annos.mat",
    "dictionary": "dict.en.txt",
    "index": "train.de-en.de.idx",
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("save", SAVERS)
def test_no_reader_runs_what_is_in_a_pickle(tmp_path: Path, reader: str, save: Callable[[Path, Trap], None]) -> None:
    sprung = tmp_path / "sprung"
    write_stanford_cars(tmp_path)
    path = tmp_path / NAMES.get(reader, "file")
    save(path, Trap(sprung))
    path.with_suffix(".bin").write_bytes(path.read_bytes())
    with pytest.raises((ValueError, SafetensorError)):
        READERS[reader](path)
    assert not sprung.exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save", SAVERS)
def test_the_traps_spring_where_they_are_read(tmp_path: Path, save: Callable[[Path, Trap], None]) -> None:
    save(tmp_path / "file", Trap(tmp_path / "sprung"))
    spring(tmp_path / "file")
    assert (tmp_path / "sprung").exists()


def test_a_gzip_that_unpacks_to_more_than_it_announces_is_left_packed(tmp_path: Path) -> None:
    """16 MiB of zeros behind the header of one image; more could take the memory."""
    packer = zlib.compressobj(9, wbits=31)
    content = packer.compress(struct.pack(">4I", 0x803, 1, 28, 28))
    content += b"".join(packer.compress(bytes(1 << 20)) for _ in range(16)) + packer.flush()
    (tmp_path / "images.gz").write_bytes(content)
    with pytest.raises(ValueError, match="announces 784 bytes and more follow"):
        read_idx(tmp_path / "images.gz", (28, 28), 60_000)


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limit for MATLAB files from 64 MiB to one: the tests unpack less."""
    assert torchvision_sets._MAX_UNPACKED_BYTES == 64 << 20
    monkeypatch.setattr(torchvision_sets, "_MAX_UNPACKED_BYTES", 1 << 20)


@pytest.mark.usefixtures("small_limit")
def test_a_matlab_file_that_unpacks_to_very_much_is_refused_unread(tmp_path: Path) -> None:
    write_stanford_cars(tmp_path)
    assert len(open_image_set("stanford_cars", "train", tmp_path)) == 5
    path = tmp_path / "stanford_cars" / "devkit" / "cars_train_annos.mat"
    savemat(path, {"annotations": np.zeros((1, 2 << 20), np.uint8)}, do_compression=True)
    assert path.stat().st_size < 100_000
    with pytest.raises(ValueError, match=r"cars_train_annos\.mat unpacks to more than 64 MiB; replace it"):
        open_image_set("stanford_cars", "train", tmp_path)


@pytest.mark.usefixtures("small_limit")
def test_a_matlab_file_of_either_byte_order_is_measured(tmp_path: Path) -> None:
    for order, mark in (("<", b"IM"), (">", b"MI")):
        packed = zlib.compress(bytes((1 << 20) + 1))
        path = tmp_path / "a.mat"
        path.write_bytes(bytes(126) + mark + struct.pack(f"{order}2I", 15, len(packed)) + packed)
        with pytest.raises(ValueError, match="more than 64 MiB"):
            check_unpacked_size(path)
        path.write_bytes(bytes(126) + mark + struct.pack(f"{order}2I", 15, 9) + b"no zlib..")
        with pytest.raises(ValueError, match=r"cannot read .*a\.mat: Error -3"):
            check_unpacked_size(path)


@pytest.mark.parametrize(
    "rule", ["1/0", "n%0", "__import__('os').system('touch sprung')", "(" * 50 + "n" + ")" * 50, "n" * 2000, "n if n"]
)
def test_a_plural_rule_that_is_none_is_refused_by_name(tmp_path: Path, monkeypatch, rule: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "vlc.mo"
    write_mo(path, {"": f"Plural-Forms: nplurals=2; plural={rule};\n", "day\0days": "Tag\0Tage"})
    with pytest.raises(ValueError, match=r"vlc\.mo is not a compiled gettext catalogue \("):
        read_mo(path)
    assert not (tmp_path / "sprung").exists()


def test_a_catalogue_that_repeats_one_long_string_is_refused(tmp_path: Path) -> None:
    """60,000 entries of a megabyte each in a file of two."""
    num, start = 60_000, 28
    text = start + 16 * num
    table = b"".join(struct.pack("<2I", 1 << 20, text) for _ in range(num))
    header = struct.pack("<7I", 0x950412DE, 0, num, start, start + 8 * num, 0, 0)
    (tmp_path / "vlc.mo").write_bytes(header + table + table + b"a" * (1 << 20))
    with pytest.raises(ValueError, match="entry 0 shares its bytes with others"):
        read_mo(tmp_path / "vlc.mo")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where three binarised sentences lie."""
    prefix = tmp_path_factory.mktemp("binarized") / "train.de-en.de"
    builder = import_fairseq("fairseq.data.indexed_dataset").MMapIndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    for sentence in ([5, 6, 2], [7, 2], [8, 9, 9, 2]):
        builder.add_item(torch.tensor(sentence))
    builder.finalize(f"{prefix}.idx")
    for ending in ("bin", "idx"):
        content = prefix.with_name(f"{prefix.name}.{ending}").read_bytes()
        (prefix.parent / f"train.de-en.en.{ending}").write_bytes(content)
    return prefix.parent


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 61), content=st.binary(max_size=9), length=st.integers(0, 70))
def test_an_index_is_read_or_refused_by_name(index: Path, place: int, content: bytes, length: int) -> None:
    path, whole = index / "train.de-en.de.idx", (index / "train.de-en.en.idx").read_bytes()
    path.write_bytes((whole[:place] + content + whole[place + len(content) :])[:length])
    try:
        (pairs,) = binarized_text.read_binarized_blocks(index, "train", "de", 10)
    except ValueError as error:
        message = str(error)
    else:
        message = str(index / "train.de-en.de")
        assert [pairs.sources[row].tolist() for row in range(3)] == [[5, 6, 2], [7, 2], [8, 9, 9, 2]]
    assert str(index / "train.de-en.de") in message and "\n" not in message
