"""Boundary activations forward, gradients back, between processes of one stage each.

Both ends of a stream predict the format of its next message: that of the same micro-batch in the step before. While the
prediction holds, a payload is one message of known size, whose receive is posted ahead and arrives while the stage
computes. A sender whose payload has another format says so in a short message, which fits any receive, and sends the
payload in the next. So shapes may change at any time, and nobody declares them.

    sender     F0 [notice][data]  F1 [data]  F2 [data] ...     the first step: formats are new
    sender     F0 [data]          F1 [data]  F2 [data] ...     every step after it

Each end of a stream has a thread, which packs, sends, asks for and unpacks messages while the stage computes.

The messages go over Gloo from host to host. Between GPUs they carry no data: the tensors follow over NCCL.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gpipe.pipeline.link import Link
from gpipe.pipeline.payload import Payload
from gpipe.pipeline.receiver import Receiver
from gpipe.pipeline.sender import Sender
from gpipe.pipeline.transfer import MiniBatch


class ProcessTransfer:
    """The transfer of one stage that has a process to itself.

    Args:
        previous: links to the stage before: receiving forward, sending backward; None in the first stage.
        following: links to the stage after: sending forward, receiving backward; None in the last stage.
    """

    def __init__(self, previous: tuple[Link, Link] | None, following: tuple[Link, Link] | None) -> None:
        self._inputs = Receiver(previous[0]) if previous else None
        self._input_gradients = Sender(previous[1]) if previous else None
        self._outputs = Sender(following[0]) if following else None
        self._output_gradients = Receiver(following[1]) if following else None
        self._senders = [sender for sender in (self._outputs, self._input_gradients) if sender is not None]
        self._receivers = [receiver for receiver in (self._inputs, self._output_gradients) if receiver is not None]
        self._batch = MiniBatch(0, 0)

    def start(self, batch: MiniBatch | None, *, training: bool) -> MiniBatch:
        """Begin a step; behind the first stage, wait for the first boundary input, which tells the mini-batch."""
        for sender in self._senders:
            sender.start(training=training)
        if self._inputs is not None:
            self._inputs.start(training=training, num_payloads=None)
            batch = self._inputs.first()
        assert batch is not None
        self._batch = batch
        if training and self._output_gradients is not None:
            self._output_gradients.start(training=training, num_payloads=batch.num_microbatches)
        return batch

    def send_forward(self, stage: int, micro_batch: int, payload: Payload) -> None:
        """Send a boundary output to the process of the next stage, without waiting."""
        assert self._outputs is not None
        self._outputs.send(payload, self._batch)

    def receive_forward(self, stage: int, micro_batch: int) -> Payload:
        """Wait for the boundary input of this process's stage."""
        assert self._inputs is not None
        return self._inputs.receive()

    def send_backward(self, stage: int, micro_batch: int, payload: Payload) -> None:
        """Send gradients to the process of the previous stage, without waiting."""
        assert self._input_gradients is not None
        self._input_gradients.send(payload, self._batch)

    def receive_backward(self, stage: int, micro_batch: int) -> list[Tensor | None]:
        """Wait for the gradients of this process's boundary outputs."""
        assert self._output_gradients is not None
        return list(self._output_gradients.receive().value())

    def fail(self, failure: dict[str, Any]) -> None:
        """Tell the neighbours why this stage sends nothing any more, and end the threads without waiting for them."""
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
