"""Which languages are rich in training data, and which are poor."""

from collections.abc import Mapping


def resource_groups(counts: Mapping[str, int]) -> dict[str, list[str]]:
    """Share out languages into "high" and "low" resource, each ordered from the most training pairs to the fewest.

    counts: training pairs of each language. Of an odd number, high has one more; ties go by the language's name.
    """
    ordered = sorted(counts, key=lambda language: (-counts[language], language))
    half = (len(ordered) + 1) // 2
    return {"high": ordered[:half], "low": ordered[half:]}
