"""Images that are truncated, huge, or none: who is named, what stands in for them, and when there are too many."""

import io
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gpipe.data import Batch, BrokenImage, ImageFiles, ImageLoader, evaluation_transform, training_transform

LABELS = [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A grey PNG whose header says what it likes."""
    header = struct.pack(">2I5B", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def picture(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


# PIL only warns of more than MAX_IMAGE_PIXELS, and refuses twice as many. The last one it would hand to Ghostscript.
BROKEN = {
    "empty": b"",
    "text": b"no picture",
    "page": b"<!doctype html><title>404 Not Found</title>",
    "truncated": picture(99)[:200],
    "wide": png(10_000, 9_000),
    "huge": png(2**31 - 1, 2**31 - 1),
    "no_size": png(0, 5),
    "script": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) print\n%%EOF\n",
}


@pytest.fixture
def files(tmp_path: Path) -> ImageFiles:
    """Ten small pictures of two classes that take turns."""
    names = [f"{index}.png" for index in range(len(LABELS))]
    for index, name in enumerate(names):
        (tmp_path / name).write_bytes(picture(index))
    return ImageFiles(tmp_path, names, LABELS, ["a", "b"])


def damage(files: ImageFiles, *indices: int, content: bytes = b"no picture") -> None:
    for index in indices:
        files.path(index).write_bytes(content)


def loader(files: ImageFiles, limit: int, **settings) -> ImageLoader:
    """A loader with augmentation, whose batches are a function of seed, epoch and files."""
    defaults = {"shuffle": True, "num_workers": 0, "max_broken_images": limit}
    return ImageLoader(files, 4, training_transform(8), 3, **{**defaults, **settings})


def by_label(batches: list[Batch]) -> list[tuple[int, torch.Tensor]]:
    return [pair for images, labels in batches for pair in zip(labels.tolist(), images, strict=True)]


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_image_is_named_with_its_path(files: ImageFiles, kind: str) -> None:
    damage(files, 3, content=BROKEN[kind])
    with pytest.raises(BrokenImage, match=f"^cannot decode {re.escape(str(files.path(3)))}: .+; remove or replace it$"):
        files.image(3)


def test_the_largest_image_that_is_decoded_has_pils_limit_of_pixels(files: ImageFiles, monkeypatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 144)
    assert files.image(3).size == (12, 12)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 143)
    with pytest.raises(BrokenImage, match=r"144 pixels\) exceeds limit of 143 pixels"):
        files.image(3)


def test_a_palette_with_transparency_is_no_reason_for_a_warning_per_image(tmp_path: Path) -> None:
    image = Image.new("P", (8, 8))
    image.putpalette([10, 20, 30] * 256)
    image.save(tmp_path / "a.png", transparency=bytes(256))
    assert ImageFiles(tmp_path, ["a.png"], [0], ["a"]).image(0).getpixel((0, 0)) == (10, 20, 30)  # warnings are errors


@pytest.mark.parametrize("name", ["image.png", "image.tif", "image.pgm"])
def test_a_grey_image_of_16_bits_has_its_upper_8(tmp_path: Path, name: str) -> None:
    pixels = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    if name.endswith("pgm"):
        (tmp_path / name).write_bytes(b"P5 16 16 65535\n" + pixels.astype(">u2").tobytes())
    else:
        Image.fromarray(pixels).save(tmp_path / name)
    image = ImageFiles(tmp_path, [name], [0], ["a"]).image(0)
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), np.repeat((pixels >> 8)[..., None], 3, axis=2))


def tiff(pixels: np.ndarray, bits: int, *, white_is_zero: bool) -> bytes:
    """A grey TIFF of 12 or 16 bits, whose rows have an even number of pixels."""
    packed = pixels.astype("<u2").tobytes()
    if bits == 12:  # two pixels in three bytes
        packed = b"".join((int(a) << 12 | int(b)).to_bytes(3) for a, b in pixels.reshape(-1, 2))
    height, width = pixels.shape
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: 0 if white_is_zero else 1, 273: 8, 277: 1, 278: height}
    entries = [struct.pack("<2H2I", tag, 4, 1, value) for tag, value in (tags | {279: len(packed)}).items()]
    directory = struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(packed)) + packed + directory


@pytest.mark.parametrize(("bits", "white_is_zero"), [(12, False), (16, False), (16, True)])
def test_a_grey_tiff_is_as_bright_as_its_header_says(tmp_path: Path, bits: int, white_is_zero: bool) -> None:
    brightness = np.arange(256).reshape(16, 16)
    pixels = (255 - brightness if white_is_zero else brightness) << (bits - 8)
    (tmp_path / "image.tif").write_bytes(tiff(pixels, bits, white_is_zero=white_is_zero))
    image = ImageFiles(tmp_path, ["image.tif"], [0], ["a"]).image(0)
    assert np.array_equal(np.asarray(image), np.repeat(brightness[..., None], 3, axis=2))


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_of_no_known_range_are_refused(tmp_path: Path, dtype: type) -> None:
    Image.fromarray(np.full((4, 4), 70_000, dtype)).save(tmp_path / "image.tif")
    with pytest.raises(BrokenImage, match=r"image\.tif: its pixels are numbers of mode [IF], expected 8 or 16 bits"):
        ImageFiles(tmp_path, ["image.tif"], [0], ["a"]).image(0)


def test_a_truncated_image_of_16_bits_is_broken(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 65536, (64, 64), dtype=np.uint16)).save(stream, "PNG")
    (tmp_path / "image.png").write_bytes(stream.getvalue()[:2000])
    with pytest.raises(BrokenImage, match=r"image\.png: .*truncated"):
        ImageFiles(tmp_path, ["image.png"], [0], ["a"]).image(0)


def test_no_file_reaches_a_decoder_that_runs_a_program(files: ImageFiles, monkeypatch) -> None:
    from PIL import EpsImagePlugin

    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *arguments: started.append(arguments))
    damage(files, 3, content=BROKEN["script"])
    with pytest.raises(BrokenImage):
        files.image(3)
    assert not started


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_next_image_of_the_class_stands_in_for_a_broken_one(files: ImageFiles, num_workers: int) -> None:
    """The oracle: copies of the stand-ins in the places of the broken files."""
    damage(files, 3, 4, 6, 9)
    found = by_label(list(loader(files, 4, num_workers=num_workers)))
    for broken, stand_in in ((3, 5), (4, 8), (6, 8), (9, 1)):
        damage(files, broken, content=files.path(stand_in).read_bytes())
    expected = by_label(list(loader(files, 0)))
    assert [label for label, _ in found] == [label for label, _ in expected]
    assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in zip(found, expected, strict=True))


def test_every_process_and_epoch_sees_the_same_stand_ins(files: ImageFiles) -> None:
    damage(files, 0, 7)
    for epoch in (0, 3):
        whole = loader(files, 2)
        parts = [loader(files, 2, replica_index=index, num_replicas=2) for index in range(2)]
        labels_alone = loader(files, 2, load_images=False)
        for each in (whole, *parts, labels_alone):
            each.set_epoch(epoch)
        assert [labels.tolist() for _, labels in labels_alone] == [labels.tolist() for _, labels in whole]
        seen = {tuple(image.flatten().tolist()) for _, image in by_label(list(whole))}
        assert seen == {tuple(image.flatten().tolist()) for part in parts for _, image in by_label(list(part))}


def test_each_is_named_once_and_each_replacement_counted(files: ImageFiles, capfd) -> None:
    damage(files, 3, 4, 8)  # 8 is the first stand-in for 4
    images = loader(files, 3, shuffle=False)
    counts = []
    for epoch in (0, 1):
        images.set_epoch(epoch)
        counts.append([images.num_replaced for _ in images])
    assert counts == [[1, 2, 3], [1, 2, 3]]
    assert sorted(images.broken_images) == [3, 4, 8]
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(": cannot decode ")[2].partition(": ")[0] for line in lines] == [
        str(files.path(index)) for index in (3, 4, 8)
    ]
    assert [line.rpartition("(")[2] for line in lines] == [f"number {n} of at most 3)" for n in (1, 2, 3)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("broken", [(0, 4, 9), (0, 1, 2), (0, 6, 8)])
def test_one_more_than_the_limit_ends_the_run(files: ImageFiles, broken: tuple[int, ...], num_workers: int) -> None:
    damage(files, *broken)
    assert len(list(loader(files, 3, shuffle=False, num_workers=num_workers))) == 3
    batches = loader(files, 2, shuffle=False, num_workers=num_workers)
    with pytest.raises(BrokenImage, match=r"^cannot decode .*\.png: .*; remove or replace it, or raise data\.max_"):
        list(batches)
    batches.close()


def test_a_class_of_broken_images_alone_ends_the_run(files: ImageFiles) -> None:
    damage(files, *range(1, 10, 2))
    with pytest.raises(BrokenImage, match="because no image of its class is left to replace it"):
        list(loader(files, 100))


def test_evaluation_replaces_too(files: ImageFiles) -> None:
    damage(files, 2)
    images = ImageLoader(files, 10, evaluation_transform(8), 0, shuffle=False, num_workers=0, max_broken_images=1)
    ((batch, labels),) = images
    assert torch.equal(batch[2], batch[4]) and labels.tolist() == LABELS
