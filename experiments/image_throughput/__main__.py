"""Measure training on one GPU in images/s, with and without recomputation, compiled, as CUDA graphs, beside torchgpipe.

    python -m experiments.image_throughput --torchgpipe FOLDER

AmoebaNet-B (18,512) at 480 px and AmoebaNet-D (18,256) at 224 px in bfloat16 autocast, channels last, with one stage
and four micro-batches. A step is forward, backward and SGD. FOLDER is a clone of torchgpipe's repository. The
AmoebaNet-D of its benchmarks has 15.2 billion multiplications per image, ours has 14.2. Without FOLDER, its rows say
"not run". The batch is halved until all rows of a setting fit; rows that do not fit stay in the table. Needs a GPU,
except for --small, which measures tiny models.
"""

import sys
from itertools import product
from pathlib import Path

import torch

from experiments.image_throughput.amoebanet_steps import NUM_MICROBATCHES
from experiments.image_throughput.measurements import FULL, SMALL, measure_rows
from experiments.program import StudyProgram, track
from reproductions.table4_imagenet_and_transfer.tables import IMAGE_THROUGHPUT

CLAIM = "table4_imagenet_and_transfer"


if __name__ == "__main__":
    program = StudyProgram(__doc__, {CLAIM: IMAGE_THROUGHPUT.tables}, rounds=10, what_rounds_are="steps that count")
    parser = program.parser
    parser.add_argument("--torchgpipe", type=Path, help="a clone of torchgpipe's repository")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before those that count")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument(
        "--no-compile", dest="backend", action="store_const", const=None, help="leave torch.compile out"
    )
    parser.add_argument("--small", action="store_true", help="measure tiny models")
    options = program.parse()
    options.cuda_graphs = has_gpu = torch.cuda.is_available()
    if not options.small and not has_gpu:
        raise SystemExit("not run: no GPU; --small tries the script on the CPU")
    if options.torchgpipe is not None:
        sys.path.insert(0, str(options.torchgpipe / "benchmarks" / "models"))
    if options.small:
        program.require_folder("--small only tries the program")
        torch.set_num_threads(1)  # threads that share a core wait for each other
    torch.backends.cudnn.benchmark = True
    device, settings = torch.device("cuda" if has_gpu else "cpu"), SMALL if options.small else FULL
    modes = ("always", "never")
    # To try the script, one mode per model is enough: compilation takes most of the time.
    pairs = list(zip(settings, modes, strict=True)) if options.small else list(product(settings, modes))
    grid = [row for pair in track(pairs, "models and modes") for row in measure_rows(*pair, options, device)]
    config = {"num_microbatches": NUM_MICROBATCHES, "num_steps": options.rounds, "backend": options.backend}
    gpus = [torch.cuda.get_device_name()] if has_gpu else []
    program.publish_record(IMAGE_THROUGHPUT.make_record(config, {"grid": grid}, gpus=gpus))
