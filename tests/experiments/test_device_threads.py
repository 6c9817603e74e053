"""The study of a launching thread per GPU: it needs two GPUs, and its table has the median of the rounds' ratios."""

from reproductions.bubble.overheads import DEVICE_THREADS, device_threads
from tests.support.program_server import run_program


def test_a_machine_without_two_gpus_is_refused() -> None:
    done = run_program("experiments.device_threads")
    assert done.returncode == 2
    assert done.stderr.endswith("torch finds 0 GPUs here; the study needs two.\n")


def test_the_table_has_the_median_of_the_rounds_ratios() -> None:
    config = {"num_layers": 3, "num_filters": 8, "image_size": 64, "num_stages": 2, "num_microbatches": 4}
    seconds = {"one thread": [0.1, 0.2, 0.4], "a thread per device": [0.09, 0.1, 0.32]}
    record = DEVICE_THREADS.make_record(config, {"seconds": seconds})
    assert device_threads([record]).splitlines()[2:] == ["| AmoebaNet-D (3,8), 64 px | 2 | 4 | 200.0 | 0.80 |"]
