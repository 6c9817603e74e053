"""The notice board remembers, and shows how long a process has been waiting for it."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from gpipe.launch.store import LOOPBACK, serve_store
from gpipe.pipeline.job.activity import Activity
from gpipe.pipeline.job.board import SILENT_SECONDS, Board
from gpipe.pipeline.job.device_work import DeviceWork
from gpipe.pipeline.job.errors import LostPeer, PeerFailure
from gpipe.pipeline.job.watch import Watch

pytestmark = pytest.mark.alone


def serve(pipe: Connection) -> None:
    store = serve_store(LOOPBACK)
    pipe.send(store.port)
    time.sleep(300)


@pytest.fixture
def server() -> Iterator[tuple[multiprocessing.Process, dist.TCPStore]]:
    """A process with the store, and a connection to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    yield process, dist.TCPStore("127.0.0.1", ours.recv(), is_master=False)
    process.kill()
    process.join()


def test_a_note_is_read_and_the_first_of_its_key_stays(server: tuple[multiprocessing.Process, dist.TCPStore]) -> None:
    board = Board(server[1])
    assert board.read("key") is None
    board.write("key", [1, None, "x"])
    assert board.read("key") == [1, None, "x"]
    board.write_first("cause", "first")
    board.write_first("cause", "second")
    assert board.read("cause") == "first"


def test_a_store_that_has_ended_leaves_what_it_last_said(
    server: tuple[multiprocessing.Process, dist.TCPStore],
) -> None:
    process, store = server
    board = Board(store)
    board.write("key", 1)
    assert board.read("key") == 1
    process.kill()
    process.join()
    board.write("key", 2)
    assert (board.read("key"), board.read("other")) == (1, None)


class EndingStore:
    """A store that has a note, and ends between two questions."""

    def check(self, _: list[str]) -> bool:
        return True

    def get(self, _: str) -> bytes:
        self.get = self.end
        return b"1"

    def end(self, _: str) -> bytes:
        raise RuntimeError("ended")


def test_a_store_that_ends_while_it_is_asked_leaves_what_it_last_said() -> None:
    board = Board(EndingStore())
    assert [board.read("key") for _ in range(3)] == [1, 1, 1]


def test_a_store_that_has_ended_is_asked_no_more(
    server: tuple[multiprocessing.Process, dist.TCPStore], capfd: pytest.CaptureFixture[str]
) -> None:
    process, store = server
    board = Board(store)
    board.write("key", 1)
    process.kill()
    process.join()
    for number in range(200):
        board.write("key", number)
        board.read("key")
    lines = capfd.readouterr().err.splitlines()
    assert len([line for line in lines if "Store" in line]) < 10, f"{len(lines)} lines"


def test_a_store_that_does_not_answer_can_be_given_up(server: tuple[multiprocessing.Process, dist.TCPStore]) -> None:
    process, store = server
    board = Board(store)
    board.write("key", 1)
    assert board.read("key") == 1
    assert board.silent_seconds == 0
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # until then, one of its threads may still answer
    threading.Thread(target=board.read, args=("key",), daemon=True).start()
    deadline = time.monotonic() + 30
    while board.silent_seconds < 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    board.give_up()
    assert board.read("key") == 1


def test_a_process_that_lost_a_neighbour_does_not_wait_for_a_store_that_does_not_answer(
    server: tuple[multiprocessing.Process, dist.TCPStore],
) -> None:
    process, store = server
    assert process.pid is not None
    board = Board(store)
    board.write("key", 1)
    assert board.read("key") == 1
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    waiting = threading.Thread(target=lambda: board.read("other"), daemon=True)
    waiting.start()
    while board.silent_seconds <= SILENT_SECONDS:
        time.sleep(0.05)
    assert board.read("key") == 1  # a wait would not come back
    writing = threading.Thread(target=lambda: board.write_first("failure", "heard"), daemon=True)
    writing.start()
    os.kill(process.pid, signal.SIGCONT)
    for thread in (waiting, writing):
        thread.join(10)
        assert not thread.is_alive()
    assert board.read("failure") == "heard"


def test_a_cause_is_not_waited_with_once_the_store_is_given_up(
    server: tuple[multiprocessing.Process, dist.TCPStore],
) -> None:
    process, store = server
    assert process.pid is not None
    board = Board(store)
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    threading.Thread(target=lambda: board.read("other"), daemon=True).start()
    while board.silent_seconds <= SILENT_SECONDS:
        time.sleep(0.05)
    writing = threading.Thread(target=lambda: board.write_first("failure", "unheard"), daemon=True)
    writing.start()
    board.give_up()
    writing.join(5)
    assert not writing.is_alive()
    os.kill(process.pid, signal.SIGCONT)


def test_without_the_store_a_lost_process_may_have_lost_another(
    server: tuple[multiprocessing.Process, dist.TCPStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, store = server
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr("gpipe.pipeline.job.watch._EXPLANATION_SECONDS", 0.1)
    watch = Watch(store, 0, [0], "stage 0", 600.0, DeviceWork(Activity(), 600.0, 0))
    lost = LostPeer([1], "gone")
    assert str(watch.explain(lost)).endswith("exited, or its host is down")
    process.kill()
    process.join()
    assert "or it lost another rank, whose message then comes first" in str(watch.explain(lost))
    watch.close()
    watch.join()


@pytest.mark.parametrize("answers", [True, False])
def test_the_end_waits_for_threads_but_not_for_a_store_that_does_not_answer(
    answers: bool, server: tuple[multiprocessing.Process, dist.TCPStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, store = server
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr("gpipe.pipeline.job.watch._JOIN_SECONDS", 600.0)  # for ever, as far as a test is concerned
    before = set(threading.enumerate())
    watch = Watch(store, 0, [0], "stage 0", 600.0, DeviceWork(Activity(), 600.0, 0))
    assert process.pid is not None
    if not answers:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        deadline = time.monotonic() + 30
        while watch._board.silent_seconds < 1.5:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    watch.close()
    watch.join()
    left = set(threading.enumerate()) - before
    assert (left == set()) == answers
    os.kill(process.pid, signal.SIGCONT)


def test_what_fails_beside_the_tasks_is_told_with_its_place(
    server: tuple[multiprocessing.Process, dist.TCPStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    watch = Watch(server[1], 1, [1], "stage 1", 600.0, DeviceWork(Activity(), 600.0, 1))
    watch.report_own("sending failed: OSError: gone")
    error = watch.explain(LostPeer([0], "closed"))
    told = Board(server[1]).read("failure")
    watch.close()
    watch.join()
    assert (str(error), error.stage) == ("rank 1, stage 1, between two steps: sending failed: OSError: gone", 1)
    assert isinstance(error, PeerFailure) and not error.told, "this process reports it"
    assert (told["message"], told["told"]) == (str(error), True)


def test_a_process_that_waits_for_nobody_goes_on_looking(
    server: tuple[multiprocessing.Process, dist.TCPStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    watch = Watch(server[1], 0, [0], "stage 0", 0.01, DeviceWork(Activity(), 0.01, 0))
    with watch.waiting_for([]):
        time.sleep(0.05)  # longer than it waits for anybody
        watch.look()
        watch.check()
        assert not watch._closed.is_set()
    watch.close()
    watch.join()
