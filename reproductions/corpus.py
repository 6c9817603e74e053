"""What the records say of a corpus of several languages: training pairs, test sentences, and shared English lines.

Languages with the same English lines in every split are a single test, so they count as one.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from statistics import fmean

from gpipe.decoding.resource_groups import resource_groups
from gpipe.records import Record
from reproductions.english_lines import ENGLISH_LINES
from reproductions.table import newest
from reproductions.translation_runs import is_score

MIN_TEST_SENTENCES = 50
"""The score of a few sentences is noisy: languages with fewer are left out of some means, which say so."""


class Corpus:
    """The languages of a data set.

    Args:
        records: those of all studies.
        name: of the data set, or the setting of a training that ends with it.
    """

    def __init__(self, records: Sequence[Record], name: str) -> None:
        self._records, self.name = records, name.rpartition(", ")[2]

    @cached_property
    def pairs(self) -> dict[str, int]:
        """The number of training pairs of each language, from the last record of its scores."""
        return self._read_scored("num_train_pairs")

    @cached_property
    def num_sentences(self) -> dict[str, int]:
        """The number of test sentences of each language, from the last record of its scores."""
        return self._read_scored("num_sentences")

    def _read_scored(self, figure: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for record in self._records:
            if is_score(record, "test") and record.config["data"]["name"] == self.name:
                found |= {language: row[figure] for language, row in record.results["languages"].items()}
        return found

    @cached_property
    def barely_tested(self) -> set[str]:
        """The languages whose test set is smaller than MIN_TEST_SENTENCES."""
        return {language for language, count in self.num_sentences.items() if count < MIN_TEST_SENTENCES}

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """The languages by resource group, by their number of training pairs."""
        return resource_groups(self.pairs)

    @cached_property
    def tested_groups(self) -> dict[str, list[str]]:
        """The same without the languages that are barely tested."""
        return {
            name: [language for language in group if language not in self.barely_tested]
            for name, group in self.groups.items()
        }

    @cached_property
    def _lines(self) -> Record | None:
        """The record of the English lines."""
        own = (record for record in self._records if record.config.get("data", {}).get("name") == self.name)
        return newest(own, ENGLISH_LINES.experiment)

    @cached_property
    def same(self) -> dict[str, str]:
        """Each language that has the same English lines as others, and the one of these that represents them."""
        groups = [] if self._lines is None else self._lines.results["same"]
        return {language: group["languages"][0] for group in groups for language in group["languages"]}

    def pool(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return values by language, with one mean for those that count as one."""
        found: dict[str, list[float]] = {}
        for language, value in values.items():
            found.setdefault(self.same.get(language, language), []).append(value)
        return {language: fmean(several) for language, several in found.items()}

    def count(self, languages: Iterable[str]) -> int:
        """Return as how many some languages count."""
        return len({self.same.get(language, language) for language in languages})

    def describe_number(self, languages: Collection[str], noun: str = "") -> str:
        """Write how many languages there are, and as how many they count: "58 (counted as 45)", "1 language"."""
        number, counted = len(languages), self.count(languages)
        named = f"{number} {noun}{'s' if number > 1 else ''}" if noun else f"{number}"
        return named if number == counted else f"{named} (counted as {counted})"

    def describe_pairs(self, languages: Iterable[str]) -> str:
        """Write how many training pairs the poorest and the richest of some languages have; empty if unknown."""
        known = [self.pairs[language] for language in languages if language in self.pairs]
        if not known:
            return ""
        return f"{' to '.join(f'{count:,}' for count in sorted({min(known), max(known)}))} training pairs"

    def describe_lines(self, split: str, languages: Iterable[str] | None = None) -> str:
        """Describe how many sentences of a split translate how many English lines; empty if unknown."""
        if self._lines is None:
            return ""
        lines = self._lines.results["lines"][split]
        found = [lines[language] for language in (lines if languages is None else languages) if language in lines]
        return f"{sum(map(len, found)):,} translations of {len(set().union(*found)):,} English lines"
