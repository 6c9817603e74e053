"""Being asked to stop: by a signal to this process, to the one that started it, or to all of a job.

A request is only noted; training looks at the note between two steps, on all processes together. Nothing imports torch.

    signal                     what comes of it
    SIGTERM, SIGINT (Ctrl-C)   saved at the next step boundary, exit status 75: the same command goes on
    SIGUSR1, SIGUSR2           the same; SLURM and its friends send them before a time limit
    SIGHUP (a closed window)   the same; nothing where it was ignored before, as under nohup
    a second SIGINT            the end at once, nothing saved, exit status 130
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again
INTERRUPTED = 128 + signal.SIGINT
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP}
_LOOK_SECONDS = 0.1
_SAME_SECONDS = 1.0  # Ctrl-C reaches torchrun's processes twice: from the terminal, and from torchrun
_REMEDY = "the same command again goes on"


class _Listener:
    """Notes the requests that reach a process, from when it is made until it is closed.

    The signals are blocked and a thread looks for them, so that a process which waits inside of torch hears them too.
    Whatever is started meanwhile inherits the block: a signal to the whole group ends no process that is still
    starting, and none that loads data. Where the system cannot look so (macOS), Python's handlers have to do.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.started = time.monotonic()
        self._received: set[int] = set()
        self._interrupted: float | None = None
        self._pass_on: Path | None = None
        self._has_told = False
        self._obey: Path | None = None
        self._told_by: set[int] = set()  # SIGTERM's senders
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look_regularly, name="stops", daemon=True)
        # torch's agent waits for its processes; who sets variables like torchrun's by hand may leave before them.
        self._agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._signals = _SIGNALS - {signal.SIGHUP} if is_nohup else _SIGNALS
        self._handlers = {number: signal.signal(number, self._handle) for number in self._signals}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        if hasattr(signal, "sigtimedwait"):
            self.block()
            # Python up to 3.12 takes the block away when it starts this process, so it is started beforehand.
            with _unheard():
                resource_tracker.ensure_running()
            self.block()
            self._thread.start()

    def block(self) -> None:
        """Leave the signals to the thread."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)

    def close(self) -> None:
        """Leave the signals to whoever had them before."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()  # else it could take a signal from a listener that comes after this one
        for number, handler in self._handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def hand_on(self) -> None:
        """Give what was received to whoever handled it before, such as submitit, which queues the job again."""
        for number in self._received:
            handler = self._handlers[signal.Signals(number)]
            if callable(handler) and handler is not signal.default_int_handler:
                handler(number, None)

    def pass_on(self, note: Path | None) -> None:
        """Write requests to a file, which other processes obey."""
        self._pass_on, self._has_told = note, False
        self._tell()

    def obey(self, note: Path) -> None:
        """Be one of the processes of a launcher: listen to what its process writes."""
        self._obey = note
        self._look()

    def ask(self, reason: str) -> None:
        """Note a request."""
        self.reason = self.reason or reason
        self._tell()

    def _tell(self) -> None:
        """Write the request to the file; where that fails, on a full disk perhaps, the next look tries again."""
        if self.reason is not None and self._pass_on is not None and not self._has_told:
            with suppress(OSError):
                self._pass_on.write_text(self.reason, encoding="utf-8")
                self._has_told = True

    def _end(self, status: int, message: str | None = None) -> None:
        """End this process now, whatever its other threads do, and those that load its data; print a last message."""
        if message is not None and sys.stderr is not None:
            with suppress(OSError):  # nobody reads it any more
                os.write(sys.stderr.fileno(), f"{message}\n".encode())
        if self._pass_on is None:  # the processes of a launcher see that it is gone, and end their own
            for child in multiprocessing.active_children():
                child.kill()
        os._exit(status)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._receive(number, None)

    def _look_regularly(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            # It does not wait here: Python makes up a signal where SIGCONT, or a debugger, interrupts such a wait.
            while (found := signal.sigtimedwait(self._signals, 0)) is not None:
                self._receive(found.si_signo, found.si_pid)
            self._tell()
            self._look()

    def _receive(self, number: int, sender: int | None) -> None:
        if number == signal.SIGTERM and sender is not None:
            self._told_by.add(sender)
            self._look()
        if number == signal.SIGINT:
            self._look()  # it is also what the system sends when the process that started this one is gone
            now = time.monotonic()
            if self._interrupted is None:
                self._interrupted = now
            elif "LOCAL_RANK" not in os.environ or now - self._interrupted > _SAME_SECONDS:
                self._end(INTERRUPTED, "error: interrupted, nothing was saved")
        self._received.add(number)
        self.ask(signal.Signals(number).name)

    def _look(self) -> None:
        """Look for the note of the process that started this one, and for that process."""
        parent = multiprocessing.parent_process()  # which is not known yet while this one starts
        if parent is not None and parent.pid in self._told_by:
            # torch's agent ends its processes by SIGTERM, what it asks of them comes by the note; and a training
            # process ends so those that load its data. That is no failure of theirs.
            self._end(0)
        is_orphan = self._agent is not None and os.getppid() != self._agent
        if self._obey is not None and parent is not None:
            is_orphan = not parent.is_alive()  # os.getppid() is the process that this one may be a copy of
        if is_orphan:
            self._end(INTERRUPTED)
        if self._obey is None:
            return
        with suppress(OSError):
            if text := self._obey.read_text(encoding="utf-8"):
                self.ask(text)


@contextmanager
def _unheard() -> Iterator[None]:
    """Let the resource tracker that starts in the body say nothing of semaphores that were left to it.

    It would have the last word of a run whose processes were killed, after the one that names the cause.
    """
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (before, "ignore:resource_tracker:UserWarning")))
    try:
        yield
    finally:
        del os.environ["PYTHONWARNINGS"]
        if before is not None:
            os.environ["PYTHONWARNINGS"] = before


_listener: _Listener | None = None  # signals are one for a whole process


def listen() -> _Listener:
    """Note requests from now on, for as long as the process lives. Called by its main thread."""
    global _listener
    if _listener is None:
        _listener = _Listener()
    return _listener


@contextmanager
def listening() -> Iterator[_Listener]:
    """Note requests while the body runs; where it ends with status 75, they go to whoever handled them before."""
    global _listener
    if _listener is not None:
        yield _listener
        return
    listener = listen()
    is_stopped = False
    try:
        yield listener
    except SystemExit as left:
        is_stopped = left.code == STOPPED
        raise
    finally:
        listener.close()
        _listener = None
        if is_stopped:
            listener.hand_on()


def reason(max_hours: float | None = None) -> str | None:
    """Return why this process was asked to stop, None where it was not; `max_hours` after its start it is, too."""
    if _listener is None:
        return None
    if max_hours is not None and time.monotonic() - _listener.started > max_hours * 3600:
        _listener.ask(f"trainer.max_hours={max_hours:g}")
    return _listener.reason


def leave_if_asked() -> None:
    """Leave with status 75 where a stop was asked for before anything was started."""
    if (found := reason()) is not None:
        print(f"stopped by {found} before the first step: {_REMEDY}.", flush=True)
        raise SystemExit(STOPPED)
