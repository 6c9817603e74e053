"""Group the languages of a translation model by their number of training pairs."""

from collections.abc import Mapping

GROUPS = ("all", "high", "low")
"""All languages, the half with the most training pairs, and the other half."""


def resource_groups(pairs: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the languages of each group, those with the most training pairs first.

    If their number is odd, "high" has one more. Ties are broken by name.
    """
    ordered = sorted(pairs, key=lambda language: (-pairs[language], language))
    half = (len(ordered) + 1) // 2
    return dict(zip(GROUPS, (ordered, ordered[:half], ordered[half:]), strict=True))
