"""The steps that have ended, each in its own folder, so that a second call continues where the first one ended."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.gpu.steps import Step
from gpipe.durable_files import write_flushed

LOG_FILE, END_FILE = "log.txt", "end.json"
_PATIENCE_SECONDS = 20  # between asking a step to end and killing it
_MINUTE = 60


@dataclass(frozen=True)
class End:
    """How a step ended.

    Attributes:
        failure: why it failed; None where it is done.
        seconds: how long it took.
        is_published: whether its records are on the pages.
    """

    failure: str | None
    seconds: float
    is_published: bool = False


class Progress:
    """Runs steps in the root of the repository, and remembers in `folder` how each one ended."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self._root = folder.resolve(), root

    def find_end(self, step: Step) -> End | None:
        """Return how a step ended; None if it never did."""
        path = self.folder / step.name / END_FILE
        return End(**json.loads(path.read_text())) if path.exists() else None

    def note_end(self, step: Step, end: End) -> None:
        """Remember how a step ended."""
        write_flushed(self.folder / step.name / END_FILE, json.dumps(asdict(end)) + "\n")

    def run(self, steps: Sequence[Step]) -> Iterator[tuple[Step, End]]:
        """Run the steps that are not done, one after the other, and yield how each one ended; say what is under way."""
        for step in steps:
            end = self.find_end(step)
            if end is None or end.failure is not None:
                print(f"{step.name}: at most {step.minutes:g} minutes; log in {self._log(step)}", flush=True)
                end = self._run(step)
                self.note_end(step, end)
                print(f"{step.name}: {end.failure or 'done'} after {end.seconds:.0f} s", flush=True)
            else:
                print(f"{step.name}: done before", flush=True)
            yield step, end

    def _log(self, step: Step) -> Path:
        path = self.folder / step.name / LOG_FILE
        return path.relative_to(self._root) if path.is_relative_to(self._root) else path

    def _run(self, step: Step) -> End:
        folder = self.folder / step.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "runs.jsonl").unlink(missing_ok=True)  # of a call that was killed after it had recorded
        words = [word.format(folder=folder, steps=self.folder) for word in step.words]
        command = [sys.executable, *words] if step.is_python else words
        started = time.monotonic()
        process = start(command, self._root, {**os.environ, **step.variables}, folder / LOG_FILE)
        try:
            failure = _wait(process, step.minutes * _MINUTE)
        finally:
            _end(process)
        return End(failure, time.monotonic() - started)


def start(words: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a program in a folder, in its own session, so that everything that it starts can be ended with it."""
    with log.open("w") as file:
        return subprocess.Popen(
            words, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str | None:
    """Wait for a process; return why it failed, or None."""
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"failed: it took longer than {seconds / _MINUTE:g} minutes and was ended"
    return None if status == 0 else f"failed: exit status {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it started; it may have ended already."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_PATIENCE_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
