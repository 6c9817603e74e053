"""What happens when a step fails: here it is cleaned up, and the other processes are told."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from gpipe.pipeline import batch_norm
from gpipe.pipeline.autocast import uncached_autocast
from gpipe.pipeline.batch_norm import MicroBatchNorm
from gpipe.pipeline.executor import Executor
from gpipe.pipeline.job.errors import LostPeer, NonFiniteError, PeerFailure, PipelineError
from gpipe.pipeline.job.topology import Processes
from gpipe.pipeline.randomness import preserved_generators
from gpipe.pipeline.transfer import Transfer


class Guard:
    """Guards the work of one process of a pipeline.

    Args:
        executor: what it forgets after a failure.
        batch_norms: whose statistics of an unfinished step it drops.
        transfer: through which the neighbours are told.
        processes: of the pipeline; None where one plays all stages, and the next step may succeed.
        devices: whose generators a step leaves alone.
        give_up: called when the processes cannot go on together.
    """

    def __init__(
        self,
        executor: Executor,
        batch_norms: Sequence[MicroBatchNorm],
        transfer: Transfer,
        processes: Processes | None,
        devices: Collection[torch.device],
        give_up: Callable[[], object],
    ) -> None:
        self._executor, self._batch_norms = executor, batch_norms
        self._transfer, self._processes = transfer, processes
        self._devices = devices
        self._give_up = give_up
        self._broken: str | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Leave the generators and autocast's cache alone; on an error clean up and tell the other processes.

        Raises:
            PipelineError: the processes stopped before.
        """
        if self._broken is not None:
            raise PipelineError(
                f"this pipeline stopped before and cannot go on, build a new one; it stopped: {self._broken}"
            )
        with self.exchange(), preserved_generators(self._devices), uncached_autocast():
            yield

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """On an error clean up and tell the other processes; find out why a connection is gone."""
        try:
            yield
        except NonFiniteError:
            raise  # every process raises it at the same place: they stay in step
        except LostPeer as lost:
            assert self._processes is not None
            error = self._processes.watch.explain(lost)
            self.stop(error)
            raise error from None
        except BaseException as error:
            self.stop(error)
            raise

    def stop(self, error: BaseException) -> None:
        """Clean up, and tell the other processes that this one stops, and why; the error is told where it happened."""
        place = self._processes.place if self._processes is not None else ""
        self._executor.reset()
        batch_norm.discard(self._batch_norms)
        if self._processes is None or self._broken is not None:
            return
        if not isinstance(error, PipelineError):
            error.add_note(place)
            what = f"{type(error).__name__}: {error}"
            # After many lines, such as the traceback of a process that loads data, nobody looks for the place above.
            text = f"{what}\n(in {place})" if "\n" in what else f"{place}: {what}"
            error = PipelineError(text, stage=self._processes.stage)
        elif not isinstance(error, PeerFailure | NonFiniteError):  # of the latter all processes say the same
            error.args = (f"rank {self._processes.rank}, {error}",)
        self._broken = str(error)
        self._give_up()
        failure = self._processes.watch.report(error)
        self._transfer.fail(failure)
        self._processes.messenger.fail(failure)
        self._processes.watch.retire()
