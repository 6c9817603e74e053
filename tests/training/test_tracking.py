"""metrics.jsonl is valid JSON, line by line; W&B mirrors it without an account."""

import json
import math
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from gpipe.training.tracking import LOST, METRICS_FILE, OUTCOME, RUN_ID_FILE, Tracker, check_mode, jsonable

SECRET = "0123456789abcdef0123456789abcdef01234567"


def read_lines(folder: Path) -> list[dict[str, object]]:
    """Parse the log strictly: NaN and Infinity are no JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    lines = (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_each_line_is_there_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    with Tracker(tmp_path, mode="disabled") as tracker:
        tracker.log({"step": 1, "epoch": 0, "loss": 2.5})
        assert read_lines(tmp_path) == [{"step": 1, "epoch": 0, "loss": 2.5}]
        tracker.log({"step": 2, "test/top1": 0.5})
    assert read_lines(tmp_path)[1] == {"step": 2, "test/top1": 0.5}


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    with Tracker(tmp_path, mode="disabled") as tracker:
        tracker.log({"step": 1, "loss": math.nan, "norms": [1.0, math.inf], "more": {"x": -math.inf}})
    assert read_lines(tmp_path) == [{"step": 1, "loss": None, "norms": [1.0, None], "more": {"x": None}}]


def test_a_run_of_its_own_takes_over_the_log_of_the_one_that_it_goes_on_from(tmp_path: Path) -> None:
    with Tracker(str(tmp_path / "first"), mode="disabled") as first:
        for step in range(1, 5):
            first.log({"step": step, "loss": step / 8})
    with Tracker(str(tmp_path / "second"), mode="disabled", resumed=str(tmp_path / "first")) as second:
        second.rewind(2)
        second.log({"step": 3, "loss": 0.0})
    assert [line["loss"] for line in read_lines(tmp_path / "second")] == [0.125, 0.25, 0.0]
    assert len(read_lines(tmp_path / "first")) == 4


def test_a_resumed_run_continues_without_gaps_or_repeats(tmp_path: Path) -> None:
    with Tracker(tmp_path, mode="disabled") as tracker:
        for step in range(1, 6):
            tracker.log({"step": step, "loss": 1.0})
    with (tmp_path / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write('{"step": 6, "lo')
    with Tracker(tmp_path, mode="disabled") as tracker:
        tracker.rewind(3)
        tracker.log({"step": 4, "loss": 2.0})
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "damage", [b'{"step": 2, "loss": "\xff"}', b"\xff\xfe", b"\0", b"[" * 9999, b'{"step": Infinity}']
)
def test_a_damaged_line_does_not_end_resuming(tmp_path: Path, damage: bytes) -> None:
    lines = [b'{"step": 1}', damage, b'{"step": 3}']
    (tmp_path / METRICS_FILE).write_bytes(b"".join(line + b"\n" for line in lines))
    with Tracker(tmp_path, mode="disabled") as tracker:
        tracker.rewind(3)
    assert read_lines(tmp_path) == [{"step": 1}, {"step": 3}]


def test_a_folder_that_is_removed_under_its_run_is_named(tmp_path: Path) -> None:
    with Tracker(tmp_path / "run", mode="disabled") as tracker:
        tracker.log({"step": 1})
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(ValueError, match=r"^the run's folder .*/run was removed or renamed during the run: sta"):
            tracker.log({"step": 2})
    assert not (tmp_path / "run").exists()


def test_nothing_is_written_into_another_runs_folder_of_the_same_name(tmp_path: Path) -> None:
    with Tracker(tmp_path / "run", mode="disabled") as first:
        first.log({"step": 1})
        (tmp_path / "run").rename(tmp_path / "aside")
        with Tracker(tmp_path / "run", mode="disabled") as second:
            second.log({"step": 9})
        with pytest.raises(ValueError, match=r"^the run's folder .*/run was removed or renamed during the run"):
            first.log({"step": 2})
    assert read_lines(tmp_path / "run") == [{"step": 9}]
    assert read_lines(tmp_path / "aside") == [{"step": 1}]


def test_only_the_enabled_process_writes(tmp_path: Path) -> None:
    with Tracker(tmp_path / "run", enabled=False) as tracker:
        tracker.log({"step": 1})
        tracker.rewind(0)
    assert not (tmp_path / "run").exists()


def test_tables_and_pictures_are_lines_too(tmp_path: Path) -> None:
    (tmp_path / "timeline.png").write_bytes(b"")
    with Tracker(tmp_path, mode="disabled") as tracker:
        for _ in range(2):
            tracker.begin([{"stage": 0, "share": 1.0}])
        tracker.log_picture(3, "timeline", tmp_path / "timeline.png")
        tracker.log_outcome(3, {"top1": math.nan})
    assert read_lines(tmp_path) == [
        {"step": 0, "plan": [{"stage": 0, "share": 1.0}]},
        {"step": 3, "timeline": "timeline.png"},
        {"step": 3, OUTCOME: [{"figure": "top1", "value": None}]},
    ]


def test_a_run_that_goes_on_gets_a_new_outcome(tmp_path: Path) -> None:
    with Tracker(tmp_path, mode="disabled") as tracker:
        tracker.log({"step": 3, "loss": 1.0})
        tracker.log_outcome(3, {"top1": 0.5})
        tracker.rewind(3)
    assert read_lines(tmp_path) == [{"step": 3, "loss": 1.0}]


@pytest.fixture
def offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that was mirrored offline, by somebody with secrets in the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("CLOUD_TOKEN", SECRET)
    monkeypatch.setattr(socket, "gethostname", lambda: "host-of-somebody")
    log_a_run(tmp_path / "run", "offline")
    return tmp_path / "run"


def log_a_run(folder: Path, mode: str) -> None:
    names = {"group": "the_experiment", "name": "seed=1", "tags": ["amoebanet", "K=2"]}
    with Tracker(folder, mode=mode, config={"seed": 1, "commit": "abc"}, **names) as tracker:
        tracker.begin([{"stage": 0, "layers": [0, 1]}])
        tracker.log({"step": 1, "epoch": 0, "loss": 1.0})
        tracker.log({"step": 1, "epoch": 0, "test/top1": 0.5, "test/loss": 2.0, "test/f1": 0.25})
        Image.new("RGB", (4, 4)).save(folder / "timeline.png")
        tracker.log_picture(1, "timeline", folder / "timeline.png")
        tracker.log_outcome(1, {"num_steps": 1, "bubble": None, "top1": 0.5})


def test_wandb_offline_needs_no_account_and_stays_in_the_run_folder(offline_run: Path) -> None:
    assert len(read_lines(offline_run)) == 5
    assert list((offline_run / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.name for path in offline_run.parent.iterdir()] == ["run"]


def read_wandb(run: Path) -> list[Any]:
    """Return the records that W&B's own process wrote of a run, once it has written the last."""
    (log,) = (run / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 60
    while not (found := parse_wandb(log.read_bytes())) or found[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline, [record.WhichOneof("record_type") for record in found]
        time.sleep(0.05)
    return found


def parse_wandb(content: bytes) -> list[Any]:
    """Return the records of a W&B log: blocks of 32 KiB with fragments, as in LevelDB's log, after 7 bytes."""
    records, parts, place = [], b"", 7
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        size, kind = struct.unpack_from("<HB", content, place + 4)
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last fragment
            records.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return records


def test_wandb_gets_the_names_the_curves_and_the_best_as_its_users_expect(offline_run: Path) -> None:
    media = {path.name.partition("_")[0] for path in (offline_run / "wandb").rglob("media/*/*")}
    assert media == {"plan", "timeline"}
    records = read_wandb(offline_run)
    (run,) = [record.run for record in records if record.HasField("run")]
    assert (run.run_group, run.display_name, run.job_type) == ("the_experiment", "seed=1", "train")
    assert list(run.tags) == ["amoebanet", "K=2"]
    config = {item.key: item.value_json for item in run.config.update}
    assert (config["seed"], config["commit"]) == ("1", '"abc"')
    logged = {item.key or "/".join(item.nested_key) for record in records for item in record.history.item}
    assert {"train/loss", "epoch", "test/top1"} <= logged and "loss" not in logged
    best = {record.metric.name: record.metric.summary for record in records if record.HasField("metric")}
    assert best.keys() == {"test/top1", "test/loss", "test/f1"}
    assert best["test/top1"].max and best["test/top1"].last and best["test/loss"].min and best["test/f1"].max
    summary = {item.key: item.value_json for record in records for item in record.summary.update}
    assert summary["outcome/num_steps"] == "1" and summary["outcome/top1"] == "0.5"


def test_nothing_secret_is_in_the_run_folder(offline_run: Path) -> None:
    secrets = {SECRET, "host-of-somebody", str(Path(__file__).parent)}
    for path in offline_run.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert not [secret for secret in secrets if secret.encode() in content], path


def test_a_resumed_run_is_the_same_run_for_wandb(offline_run: Path) -> None:
    run_id = (offline_run / RUN_ID_FILE).read_text()
    with Tracker(offline_run, mode="offline") as tracker:
        tracker.log({"step": 2, "loss": 1.0})
    assert (offline_run / RUN_ID_FILE).read_text() == run_id
    sessions = [path.name for path in (offline_run / "wandb").glob("offline-run-*")]
    assert len(sessions) == 2 and all(run_id.strip() in name for name in sessions)


def test_runs_from_the_state_of_another_are_runs_of_their_own_with_its_curves(
    offline_run: Path, tmp_path: Path
) -> None:
    with (offline_run / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write('{"step": 1, "tracking_lost": "its process was killed"}\n')
    folders = [tmp_path / name for name in ("longer", "wider")]
    for folder in folders:
        with Tracker(folder, mode="offline", resumed=offline_run) as tracker:
            tracker.rewind(1)
            tracker.log({"step": 2, "loss": 0.5})
            assert tracker.find_lost() is None
        steps = [json.loads(item.value_json) for item in read_history(folder, "_step")]
        assert steps == [1, 2]  # one of the two lines of step 1 has figures of training, the other of an evaluation
        for name, values in (("train/loss", [1.0, 0.5]), ("test/top1", [0.5])):
            assert [json.loads(item.value_json) for item in read_history(folder, name)] == values
    assert len({(folder / RUN_ID_FILE).read_text() for folder in (offline_run, *folders)}) == 3


def read_history(run: Path, name: str) -> list[Any]:
    items = [item for record in read_wandb(run) for item in record.history.item]
    return [item for item in items if (item.key or "/".join(item.nested_key)) == name]


def kill_wandb(number: int) -> None:
    """Send a signal to wandb's own process, which is a child of this one, and wait until it has ended."""
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    for child in " ".join(path.read_text() for path in children).split():
        if Path(f"/proc/{child}/comm").read_text().startswith("wandb-core"):
            os.kill(int(child), number)
            os.waitid(os.P_PID, int(child), os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize(
    ("number", "num_logged"), [(signal.SIGKILL, 0), (signal.SIGKILL, 3), (signal.SIGTERM, 3), (signal.SIGINT, 3)]
)
def test_a_run_outlives_wandbs_process_and_is_marked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], number: int, num_logged: int
) -> None:
    with Tracker(tmp_path / "first") as tracker:
        kill_wandb(number)
        for step in range(num_logged):
            tracker.log({"step": step, "loss": 1.0})
    lost = tracker.find_lost()
    assert lost is not None and lost.startswith("Weights & Biases: ")
    with Tracker(tmp_path / "second") as tracker:
        tracker.log({"step": 0, "loss": 1.0})
    assert tracker.find_lost() is None
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in lines] == ["warning: Weights & Biases failed"]
    assert lines[0].endswith(
        f"the run continues with {tmp_path}/first/metrics.jsonl alone; tracking=disabled turns it off."
    )
    assert [line["step"] for line in read_lines(tmp_path / "second")] == [0]
    marks = [line for line in read_lines(tmp_path / "first") if LOST in line]
    assert [mark[LOST] for mark in marks] == [lost]
    assert len(read_lines(tmp_path / "first")) == num_logged + 1
    assert Tracker(tmp_path / "first", mode="disabled").find_lost() == lost, "the run goes on in another session"
    assert list((tmp_path / "second" / "wandb").glob("offline-run-*/*.wandb"))


PROGRAM = """
from pathlib import Path
from gpipe.training.tracking import Tracker
with Tracker(Path("run")) as tracker:
    tracker.begin([{"stage": 0, "layers": [0, 1]}])
    tracker.log({"step": 1, "loss": 1.0})
"""


@pytest.mark.parametrize("home", ["home", "/dev/null/home"])
def test_an_offline_run_leaves_nothing_at_home_and_sends_nothing(tmp_path: Path, home: str) -> None:
    """A home that is a folder of its own, or cannot be written to; whoever would send something asks the proxy."""
    (tmp_path / "home").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        others = ("WANDB", "XDG", "NO_PROXY", "no_proxy")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        environment = {**kept, "HOME": str(tmp_path / home), "HTTPS_PROXY": address, "HTTP_PROXY": address}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()
    assert done.stderr == ""
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.parametrize(("content", "shown"), [(b"../elsewhere", r"\.\./elsewhere"), (b"\xff\xfe", "\ufffd\ufffd")])
def test_an_id_that_is_none_is_refused(tmp_path: Path, content: bytes, shown: str) -> None:
    (tmp_path / RUN_ID_FILE).write_bytes(content)
    with pytest.raises(ValueError, match=rf"has '{shown}', expected a run's id: delete the file"):
        Tracker(tmp_path, mode="offline")


def test_tensorboard_gets_the_same_curves_and_a_resumed_run_hides_what_it_repeats(tmp_path: Path) -> None:
    log_a_run(tmp_path, "tensorboard")
    with Tracker(tmp_path, mode="tensorboard") as tracker:
        for step in (2, 3):
            tracker.log({"step": step, "loss": 0.5})
    with Tracker(tmp_path, mode="tensorboard") as tracker:
        tracker.rewind(2)
        tracker.log({"step": 3, "loss": 0.25})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert set(tags["scalars"]) == {"train/loss", "epoch", "test/top1", "test/loss", "test/f1"}
    assert {tag.removesuffix("/text_summary") for tag in tags["tensors"]} == {"config", "plan", "outcome"}
    assert tags["images"] == ["timeline"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 0.5), (3, 0.25)]
    assert [line["step"] for line in read_lines(tmp_path)] == [0, 1, 1, 1, 2, 3]


