"""A launching thread per GPU, where one process has several: each starts the tasks of its GPU, in the schedule's order.

    thread of cuda:0   F0 F1 F2 . B2 ...   a task waits until the one whose result it takes has been launched, not until
    thread of cuda:1      F0 F1 F2 B2 ...  its GPU has done it: for that, streams wait

One thread launches for all GPUs otherwise, and those with small operations wait for it. Python runs one thread at a
time, but none of it runs in a backward, and torch lets others run while it launches. Why not by default: see the guide.

Gradients and masks have the same bits: what a thread does on a GPU depends on the order of that GPU's tasks alone. The
host's generators of random numbers belong to all threads; so nothing that is seeded may draw from them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager

import torch

from gpipe.pipeline.batch_norm import phase_per_gpu
from gpipe.pipeline.generators import HostGenerators
from gpipe.pipeline.job.errors import PipelineError
from gpipe.pipeline.schedule import Task, dependencies


class DeviceThreads:
    """The threads, one per GPU; they end with this object.

    Args:
        devices: of each stage, by index: at least two GPUs, and nothing else.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        # Torch's libraries keep what they have found out per thread: the same one launches for a GPU in all steps.
        self._threads = {
            device: ThreadPoolExecutor(1, thread_name_prefix=f"gpipe-launches-{device}") for device in set(devices)
        }
        self._has_run = False

    def run(self, tasks: Sequence[Task], run_task: Callable[[Task], None]) -> None:
        """Run the tasks of a training step; return once all have been launched.

        The first time, one thread launches all of them, and looks whether they draw random numbers on the host.

        Args:
            tasks: of all stages, in an order in which one thread could run them.
            run_task: receives, works and sends.

        Raises:
            PipelineError: a layer, or the loss, draws random numbers on the host.
            Exception: the first that a task raised. No thread runs a task any more.
        """
        if self._has_run:
            self._run_at_once(tasks, run_task)
            return
        for task in tasks:
            generators = HostGenerators()
            run_task(task)
            if (drawn := generators.find_drawn()) is not None:
                text = (
                    f"stage {task.stage}, micro-batch {task.micro_batch}, {task.kind.words}: a layer or the loss draws "
                    f"from {drawn}, and the threads of all devices would share it; draw on the GPU, or do not use a "
                    "thread per device (launch.device_threads=false)"
                )
                raise PipelineError(text, stage=task.stage, micro_batch=task.micro_batch)
        self._has_run = True

    def _run_at_once(self, tasks: Sequence[Task], run_task: Callable[[Task], None]) -> None:
        launched = _Launched()
        settings = _ThreadSettings()

        def launch(device: torch.device) -> None:
            with launched.stopping_all(), settings.adopted(device):
                for task in (task for task in tasks if self._devices[task.stage] == device):
                    if not launched.await_all(dependencies(task, len(self._devices))):
                        return
                    run_task(task)
                    launched.add(task)

        with phase_per_gpu(self._threads):
            running = [thread.submit(launch, device) for device, thread in self._threads.items()]
            try:
                wait(running)
            except BaseException:  # a signal's
                launched.stop()
                wait(running)
                raise
        if launched.error is not None:
            raise launched.error

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads.values():
            thread.shutdown()


class _Launched:
    """Which tasks of a step have been launched.

    Attributes:
        error: the first that was raised.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._tasks: set[Task] = set()
        self._is_stopped = False
        self._changed = threading.Condition()

    def await_all(self, needed: Iterable[Task]) -> bool:
        """Wait until some tasks have been launched; return False where none is to be run any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._tasks.issuperset(needed))
            return not self._is_stopped

    def add(self, task: Task) -> None:
        """Note a task."""
        with self._changed:
            self._tasks.add(task)
            self._changed.notify_all()

    def stop(self) -> None:
        """Let no thread begin another task."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    @contextmanager
    def stopping_all(self) -> Iterator[None]:
        """Keep an error of the body, if it is the first, and stop."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - whoever waits for the threads raises it
            self.error = self.error or error
            self.stop()


class _ThreadSettings:
    """What torch keeps per thread and a step depends on, of the thread that calls `train_step`."""

    def __init__(self) -> None:
        self._streams = [torch.cuda.current_stream(index) for index in range(torch.cuda.device_count())]
        self._autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        self._keeps_copies = torch.is_autocast_cache_enabled()
        self._has_gradients = torch.is_grad_enabled()

    @contextmanager
    def adopted(self, device: torch.device) -> Iterator[None]:
        """Give them to the thread that launches for a GPU, which becomes the current one."""
        is_enabled, dtype = self._autocast
        torch.set_autocast_enabled("cuda", is_enabled)
        torch.set_autocast_dtype("cuda", dtype)
        torch.set_autocast_cache_enabled(self._keeps_copies)
        # The copies of weights belong to all threads, and the end of the outermost autocast in any of them drops all.
        torch.autocast_increment_nesting()
        try:
            with ExitStack() as streams, torch.set_grad_enabled(self._has_gradients):
                for stream in self._streams:  # a batch may be on any GPU
                    # Not those that the thread has anyway: to choose one would start a GPU that nobody uses.
                    if stream != torch.cuda.default_stream(stream.device):
                        streams.enter_context(torch.cuda.stream(stream))
                streams.enter_context(torch.cuda.stream(self._streams[device.index]))
                yield
        finally:
            torch.autocast_decrement_nesting()
