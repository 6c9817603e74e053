"""How many images a second one GPU trains on, with and without recomputation and torch.compile, beside torchgpipe's.

    python experiments/image_throughput.py --torchgpipe FOLDER

AmoebaNet-B (18,512) at 480 px and AmoebaNet-D (18,256) at 224 px in bfloat16 autocast, channels last, one stage, four
micro-batches; a step is forward, backward and SGD. FOLDER is a clone of torchgpipe's repository, whose benchmarks have
an AmoebaNet-D of 15.2 billion multiplications an image, ours has 14.2; without it its rows say that they were not run.
The batch is halved until all rows of a setting fit; what did not stays as a row. Appends a record to Table 4's in
reproductions/ and renders its README. Needs a GPU; --small prints a record of tiny models on the CPU instead.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from amoebanet_steps import NUM_CLASSES, NUM_MICROBATCHES, Step, memory_format, our_step, torchgpipe_step
from torch import nn

from gpipe.results.records import make_record
from gpipe.results.reproduction import add_record

ROOT = Path(__file__).parent.parent


class Setting(NamedTuple):
    """A model, its images, and the first batch size to try."""

    variant: str
    num_layers: int
    num_filters: int
    image_size: int
    batch_size: int


FULL = (Setting("b", 18, 512, 480, 128), Setting("d", 18, 256, 224, 512))
SMALL = (Setting("b", 3, 8, 64, 4), Setting("d", 3, 16, 224, 4))  # torchgpipe's classifier fits 224 px alone


def measure(step: Step, modules: nn.Module, images: torch.Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Return images/s in the median step, the peak of the GPU's memory, and the number of parameters."""
    is_cuda = images.device.type == "cuda"
    labels = torch.randint(NUM_CLASSES, (len(images),), device=images.device)
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.0)  # the labels are random, and the loss must stay finite
    seconds = []
    for _ in range(options.warm_up + options.steps):
        start = time.perf_counter()
        with torch.autocast(images.device.type, torch.bfloat16):
            step(images, labels)
        optimizer.step()
        optimizer.zero_grad()
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "images_per_second": len(images) / statistics.median(seconds[options.warm_up :]),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
        "num_parameters": sum(parameter.numel() for parameter in modules.parameters()),
    }


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Return whether the GPU's memory is the cause of an error, or of one that it came from."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or ran_out_of_memory(error.__cause__))


def try_batch(
    make: Callable[[], tuple[Step, nn.Module]], images: torch.Tensor, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure a model with a batch, and say whether it fits."""
    gc.collect()
    torch._dynamo.reset()
    if images.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        return {"outcome": "measured"} | measure(*make(), images, options)
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        return {"outcome": "out of memory"}


def rows_of(setting: Setting, mode: str, options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the rows of a model and a mode, at one batch size after the other until everything fits."""
    model, fixed = setting[:3], setting._asdict() | {"rematerialize": mode}
    ours, theirs = partial(our_step, *model, mode, device), partial(torchgpipe_step, *model[1:], mode, device)
    makers = {("ours", False): partial(ours, None), ("ours", True): partial(ours, options.backend)}
    if setting.variant == "d" and options.torchgpipe is None:
        yield fixed | {"code": "torchgpipe", "compiled": False, "outcome": "not run"}
    elif setting.variant == "d":
        makers = {("torchgpipe", False): theirs} | makers
    batch_size, fits = setting.batch_size, False
    while not fits and batch_size >= NUM_MICROBATCHES:
        images = torch.randn(batch_size, 3, setting.image_size, setting.image_size, device=device)
        images = images.contiguous(memory_format=memory_format(device))
        for (code, compiled), make in makers.items():
            row = fixed | {"batch_size": batch_size, "code": code, "compiled": compiled}
            row |= try_batch(make, images, options)
            print(row, file=sys.stderr, flush=True)
            yield row
            if not (fits := row["outcome"] == "measured"):
                break
        batch_size //= 2


def main() -> None:
    """Read the command line, measure, and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torchgpipe", type=Path, help="a clone of torchgpipe's repository")
    parser.add_argument("--steps", type=int, default=10, help="of each that count")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU; prints the record")
    options = parser.parse_args()
    if not options.small and not torch.cuda.is_available():
        raise SystemExit("not run: no GPU; --small tries the script on the CPU")
    if options.torchgpipe is not None:
        sys.path.insert(0, str(options.torchgpipe / "benchmarks" / "models"))
    if options.small:
        torch.set_num_threads(1)  # threads that share a core wait for each other
    torch.backends.cudnn.benchmark = True
    device, settings = torch.device("cpu" if options.small else "cuda"), SMALL if options.small else FULL
    modes = ("always", "never")
    # To try the script, each model in one mode is enough: compiling it takes most of the time.
    pairs = list(zip(settings, modes, strict=True)) if options.small else list(product(settings, modes))
    grid = [row for setting, mode in pairs for row in rows_of(setting, mode, options, device)]
    record = make_record(
        kind="measured", command=f"python {' '.join(sys.argv)}", experiment="image_throughput", seed=0,
        config={"num_microbatches": NUM_MICROBATCHES, "num_steps": options.steps, "backend": options.backend},
        results={"grid": grid}, gpus=[] if options.small else [torch.cuda.get_device_name()],
    )  # fmt: skip
    if options.small:
        print(json.dumps(asdict(record)))
        return
    add_record(ROOT, "table4_imagenet_and_transfer", record)


if __name__ == "__main__":
    main()
