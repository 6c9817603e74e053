"""Translate text with checked settings, and print or write the translations."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from gpipe.config import ConfigError, Device
from gpipe.config.checks import require
from gpipe.config.translate import TranslateConfig
from gpipe.data import Tokenizer
from gpipe.data.text.tokenizer import clean_line
from gpipe.decoding.beam_search import BeamSearch
from gpipe.durable_files import write_flushed
from gpipe.launch.errors import report_errors
from gpipe.programs.trained import TrainedModel, open_trained

_STANDARD_INPUT = "-"


def start(settings: TranslateConfig) -> None:
    """Translate and print, or write a file; an error is one message and an exit with status 1."""
    with report_errors(debug=settings.debug):
        assert settings.checkpoint is not None
        output = check_output("output", settings.output)
        lines = _read(settings)
        device = find_device(settings.device)
        model = open_trained(settings.checkpoint, device)
        require_beams("beam", settings.beam, model)
        tokens = _encode(model.tokenizer, lines, settings)
        search = BeamSearch(
            model.layers,
            settings.beam,
            length_penalty=settings.length_penalty,
            max_length_a=settings.max_length_a,
            max_length_b=settings.max_length_b,
            max_length=settings.max_length,
            batch_size=settings.batch_size,
        )
        translated = translate_lines(search, model.tokenizer, tokens)
        text = "".join(f"{line}\n" for line in translated)
        if output is None:
            print(text, end="", flush=True)
        else:
            write_flushed(output, text)
            lines_in_words = "1 line" if len(translated) == 1 else f"{len(translated)} lines"
            print(f"wrote {lines_in_words} to {output}", file=sys.stderr)


def translate_lines(search: BeamSearch, tokenizer: Tokenizer, tokens: Sequence[Sequence[int]]) -> list[str]:
    """Return a line of text for each line's tokens; a line without tokens stays empty.

    Line breaks, which a model may spell in bytes, become spaces, so that line n is the translation of line n.
    """
    found = iter(search.translate([line for line in tokens if line]))
    return [clean_line(tokenizer.decode(next(found).tokens)) if line else "" for line in tokens]


def require_beams(name: str, num_beams: int, model: TrainedModel) -> None:
    """Refuse a search without hypotheses, or with more than the vocabulary can begin."""
    most = model.data.vocabulary_size - 1
    require(1 <= num_beams <= most, name, num_beams, f"a number from 1 to {most}")


def find_device(device: Device) -> torch.device:
    """Return the device that a setting means."""
    has_gpu = torch.cuda.is_available()
    if device is Device.cuda and not has_gpu:
        raise ConfigError("device is cuda, but there is no GPU here: set device=cpu.")
    return torch.device("cuda" if has_gpu and device is not Device.cpu else "cpu")


def _read(settings: TranslateConfig) -> list[str]:
    if settings.text is not None:
        try:
            settings.text.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"text is {settings.text!a}, which is not UTF-8: convert it to UTF-8.") from None
        return [settings.text]
    name = _name(settings)
    assert settings.file is not None
    try:
        content = sys.stdin.buffer.read() if settings.file == _STANDARD_INPUT else Path(settings.file).read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{name} cannot be read ({error.strerror}): set file=<a text file>.") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}, line {line}, is not UTF-8: convert it to UTF-8.") from None
    if not text.strip():
        raise ConfigError(f"{name} is empty, expected one sentence per line: write some into it.")
    return text.removesuffix("\n").split("\n")


def _name(settings: TranslateConfig) -> str:
    """Return what a message calls the text."""
    if settings.text is not None:
        return "text"
    return "the standard input" if settings.file == _STANDARD_INPUT else str(settings.file)


def _encode(tokenizer: Tokenizer, lines: Sequence[str], settings: TranslateConfig) -> list[list[int]]:
    """Return the tokens of each line; warn of empty ones, and refuse long ones, each by its number."""
    tokens = tokenizer.encode_lines(lines)
    long = [number for number, line in enumerate(tokens, start=1) if len(line) > settings.max_length]
    if long:
        where = _name(settings) + (f", line {long[0]}," if settings.text is None else "")
        raise ConfigError(
            f"{where} has {len(tokens[long[0] - 1])} tokens, expected at most max_length={settings.max_length}: "
            "split the sentence, or raise max_length."
        )
    empty = [number for number, line in enumerate(tokens, start=1) if not line]
    if empty and settings.text is not None:
        raise ConfigError(f"text is {settings.text!r}, which has nothing to translate: give a sentence.")
    if empty:
        which = (
            f"1 empty line, line {empty[0]}"
            if len(empty) == 1
            else f"{len(empty)} empty lines, the first is line {empty[0]}"
        )
        print(f"warning: {_name(settings)} has {which}: empty lines stay empty.", file=sys.stderr)
    return tokens


def check_output(name: str, value: str | None) -> Path | None:
    """Return the file that a setting names; refuse, before the work, a place where no file can be written."""
    if value is None:
        return None
    path = Path(value)
    if not path.parent.is_dir():
        what = f"in {path.parent}, which does not exist"
    elif path.exists() and not path.is_file():  # it would be replaced
        what = "a folder" if path.is_dir() else "a device or a pipe"
    else:
        return path
    raise ConfigError(f"{name} is {value}, {what}, expected a file in a folder that exists: name another.")
