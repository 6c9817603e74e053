"""Plan your own model for GPUs that you do not have: the cut, the memory and the seconds of a step.

    python examples/plan_own_model.py

Nothing is computed or allocated: the model is on the meta device, and a roofline models the GPUs.
"""

import torch
from torch import nn
from torch.nn import functional as F

from gpipe.planning.accelerator import Speed, find_accelerator
from gpipe.planning.cut import Cutter
from gpipe.planning.planner import Planner
from gpipe.planning.profile import LayerProfile, profile_layers
from gpipe.planning.report import print_plan
from gpipe.planning.step import Setting

NUM_TOKENS, WIDTH = 512, 4096

with torch.device("meta"):
    blocks = [nn.TransformerEncoderLayer(WIDTH, 32, 4 * WIDTH, batch_first=True) for _ in range(24)]
    layers = nn.Sequential(nn.Linear(256, WIDTH), *blocks, nn.Linear(WIDTH, 256))


def profile(microbatch_size: int) -> list[LayerProfile]:
    """Describe each layer, and the loss, for a micro-batch of this size."""
    example = torch.empty(microbatch_size, NUM_TOKENS, 256, device="meta")
    return profile_layers(layers, F.mse_loss, (example, example))


h100 = find_accelerator("h100")
speed = Speed.of(h100, "float32")
planner = Planner(profile, Cutter("seconds", "step", speed), batch_size=256, accelerator=h100, speed=speed)
for schedule in ("gpipe", "1f1b", "zb_h1"):
    # Adam keeps two numbers per parameter.
    setting = Setting(num_stages=4, num_microbatches=32, schedule=schedule, rematerialize="never", state_ratio=2.0)
    print_plan(planner, planner.plan(setting), "my model")
