"""Find the runs that count beside the paper's numbers: those with the settings of the paper-scale experiment.

The settings of a record are compared with those that conf/ composes for its experiment. The data set, the seed, the
initial weights and the launch may differ. All other runs are in the table "other settings".
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gpipe.config import ConfigError, compose_plain
from gpipe.records import WHEREABOUTS, Record
from reproductions.table import markdown

Differences = Callable[[Record], list[str]]
"""(record) -> the settings in which it departs from the paper-scale run to compare it with."""
_MAY_DIFFER = WHEREABOUTS | {"launch", "seed", "init_from", "data.name", "data.tokenizer"}
_ABSENT = "absent"


def differences(run: Record, overrides: Sequence[str], *, launched_alike: bool = False) -> list[str]:
    """Return the settings in which a run departs from a paper-scale command: `key: its value (paper scale: value)`.

    Args:
        run: to compare.
        overrides: of the command.
        launched_alike: also compare the numbers of processes and replicas, as for a speed.
    """
    try:
        paper = compose_plain([*overrides, "init_from=null"])
    except ConfigError as error:
        return [str(error)]
    ours, theirs = dict(_flatten(run.config)), dict(_flatten(paper))
    if launched_alike:
        for settings, flat in ((run.config, ours), (paper, theirs)):
            launch = settings.get("launch", {})
            flat |= {f"launch.{name}": launch.get(name, _ABSENT) for name in ("num_processes", "num_replicas")}
    return [
        f"{key}: {_format_setting(ours.get(key, _ABSENT))} (paper scale: {_format_setting(theirs.get(key, _ABSENT))})"
        for key in dict.fromkeys((*theirs, *ours))
        if ours.get(key, _ABSENT) != theirs.get(key, _ABSENT)
    ]


def paper_scale(records: Iterable[Record], experiments: Sequence[str], departs: Differences) -> list[Record]:
    """Return the measured runs of these experiments that have the paper-scale settings."""
    return [run for run in _select_measured(records, experiments) if not departs(run)]


def other_settings(records: Iterable[Record], experiments: Sequence[str], departs: Differences) -> str:
    """Return the table of the measured runs of these experiments that do not count beside the paper's numbers."""
    rows = []
    for run in _select_measured(records, experiments):
        if found := departs(run):
            figures = ", ".join(f"{name} {value:.4g}" for name, value in _get_figures(run.results).items())
            rows.append([run.experiment, _get_data(run), str(run.seed), figures, "; ".join(found)])
    if not rows:
        return "Other settings under a paper-scale name: no run.\n"
    return markdown(["experiment, other settings", "data set", "seed", "figures", "differences"], rows)


def data_set(run: Record) -> list[str]:
    """Return the override that chooses the data set of a run."""
    return [f"data={_get_data(run)}"]


def _select_measured(records: Iterable[Record], experiments: Sequence[str]) -> list[Record]:
    return [run for run in records if run.kind == "measured" and run.experiment in experiments]


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield full key and value of each setting that counts."""
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if key in _MAY_DIFFER:
            continue
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def _format_setting(value: Any) -> str:
    return "null" if value is None else str(value)


def _get_data(run: Record) -> str:
    return str(run.config.get("data", {}).get("name", ""))


def _get_figures(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the accuracy, the loss and the speed of a run, if it has them."""
    figures: dict[str, Any] = {name: results.get(name) for name in ("top1", "top5", "examples_per_second")}
    evaluation: dict[str, Any] = next(iter(results.get("evaluation", {}).values()), {})
    figures["loss"] = evaluation.get("loss")
    return {name: value for name, value in figures.items() if value is not None}
