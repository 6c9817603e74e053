"""The lists of departures in the pages are those that conf/ and the code mark, no more and no less."""

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from reproductions.deviations import deviations, deviations_table, find_marks, python_prose, yaml_prose
from reproductions.pages import CLAIMS

ROOT = Path(__file__).parents[2]


def test_every_mark_in_the_sources_is_listed_once() -> None:
    # By git and a plain search, in place of paragraphs and tokens.
    searched = subprocess.run(
        ["git", "grep", "--count", "-E", "Deviation:", "--", "conf", "src/gpipe", "experiments/*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    counts = {name: int(count) for name, count in (line.rsplit(":", 1) for line in searched)}
    listed = re.findall(
        r"^- `([^`]*)`: ", (ROOT / "reproductions" / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert Counter(listed) == counts
    assert len(listed) == len(deviations(ROOT)) > 20


def test_every_departure_stands_on_a_page_of_the_claims_that_it_matters_to() -> None:
    on_pages = {line for page in CLAIMS for line in deviations_table(ROOT, page).splitlines()} - {"None."}
    assert on_pages == set(deviations_table(ROOT, None).splitlines())


def test_a_departure_of_no_page_is_refused(tmp_path: Path) -> None:
    (tmp_path / "conf" / "elsewhere").mkdir(parents=True)
    (tmp_path / "conf" / "elsewhere" / "new.yaml").write_text("a: 1 # Deviation: the paper has 2.\n")
    with pytest.raises(ValueError, match=re.escape("conf/elsewhere/new.yaml has a Deviation: of no page")):
        deviations_table(tmp_path, "bubble")


def test_a_comment_in_yaml_reaches_to_the_next_setting_or_mark() -> None:
    source = """\
# Header.
# Deviation: the paper
#   has none. Deviation: nor this.
#
# Something else.
a: 1 # Deviation: it has 2
# About b.
b: 2
"""
    assert list(find_marks(yaml_prose(source))) == ["The paper has none.", "Nor this.", "`a: 1`: it has 2"]


def test_a_docstring_reaches_to_the_end_of_its_paragraph() -> None:
    source = '''\
"""Title.

Before. Deviation: the paper pads
  differently.

Other.
"""

A = 1  # Deviation: the paper has 2.
# Deviation: it says
# nothing.
B = "Deviation: no docstring"
'''
    assert list(find_marks(python_prose(source))) == [
        "The paper pads differently.",
        "The paper has 2.",
        "It says nothing.",
    ]
