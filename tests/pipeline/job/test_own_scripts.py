"""A script of a user's own that catches what its layer raised ends as it wants to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpipe.launch.store import LOOPBACK, serve_store

pytestmark = pytest.mark.alone
ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
import gpipe

class Broken(nn.Module):
    def forward(self, x):
        raise ValueError("of the user")

rank, port, ending = (int(word) for word in sys.argv[1:])
store = dist.TCPStore("{host}", port, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("stage",))
pipeline = gpipe.Pipeline(nn.Sequential(nn.Linear(4, 4), Broken()), nn.functional.mse_loss, [1, 1], 4, mesh=mesh)
try:
    pipeline.train_step((torch.ones(8, 4), torch.ones(8, 4)))
except ValueError:
    caught = "the user's"
except gpipe.PeerFailure:
    caught = "the other's"
if ending == 1:
    pipeline.close()
if ending == 2:
    del pipeline
dist.destroy_process_group()
print(caught)
"""


@pytest.mark.parametrize("ending", range(3), ids=["at its end", "after close", "without the pipeline"])
def test_a_script_that_catches_a_failure_ends_in_peace(ending: int) -> None:
    """Three times: a thread that still waited inside of torch aborted five of six such scripts."""
    for _ in range(3):
        store = serve_store(LOOPBACK)
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SCRIPT.format(host=LOOPBACK)]
        scripts = [
            subprocess.Popen(
                [*command, str(rank), str(store.port), str(ending)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        ends = [(*script.communicate(timeout=60), script.returncode) for script in scripts]
        assert [status for _, _, status in ends] == [0, 0], ends
        assert [output.strip() for output, _, _ in ends] == ["the other's", "the user's"]
