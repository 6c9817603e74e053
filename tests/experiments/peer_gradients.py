"""The gradients of an engine that experiments/peers compares, in a process of a test."""

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh


def gradients(
    rank: int, num_processes: int, engine: str, workload: str, partitions: list[int]
) -> dict[str, np.ndarray]:
    """Return this process's gradients after two steps of an engine in so many processes, by the parameters' names."""
    from experiments.peers.engines import ENGINES, Place
    from experiments.peers.workloads import SCALES

    mesh = None
    if num_processes > 1:
        mesh = init_device_mesh("cpu", (1, num_processes), mesh_dim_names=("replica", "stage"))
    place = Place(rank, num_processes, [torch.device("cpu")] * len(partitions), mesh)
    made = ENGINES[engine](SCALES["tiny"][workload], partitions, 4, place)
    for _ in range(2):  # gradients are those of one step, whatever was there before
        made.step()
    found = {}
    for name, parameter in made.parameters.items():
        assert parameter.grad is not None
        found[name] = parameter.grad.numpy()
    return found
