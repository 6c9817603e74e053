"""The answers of the records to the questions of the notebooks."""

from collections.abc import Iterable

from house_style import show

from reproductions.claims import Claim


def show_answers(claims: Iterable[Claim], about: str) -> None:
    """Show what was measured, and the verdict, of each claim whose text has a phrase."""
    found = [claim for claim in claims if about in claim.text]
    show(*map(_write_answer, found))


def _write_answer(claim: Claim) -> str:
    scope = f" ({claim.scope})" if claim.scope else ""
    return f'**Answer** to "{claim.text}"{scope}: measured {claim.measured}; {claim.verdict}.'
