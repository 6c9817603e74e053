"""The tables of the paper's Table 5: what larger mini-batches bring."""

from collections.abc import Iterable, Sequence

from gpipe.results.records import Record
from gpipe.results.tables import Paper, markdown, named, not_run, provenance
from gpipe.results.translation_runs import SCORER, Trained, beams, mean, searched, spread, trainings, verdict

PAPER_SCALE = "batch_size"
LAPTOP = "batch_size_laptop"
_COMMAND = "train.py -m +experiment=batch_size scale=laptop"


def table5(records: Sequence[Record], paper: Paper) -> str:
    """Return the paper's BLEU and negative log-likelihood beside ours, a row a mini-batch."""
    sizes = _by_size(trainings(records, PAPER_SCALE))
    rows = []
    for row in paper:
        runs = list(sizes.get(int(row["batch_tokens"]), {}).values())
        ours = [spread([bleu(one) for one in runs], ".2f"), spread([one.last("loss") for one in runs], ".2f")]
        cells = [row["bleu"], ours[0] or "not run", row["nll"], ours[1] or "not run", str(len(runs))]
        rows.append([row["title"], *cells])
    return markdown(["tokens a mini-batch", "BLEU: paper", "ours", "NLL: paper", "ours", "runs"], rows)


def table5_laptop(records: Sequence[Record]) -> str:
    """Return a small model's figures by the mini-batch's tokens, and whether the next larger one is better.

    Means and deviations over the seeds, at the end of training; gains are between runs of the same seed.
    """
    rows = []
    for setting, sizes in small_runs(records).items():
        smaller: dict[int, Trained] = {}
        for size, seeds in sizes.items():
            runs = list(seeds.values())
            steps = {one.run.results["num_steps"] for one in runs}
            both = [(smaller[seed], one) for seed, one in seeds.items() if seed in smaller]
            gains = [_minus(before.last("loss"), one.last("loss")) for before, one in both]
            rows.append(
                [
                    setting,
                    f"{size:,}",
                    ", ".join(sorted({str(one.run.config["pipeline"]["num_microbatches"]) for one in runs})),
                    ", ".join(f"{number:,}" for number in sorted(steps)),
                    str(len(runs)),
                    spread([one.last("loss") for one in runs], ".3f"),
                    spread(gains, ".3f", "+"),
                    spread([bleu(one) for one in runs], ".2f"),
                    spread([chrf(one) for one in runs], ".2f"),
                    verdict(gains),
                ]
            )
            smaller = seeds
    if not rows:
        return not_run(_COMMAND)
    header = ["model, data", "tokens a mini-batch", "M", "steps", "runs", "NLL, nats a token"]
    found = beams(one for sizes in small_runs(records).values() for one in _all(sizes))
    scores = ", ".join(["BLEU", *map(searched, found[:1])]), ", ".join(["chrF", *map(searched, found[:1])])
    table = markdown([*header, "gain over the row above", *scores, "larger is better, NLL"], rows)
    return table if found else f"{table}\nBLEU and chrF: {not_run(SCORER).lower()}"


def table5_run(records: Sequence[Record]) -> str:
    """Return where the newest of the small models was trained, and on what."""
    runs = [one.run for one in trainings(records, LAPTOP)]
    return provenance(max(runs, key=lambda run: run.date, default=None), _COMMAND)


def small_runs(records: Sequence[Record]) -> dict[str, dict[int, dict[int, Trained]]]:
    """Return the small trainings by setting, tokens of a mini-batch, and seed, the smallest mini-batch first."""
    settings: dict[str, list[Trained]] = {}
    for one in trainings(records, LAPTOP):
        settings.setdefault(one.setting, []).append(one)
    return {setting: _by_size(found) for setting, found in settings.items()}


def bleu(one: Trained) -> float | None:
    """Return the mean BLEU over the languages that were scored, with the narrowest beam."""
    return mean(one.score("bleu", language) for language in one.pairs())


def chrf(one: Trained) -> float | None:
    """Return the mean chrF over the languages that were scored, with the narrowest beam."""
    return mean(one.score("chrf", language) for language in one.pairs())


def _by_size(found: Iterable[Trained]) -> dict[int, dict[int, Trained]]:
    sizes: dict[int, dict[int, Trained]] = {}
    for one in found:
        sizes.setdefault(one.run.config["trainer"]["batch_size"], {})[one.run.seed] = one
    return {size: dict(sorted(seeds.items())) for size, seeds in sorted(sizes.items())}


def _all(sizes: dict[int, dict[int, Trained]]) -> list[Trained]:
    return [one for seeds in sizes.values() for one in seeds.values()]


def _minus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


BESIDE_PAPER = named(table5)
TABLES = named(table5_laptop, table5_run)
