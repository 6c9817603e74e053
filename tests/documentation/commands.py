"""Find every command that a page, a docstring, or a comment or help text of conf/ prints."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
IGNORED = (".venv", ".git", "runs", "build", "site", "multirun", "outputs", "__pycache__")
PROGRAMS = "python|make|torchrun|srun|salloc|sbatch|export|nohup|pip|conda|apt-get|dpkg-deb|wandb|pre-commit|echo|\\."
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:{PROGRAMS}) \S.*")


def find_commands() -> dict[str, str]:
    """Return each command once, with the file that prints it first."""
    found: dict[str, str] = {}
    for path in sorted(_files()):
        text = path.read_text("utf-8")
        for command in _FINDERS[path.suffix](text):
            found.setdefault(command, str(path.relative_to(ROOT)))
    return found


def _files() -> Iterator[Path]:
    for suffix in _FINDERS:
        for path in ROOT.rglob(f"*{suffix}"):
            place = path.relative_to(ROOT).parts
            if not set(IGNORED) & set(place) and (suffix != ".yaml" or place[0] == "conf") and place[0] != "tests":
                yield path


def _of_page(text: str) -> Iterator[str]:
    """Yield the commands in code blocks, indented or fenced, and those in code spans."""
    text = re.sub(r"<!-- table: .*?<!-- end -->", "", text, flags=re.DOTALL)  # commands of records, as they were run
    fenced = re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"(?:^    .*\n?)+", text, flags=re.MULTILINE)
    for block in (*fenced, *indented):
        yield from _of_lines(block)
    yield from _of_spans(re.sub(r"(?:^    .*\n?)+", "", text, flags=re.MULTILINE))


def _of_settings(text: str) -> Iterator[str]:
    """Yield the commands of a header, which are indented in its comment, and those of a help text."""
    lines = [line.lstrip("#") if line.startswith("#") else line for line in text.splitlines()]
    yield from _of_lines("\n".join(line for line in lines if line.startswith("  ")))


def _of_module(text: str) -> Iterator[str]:
    """Yield the commands of a module's docstring: lines of their own, and code spans."""
    docstring = ast.get_docstring(ast.parse(text)) or ""
    yield from _of_lines(docstring)
    yield from _of_spans(docstring)


def _of_spans(text: str) -> Iterator[str]:
    """Yield the code spans that are commands; a span may go on in the next line."""
    for paragraph in re.split(r"\n\s*\n", text):
        for span in re.findall(r"`([^`]+)`", re.sub(r"\n\s*", " ", paragraph)):
            yield from _of_lines(span)


def _of_lines(text: str) -> Iterator[str]:
    """Yield the lines that are commands, each with its continuations, without a remark two spaces behind it.

    A variable of the shell that a line before sets is in its place.
    """
    variables: dict[str, str] = {}
    for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
        if assignment := re.fullmatch(r"\s*(\w+)=(['\"])(.*)\2", line):
            variables[f"${assignment[1]}"] = assignment[3]
        for name, value in variables.items():
            line = line.replace(name, value)
        if COMMAND.fullmatch(command := re.split(r"\s{2,}", line.strip())[0]):
            yield command


_FINDERS = {".md": _of_page, ".py": _of_module, ".yaml": _of_settings}
