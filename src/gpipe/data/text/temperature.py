"""How often a language is drawn."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def sampling_probabilities(num_pairs: ArrayLike, temperature: float) -> NDArray[np.float64]:
    """Return the probability of each language, proportional to (its share of the pairs)^(1 / temperature).

    Temperature 1 draws by size, a large one evenly. The paper (section 5) takes shares to the power of 0.7, which is
    the temperature 1 / 0.7. Raises ValueError for a temperature that is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} must be above 0: 1 draws by size, more draws more evenly")
    shares = np.asarray(num_pairs, dtype=np.float64)
    weights = (shares / shares.max()) ** (1 / temperature)  # to the largest one, as shares of a cold draw underflow
    return np.asarray(weights / weights.sum())
