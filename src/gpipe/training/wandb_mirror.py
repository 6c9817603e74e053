"""A run in Weights & Biases."""

import json
import netrc
import os
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import wandb

from gpipe._compat.wandb import end_service

_TEARDOWN_SECONDS = 5.0
# For these figures of evaluations, the summary has the best value beside the last.
_BEST = {"loss": "min", "nll": "min", "top1": "max", "top5": "max", "f1": "max", "bleu": "max", "chrf": "max"}


class WandbMirror:
    """Mirrors a run to Weights & Biases, and raises its errors.

    W&B writes everything into the run's folder. All sessions of a run share the id.
    """

    def __init__(
        self,
        folder: Path,
        run_id: str,
        *,
        is_online: bool,
        project: str,
        group: str | None,
        name: str | None,
        tags: Sequence[str],
        config: Mapping[str, Any],
    ) -> None:
        # wandb writes only into the run's folder, reports no errors to its makers, and prints nothing. It has settings
        # for these per process, not per run. Online, the account's settings stay where they are.
        os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
        for kind in ("DATA", "CACHE") if is_online else ("DATA", "CACHE", "CONFIG"):
            os.environ[f"WANDB_{kind}_DIR"] = str((folder / "wandb" / kind.lower()).resolve())
        # These settings keep arguments, console output, source files, the names of installed packages and the host's
        # name out of W&B's folder. The load of the host and of its GPUs is still sampled.
        settings = wandb.Settings(
            x_disable_meta=True,
            x_save_requirements=False,
            save_code=False,
            console="off",
            host="",
        )
        self._defined: set[str] = set()
        self._run = wandb.init(
            mode="online" if is_online else "offline",
            dir=str(folder),
            project=project,
            group=group,
            job_type="train",
            name=name,
            tags=list(tags),
            id=run_id,
            resume="allow" if is_online else None,  # offline, `wandb sync` joins the parts with the same id
            config=dict(config),
            settings=settings,
        )

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log figures of a step; for those of an evaluation, the summary has the best value too."""
        for key in values.keys() - self._defined:
            self._defined.add(key)
            best = _BEST.get(key.rpartition("/")[2].removeprefix("raw_"))
            if best is not None and not key.startswith("train/"):
                self._run.define_metric(key, summary=f"{best},last")
        self._run.log(dict(values), step=step)

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table."""
        data = [[_cell(value) for value in row.values()] for row in rows]
        self._run.log({name: wandb.Table(columns=list(rows[0]), data=data, allow_mixed_types=True)}, step=step)

    def log_picture(self, step: int, name: str, path: Path) -> None:
        """Log a picture."""
        self._run.log({name: wandb.Image(str(path))}, step=step)

    def log_outcome(self, step: int, figures: Mapping[str, Any]) -> None:
        """Put the outcome into the summary, as "outcome/<figure>"."""
        known = {f"outcome/{figure}": _cell(value) for figure, value in figures.items() if value is not None}
        self._run.summary.update(known)

    def close(self, *, failed: bool) -> None:
        """End the run."""
        self._run.finish(exit_code=int(failed))


def forget_service() -> None:
    """Let the next run of this process, such as a sweep's next job, restart wandb's own process."""
    thread = threading.Thread(target=_tear_down, name="wandb-teardown", daemon=True)
    thread.start()
    thread.join(_TEARDOWN_SECONDS)  # teardown waits for that process, which may hang


def has_key() -> bool:
    """Return whether this user has a Weights & Biases key: in the environment, the settings or a netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = wandb.setup().settings
    if settings.api_key:
        return True
    hosts = {re.sub(r"^\w+://|[:/].*", "", settings.base_url), "api.wandb.ai"}  # base_url may name another host
    files = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for file in files:
        with suppress(OSError, netrc.NetrcParseError):
            found = netrc.netrc(os.path.expanduser(file))  # noqa: PTH111 - a home may be missing
            if not hosts.isdisjoint(found.hosts):
                return True
    return False


def _tear_down() -> None:
    with suppress(Exception, SystemExit):  # teardown exits the program if its process was killed
        end_service()


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value
