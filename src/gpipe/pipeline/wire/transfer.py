"""The boundary between two stages in two processes: activations forward, gradients back.

Both ends of a stream predict the format of its next message: that of the same micro-batch in the step before. While the
prediction holds, a payload is one message of known size, whose receive is posted ahead: it arrives while the stage
computes. A sender whose payload has another format announces it in a short format message, which fits any receive, and
sends the payload in the next message. So shapes may change at any time, and are never declared.

    sender     F0 [format][data]  F1 [data]  F2 [data] ...     the first step: formats are new
    sender     F0 [data]          F1 [data]  F2 [data] ...     every step after it

Between CPUs of one host the messages go over a socket, written and read by the stages themselves: local.py.

All others go over Gloo, and each end of a stream has a thread, which sends, asks for and unpacks messages while the
stage computes: streams.py. Between GPUs these messages carry no data: the tensors follow over NCCL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gpipe.pipeline.job.watch import join_threads
from gpipe.pipeline.microbatch import Payload
from gpipe.pipeline.schedule import Kind, Task
from gpipe.pipeline.transfer import LocalTransfer, MiniBatch
from gpipe.pipeline.wire.local import LocalReceiver, LocalSender
from gpipe.pipeline.wire.streams import Link, Receiver, Sender


class ProcessTransfer(LocalTransfer):
    """Carries payloads between this process's stages and their neighbours, most of which are in other processes.

    After an error the streams stay out of step, and the engine refuses to continue.

    Args:
        outgoing: the links over which this process's stages send, by what travels (outputs forward, gradients
            backward) and stage.
        incoming: the links over which they receive, in the order of the stages.
        devices: as for `LocalTransfer`, which carries payloads between two neighbours that are both here.
    """

    def __init__(
        self,
        outgoing: Mapping[tuple[Kind, int], Link],
        incoming: Mapping[tuple[Kind, int], Link],
        devices: Sequence[torch.device],
    ) -> None:
        super().__init__(devices)
        self._senders = {end: (LocalSender if link.connection else Sender)(link) for end, link in outgoing.items()}
        self._receivers = {
            end: (LocalReceiver if link.connection else Receiver)(link) for end, link in incoming.items()
        }
        self._ends = [*self._senders.values(), *self._receivers.values()]
        self._batch = MiniBatch(0, 0)

    def start(self, batch: MiniBatch | None, *, training: bool) -> MiniBatch:
        """Begin a step; without the first stage, wait for the first boundary input, which carries the mini-batch."""
        for sender in self._senders.values():
            sender.start(training=training)
        expecting = [receiver for (kind, _), receiver in self._receivers.items() if training or kind is Kind.FORWARD]
        if batch is None:
            first, *expecting = expecting
            first.start(training=training, num_payloads=None)
            batch = first.first()
        self._batch = batch
        for receiver in expecting:
            receiver.start(training=training, num_payloads=batch.num_microbatches)
        return batch

    def send(self, task: Task, payload: Payload) -> None:
        """Send the result of a task to the process of the stage after or before, without waiting."""
        sender = self._senders.get((task.kind.direction, task.stage))
        if sender is None:
            super().send(task, payload)
        else:
            sender.send(payload, self._batch)

    def receive(self, task: Task) -> Payload:
        """Wait for what a task needs."""
        receiver = self._receivers.get((task.kind.direction, task.stage))
        return super().receive(task) if receiver is None else receiver.receive()

    def join(self) -> None:
        """End the threads after a failure, once the connections are cut."""
        for end in self._ends:
            end.end()
        join_threads(thread for end in self._ends for thread in end.threads)

    def close(self) -> None:
        """Wait until everything sent has arrived, and end the threads."""
        for end in self._ends:
            end.close()
