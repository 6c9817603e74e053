"""The settings of translate.py: what to translate, and how to search for the translation."""

from dataclasses import dataclass

from omegaconf import MISSING

from gpipe.config.checks import ConfigError, Section, allowed, at_least, require, within
from gpipe.config.pipeline import Device

LITERAL = ("checkpoint", "text", "file", "output")
"""Settings that are texts and file names."""


@dataclass
class TranslateConfig(Section):
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
    text: str | None = allowed(str.strip, "a sentence")
    file: str | None = MISSING
    output: str | None = MISSING
    beam: int = at_least(1)
    length_penalty: float = within(0, 10)  # a power, which a float must hold
    max_length: int = at_least(2)
    max_length_a: float = at_least(0)
    max_length_b: int = at_least(1)
    batch_size: int = MISSING
    device: Device = MISSING
    debug: bool = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.checkpoint is None:
            raise ConfigError(
                "checkpoint is null, expected the run that trained the model: set checkpoint=<a run's folder>."
            )
        if (self.text is None) == (self.file is None):
            found = "neither text nor file is" if self.text is None else "both text and file are"
            raise ConfigError(f"{found} set, expected one of them: set text=<a sentence> or file=<a text file>.")
        enough = self.batch_size >= self.max_length
        require(enough, "batch_size", self.batch_size, f"max_length={self.max_length} or more")
