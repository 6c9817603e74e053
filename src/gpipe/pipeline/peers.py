"""Find out, when a process of the pipeline went silent, which one and why."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from gpipe.pipeline.failure import PeerFailure, PipelineError
from gpipe.pipeline.messages import LostPeer

_EXPLANATION_SECONDS = 2.0  # a peer that failed wrote down the cause before it closed its connections


class Peers:
    """A notice board of the pipeline's processes, in the key-value store that torch.distributed started with.

    Args:
        store: reachable by all processes.
        stage: this process's stage.
        timeout_seconds: how long receives wait; only quoted in messages.
    """

    def __init__(self, store: dist.Store, stage: int, timeout_seconds: float) -> None:
        self._store = store
        self._stage = stage
        self._timeout_seconds = timeout_seconds
        self._write(f"process/{stage}", f"rank {dist.get_rank()}, process {os.getpid()} on {socket.gethostname()}")

    def report(self, error: PipelineError) -> dict[str, Any]:
        """Write down why this stage stops, unless another cause stands there; return what to send to the peers."""
        failure = {
            "message": str(error),
            "stage": error.stage,
            "micro_batch": error.micro_batch,
            "layer": error.layer,
        }
        if not isinstance(error, PeerFailure):
            self._write("failure", failure)
        return failure

    def explain(self, lost: LostPeer) -> PipelineError:
        """Return the error to raise for a peer that is gone or silent."""
        self._write(f"waiting/{self._stage}", lost.peer)
        deadline = time.monotonic() + _EXPLANATION_SECONDS
        while time.monotonic() < deadline:
            failure = self._read("failure")
            if failure is not None:
                return PeerFailure(**failure)
            time.sleep(0.05)
        # Every process that waited in vain has written for whom by now. The one that did not is the culprit.
        stage, chain = lost.peer, [self._stage]
        while stage not in chain and (waiting_for := self._read(f"waiting/{stage}")) is not None:
            chain.append(stage)
            stage = waiting_for
        name = f"stage {stage} ({self._read(f'process/{stage}') or 'which never said where it runs'})"
        if lost.timed_out:
            waited = f"stage {self._stage} waited {self._timeout_seconds:g} s"
            text = f"{name} does not answer: {waited}; see what it is doing there, or raise timeout_seconds"
        else:
            text = f"{name} is gone without a word: it was killed, ran out of memory, or its host is down"
        return PeerFailure(text, stage=stage)

    def _write(self, key: str, value: Any) -> None:
        with suppress(dist.DistError, RuntimeError):  # the store may be gone together with the peer
            self._store.set(key, json.dumps(value))

    def _read(self, key: str) -> Any:
        with suppress(dist.DistError, RuntimeError):
            if self._store.check([key]):
                return json.loads(self._store.get(key))
        return None
