"""How a pipeline's layers run: as they are, compiled, as CUDA graphs, or launched by a thread per GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from gpipe.pipeline.checks.refusals import refuse_cuda_graphs
from gpipe.pipeline.job.job import Job
from gpipe.pipeline.layers.compilation import Compilation
from gpipe.pipeline.layers.device_threads import DeviceThreads
from gpipe.pipeline.stage import Stage


class LayerExecution:
    """The part of `Pipeline` that chooses how its layers run; see there for the attributes."""

    layers: nn.ModuleDict
    job: Job
    stages: Mapping[int, Stage]
    num_layers: int
    shards_replicas: bool
    _synchronizes: bool  # whether batch norms exchange statistics over the replicas
    _compilation: Compilation | None = None
    _device_threads: DeviceThreads | None = None

    def __reduce__(self) -> Any:
        """Refuse to be copied or pickled, with its threads and connections."""
        raise TypeError(
            "a pipeline has threads and connections, which cannot be copied or saved; copy or save its layers "
            "(pipeline.layers.state_dict()), and build another pipeline from them"
        )

    def compile(self, asked_to_stop: Callable[[], Any] = lambda: None, **options: Any) -> None:
        """Run each of this process's layers through torch.compile(**options); layers and names stay the same.

        A layer is compiled at its first run, and again for other shapes; equal layers share the compiled code.
        Compiling counts as progress, however long it takes. Batch norms that are synchronised over replicas run
        uncompiled between two graphs, so they do not allow fullgraph=True.

        Args:
            asked_to_stop: on any process, returns something true once training is to stop. A training step that
                learns of it while compiling compiles no further layer and raises StepAbandoned.
            options: of torch.compile, except those for CUDA graphs.

        Raises:
            ValueError: the options ask for CUDA graphs, the layers run in another way, or the replicas shard their
                weights.
        """
        refuse_cuda_graphs(options)
        self._refuse_second_way("torch.compile")
        if self.shards_replicas:
            raise ValueError(
                "shard_replicas is True, and torch's fully_shard gathers weights outside the compiled code; do not "
                "compile, or set shard_replicas=False"
            )
        layers = {int(index): layer for index, layer in self.layers.items()}
        self._compilation = Compilation(layers, self.num_layers, self.job.activity, asked_to_stop, options)
        for stage in self.stages.values():
            stage.compilation = self._compilation
        self.job.expect_compiling()

    def use_cuda_graphs(self) -> None:
        """Run each of this process's layers on a GPU as a CUDA graph in training: one launch for all its operations.

        For layers of many small operations, which a GPU computes faster than the host launches them. For each shape of
        its inputs, a layer first runs as it is; then its forward and backward are captured. Gradients and masks keep
        their bits. On a CPU it changes nothing.

        Graphs keep their memory, and copies of each layer's inputs: see the guide. A layer's Python code runs only
        when the layer is captured. Layers that change buffers other than batch norms' moving averages run as they are.
        So do layers that take or return several tensors in the same memory, and evaluations.

        Raises:
            ValueError: the layers run in another way, or exchange data among replicas within a step.
        """
        for name, is_true in (
            ("synchronize_batch_norm", self._synchronizes),
            ("shard_replicas", self.shards_replicas),
        ):
            if is_true:
                raise ValueError(
                    f"{name} is True, and layers that exchange data among replicas cannot be captured as CUDA graphs; "
                    f"do not use CUDA graphs, or set {name}=False"
                )
        self._refuse_second_way("CUDA graphs")
        for stage in self.stages.values():
            stage.use_cuda_graphs()

    def use_device_threads(self) -> None:
        """Launch each GPU's training tasks from a thread of its own, if this process has several GPUs.

        For layers of many small operations, where GPUs wait for the one thread that launches for all. Gradients and
        masks keep their bits. In the next step a single thread still launches everything. On one GPU or a CPU it
        changes nothing.

        Layers and the loss run in several threads at once: protect an object that two of them change. Of the contexts
        around `train_step`, only autocast and the current streams reach the threads. A layer, or a loss, that draws
        random numbers on the host, whose generators all threads share, is refused in the next step.

        Raises:
            ValueError: the layers are compiled or run as CUDA graphs.
        """
        self._refuse_second_way("a thread per device")
        devices = [self.job.devices[k] for k in sorted(self.job.devices)]
        if len(set(devices)) > 1 and all(device.type == "cuda" for device in devices):
            self._device_threads = DeviceThreads(devices)

    def _refuse_second_way(self, wanted: str) -> None:
        """Refuse a second way to run layers, other than the one already chosen."""
        chosen = {
            "torch.compile": self._compilation is not None,
            "a thread per device": self._device_threads is not None,
            "CUDA graphs": any(stage.graphs is not None for stage in self.stages.values()),
        }
        for found, is_chosen in chosen.items():
            if is_chosen and found != wanted:
                raise ValueError(f"the layers already run with {found}; use either {found} or {wanted}")
