"""Count the cost of autocast's copies of weights in a step: one per step and stage, and one per use.

    python -m experiments.weight_copies

Steps in bfloat16 of a small Transformer and a small AmoebaNet on the CPU: two stages in one process, eight
micro-batches. Counted are all operations, the bytes that they read and write, and all live tensors. One copy per use is
torch's autocast without its cache. A third variant lets the Transformer's layers take their input in bfloat16. Half a
minute; nothing is timed.
"""

import copy
from itertools import product
from typing import Any

import torch
from torch import Tensor

import gpipe
from experiments.planned_memory.small_models import MICROBATCH_SIZE, SmallModel, make_image_model, make_text_model
from experiments.program import StudyProgram, track
from gpipe.pipeline.microbatch import Payload
from gpipe.planning.ledger import Ledger
from reproductions.table2_throughput.step_costs import WEIGHT_COPIES

NUM_MICROBATCHES, NUM_STAGES = 8, 2
PER_USE, PER_STEP, STATES = "one copy per use", "one copy per step", "one copy per step, inputs of layers in bfloat16"


class Counts(Ledger):
    """What a step does: all operations, and among them the conversions of weights."""

    def __init__(self, pipeline: gpipe.Pipeline) -> None:
        super().__init__([*pipeline.layers.parameters(), *pipeline.layers.buffers()])
        self.conversions = self.converted = 0
        self._weights = set(map(id, pipeline.layers.parameters()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten._to_copy.default and id(args[0]) in self._weights:
            self.conversions += 1
            self.converted += args[0].nbytes + result.nbytes
        return result


def count(model: SmallModel, way: str, mode: str) -> dict[str, Any]:
    """Make a step; return its counts."""
    layers = copy.deepcopy(model.layers)
    for layer in layers:
        layer.wants_low_precision = way == STATES or None  # type: ignore[assignment]
    half = len(layers) // 2
    pipeline = gpipe.Pipeline(layers, model.loss, [half, len(layers) - half], NUM_MICROBATCHES, rematerialize=mode)
    sent, send = [], pipeline.job.transfer.send

    def watch(task: Any, payload: Payload) -> None:
        sent.append(sum(tensor.nbytes for tensor in payload.tensors if isinstance(tensor, Tensor)))
        send(task, payload)

    pipeline.job.transfer.send = watch  # type: ignore[method-assign]
    batch = model.batch(MICROBATCH_SIZE * NUM_MICROBATCHES)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=way != PER_USE), Counts(pipeline) as counts:
        pipeline.train_step(batch)
    return {
        "model": model.title,
        "way": way,
        "rematerialize": mode,
        "conversions": counts.conversions,
        "converted_bytes_moved": counts.converted,
        "operations": len(counts.work),
        "bytes_moved": sum(one.bytes_moved for one in counts.work),
        "peak_bytes": counts.peak_bytes,
        "sent_bytes": sum(sent),
    }


if __name__ == "__main__":
    program = StudyProgram(__doc__, {"table2_throughput": WEIGHT_COPIES.tables})
    program.parse()
    torch.manual_seed(0)
    images, text = make_image_model(), make_text_model()
    ways = [(text, PER_USE), (text, PER_STEP), (text, STATES), (images, PER_USE), (images, PER_STEP)]
    cases = list(product(ways, ("always", "never")))
    rows = [count(model, way, mode) for (model, way), mode in track(cases, "steps")]
    config = {
        "num_microbatches": NUM_MICROBATCHES, "microbatch_size": MICROBATCH_SIZE, "num_stages": NUM_STAGES,
        "autocast": "bfloat16",
    }  # fmt: skip
    program.publish_record(WEIGHT_COPIES.make_record(config, {"rows": rows}))
