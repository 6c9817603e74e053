"""Temperature sampling, against fairseq's."""

import numpy as np
import pytest

from gpipe._compat.fairseq import import_fairseq
from gpipe.data import sampling_probabilities

SIZES = [1_000_000_000, 25_000_000, 744, 60]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1 / 0.7, 5.0, 100.0])
def test_probabilities_are_those_of_fairseq(temperature: float) -> None:
    sampling = import_fairseq("fairseq.data.multilingual.sampling_method")
    ratios = np.array(sampling.make_temperature_sampling(temperature)(SIZES))
    np.testing.assert_allclose(sampling_probabilities(SIZES, temperature), ratios / ratios.sum(), rtol=1e-12)


def test_the_papers_rule_is_a_temperature_of_one_over_0_7() -> None:
    shares = np.array(SIZES) / sum(SIZES)
    np.testing.assert_allclose(sampling_probabilities(SIZES, 1 / 0.7), shares**0.7 / (shares**0.7).sum(), rtol=1e-12)


def test_a_cold_draw_of_very_unequal_languages_does_not_underflow() -> None:
    assert sampling_probabilities([10**9, 1], 0.01).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_above_0_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=f"temperature {temperature} must be above 0"):
        sampling_probabilities(SIZES, temperature)
