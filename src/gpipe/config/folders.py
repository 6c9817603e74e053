"""Names of the folders of runs."""

import hashlib
import os
import re
import sys
import time
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

_LONGEST_LABEL = 40


def date_folder() -> str:
    """Return the name of a run's folder: the local date and time.

    Each process of torchrun composes the settings for itself, maybe in another second. All but the first get ".", the
    parent folder, and learn the real name from the first (gpipe.launch).
    """
    return time.strftime("%Y-%m-%d_%H-%M-%S") if os.environ.get("RANK", "0") == "0" else "."


def sweep_id() -> str:
    """Return a digest of the command line that does not depend on the order of its words."""
    return _digest("\0".join(sorted(word for word in sys.argv[1:] if word not in ("-m", "--multirun"))))


def command_words() -> str:
    """Return the words of the command line; a job that a launcher starts elsewhere gets those of its sweep."""
    return "\0".join(sys.argv[1:])


def job_folder(overrides: str, command: str, *, _root_: DictConfig) -> str:
    """Return the folder name of a sweep's job, such as 03_seed1_c6408c82, which can be typed and passed to Hydra.

    It consists of the job's number, the settings in which it differs from the others, and a digest of its overrides. By
    the digest, a job finds its earlier folder, even if its number was different then.

    Args:
        overrides: the job's, as key=value joined by commas, without Hydra's exclude_keys. Those change no result, and
            count only if the sweep varies them.
        command: what `command_words` returned.
        _root_: the job's settings, and Hydra's.
    """
    hydra = _root_.hydra
    params = OmegaConf.to_container(hydra.sweeper.get("params") or OmegaConf.create())
    assert isinstance(params, dict)
    said = (*command.split("\0"), *("=".join(map(str, pair)) for pair in params.items()))
    shared = {word.lower() for word in said}  # by all jobs; lower case, because Hydra writes True for true in theirs
    own = [word for word in hydra.overrides.task if word.lower() not in shared]
    left_out = OmegaConf.select(hydra, "job.config.override_dirname.exclude_keys") or ()
    varied = [word for word in own if word.partition("=")[0] in left_out]
    digest = _digest(",".join([overrides, *varied]))
    for earlier in sorted(Path(hydra.sweep.dir).glob(f"*_{digest}")):
        return earlier.name
    number = OmegaConf.select(hydra, "job.num")
    label = "_".join(_label(word) for word in own if word in varied or word.lstrip("+") in overrides)
    return f"{number or 0:02d}_{label[:_LONGEST_LABEL] or 'job'}_{digest}"


def _label(override: str) -> str:
    """Return a short label of a setting: its value, after the last word of its key if the value is a number."""
    key, _, value = override.partition("=")
    short = key.rpartition(".")[2].lstrip("+") if re.fullmatch(r"(?i)[\d.e+-]+|true|false|null", value) else ""
    return re.sub(r"[^A-Za-z0-9.]+", "-", f"{short}{value}").strip("-.")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
