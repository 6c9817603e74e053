"""Count the kernels, bytes and waits of a step on GPUs and on their host, with and without each optimisation.

    python -m experiments.device_work

Runs on the tests' simulated GPUs, so it needs no GPU, and nothing is timed. Half a minute. It counts:

- the averages of two replicas, awaited within the backward or at the end of the step: two stages, four GPUs;
- the loss of a micro-batch of 1,024 tokens with a vocabulary of 64,000, by separate operations or in one pass;
- a step of a small Transformer under autocast, with a copy of each weight per use or per step: two stages, eight
  micro-batches;
- a step of a small AmoebaNet without and with CUDA graphs: eight micro-batches.
"""

from typing import Any

from experiments.device_work import counts
from experiments.loss_cost import WAYS
from experiments.program import StudyProgram, track
from experiments.replica_wait import IN_BACKWARD, REPLICAS
from experiments.weight_copies import PER_STEP, PER_USE
from reproductions.table2_throughput.step_costs import DEVICE_WORK
from tests.simulated_cuda.machine import Machine

GRAPHS = "a CUDA graph per layer"
# What is counted, how it was and how it is, and what counts it: processes, a function and its arguments.
_CASES: list[tuple[str, str, int, Any, tuple[Any, ...]]] = [
    ("a step of two replicas", IN_BACKWARD, 4, counts.count_averaging, (True,)),
    ("a step of two replicas", REPLICAS, 4, counts.count_averaging, (False,)),
    *(
        (f"the loss of a micro-batch, {what}", way, 1, counts.count_loss, (what, number))
        for what in WAYS
        for number, way in ((1, "one by one"), (0, "one pass"))
    ),
    *(
        (f"a step under autocast, recomputing {mode}", way, 1, counts.count_step, (mode, way == PER_STEP))
        for mode in ("always", "never")
        for way in (PER_USE, PER_STEP)
    ),
    *(
        (f"a step of AmoebaNet-D (3,8), recomputing {mode}", way, 1, counts.count_images, (mode, way == GRAPHS))
        for mode in ("always", "never")
        for way in ("operation by operation", GRAPHS)
    ),
]


if __name__ == "__main__":
    program = StudyProgram(__doc__, {"table2_throughput": DEVICE_WORK.tables})
    program.parse()
    machine, rows = Machine(simulated=True), []
    for what, way, num_processes, function, arguments in track(_CASES, "cases"):
        found = machine.run(num_processes, function, *arguments)
        sums = {name: None if number is None else sum(one[name] for one in found) for name, number in found[0].items()}
        rows.append({"what": what, "way": way, **sums})
    machine.close()
    config = {
        "num_microbatches": counts.NUM_MICROBATCHES, "num_tokens": counts.NUM_TOKENS, "vocabulary_size":
        counts.VOCABULARY, "autocast": "bfloat16", "width": counts.WIDTH,
    }  # fmt: skip
    program.publish_record(DEVICE_WORK.make_record(config, {"rows": rows}, kind="simulated"))
