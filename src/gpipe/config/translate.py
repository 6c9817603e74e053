"""The settings of translate.py: what to translate, and how to search for the translation."""

from dataclasses import dataclass

from omegaconf import MISSING

from gpipe.config.checks import ConfigError, at_least, countable, require, within
from gpipe.config.pipeline import Device

LITERAL = ("checkpoint", "text", "file", "output")
"""Settings that are texts and file names."""


@dataclass
class TranslateConfig:
    """A checkpoint, a text, and a beam search.

    Attributes:
        checkpoint: a folder of a run, whose best checkpoint counts, of runs, or of a checkpoint.
        text: a sentence.
        file: a text file with one sentence per line; - is the standard input. Set either this or text.
        output: the file for the translations; null prints them.
        beam: hypotheses per sentence.
        length_penalty: scores are divided by length ** length_penalty; above 1 favours long translations.
        max_length: the most tokens of a sentence, and of its translation.
        max_length_a: a translation of n tokens has at most max_length_a * n + max_length_b tokens.
        max_length_b: see max_length_a.
        batch_size: tokens to translate at once, padding included.
        debug: print whole tracebacks.
    """

    checkpoint: str | None = MISSING
    text: str | None = MISSING
    file: str | None = MISSING
    output: str | None = MISSING
    beam: int = MISSING
    length_penalty: float = MISSING
    max_length: int = MISSING
    max_length_a: float = MISSING
    max_length_b: int = MISSING
    batch_size: int = MISSING
    device: Device = MISSING
    debug: bool = MISSING

    def __post_init__(self) -> None:
        countable(self)
        if self.checkpoint is None:
            raise ConfigError(
                "checkpoint is null, expected the run that trained the model: set checkpoint=<a run's folder>."
            )
        if (self.text is None) == (self.file is None):
            found = "neither text nor file is" if self.text is None else "both text and file are"
            raise ConfigError(f"{found} set, expected one of them: set text=<a sentence> or file=<a text file>.")
        require(self.text is None or self.text.strip() != "", "text", repr(self.text), "a sentence")
        at_least("beam", self.beam, 1)
        within("length_penalty", self.length_penalty, 0, 10)  # a power, which a float must hold
        at_least("max_length", self.max_length, 2)
        at_least("max_length_a", self.max_length_a, 0)
        at_least("max_length_b", self.max_length_b, 1)
        at_least("batch_size", self.batch_size, self.max_length)
