"""The study of languages repeats nothing that is on record, and chooses the beam of the best translations."""

import pytest

from experiments import tuning
from experiments.multilingual import Scored, choose_beam, train_alone, train_together
from reproductions.translation_runs import SCORING
from tests.reproductions.translation_records import scored, trained


def test_what_is_on_record_is_not_trained_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning.subprocess, "run", None)
    (alone,) = train_alone((0.0025, 0.2), "gu", 0)
    assert alone.config["data"]["languages"] == ["gu"] and alone.config["model"]["dropout"] == 0.2
    together, translated = train_together((0.0025, 0.3), 1, [Scored(beam=1)])
    assert together.seed == translated.seed == 1
    assert together.config["optimizer"]["learning_rate"] == 0.0025
    assert translated.experiment == SCORING and translated.results["num_beams"] == 1
    with pytest.raises(TypeError):  # it would train
        train_alone((0.0025, 0.2), "gu", 1)


def test_the_beam_of_the_highest_mean_score_over_the_languages_is_chosen() -> None:
    run = trained("bilingual_laptop", 0, {})
    chrf = {1: (4.0, 2.0), 2: (6.0, 1.0), 4: (5.0, 1.0)}
    beam, made = choose_beam(
        lambda asked: [
            scored(run, {name: value}, {name: 9}) for name, value in zip("ab", chrf[asked.beam], strict=True)
        ]
    )
    assert (beam, len(made)) == (2, 6)
