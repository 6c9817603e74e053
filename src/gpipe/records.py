"""The record of a run: its command, settings, hardware and results. Every published number comes from a record."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from gpipe.durable_files import write_flushed

SCHEMA_VERSION = 1
RECORD_FILE = "record.json"
KINDS = ("measured", "simulated", "planned", "not run")
# Two runs with the same settings may differ in these: where they run, and what observes them.
WHEREABOUTS = {
    "launch.num_processes", "launch.num_threads", "launch.pin_cores", "launch.device", "launch.max_restarts",
    "launch.shard_optimizer", "launch.device_threads", "launch.gpus_per_node", "launch.debug", "tracking",
    "reproduction", "trainer.resume", "trainer.resume_from", "trainer.max_hours", "data.root",
    "data.cache", "data.num_workers", "data.prefetch_factor",
}  # fmt: skip
# The record of one run holds for another that differs in these: they lead to no other data and no other state.
OBSERVERS = WHEREABOUTS - {"data.root", "trainer.resume_from"}
# One run can resume another that differs in these: they change how fast it is and which files it leaves.
EFFORTS = OBSERVERS | {
    "pipeline.partition_by", "pipeline.partitions", "pipeline.objective", "pipeline.memory_limit_bytes",
    "pipeline.timeout_seconds", "trainer.timeline_every_steps", "trainer.num_untimed_steps", "trainer.checkpoints",
    "trainer.non_finite", "trainer.evaluation.raw",
}  # fmt: skip
# A run that resumes from the state of another run may differ in these: its length, its learning rate, how it is run.
RESUMED_MAY_DIFFER = EFFORTS | {
    "launch.num_replicas",  # whose micro-batches are smaller: other statistics of batch norms, other masks
    "name", "schedule", "optimizer.learning_rate", "optimizer.times_batch_size", "optimizer.clip_norm",
    "pipeline.num_stages", "pipeline.schedule", "pipeline.stages_per_device", "pipeline.rematerialize",
    "data.tokenizer", "data.vocabulary_size",  # the tokenizer's content is compared instead
    "trainer.resume_from", "trainer.num_epochs", "trainer.max_steps", "trainer.evaluation",
    "trainer.dry_run",
}  # fmt: skip
# In JSON text, the folders and the last name of an absolute path: a whole string, an argument, or an override. In
# quotes, also those of a shell, it may have spaces.
_ABSOLUTE_PATHS = (
    *(
        re.compile(rf"""({mark}(?:[^\s"'=/]+=)?)/(?:[^{mark}"=/]*[^{mark}"=/\s]/)*([^{mark}"=/]+)/?(?={mark})""")
        for mark in ('"', "'")
    ),
    re.compile(r"""(["=\s])/(?:[^/"\s]+/)*([^/"\s]+)/?(?=["\s])"""),
)
_NO_PROGRAMS = ":(top,exclude)*.md", ":(top,exclude)reproductions/*.jsonl"
_VECTORS = ("avx512f", "avx2")
_PACKAGES = ("torch", "timm", "fairseq", "sacrebleu", "sentencepiece")


@dataclass(frozen=True)
class Record:
    """One run. It contains no host name, because records are published.

    Attributes:
        kind: "measured", "simulated" or "planned", which never share a column, or "not run", with a reason as result.
        command: The command that makes the record again.
        experiment: The name under which tables find the record.
        commit: The commit of the program; None outside git.
        dirty: Whether there were uncommitted changes; None outside git.
        date: UTC in ISO 8601.
        hardware: The processor, the number of cores, and the GPUs.
        packages: Versions by name.
        config: All settings, as JSON.
        seed: The seed.
        results: Whatever the program measured, as JSON.
        schema_version: The version of this format.

    Raises:
        ValueError: A field has a wrong type or value; the message names the field.
    """

    kind: str
    command: str
    experiment: str
    commit: str | None
    dirty: bool | None
    date: str
    hardware: dict[str, Any]
    packages: dict[str, str]
    config: dict[str, Any]
    seed: int
    results: dict[str, Any]
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {self.schema_version}, but this program reads {SCHEMA_VERSION}.")
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}, but a record is one of {', '.join(KINDS)}.")
        for name, types in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise ValueError(f"{name} is {value!r}, but it must be {' or '.join(t.__name__ for t in types)}.")
        datetime.datetime.fromisoformat(self.date)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings that its numbers depend on, wherever it runs: what `same_settings` compares."""
        return without(WHEREABOUTS, self.config)

    @property
    def examples_per_second(self) -> float | None:
        """The median speed of a training; earlier records call it images_per_second."""
        speed: float | None = self.results.get("examples_per_second", self.results.get("images_per_second"))
        return speed


# Of a generic type, only the container is checked.
_TYPES: dict[str, tuple[type, ...]] = {
    field.name: get_args(field.type) if isinstance(field.type, UnionType) else (get_origin(field.type) or field.type,)
    for field in fields(Record)
}


def make_record(
    *,
    kind: str,
    experiment: str,
    config: Mapping[str, Any],
    seed: int,
    results: Mapping[str, Any],
    command: str | None = None,
    gpus: Sequence[str] = (),
    num_cores: int | None = None,
) -> Record:
    """Return the record of a run that has just ended in this process; `command` and `num_cores` are its own by default.

    The GPUs and cores are those that the run could use.
    """
    commit, dirty = git_state(Path(__file__).parent)
    return Record(
        kind=kind,
        command=command or command_line(),
        experiment=experiment,
        commit=commit,
        dirty=dirty,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        hardware=describe_hardware(gpus, num_cores),
        packages=package_versions(),
        config=dict(config),
        seed=seed,
        results=dict(results),
    )


def command_line() -> str:
    """Return the command that started this process, as a user types it in the repository's root."""
    spec = sys.modules["__main__"].__spec__
    program = [Path(sys.argv[0]).name] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    return shlex.join(["python", *program, *sys.argv[1:]])


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Return the commit that `folder` is at and whether tracked files differ from it; (None, None) outside git.

    Records and pages do not count: no program reads them to measure.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None, None
    status = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", *_NO_PROGRAMS)
    return commit, None if status is None else status != ""


def describe_hardware(gpus: Sequence[str] = (), num_cores: int | None = None) -> dict[str, Any]:
    """Return the CPU's model, the number of cores, by default those this process may use, and the GPUs' names.

    Also the widest vector instructions that torch has kernels for: with others, sums differ in their last digits.
    """
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    instructions = next((name for name in _VECTORS if name in _read_processor("flags").split()), None)
    cpu = _read_processor("model name") or platform.processor() or platform.machine()
    return {"cpu": cpu, "instructions": instructions, "num_cores": num_cores or own, "gpus": list(gpus)}


def package_versions(names: Iterable[str] = _PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed, without importing them."""
    versions = {name: version for name in names if (version := _find_version(name)) is not None}
    return {"python": platform.python_version(), **versions}


@cache  # each reads a file, and a run asks at its start and at its end
def _find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def same_settings(one: Mapping[str, Any], other: Mapping[str, Any], may_differ: Collection[str] = WHEREABOUTS) -> bool:
    """Return whether the settings of two runs, as JSON, are the same, apart from those whose keys may differ."""
    return without(may_differ, one) == without(may_differ, other)


def differences(saved: Mapping[str, Any], own: Mapping[str, Any], may_differ: Collection[str] = EFFORTS) -> list[str]:
    """Return the settings in which two trainings differ, each as "<key> is <value> there, <value> here".

    Args:
        saved: The settings there, as JSON.
        own: The settings here, as JSON. A setting that one of the two lacks, such as a newer one, is left out.
        may_differ: Keys that are left out too.
    """
    there, here = _flatten(without(may_differ, saved)), _flatten(without(may_differ, own))
    return [
        f"{key} is {_shorten(there[key])} there, {_shorten(value)} here"
        for key, value in here.items()
        if key in there and there[key] != value
    ]


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings of all sections under their full keys, such as trainer.evaluation.batch_size."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        # The arguments of a library's model are one setting: which of them are given is part of it.
        is_section = isinstance(value, Mapping) and key != "model.arguments"
        found |= _flatten(value, f"{key}.") if is_section else {key: value}
    return found


def _shorten(value: Any) -> str:
    """Return a value as a user types it on the command line, shortened to 60 characters."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def without(left_out: Collection[str], config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings without those whose full keys are left out, and without sections that had no others."""
    found = {
        name: without(left_out, value, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in config.items()
        if f"{prefix}{name}" not in left_out
    }
    return {name: value for name, value in found.items() if value or not config[name]}


def without_places(record: Record) -> Record:
    """Return a record with only the last name of each absolute path, because records are published."""
    text = json.dumps(asdict(record))
    for path in _ABSOLUTE_PATHS:
        text = path.sub(r"\1<...>/\2", text)
    return Record(**json.loads(text))


def write_record(path: Path, record: Record) -> None:
    """Write one record as JSON; the file appears complete or not at all.

    Raises:
        ValueError: A number is NaN or infinite.
    """
    _write(path, json.dumps(asdict(record), indent=2, allow_nan=False) + "\n")


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Replace the lines of a .jsonl file by records; otherwise like `write_record`."""
    _write(path, "".join(_format_line(record) for record in records))


def _format_line(record: Record) -> str:
    return json.dumps(asdict(record), allow_nan=False) + "\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_flushed(path, text)


def append_record(path: Path, record: Record) -> None:
    """Add one record as a line to a .jsonl file; refuse NaN and infinities like `write_record`."""
    line = _format_line(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


def read_records(path: str | Path) -> list[Record]:
    """Read a .jsonl file (one record per line), a .json file (one record), or every record.json below a folder.

    Raises:
        ValueError: A record is invalid; the message names the file, the line and the fault.
        FileNotFoundError: There is no such path.
    """
    path = Path(path)
    if path.is_dir():
        return [record for file in sorted(path.rglob(RECORD_FILE)) for record in read_records(file)]
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return [_parse(text, str(path))]
    lines = enumerate(text.splitlines(), start=1)
    return [_parse(line, f"{path}, line {number}") for number, line in lines if line.strip()]


def _parse(text: str, place: str) -> Record:
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"a record is a JSON object, not {type(content).__name__}.")
        names = {field.name for field in fields(Record)}
        if content.keys() != names:
            raise ValueError(f"the fields {sorted(content.keys() ^ names)} are missing or unknown.")
        return Record(**content)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


_GIT_SECONDS = 5.0  # a network folder may hang; a run must not hang for its commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(
            command, capture_output=True, check=True, timeout=_GIT_SECONDS, encoding="utf-8", errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _read_processor(key: str) -> str:
    """Return what Linux reports for the first core under a key, or ""."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
