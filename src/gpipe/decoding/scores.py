"""BLEU and chrF of translations, by sacreBLEU, whose scores are comparable across papers, and by fairseq."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean

import torch
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from gpipe._compat.fairseq import import_fairseq


@dataclass(frozen=True)
class Scores:
    """Scores of a corpus, each from 0 to 100, or averages over several.

    Attributes:
        bleu, chrf: sacreBLEU's, with default settings (see `signatures`).
        fairseq_sacrebleu: from fairseq's scorer "sacrebleu"; should equal `bleu`.
        fairseq_bleu: from fairseq's scorer "bleu", a C library, on the same words. It does not smooth, so it is 0
            unless four consecutive words match.
    """

    bleu: float
    chrf: float
    fairseq_sacrebleu: float
    fairseq_bleu: float


def score_corpus(translations: Sequence[str], references: Sequence[str]) -> Scores:
    """Score a corpus of translations, each with its reference.

    Raises:
        ValueError: there are no sentences, or the numbers of translations and references differ.
    """
    if len(translations) != len(references) or not references:
        raise ValueError(
            f"there are {len(translations)} translations for {len(references)} references: give one translation per "
            "reference, and at least one."
        )
    return Scores(
        bleu=BLEU().corpus_score(translations, [references]).score,
        chrf=CHRF().corpus_score(translations, [references]).score,
        fairseq_sacrebleu=_score_with_sacrebleu(translations, references),
        fairseq_bleu=_score_with_library(translations, references),
    )


def signatures() -> dict[str, str]:
    """Return sacreBLEU's signature of each score, which specifies its computation."""
    found = {}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        metric.corpus_score(["a"], [["a"]])  # sets the number of references
        found[name] = metric.get_signature().format()
    return found


def average(scores: Iterable[Scores]) -> Scores:
    """Average each score over languages, with equal weights."""
    return Scores(*map(fmean, zip(*map(astuple, scores), strict=True)))


def average_groups(scores: Mapping[str, Scores], groups: Mapping[str, Sequence[str]]) -> dict[str, Scores]:
    """Average over the scored languages of each group; leave out groups without any."""
    found = {name: [scores[each] for each in languages if each in scores] for name, languages in groups.items()}
    return {name: average(some) for name, some in found.items() if some}


def _score_with_sacrebleu(translations: Sequence[str], references: Sequence[str]) -> float:
    scoring = import_fairseq("fairseq.scoring.bleu")
    scorer = scoring.SacrebleuScorer(scoring.SacrebleuConfig())
    for reference, translation in zip(references, translations, strict=True):
        scorer.add_string(reference, translation)
    return float(scorer.score())


def _score_with_library(translations: Sequence[str], references: Sequence[str]) -> float:
    """Return the BLEU of fairseq's C library, which gets sacreBLEU's words as ids.

    An empty translation counts as one wrong word, because the library reads beyond the end of an empty sentence.
    """
    scoring = import_fairseq("fairseq.scoring.bleu")
    words = import_fairseq("fairseq.data").Dictionary()
    cut = BLEU().tokenizer
    scorer = scoring.Scorer(scoring.BleuConfig(pad=words.pad(), eos=words.eos(), unk=words.unk()))

    def encode(text: str) -> torch.Tensor:
        found: torch.Tensor = words.encode_line(cut(text), add_if_not_exist=True).int()
        return found

    for reference, translation in zip(references, translations, strict=True):
        scorer.add(encode(reference), encode(translation))
    return float(scorer.score())
