"""Measure the images per second of our loader beside torchvision's ImageFolder and torch's DataLoader.

    python -m experiments.input_pipeline

Both read the same JPEG files, which have about the dimensions and the bytes of ImageNet's. Both use the same recipe:
random-area crop, flip, colour jitter, pixels in [-1, 1]. They take turns, one epoch each, with one thread per process.
Speeds are medians; the ratio is the median over pairs. Two minutes.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import gpipe._compat.torchvision  # noqa: F401  (before torchvision)
from experiments.program import StudyProgram
from experiments.turns import median_ratio, take_turns
from gpipe.data import ImageFiles, ImageLoader, training_transform
from reproductions.table4_imagenet_and_transfer.tables import INPUT_PIPELINE

# isort: split
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

CLAIM = "table4_imagenet_and_transfer"
WIDTH, HEIGHT, QUALITY = 500, 375, 90  # 114 KB per file; ImageNet's mean is 110


def write_photograph(path: Path, generator: np.random.Generator) -> None:
    """Write a JPEG of noise with the falling spectrum of photographs, first grey, then colours."""
    frequency = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH))
    frequency[0, 0] = np.inf
    bands = []
    for contrast in (45, 18, 18):
        spectrum = np.fft.rfft2(generator.standard_normal((HEIGHT, WIDTH))) / frequency**1.1
        noise = np.fft.irfft2(spectrum, (HEIGHT, WIDTH))
        bands.append(Image.fromarray((128 + contrast * noise / noise.std()).clip(0, 255).astype(np.uint8)))
    Image.merge("YCbCr", bands).save(path, quality=QUALITY)


def make_our_loader(folder: Path, image_size: int, batch_size: int, num_workers: int) -> ImageLoader:
    """Return a loader of all images in a folder of classes, as training has it."""
    names = sorted(str(path.relative_to(folder)) for path in folder.glob("*/*"))
    files = ImageFiles(folder, names, [0] * len(names), ["noise"])
    return ImageLoader(files, batch_size, training_transform(image_size), 0, shuffle=True, num_workers=num_workers)


def make_torchvision_loader(folder: Path, image_size: int, batch_size: int, num_workers: int) -> DataLoader[Any]:
    """Return a loader of all images in a folder of classes, as users of torchvision write it."""
    recipe = transforms.Compose(
        [
            transforms.RandomResizedCrop(image_size, scale=(0.1, 1.0)),
            transforms.RandomHorizontalFlip(),
            transforms.ColorJitter(0.4, 0.4, 0.4),
            transforms.ToTensor(),
            transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        ]
    )
    return DataLoader(
        ImageFolder(str(folder), recipe),
        batch_size,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )


MAKERS = make_our_loader, make_torchvision_loader


def time_epoch(loader: Iterable[Any], num_images: int) -> float:
    """Return the seconds of an epoch; raise RuntimeError if images are missing."""
    start = time.perf_counter()
    found = sum(len(images) for images, _ in loader)
    if found != num_images:
        raise RuntimeError(f"an epoch has {found} images, expected {num_images}")
    return time.perf_counter() - start


def measure(folder: Path, options: argparse.Namespace, image_size: int, num_workers: int) -> dict[str, Any]:
    """Return a row: images/s of both loaders, and the median of the rounds' ratios."""
    loaders = {make.__name__: make(folder, image_size, options.batch_size, num_workers) for make in MAKERS}
    ways = {name: partial(time_epoch, loader, options.num_images) for name, loader in loaders.items()}
    seconds = take_turns(ways, options.rounds, f"epochs at {image_size} px, {num_workers} workers").values()
    ours, torchvision = (options.num_images / statistics.median(found) for found in seconds)
    row = {"image_size": image_size, "num_workers": num_workers, "ours_images_per_second": ours}
    row |= {"torchvision_images_per_second": torchvision, "ratio": median_ratio(*reversed(seconds))}
    return row


if __name__ == "__main__":
    program = StudyProgram(__doc__, {CLAIM: INPUT_PIPELINE.tables}, rounds=9, what_rounds_are="epochs of each loader")
    parser = program.parser
    parser.add_argument("--num-images", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--image-sizes", type=int, nargs="+", default=[224, 480], help="pixels per side")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    options = program.parse()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "noise").mkdir()
        generator = np.random.default_rng(0)
        for index in range(options.num_images):
            write_photograph(folder / "noise" / f"{index}.jpg", generator)
        num_bytes = statistics.mean(path.stat().st_size for path in folder.glob("*/*"))
        settings = [(size, num_workers) for size in options.image_sizes for num_workers in options.workers]
        grid = [measure(folder, options, *setting) for setting in settings]
    config = {"num_images": options.num_images, "batch_size": options.batch_size, "rounds": options.rounds}
    config |= {"width": WIDTH, "height": HEIGHT, "quality": QUALITY}
    results = {"grid": grid, "mean_file_bytes": num_bytes}
    program.publish_record(INPUT_PIPELINE.make_record(config, results))
