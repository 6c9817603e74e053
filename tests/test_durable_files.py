"""A file is there completely or not at all, and who holds a lock holds it alone."""

import errno
import threading
from pathlib import Path

import pytest

from gpipe.durable_files import locked, replacing, write_flushed


@pytest.mark.parametrize("named", [None, "elsewhere"])
def test_a_file_that_cannot_be_replaced_stays_and_is_named(tmp_path: Path, named: str | None) -> None:
    path = tmp_path / "file.txt"
    write_flushed(path, "before")

    def fail() -> None:
        with replacing(path) as partial:
            partial.write_text("half")
            raise OSError(errno.ENOSPC, "No space", named)

    with pytest.raises(OSError, match="No space") as raised:
        fail()
    assert raised.value.filename == (named or str(path))
    assert [each.name for each in tmp_path.iterdir()] == ["file.txt"] and path.read_text() == "before"


def test_a_lock_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    entered = threading.Event()

    def enter() -> None:
        with locked(tmp_path / "lock"):
            entered.set()

    with locked(tmp_path / "lock"):
        (other := threading.Thread(target=enter)).start()
        assert not entered.wait(0.05)
    other.join(60)
    assert entered.is_set()
