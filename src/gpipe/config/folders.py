"""Names of the folders of runs."""

import hashlib
import os
import re
import sys
import time

_LONGEST_NAME = 120


def date_folder() -> str:
    """Return the name of a run's folder: the local date and time.

    Each process of torchrun composes the settings for itself, maybe in another second. All but the first get ".", the
    parent folder, and learn the real name from the first (gpipe.launch).
    """
    return time.strftime("%Y-%m-%d_%H-%M-%S") if os.environ.get("RANK", "0") == "0" else "."


def sweep_id() -> str:
    """Return a digest of the command line that does not depend on the order of its words."""
    return _digest("\0".join(sorted(word for word in sys.argv[1:] if word not in ("-m", "--multirun"))))


def job_folder(overrides: str) -> str:
    """Return the folder name of a sweep's job from its overrides, key=value joined by commas."""
    name = re.sub(r"[^\w.,=+-]+", "_", overrides) or "job"
    if name == overrides and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 9]}-{_digest(overrides)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
