"""What the records answer to a question of a notebook."""

from collections.abc import Iterable

from house_style import show

from reproductions.claims import Claim


def show_answers(claims: Iterable[Claim], about: str) -> None:
    """Show what was measured, and the verdict, of each claim whose text has a phrase."""
    found = [claim for claim in claims if about in claim.text]
    show(*(f'**Answer** to "{claim.text}": measured {claim.measured}; {claim.verdict}.' for claim in found))
