"""A launching thread per GPU, where one process has several: each starts the tasks of its GPU, in the schedule's order.

    thread of cuda:0   F0 F1 F2 . B2 ...   a task waits until the task that it depends on has been launched;
    thread of cuda:1      F0 F1 F2 B2 ...  only the streams wait until a GPU has done it

Otherwise one thread launches for all GPUs, and those with small operations wait for it. Python runs one thread at a
time, but a backward runs no Python, and torch lets other threads run while it launches. Why this is not the default:
see the guide.

Gradients and masks keep their bits: what a thread does on a GPU depends only on the order of that GPU's tasks. All
threads share the host's random generators, so neither a layer nor the loss may draw from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager

import torch

from gpipe.pipeline.batch_norm import phase_per_gpu
from gpipe.pipeline.job.errors import PipelineError
from gpipe.pipeline.layers.generators import HostGenerators
from gpipe.pipeline.schedule import Task, dependencies


class DeviceThreads:
    """The threads, one per GPU; they end with this object.

    Args:
        devices: of each stage, by index: at least two GPUs, and nothing else.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        # Torch's libraries keep caches per thread: the same thread launches for a GPU in all steps.
        self._threads = {
            device: ThreadPoolExecutor(1, thread_name_prefix=f"gpipe-launches-{device}") for device in set(devices)
        }
        self._has_run = False

    def run(self, tasks: Sequence[Task], run_task: Callable[[Task], None]) -> None:
        """Run the tasks of a training step; return once all have been launched.

        The first time, one thread launches all of them, and checks whether they draw random numbers on the host.

        Args:
            tasks: of all stages, in an order in which one thread could run them.
            run_task: receives, works and sends.

        Raises:
            PipelineError: a layer, or the loss, draws random numbers on the host.
            Exception: the first that a task raised. No thread starts another task once this one has learnt of it.
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
        launched: dict[Task, Future[None]] = {}
        settings = _ThreadSettings()
        adopted = {device: ExitStack() for device in self._threads}

        def launch(task: Task) -> None:
            for needed in dependencies(task, len(self._devices)):
                launched[needed].result()
            run_task(task)

        with phase_per_gpu(self._threads):
            try:
                for device, thread in self._threads.items():
                    thread.submit(adopted[device].enter_context, settings.adopted(device)).result()
                for task in tasks:
                    launched[task] = self._threads[self._devices[task.stage]].submit(launch, task)
                done, _ = wait(launched.values(), return_when=FIRST_EXCEPTION)
            finally:  # also after a signal's error
                for future in launched.values():
                    future.cancel()
                for device, thread in self._threads.items():
                    thread.submit(adopted[device].close).result()
        for future in done:
            future.result()

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads.values():
            thread.shutdown()


class _ThreadSettings:
    """Torch's per-thread settings that a step depends on, as they are in the thread that calls `train_step`."""

    def __init__(self) -> None:
        self._streams = [torch.cuda.current_stream(index) for index in range(torch.cuda.device_count())]
        self._autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        self._keeps_copies = torch.is_autocast_cache_enabled()
        self._has_gradients = torch.is_grad_enabled()

    @contextmanager
    def adopted(self, device: torch.device) -> Iterator[None]:
        """Apply them to this thread, which launches for a GPU, and make that GPU the current one."""
        is_enabled, dtype = self._autocast
        torch.set_autocast_enabled("cuda", is_enabled)
        torch.set_autocast_dtype("cuda", dtype)
        torch.set_autocast_cache_enabled(self._keeps_copies)
        # All threads share autocast's copies of weights, and the outermost autocast to end in any thread drops them.
        torch.autocast_increment_nesting()
        try:
            with ExitStack() as streams, torch.set_grad_enabled(self._has_gradients):
                for stream in self._streams:  # a batch may be on any GPU
                    # Not those that the thread has anyway: setting one would initialise a GPU that is not used.
                    if stream != torch.cuda.default_stream(stream.device):
                        streams.enter_context(torch.cuda.stream(stream))
                streams.enter_context(torch.cuda.stream(self._streams[device.index]))
                yield
        finally:
            torch.autocast_decrement_nesting()
