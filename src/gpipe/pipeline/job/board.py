"""The notices that the processes of a job leave for each other."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import Store

SILENT_SECONDS = 1.0  # after which another answer of the store is not waited for
_PATIENCE_SECONDS = 10.0  # with a silent store, where a cause of failure is to be noted: nobody may hear it otherwise


class Board:
    """Notes in the job's key-value store; where it cannot be reached any more, what it last said.

    The store is in a process of one host. When that host ends, a call fails at once. When the network to it does, a
    call may take a quarter of an hour: others can see that it is under way, and give the store up. Until then nobody
    joins a wait that is long already: a process that has lost a neighbour must not hang while it asks why.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, Any] = {}
        self._under_way: dict[int, float] = {}  # since when, by thread
        self._is_given_up = False

    @property
    def silent_seconds(self) -> float:
        """For how long somebody has been waiting for the store's answer."""
        now = time.monotonic()
        return now - min(list(self._under_way.values()), default=now)

    def give_up(self) -> None:
        """Ask the store no more."""
        self._is_given_up = True

    def write(self, key: str, value: Any) -> None:
        """Write a note of JSON's types."""
        self._ask(lambda: self._store.set(key, json.dumps(value)))

    def write_first(self, key: str, value: Any) -> None:
        """Write a note, unless there is one with this key; wait a while for a silent store that is not given up."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self.silent_seconds > SILENT_SECONDS and not self._is_given_up and time.monotonic() < deadline:
            time.sleep(0.05)
        self._ask(lambda: self._store.compare_set(key, "", json.dumps(value)))

    def read(self, key: str) -> Any:
        """Return a note, None where there is none."""
        is_there = self._ask(lambda: self._store.check([key]))
        if is_there and (found := self._ask(lambda: json.loads(self._store.get(key)))) is not None:
            self._known[key] = found
        return self._known.get(key)

    def _ask(self, question: Callable[[], Any]) -> Any:
        if self._is_given_up or self.silent_seconds > SILENT_SECONDS:
            return None
        thread = threading.get_ident()
        self._under_way[thread] = time.monotonic()
        try:
            return question()
        except RuntimeError:  # the store is gone together with its process: torch would warn of each further call
            self.give_up()
            return None
        finally:
            del self._under_way[thread]
