"""Score a trained translation model, by language and group of languages, with BLEU and chrF after beam search.

    python bleu.py runs/transformer_multilingual_laptop/<date> --record runs/bleu.jsonl
    python bleu.py runs/sweep-<id>/*/checkpoints/best --record runs/bleu.jsonl

The half of the languages with the most training pairs is high resource, the other half low resource. All languages
have the same weight in an average. The scores are sacreBLEU's BLEU and chrF with their default settings, and those of
fairseq's two scorers: "sacrebleu", which should be equal, and "bleu", its C library, which does not smooth. A
reference is the text of its tokens. It equals the original text if the tokenizer spells unknown characters in bytes,
as those of this package do.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from gpipe.config import ConfigError, Device, to_plain
from gpipe.data import SPLITS, ParallelCorpus, open_corpus
from gpipe.decoding.beam_search import BeamSearch
from gpipe.decoding.resource_groups import resource_groups
from gpipe.decoding.scores import average_groups, score_corpus, signatures
from gpipe.launch.errors import report_errors
from gpipe.programs.trained import TrainedModel, open_trained
from gpipe.programs.translate import find_device, require_beams, translate_lines
from gpipe.records import Record, append_record, make_record, without_places

EXPERIMENT = "bleu"
_MAX_LENGTH = 256  # of a translation; more if the model was trained on longer sentences
COLUMNS = {"bleu": "BLEU", "chrf": "chrF", "fairseq_sacrebleu": "fairseq sacrebleu", "fairseq_bleu": "fairseq bleu"}


def choose_search(max_tokens: int) -> dict[str, Any]:
    """Return the settings of `BeamSearch` for a model that was trained on sentences of at most `max_tokens`."""
    return {
        "length_penalty": 1.0,
        "max_length_a": 2.0,
        "max_length_b": 16,
        "max_length": max(_MAX_LENGTH, max_tokens),
    }


def translate_split(
    model: TrainedModel, search: BeamSearch, corpus: ParallelCorpus, limit: int | None = None
) -> dict[str, tuple[list[str], list[str]]]:
    """Return the translations and the references of the first `limit` sentences of each language.

    All languages are translated together, so that batches of similar lengths are large.
    """
    pairs = {
        language: [corpus.pair(language, index) for index in range(count)[:limit]]
        for language, count in zip(corpus.languages, corpus.num_pairs().tolist(), strict=True)
    }
    sources = [source.tolist()[:-1] for found in pairs.values() for source, _ in found]  # without END
    translations, decode = iter(translate_lines(search, model.tokenizer, sources)), model.tokenizer.decode
    return {
        language: ([next(translations) for _ in found], [decode(target.tolist()) for _, target in found])
        for language, found in pairs.items()
    }


def score_languages(texts: Mapping[str, tuple[list[str], list[str]]], num_pairs: Mapping[str, int]) -> dict[str, Any]:
    """Return the scores of each language, and their averages by the resource groups of all languages in `num_pairs`."""
    scores = {language: score_corpus(*both) for language, both in texts.items()}
    groups = resource_groups(num_pairs)
    rows = {
        language: {
            "group": "low" if language in groups["low"] else "high",
            "num_train_pairs": num_pairs[language],
            "num_sentences": len(texts[language][1]),
            **asdict(scores[language]),
        }
        for language in sorted(scores, key=lambda language: (-num_pairs[language], language))
    }
    averages = {group: asdict(average) for group, average in average_groups(scores, groups).items()}
    return {"languages": rows, "averages": averages, "signatures": signatures()}


def print_scores(results: Mapping[str, Any]) -> None:
    """Print one row per language, the most training pairs first, then the averages and the scores' signatures."""
    table = Table()
    for name in ("language", "group", "training pairs", "sentences", *COLUMNS.values()):
        table.add_column(name, justify="left" if name in ("language", "group") else "right")
    for language, row in results["languages"].items():
        counts = (f"{row['num_train_pairs']:,}", f"{row['num_sentences']:,}")
        table.add_row(language, row["group"], *counts, *_format_scores(row))
    table.add_section()
    for group, row in results["averages"].items():
        table.add_row("average", group, "", "", *_format_scores(row))
    Console().print(table)
    print("\n".join(f"{COLUMNS[name]}: {signature}" for name, signature in results["signatures"].items()))


def _format_scores(row: Mapping[str, Any]) -> list[str]:
    return [f"{row[name]:.1f}" for name in COLUMNS]


def score_model(model: TrainedModel, options: argparse.Namespace) -> dict[str, Any]:
    """Translate and score the sentences that the options select; return the record's results."""
    require_beams("--beam", options.beam, model)
    data, asked = model.data, options.languages
    settings: dict[str, Any] = {"tokenizer": model.tokenizer, "max_tokens": data.max_tokens, "cache": data.cache}
    corpus_of = partial(open_corpus, data.name, root=data.root, **settings)
    train = corpus_of(split="train", languages=data.languages, max_pairs=data.max_pairs)
    num_pairs = dict(zip(train.languages, train.num_pairs().tolist(), strict=True))
    if unknown := set(asked or []) - set(num_pairs):
        raise ConfigError(f"--languages has {min(unknown)}, which the model was not trained on: leave it out.")
    corpus = corpus_of(split=options.split, languages=asked or data.languages)
    for warning in corpus.warnings():
        print(f"warning: {options.split}: {warning}", file=sys.stderr)
    chosen = choose_search(data.max_tokens)
    search, start = BeamSearch(model.layers, options.beam, **chosen), time.perf_counter()
    texts = translate_split(model, search, corpus, options.limit)
    seconds = time.perf_counter() - start
    searched = {"split": options.split, "num_beams": options.beam, "limit": options.limit, **chosen}
    return {"step": model.step, "seconds": seconds, **searched, **score_languages(texts, num_pairs)}


def record_of(model: TrainedModel, results: dict[str, Any], words: list[str], device: torch.device) -> Record:
    """Return the record of one run's scores; `words` is the command line that scores this run alone."""
    return make_record(
        kind="measured",
        command=shlex.join(["python", "bleu.py", *words]),
        experiment=EXPERIMENT,
        config=to_plain(model.run),
        seed=model.run.seed,
        results=results,
        gpus=[torch.cuda.get_device_name()] if device.type == "cuda" else [],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line; score and record the runs in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "runs", nargs="+", metavar="run", help="a run's folder, a folder of runs, a checkpoint's, or checkpoints/best"
    )
    parser.add_argument("--split", choices=SPLITS, default="test", help="default: %(default)s")
    parser.add_argument("--languages", nargs="+", help="codes; default: all that the model was trained on")
    parser.add_argument("--limit", type=int, help="translate only this many sentences of each language, the first ones")
    parser.add_argument("--beam", type=int, default=4, help="hypotheses per sentence; default: %(default)s")
    parser.add_argument(
        "--device", choices=[device.value for device in Device], default="auto", help="default: CUDA if there is a GPU"
    )
    parser.add_argument("--record", type=Path, help="the .jsonl file to which the record is added")
    options = parser.parse_args(arguments)
    if options.limit is not None and options.limit < 1:
        parser.error(f"--limit is {options.limit}, expected 1 or more: leave it out for all sentences.")
    with report_errors():
        device = find_device(Device(options.device))
        for run in options.runs:
            model = open_trained(run, device)
            results = score_model(model, options)
            print_scores(results)
            if options.record is not None:
                words = [word for word in arguments or sys.argv[1:] if word == run or word not in options.runs]
                append_record(options.record, without_places(record_of(model, results, words, device)))
