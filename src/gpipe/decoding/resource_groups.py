"""The languages of a translation model by how much text it was trained on."""

from collections.abc import Mapping

GROUPS = ("all", "high", "low")
"""All languages, the half of them with the most training pairs, and the other half."""


def resource_groups(pairs: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the languages of each group, those with the most training pairs first.

    Of an odd number, "high" has one more; ties go by the language's name.
    """
    ordered = sorted(pairs, key=lambda language: (-pairs[language], language))
    half = (len(ordered) + 1) // 2
    return dict(zip(GROUPS, (ordered, ordered[:half], ordered[half:]), strict=True))
