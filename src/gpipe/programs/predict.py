"""Classify images with checked settings, and print or write the answers."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

from gpipe.checkpoint.read import load_layers
from gpipe.checkpoint.stale_statistics import describe_stale_statistics
from gpipe.config import AmoebaNetConfig, ConfigError, TimmConfig
from gpipe.config.predict import PredictConfig
from gpipe.config.saved import from_plain
from gpipe.data import BrokenImage, ImageFiles, Transform
from gpipe.data.images.class_folders import walk
from gpipe.data.images.image_set import IMAGE_SUFFIXES, is_hidden, is_image
from gpipe.durable_files import replacing
from gpipe.launch.errors import report_errors
from gpipe.programs.build import build_layers
from gpipe.programs.chosen_checkpoint import read_class_names
from gpipe.programs.complete import without_fetching
from gpipe.programs.trained import find_trained
from gpipe.programs.translate import check_output, find_device
from gpipe.programs.workloads import workload_of
from gpipe.programs.workloads.image_classification import ImageClassification

_GRID_SIDE = 6


@dataclass(frozen=True)
class TrainedClassifier:
    """A trained image classifier, on one device, in evaluation mode.

    Attributes:
        transform: turns a decoded image into the model's input.
        class_names: the classes by label.
        has_several_labels: whether an image may have several labels, each with its own probability.
    """

    layers: nn.Sequential
    transform: Transform
    class_names: Sequence[str]
    device: torch.device
    has_several_labels: bool

    @torch.inference_mode()
    def classify(self, images: Sequence[Image.Image], top: int) -> list[list[tuple[str, float]]]:
        """Return, for each image, its most probable classes with their probabilities, the most probable first."""
        inputs = torch.stack([self.transform(image) for image in images]).to(self.device)
        logits = self.layers(inputs).float()
        probabilities = logits.sigmoid() if self.has_several_labels else logits.softmax(dim=1)
        found = probabilities.topk(min(top, len(self.class_names)), dim=1)
        rows = zip(found.indices.tolist(), found.values.tolist(), strict=True)
        return [[(self.class_names[label], p) for label, p in zip(*row, strict=True)] for row in rows]


@dataclass(frozen=True)
class Answer:
    """What an image shows: classes with their probabilities, the most probable first."""

    path: Path
    image: Image.Image
    classes: Sequence[tuple[str, float]]


def start(settings: PredictConfig) -> None:
    """Classify, and print or write the answers; an error is one message and an exit with status 1."""
    with report_errors(debug=settings.debug):
        assert settings.checkpoint is not None and settings.images is not None
        paths = _find_images(Path(settings.images))
        for name in ("output", "grid"):
            check_output(name, getattr(settings, name))
        model = open_classifier(settings.checkpoint, find_device(settings.device))
        shown: list[Answer] = []
        num_broken = 0
        with _open_output(settings.output) as stream:
            for answer in _answers(model, paths, settings):
                if answer is None:
                    num_broken += 1
                    continue
                _write(answer, stream, is_csv=settings.output is not None)
                shown += [answer] if len(shown) < _GRID_SIDE**2 else []
            if not shown:  # an error here leaves an earlier file as it is
                raise ConfigError(f"images is {settings.images}, where no image can be decoded: name other images.")
        if settings.grid is not None:
            with replacing(Path(settings.grid)) as path:
                _draw(shown, path)
        if written := _describe_written(settings, len(paths) - num_broken, len(paths), len(shown)):
            print(f"wrote {written}", file=sys.stderr)


def open_classifier(checkpoint: str, device: torch.device) -> TrainedClassifier:
    """Load the model of a checkpoint, or of a run (its best one), with the averages of its weights if there are any.

    Raises:
        ConfigError: there is no checkpoint, or it is of another family of models.
        CheckpointError: it is damaged.
    """
    path, manifest = find_trained(checkpoint, AmoebaNetConfig.family, TimmConfig.family)
    kind = "ema" if "ema" in manifest.tensors else "weights"
    if (stale := describe_stale_statistics(path, manifest, kind)) is not None:
        print(f"warning: {stale}", file=sys.stderr)
    run = without_fetching(from_plain(manifest.config))
    workload = workload_of(run)
    assert isinstance(workload, ImageClassification)
    layers = build_layers(run)
    load_layers(path, layers)
    class_names = read_class_names(manifest)
    if class_names is None or len(class_names) != workload.num_classes:  # edited by hand
        class_names = [f"class {label}" for label in range(workload.num_classes)]
    transform = workload.evaluation_transform()
    return TrainedClassifier(layers.to(device).eval(), transform, class_names, device, workload.has_several_labels)


def _find_images(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise ConfigError(f"images is {place}, which does not exist: name an image, or a folder of images.")
    shown = (place / below / name for below, names in walk(place, ".", {}) for name in names if not is_hidden(name))
    found = sorted(path for path in shown if is_image(path.name) and path.is_file())
    if not found:
        raise ConfigError(
            f"images is {place}, a folder without an image, expected files that end in {', '.join(IMAGE_SUFFIXES)}: "
            "name another."
        )
    return found


def _answers(model: TrainedClassifier, paths: Sequence[Path], settings: PredictConfig) -> Iterator[Answer | None]:
    """Yield the answer for each image, in order; None for a broken image, after a warning that says why."""
    for first in range(0, len(paths), settings.batch_size):
        chosen = paths[first : first + settings.batch_size]
        images = [_decode(path) for path in chosen]
        good = [image for image in images if image is not None]
        classes = iter(model.classify(good, settings.top) if good else [])
        for path, image in zip(chosen, images, strict=True):
            yield None if image is None else Answer(path, image, next(classes))


def _decode(path: Path) -> Image.Image | None:
    try:
        return ImageFiles(path.parent, [path.name], [0], []).image(0)
    except BrokenImage as error:
        print(f"warning: {error}", file=sys.stderr, flush=True)
        return None


@contextmanager
def _open_output(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    names_keep_bytes = "surrogateescape"  # those of files that are not UTF-8
    with (
        replacing(Path(path)) as partial,
        partial.open("w", encoding="utf-8", errors=names_keep_bytes, newline="") as stream,
    ):
        csv.writer(stream).writerow(["image", "rank", "class", "probability"])
        yield stream


def _write(answer: Answer, stream: TextIO, *, is_csv: bool) -> None:
    if is_csv:
        rows = ([answer.path, rank, name, f"{p:.6f}"] for rank, (name, p) in enumerate(answer.classes, start=1))
        csv.writer(stream).writerows(rows)
    else:
        classes = ", ".join(f"{name} {p:.1%}" for name, p in answer.classes)
        path = str(answer.path).encode(errors="backslashreplace").decode()  # it may not be UTF-8
        print(f"{path}: {classes}", file=stream, flush=True)


def _describe_written(settings: PredictConfig, num_classified: int, num_images: int, num_drawn: int) -> str:
    """Say how many images are in each file that was written; "" where there is no file."""
    share = _count_images(num_images) if num_classified == num_images else f"{num_classified} of {num_images} images"
    table = [] if settings.output is None else [f"the classes of {share} to {settings.output}"]
    picture = [] if settings.grid is None else [f"a picture of {_count_images(num_drawn)} to {settings.grid}"]
    return " and ".join(table + picture)


def _count_images(count: int) -> str:
    return "1 image" if count == 1 else f"{count} images"


def _draw(answers: Sequence[Answer], path: Path) -> None:
    """Draw the images in rows, each under its most probable class."""
    columns = min(_GRID_SIDE, len(answers))
    rows = -(-len(answers) // columns)
    figure = Figure(figsize=(2.2 * columns, 2.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, answer in zip(figure.subplots(rows, columns, squeeze=False).flat, answers, strict=False):
        (name, probability), *_ = answer.classes
        axes.imshow(answer.image, cmap="gray")
        axes.set_title(f"{name} {probability:.0%}", fontsize=9, parse_math=False)
    for axes in figure.axes:
        axes.set_axis_off()
    figure.savefig(path, format="png", dpi=144)
