"""The notices that the processes of a job leave for each other."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import Store

SILENT_SECONDS = 1.0  # without an answer from the store, after which no other thread asks
_PATIENCE_SECONDS = 10.0  # with a silent store, to note a cause of failure, which might not be reported otherwise


class Board:
    """Notes in the job's key-value store; once the store cannot be reached, the last answers.

    The store is in a process of one host. If that host goes down, a call fails at once. If the network to it fails, a
    call may take a quarter of an hour: other threads can see that it is pending, and abandon the store. Until then no
    other thread asks: a process that has lost a neighbour must not hang while it finds out why.

    Attributes:
        is_given_up: whether the store is gone or was abandoned, so that there are no new notes.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, Any] = {}
        self._under_way: dict[int, float] = {}  # when each thread's call began
        self.is_given_up = False

    @property
    def silent_seconds(self) -> float:
        """How long a thread has been waiting for the store's answer."""
        now = time.monotonic()
        return now - min(list(self._under_way.values()), default=now)

    def give_up(self) -> None:
        """Stop using the store."""
        self.is_given_up = True

    def write(self, key: str, value: Any) -> None:
        """Write a note of JSON's types."""
        self._ask(lambda: self._store.set(key, json.dumps(value)))

    def write_first(self, key: str, value: Any) -> None:
        """Write a note unless its key has one; wait a while for a silent store that has not been given up."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self.silent_seconds > SILENT_SECONDS and not self.is_given_up and time.monotonic() < deadline:
            time.sleep(0.05)
        self._ask(lambda: self._store.compare_set(key, "", json.dumps(value)))

    def read(self, key: str) -> Any:
        """Return a note; None if there is none."""
        is_there = self._ask(lambda: self._store.check([key]))
        if is_there and (found := self._ask(lambda: json.loads(self._store.get(key)))) is not None:
            self._known[key] = found
        return self._known.get(key)

    def _ask(self, question: Callable[[], Any]) -> Any:
        if self.is_given_up or self.silent_seconds > SILENT_SECONDS:
            return None
        thread = threading.get_ident()
        self._under_way[thread] = time.monotonic()
        try:
            return question()
        except RuntimeError:  # the store is gone with its process; torch would warn at each further call
            self.give_up()
            return None
        finally:
            del self._under_way[thread]
