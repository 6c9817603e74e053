"""Listen to requests to stop: signals to this process, to the one that started it, or to all processes of a job.

A request is only noted; training reads the note between two steps, on all processes together. This imports no torch.

    signal                     effect
    SIGTERM, SIGINT (Ctrl-C)   save at the next step boundary, exit status 75; the same command resumes the run
    SIGQUIT                    the same
    SIGUSR1, SIGUSR2           the same; schedulers such as SLURM send them before a time limit
    SIGHUP (a closed window)   the same; no effect if it was ignored before, as under nohup
    a second SIGINT            exit at once with status 130, nothing is saved
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

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again
INTERRUPTED = 128 + signal.SIGINT
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP}
_POLL_SECONDS = 0.1
_SAME_SECONDS = 1.0  # the terminal and torchrun both send Ctrl-C to torchrun's processes
_ROOM = b" " * 256
_REMEDY = "repeat the command to resume"


class _Listener:
    """Notes the requests that reach a process, from the listener's creation until it is closed.

    The signals are blocked and a thread polls them, so that a process that waits inside torch notices them too.
    Processes that start meanwhile inherit the block: a signal to the whole group kills no process that is still
    starting or that loads data. If the system cannot poll signals (macOS), Python's handlers are used.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.started = time.monotonic()
        self._received: set[int] = set()
        self._interrupted: float | None = None
        self._forward_to: Path | None = None
        self._has_forwarded = False
        self._followed: Path | None = None
        self._terminators: set[int] = set()  # who sent SIGTERM
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll_regularly, name="stops", daemon=True)
        # torch's agent waits for its processes; a parent that sets torchrun's variables by hand may exit before them.
        self._agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._signals = _SIGNALS - {signal.SIGHUP} if is_nohup else _SIGNALS
        self._handlers = {
            number: signal.signal(number, lambda number, _: self._receive(number, None)) for number in self._signals
        }
        blocked = self._signals if hasattr(signal, "sigtimedwait") else set()
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        if blocked:
            # Python up to 3.12 removes the block when it starts the resource tracker, so start the tracker beforehand.
            # Silence its warnings about leaked semaphores: if a run's processes were killed, they would follow the
            # message that names the cause.
            silent = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning")))
            with environment_variable("PYTHONWARNINGS", silent):
                resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
            self._thread.start()

    def close(self) -> None:
        """Restore the previous handlers and the previous mask."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()  # else it could take a signal from a later listener
        for number, handler in self._handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def forward_to_handlers(self) -> None:
        """Forward the received signals to the previous handlers, such as submitit's, which queues the job again."""
        for number in self._received:
            handler = self._handlers[signal.Signals(number)]
            if callable(handler) and handler is not signal.default_int_handler:
                handler(number, None)

    def forward_to(self, note: Path | None) -> None:
        """Forward requests, through a file, to the processes that follow it; None stops that."""
        if note is not None:
            note.write_bytes(_ROOM)  # even a full disk can then take the request, which overwrites this
        self._forward_to, self._has_forwarded = note, False
        self._forward()

    def follow(self, note: Path) -> None:
        """Read requests from the file that the process which started this one forwards them to."""
        self._followed = note
        self._poll()

    def request(self, reason: str) -> None:
        """Note a request to stop."""
        self.reason = self.reason or reason
        self._forward()

    def _forward(self) -> None:
        """Write the request to the file; if that fails, the next poll tries again."""
        if self.reason is not None and self._forward_to is not None and not self._has_forwarded:
            with suppress(OSError), self._forward_to.open("r+b") as file:
                file.write(self.reason.encode().ljust(len(_ROOM)))
                self._has_forwarded = True

    def _exit(self, status: int, message: str | None = None) -> None:
        """Print a message and exit now, whatever other threads do; kill the processes that load this one's data."""
        if message is not None and sys.stderr is not None:
            with suppress(OSError):  # the reader is gone
                os.write(sys.stderr.fileno(), f"{message}\n".encode())
        if self._forward_to is None:  # a launcher's processes notice that it is gone, and kill their own
            for child in multiprocessing.active_children():
                child.kill()
        os._exit(status)

    def _poll_regularly(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            # Do not wait here: Python invents a signal when SIGCONT, or a debugger, interrupts such a wait.
            while (found := signal.sigtimedwait(self._signals, 0)) is not None:
                self._receive(found.si_signo, found.si_pid)
            self._forward()
            self._poll()

    def _receive(self, number: int, sender: int | None) -> None:
        if number == signal.SIGTERM and sender is not None:
            self._terminators.add(sender)
            self._poll()
        if number == signal.SIGINT:
            self._poll()  # the system also sends it when the parent process is gone
            now = time.monotonic()
            if self._interrupted is None:
                self._interrupted = now
            elif "LOCAL_RANK" not in os.environ or now - self._interrupted > _SAME_SECONDS:
                self._exit(INTERRUPTED, "error: interrupted, nothing was saved")
        self._received.add(number)
        self.request(signal.Signals(number).name)

    def _poll(self) -> None:
        """Read the note of the process that started this one, and check that this process is alive."""
        parent = multiprocessing.parent_process()  # None while this process starts
        if parent is not None and parent.pid in self._terminators:
            # torch's agent ends its processes by SIGTERM, as a training process ends those that load its data.
            # Requests to stop come through the note, so this is not a failure.
            self._exit(0)
        is_orphan = self._agent is not None and os.getppid() != self._agent
        if self._followed is not None and parent is not None:
            is_orphan = not parent.is_alive()  # os.getppid() may be the fork server
        if is_orphan:
            self._exit(INTERRUPTED)
        if self._followed is None:
            return
        with suppress(OSError):
            if text := self._followed.read_text(encoding="utf-8").strip():
                self.request(text)


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable while the body runs."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


_listener: _Listener | None = None  # a process has one set of signal handlers


def listen() -> _Listener:
    """Note requests from now on, until the process exits. Call it in the main thread."""
    global _listener
    if _listener is None:
        _listener = _Listener()
    return _listener


@contextmanager
def listening() -> Iterator[_Listener]:
    """Note requests while the body runs; if it exits with status 75, forward them to the previous handlers."""
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
            listener.forward_to_handlers()


def find_reason(max_hours: float | None = None) -> str | None:
    """Return why this process should stop: a request, or `max_hours` since its start; None if it should not."""
    if _listener is None:
        return None
    if max_hours is not None and time.monotonic() - _listener.started > max_hours * 3600:
        _listener.request(f"trainer.max_hours={max_hours:g}")
    return _listener.reason


def exit_before_start(reason: str | None, *, speaks: bool = True) -> None:
    """Exit with status 75 if there is a reason to stop before anything was started; one process `speaks`."""
    if reason:
        if speaks:
            print(f"stopped by {reason} before the first step: {_REMEDY}.", flush=True)
        raise SystemExit(STOPPED)
