"""Collect the departures from the paper: each is marked `Deviation:` in conf/ or in the code.

A mark begins a sentence or more in a comment or docstring and reaches to the next mark, or to the end of the paragraph.
The lists on the pages therefore equal the marks, no more and no less.
"""

import io
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

MARK = "Deviation:"
_SOURCES = ("conf/**/*.yaml", "src/gpipe/**/*.py", "experiments/**/*.py")
_IMAGES = (
    "conf/data/imagenet.yaml", "conf/data/cifar10.yaml", "conf/data/cifar100.yaml", "conf/data/stanford_cars.yaml",
    "conf/data/oxford_pets.yaml", "conf/data/food101.yaml", "conf/data/fgvc_aircraft.yaml", "conf/data/birdsnap.yaml",
    "conf/experiment/amoebanet_*.yaml", "conf/experiment/transfer*.yaml", "conf/optimizer/rmsprop.yaml",
    "src/gpipe/data/images/augmentation.py", "src/gpipe/training/*.py",
)  # fmt: skip
_AMOEBANET = ("conf/model/amoebanet_*.yaml", "src/gpipe/models/amoebanet*.py", "src/gpipe/models/linear.py")
_TRANSFORMER = ("conf/model/transformer_lm*.yaml", "src/gpipe/models/transformer*.py")
_TRANSLATION = (
    "conf/experiment/transformer_multilingual.yaml", "conf/model/translation_*.yaml", "conf/data/multilingual_*.yaml",
    "conf/data/parallel_text.yaml", "conf/data/binarized.yaml", "conf/optimizer/adam.yaml",
    "src/gpipe/models/translation*.py", "src/gpipe/models/transformer*.py", "src/gpipe/data/text/sentence_walk.py",
)  # fmt: skip
_CAPACITY, _THROUGHPUT = "experiments/table1_capacity/*.py", "experiments/table2_throughput/*.py"
_PIPELINE = ("conf/pipeline/*.yaml", "src/gpipe/pipeline/*.py", "conf/launch/*.yaml")
_PLACES = {
    "bubble": _PIPELINE,
    "task_independence": ("src/gpipe/tracing/*.py",),
    "table1_model_size": (*_PIPELINE, *_AMOEBANET, *_TRANSFORMER, _CAPACITY, "src/gpipe/planning/*.py"),
    "table2_throughput": (
        *_PIPELINE,
        *_AMOEBANET,
        *_TRANSFORMER,
        "conf/experiment/table2_*.yaml",
        _CAPACITY,
        _THROUGHPUT,
    ),
    "table3_slow_links": (*_PIPELINE, *_AMOEBANET, *_TRANSFORMER, _THROUGHPUT),
    "table4_imagenet_and_transfer": (*_PIPELINE, *_AMOEBANET, *_IMAGES),
    "figure3_multilingual": (
        *_PIPELINE,
        *_TRANSLATION,
        "conf/experiment/bilingual.yaml",
        "conf/experiment/deep_*.yaml",
    ),
    "table5_batch_size": (*_PIPELINE, *_TRANSLATION, "conf/experiment/batch_size.yaml"),
}
"""The page of each claim, and the files whose departures matter to it."""


@dataclass(frozen=True)
class Deviation:
    """A departure from the paper: its text, and its file relative to the root of the repository."""

    file: str
    text: str


@cache  # every page of a rendering needs them
def deviations(root: Path) -> list[Deviation]:
    """Return every departure that is marked below the repository's root, in the order of the files."""
    found = []
    for path in sorted({path for pattern in _SOURCES for path in root.glob(pattern)}):
        prose = yaml_prose if path.suffix == ".yaml" else python_prose
        texts = find_marks(prose(path.read_text(encoding="utf-8")))
        found += [Deviation(path.relative_to(root).as_posix(), text) for text in texts]
    return found


def find_marks(prose: Iterable[str | None]) -> Iterator[str]:
    """Yield the text of each mark in the lines of comments and docstrings; None stands between paragraphs."""
    found: list[str] | None = None
    for line in (*prose, None):
        before, mark, after = (line or "").partition(MARK)
        if found is not None and (mark or line is None):
            text = " ".join(" ".join([*found, before]).split())
            yield text[:1].upper() + text[1:]
            found = None
        if mark:
            found = [after]
        elif found is not None:
            found.append(before)


def yaml_prose(source: str) -> Iterator[str | None]:
    """Yield the comments of a YAML file, line by line; a comment after a setting is its own paragraph."""
    for line in source.splitlines():
        before, mark, comment = line.partition("#")
        if before.strip() or not comment.strip():
            yield None
        if mark and comment.strip():
            yield comment.replace(MARK, f"{MARK} `{before.strip()}`:") if before.strip() else comment
        if before.strip():
            yield None


def python_prose(source: str) -> Iterator[str | None]:
    """Yield the comments and the docstrings of a Python file, line by line."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.line[: token.start[1]].strip():
                yield None
            yield token.string.lstrip("#")
        elif token.type == tokenize.STRING and token.string.endswith('"""'):
            yield None
            for line in token.string.strip('"').splitlines():
                yield line if line.strip() else None
            yield None
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            yield None


def deviations_table(root: Path, page: str | None) -> str:
    """Return a page's departures as a list, or with None those of all pages; refuse a departure that no page has."""
    found = deviations(root)
    for one in found:
        if not any(fnmatch(one.file, place) for places in _PLACES.values() for place in places):
            raise ValueError(f"{one.file} has a {MARK} of no page: name the file in _PLACES of {Path(__file__).name}.")
    shown = [one for one in found if page is None or any(fnmatch(one.file, place) for place in _PLACES.get(page, ()))]
    return "".join(f"- `{one.file}`: {one.text}\n" for one in shown) or "None.\n"
