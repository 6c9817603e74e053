"""The boundary between two stages in two processes: activations forward, gradients back.

Both ends of a stream predict the format of its next message: that of the same micro-batch in the step before. While the
prediction holds, a payload is one message of known size, whose receive is posted ahead: it arrives while the stage
computes. A sender whose payload has another format announces it in a short format message, which fits any receive, and
sends the payload in the next message. So shapes may change at any time, and nobody declares them.

    sender     F0 [format][data]  F1 [data]  F2 [data] ...     the first step: formats are new
    sender     F0 [data]          F1 [data]  F2 [data] ...     every step after it

Each end of a stream has a thread, which packs, sends, asks for and unpacks messages while the stage computes.

The messages go over Gloo from host to host. Between GPUs they carry no data: the tensors follow over NCCL.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gpipe.pipeline.microbatch import Payload
from gpipe.pipeline.transfer import MiniBatch
from gpipe.pipeline.wire.streams import Link, Receiver, Sender


class ProcessTransfer:
    """Carries payloads between this process's stages and their neighbours, which are all in other processes.

    Args:
        previous: of each stage but the first of all, links to the one before: receiving forward, sending backward.
        following: of each stage but the last of all, links to the one after: sending forward, receiving backward.
    """

    def __init__(self, previous: Mapping[int, tuple[Link, Link]], following: Mapping[int, tuple[Link, Link]]) -> None:
        self._inputs = {stage: Receiver(forward) for stage, (forward, _) in previous.items()}
        self._input_gradients = {stage: Sender(backward) for stage, (_, backward) in previous.items()}
        self._outputs = {stage: Sender(forward) for stage, (forward, _) in following.items()}
        self._output_gradients = {stage: Receiver(backward) for stage, (_, backward) in following.items()}
        self._senders = [*self._outputs.values(), *self._input_gradients.values()]
        self._receivers = [*self._inputs.values(), *self._output_gradients.values()]
        self._batch = MiniBatch(0, 0)

    def start(self, batch: MiniBatch | None, *, training: bool) -> MiniBatch:
        """Begin a step; without the first stage, wait for the first boundary input, which carries the mini-batch."""
        for sender in self._senders:
            sender.start(training=training)
        expecting = [self._inputs[stage] for stage in sorted(self._inputs)]
        if batch is None:
            first, *expecting = expecting
            first.start(training=training, num_payloads=None)
            batch = first.first()
        self._batch = batch
        if training:
            expecting += self._output_gradients.values()
        for receiver in expecting:
            receiver.start(training=training, num_payloads=batch.num_microbatches)
        return batch

    def send_forward(self, stage: int, micro_batch: int, payload: Payload) -> None:
        """Send a boundary output to the process of the next stage, without waiting."""
        self._outputs[stage].send(payload, self._batch)

    def receive_forward(self, stage: int, micro_batch: int) -> Payload:
        """Wait for the boundary input of a stage."""
        return self._inputs[stage].receive()

    def send_backward(self, stage: int, micro_batch: int, payload: Payload) -> None:
        """Send gradients to the process of the previous stage, without waiting."""
        self._input_gradients[stage].send(payload, self._batch)

    def receive_backward(self, stage: int, micro_batch: int) -> list[Tensor | None]:
        """Wait for the gradients of a stage's boundary outputs."""
        return list(self._output_gradients[stage].receive().value())

    def fail(self, failure: dict[str, Any]) -> None:
        """Tell the neighbours why this process sends nothing any more, and end the threads without waiting for them."""
        for sender in self._senders:
            sender.fail(failure)
        for receiver in self._receivers:
            receiver.fail()

    def reset(self) -> None:
        """Do nothing: after a failure the streams are out of step for good, and the engine refuses to go on."""

    def close(self) -> None:
        """Wait until everything sent has arrived, and end the threads."""
        for sender in self._senders:
            sender.close()
        for receiver in self._receivers:
            receiver.close()
