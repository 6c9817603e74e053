"""A script of a user's own that catches what its layer raised ends as it wants to."""

from pathlib import Path

import pytest

from gpipe.launch.store import LOOPBACK, serve_store
from tests.support.program_server import Program

pytestmark = pytest.mark.reliability
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
def test_a_script_that_catches_a_failure_ends_in_peace(ending: int, tmp_path: Path) -> None:
    """Three times: a thread that still waited inside of torch aborted five of six such scripts."""
    (script := tmp_path / "script.py").write_text(SCRIPT.format(host=LOOPBACK))
    for _ in range(3):
        store = serve_store(LOOPBACK)
        outputs = [tmp_path / f"output-{rank}.txt" for rank in range(2)]
        scripts = []
        for rank, output in enumerate(outputs):
            output.write_text("")
            words = (str(rank), str(store.port), str(ending))
            scripts.append(Program(script, *words, folder=tmp_path, output=output, finalizes=True, OMP_NUM_THREADS="1"))
        statuses = [program.wait(60) for program in scripts]
        said = [output.read_text() for output in outputs]
        assert statuses == [0, 0], said
        assert [text.splitlines()[-1] for text in said] == ["the other's", "the user's"]