def test_tensorboard_keeps_the_last_step_of_a_run_whose_next_session_only_tells_the_outcome(tmp_path: Path) -> None:
    with Tracker(tmp_path, mode="tensorboard") as tracker:
        tracker.log({"step": 2, "test/top1": 0.5})
    with Tracker(tmp_path, mode="tensorboard") as tracker:
        tracker.rewind(2)
        tracker.log_outcome(2, {"top1": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("test/top1")] == [(2, 0.5)]


def test_an_evaluation_on_the_training_set_has_curves_of_its_own(tmp_path: Path) -> None:
    with Tracker(tmp_path, mode="tensorboard") as tracker:
        tracker.log({"step": 1, "loss": 2.0})
        tracker.log({"step": 1, "train/loss": 1.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("train/loss")] == [2.0]
    assert [event.value for event in events.Scalars("train_set/loss")] == [1.0]
    assert read_lines(tmp_path)[1] == {"step": 1, "train/loss": 1.0}


def test_online_without_a_key_is_refused_with_the_remedies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("NETRC", raising=False)
    reason = check_mode("online")
    assert reason is not None and reason.startswith("this machine has no Weights & Biases key: run `wandb login`")
    (tmp_path / ".netrc").write_text(f"machine api.wandb.ai login user password {SECRET}\n")
    assert check_mode("online") is None
    (tmp_path / ".netrc").write_text("machine elsewhere login user password x\n")
    assert check_mode("online") is not None
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    assert check_mode("online") is None


def test_a_mode_whose_package_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_mode("tensorboard") is None
    monkeypatch.setattr("gpipe.training.tracking.find_spec", lambda name: None)
    assert check_mode("tensorboard") == "the package tensorboard is not installed: install it, or set tracking=offline"


def test_values_without_a_step_are_refused(tmp_path: Path) -> None:
    with Tracker(tmp_path, mode="disabled") as tracker, pytest.raises(ValueError, match="lack 'step'"):
        tracker.log({"loss": 1.0})


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'dryrun': choose one of offline, online, tensorboard, disabled"):
        Tracker(tmp_path, mode="dryrun")


def test_integers_and_text_stay_as_they_are() -> None:
    assert jsonable({"a": 1, "b": "nan", "c": True, "d": None}) == {"a": 1, "b": "nan", "c": True, "d": None}
