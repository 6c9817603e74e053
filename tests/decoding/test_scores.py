"""Scores of translations against other ways to compute them."""

import math
from collections import Counter
from dataclasses import asdict

import pytest
import sacrebleu

from gpipe.decoding.scores import Scores, average, average_groups, score_corpus, signatures

REFERENCES = ["The quick brown fox jumps over the lazy dog.", "Where is the next station, please?", "All is well here."]
TRANSLATIONS = ["The quick brown fox jumped over a lazy dog.", "Where is the next station?", "All is well there."]


def bleu_by_hand(translations: list[str], references: list[str]) -> float:
    """BLEU as Papineni et al. define it, over words parted by spaces."""
    log_precisions, lengths = [], [0, 0]
    for order in range(1, 5):
        right = total = 0
        for translation, reference in zip(translations, references, strict=True):
            grams = [
                Counter(zip(*(words[i:] for i in range(order)), strict=False))
                for words in (translation.split(), reference.split())
            ]
            right += sum((grams[0] & grams[1]).values())
            total += sum(grams[0].values())
            if order == 1:
                lengths = [lengths[0] + len(translation.split()), lengths[1] + len(reference.split())]
        log_precisions.append(math.log(right / total))
    return 100 * math.exp(sum(log_precisions) / 4 + min(0.0, 1 - lengths[1] / lengths[0]))


def test_all_bleus_agree_with_one_by_hand_where_no_smoothing_is_needed() -> None:
    spaced = [
        [text.replace(".", " .").replace(",", " ,").replace("?", " ?") for text in part]
        for part in (TRANSLATIONS, REFERENCES)
    ]
    found = score_corpus(TRANSLATIONS, REFERENCES)
    expected = bleu_by_hand(*spaced)
    assert found.bleu == pytest.approx(expected) == found.fairseq_sacrebleu
    assert found.fairseq_bleu == pytest.approx(expected, rel=1e-5)


def test_chrf_is_that_of_the_function_that_others_call() -> None:
    assert score_corpus(TRANSLATIONS, REFERENCES).chrf == sacrebleu.corpus_chrf(TRANSLATIONS, [REFERENCES]).score


def test_a_copy_scores_100_and_silence_0() -> None:
    copied = asdict(score_corpus(REFERENCES, REFERENCES))
    assert copied == pytest.approx(dict.fromkeys(copied, 100.0), rel=1e-5)
    silent = asdict(score_corpus(["", "", ""], REFERENCES))
    assert silent == dict.fromkeys(silent, 0.0)


def test_the_library_without_smoothing_gives_0_where_no_four_words_are_right() -> None:
    found = score_corpus(["the dog is here"], ["the dog was there"])
    assert found.bleu > 0 == found.fairseq_bleu


@pytest.mark.parametrize("translations", [[], ["one"], ["one", "two"]])
def test_unequal_numbers_are_refused(translations: list[str]) -> None:
    references = ["one"] if len(translations) != 1 else []
    with pytest.raises(ValueError, match=r"there are \d translations for \d references: give one translation per"):
        score_corpus(translations, references)


def test_the_signatures_say_what_was_computed() -> None:
    assert signatures()["bleu"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert signatures()["chrf"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:")


def test_languages_count_alike_in_the_averages_of_their_groups() -> None:
    scores = {name: Scores(value, 2 * value, value, value) for name, value in (("de", 30.0), ("yo", 1.0), ("fr", 20.0))}
    found = average_groups(
        scores, {"all": ["de", "fr", "yo"], "high": ["de", "fr"], "low": ["yo", "ta"], "none": ["la"]}
    )
    assert found == {
        "all": Scores(17.0, 34.0, 17.0, 17.0),
        "high": Scores(25.0, 50.0, 25.0, 25.0),
        "low": Scores(1.0, 2.0, 1.0, 1.0),
    }
    assert average([scores["de"]]) == scores["de"]
