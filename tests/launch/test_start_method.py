"""New processes are copies of one that has loaded what they need, where that is possible."""

import json
import os
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path

import pytest

from gpipe.launch.processes import Place, run
from tests.launch.launched import is_running, two


def note_origin(place: Place, folder: Path) -> None:
    """Note what starts this process, whether a module was there before, and a variable."""
    origin = {"parent": os.getppid(), "loaded": "colorsys" in sys.modules, "variable": os.environ["VARIABLE"]}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(origin))


def test_new_processes_are_copies_of_one_that_has_loaded_what_they_need_and_ends_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forkserver.ensure_running()  # one of the user's own, which knows no variable
    servers = {forkserver._forkserver._forkserver_pid}
    for variable in ("first", "second"):
        monkeypatch.setenv("VARIABLE", variable)
        run(note_origin, two(tmp_path, modules=("colorsys", "gpipe.launch.processes")))
        first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
        assert first == second == {"parent": first["parent"], "loaded": True, "variable": variable}
        assert not is_running(first["parent"])
        servers.add(first["parent"])
    assert len(servers) == 3 and os.getpid() not in servers


def test_processes_start_below_a_folder_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary := tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("VARIABLE", "")
    run(note_origin, two(tmp_path, num_stages=1, num_processes=1, max_restarts=1))
    assert json.loads((tmp_path / "0.json").read_text())["parent"] == os.getpid()
