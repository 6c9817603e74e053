"""The job: which processes train together, which stages and devices each has, and how they agree and fail together.

`Job` is a job of one process, which plays all stages: whatever it gathers is one value. mesh_job.py has the job of
several processes, with the same methods. So the engine never asks how many processes there are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from gpipe.pipeline.job.activity import Activity
from gpipe.pipeline.job.device_work import DeviceWork
from gpipe.pipeline.job.errors import NonFiniteError, PipelineError, StepAbandoned
from gpipe.pipeline.shared.peers import Peers
from gpipe.pipeline.shared.replicas import Replicas
from gpipe.pipeline.transfer import LocalTransfer


class Job:
    """A job of one process, which plays all stages.

    Attributes:
        devices: of this process's stages, by index.
        transfer: carries payloads between this process's stages and their neighbours.
        replicas: the processes that hold the same stages in other pipelines.
        activity: what this process is doing.
        device_work: what its GPUs have not done yet.
        on_failure: called when a step fails, to drop what is left of it. Weak: the job is held until its pipeline is
            released, and a layer may refer to the pipeline, which would then never be.
        process: the index of this process in its pipeline.
    """

    process = 0

    def __init__(self, devices: Mapping[int, torch.device], timeout_seconds: float) -> None:
        self.devices = dict(devices)
        self.activity = Activity()
        stage = next(iter(devices)) if len(devices) == 1 else None
        self.device_work = DeviceWork(self.activity, timeout_seconds, stage)
        self._timeout = timedelta(seconds=timeout_seconds)
        self.transfer = LocalTransfer(list(devices.values()))
        self.replicas = Replicas()
        self.on_failure: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._failure: str | None = None  # why the processes cannot go on together

    @property
    def num_replicas(self) -> int:
        """R, the number of pipelines that train the same weights."""
        return self.replicas.count

    @property
    def replica_index(self) -> int:
        """Which of the R pipelines this process belongs to."""
        return self.replicas.index

    @property
    def overlaps(self) -> bool:
        """Whether stages can run at the same time, as processes or on several devices; otherwise they take turns."""
        return len(set(self.devices.values())) > 1

    @property
    def place(self) -> str:
        """What this process is doing, for messages: "between two steps"."""
        return str(self.activity)

    @property
    def compiling(self) -> str | None:
        """What is being compiled here, or in a process that this one waits for: "compiling layer 3 of 9"; or None."""
        return self.activity.compiling

    def process_of(self, stage: int) -> int:
        """Return the index of the process of the pipeline that has a stage."""
        return 0

    def connect(self, settings: Callable[[], Mapping[str, Any]], among_replicas: Sequence[str] | None) -> None:
        """Compare settings with those of the other stages and of the other replicas; then connect.

        Args:
            settings: returns them by name, of JSON's types.
            among_replicas: the names of those that the replicas must agree on; None: all.

        Raises:
            ValueError: settings differ; on all processes, with the first difference.
            PipelineError: another process is gone or does not appear.
        """

    def connect_replicas(self) -> Replicas:
        """Return the replicas, connected by a separate group, for exchanges that run beside those of `replicas`."""
        return self.replicas

    def connect_tied(self, groups: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Peers]:
        """Connect processes of each pipeline with each other; return the connections that this one belongs to.

        Args:
            groups: processes of a pipeline, ascending; the same groups on each process of the job.
        """
        return {}

    def gather(self, value: Any) -> list[Any]:
        """Return the values that the pipeline's processes passed, in the order of their first stages.

        Every process calls it, with a value of JSON's types.
        """
        return [value]

    def gather_all(self, value: Any) -> list[Any]:
        """Return what `gather` returns in each replica, one replica after the other."""
        return self.join_replicas(self.gather(value))

    def join_replicas(self, values: list[Any]) -> list[Any]:
        """Return the values that the replicas gathered, one replica after the other."""
        with self._guard_exchange():
            return [value for part in self.replicas.gather(values) for value in part]

    def check(self) -> None:
        """Note progress, and raise the cause of failure of another process, if there is one."""

    def expect_compiling(self) -> None:
        """Let processes wait for each other however long one of them compiles."""

    def wait_for_devices(self) -> None:
        """Wait until this process's GPUs have done all that their current streams were given; a CPU has.

        The host waits here before it reads a number from a GPU. This wait ends if the GPU hangs or data never come.

        Raises:
            PipelineError: a GPU failed, or did nothing for longer than the time-out.
            PeerFailure: another process failed, hangs, or sends nothing.
        """
        self.device_work.wait_for_devices(self.devices.values(), self._raise_failure)

    def _raise_failure(self) -> None:
        """Raise the cause of failure of another process, if there is one."""

    @contextmanager
    def guard(self) -> Iterator[None]:
        """On an error in the body, drop the step and tell the other processes; find out why a connection is gone.

        Raises:
            PipelineError: the pipeline has already stopped.
        """
        if self._failure is not None:
            raise PipelineError(
                f"this pipeline has stopped and cannot continue; build a new one. The cause: {self._failure}"
            )
        with self._guard_exchange():
            yield

    @contextmanager
    def _guard_exchange(self) -> Iterator[None]:
        try:
            yield
        except (NonFiniteError, StepAbandoned):
            raise  # every process raises it at the same point, so they stay in step
        except BaseException as error:
            cause = self.abort(error)
            if cause is not error:
                raise cause from None
            raise

    def abort(self, error: BaseException) -> BaseException:
        """Drop the unfinished step, and tell the other processes why this one stops; return the error that says so.

        The error gets a note of the place where it happened.
        """
        self.activity.clear()
        self.device_work.clear()
        self.transfer.reset()
        for find in self.on_failure:
            if (drop := find()) is not None:
                drop()
        return error

    def close(self) -> None:
        """Wait until everything sent has arrived, and end the threads."""
