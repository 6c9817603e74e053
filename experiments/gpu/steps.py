"""The steps that run on GPUs: the tests of the device path, and every measurement that needs GPUs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

TORCHGPIPE = "https://github.com/kakaobrain/torchgpipe", "v0.0.7"
"""The repository and the version of the code that ours is measured beside."""

_CLONE = "torchgpipe"
_PYTEST = "-m", "pytest", "-p", "no:cacheprovider", "-k"
_STEPS, _KERNELS = "tests/simulated_cuda/test_steps.py", "tests/pipeline/layers/test_first_forward.py"
_GRAPHS = "tests/simulated_cuda/test_cuda_graphs.py"  # not for the sanitizer, which takes a capture for the work itself
_THREADS = "tests/simulated_cuda/test_device_threads.py"  # which need several GPUs
# It takes what any GPU computes for work of the current one.
_SANITIZER = {"TORCH_CUDA_SANITIZER": "1", "CUDA_VISIBLE_DEVICES": "0"}
_TABLES = "train.py", "-m"
_SHORT = (
    "pipeline.num_stages=2", "pipeline.num_microbatches=2", "trainer.max_steps=2", "trainer.num_untimed_steps=1",
    "trainer.timeline_every_steps=null", "launch.device=cuda", "launch.pin_cores=false",
)  # fmt: skip
_SMALL_LAYERS = (
    "--layers", "1", "--width", "64", "--batch", "2", "--sequence", "1", "--no-compile", "--rounds", "1",
)  # fmt: skip
_SMALL_IMAGES = (
    "+experiment=table2_amoebanet_d_laptop", "model.num_layers=3", "model.num_filters=8", "data.image_size=32", *_SHORT,
)  # fmt: skip
_SMALL_TEXT = (
    "+experiment=table2_transformer_lm_laptop", "model.num_layers=2", "model.model_size=32",
    "model.feedforward_size=64", "data.vocabulary_size=40", "data.sequence_length=8", *_SHORT,
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One command, which starts anew where it did not end; a sweep goes on.

    Attributes:
        name: of the step, and of its folder.
        words: the program and its arguments; {folder} is the step's folder, and {steps} the folder of all.
        minutes: after which it is ended.
        claim: the folder of reproductions/ that its records go to; None if it makes none.
        sweep: the experiment's name, where the step is a sweep.
        num_gpus: how many it needs at least.
        variables: of its environment, beside those of this process.
        is_python: whether the program is Python's.
    """

    name: str
    words: tuple[str, ...]
    minutes: float
    claim: str | None = None
    sweep: str | None = None
    num_gpus: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)
    is_python: bool = True


def list_steps(*, small: bool, torchgpipe: tuple[str, str] = TORCHGPIPE) -> list[Step]:
    """Return the steps in their order: on one GPU they take half an hour at most.

    Args:
        small: take sizes that a test can afford, and no torch.compile.
        torchgpipe: the repository to clone, and the version.
    """
    repository, version = torchgpipe
    clone = "git", "clone", "--quiet", "--depth", "1", "--branch", version, repository, "{folder}/clone"
    tests = (*_PYTEST, "real and (autocast or checkpoint or refused or Dropout)" if small else "real", _STEPS)
    sizes = _SMALL_LAYERS if small else ()
    rounds = ("--rounds", "1") if small else ()
    return [
        Step("tests", (*tests, _GRAPHS, _THREADS, _KERNELS), 3),
        Step("tests_with_sanitizer", tests, 3, variables=_SANITIZER),
        _study("table1_capacity", "table1_model_size", 9, "--measure-only", *(["--small"] if small else [])),
        _study("transformer_utilization", "table2_throughput", 4, *sizes),
        _study(
            "checkpoint_cost", "bubble", 3, "--device", "cuda", *(["--width", "32"] if small else []), *rounds
        ),
        Step(_CLONE, clone, 1, is_python=False),
        _study(
            "image_throughput", "table4_imagenet_and_transfer", 7, "--no-compile", "--torchgpipe",
            f"{{steps}}/{_CLONE}/clone", *(["--small", "--warm-up", "0"] if small else []), *rounds,
        ),
        _study("device_threads", "bubble", 5, *(["--small"] if small else []), *rounds, num_gpus=2),
        *_list_sweeps(small=small),
    ]  # fmt: skip


def _study(name: str, claim: str, minutes: float, *options: str, num_gpus: int = 1) -> Step:
    """Return the step of one of the other studies of this folder."""
    words = "-m", f"experiments.{name}", "--record", "{folder}", *options
    return Step(name, words, minutes, claim, num_gpus=num_gpus)


def _list_sweeps(*, small: bool) -> list[Step]:
    """Return the measured cells of Tables 2 and 3, and of the bubble where M is 4K or more.

    Those that need more GPUs than there are count as not run.
    """
    if small:
        both, images, text = _SMALL_IMAGES, _SMALL_IMAGES, _SMALL_TEXT
        equal, slow, long = "trainer.batch_size=4", (), ("trainer.timeline_every_steps=2",)
    else:
        both, images, text = (
            ("+experiment=table2_throughput",),
            ("+experiment=table2_amoebanet_d", "model.num_filters=128"),
            ("+experiment=table2_transformer_lm", "model.num_layers=24"),  # as deep as Table 3 has it
        )
        equal = "trainer.batch_size=128"
        slow = "pipeline.num_stages=2,4,8", "pipeline.num_microbatches=32", "trainer.autocast=none"  # as on a P100
        long = "pipeline.num_stages=2,4,8", "pipeline.num_microbatches=8,32", "model.num_layers=48"
    table3, through_host = ("name=table3_slow_links", *slow), {"NCCL_P2P_DISABLE": "1"}
    return [
        _sweep("table2", "table2_throughput", 40, *both),
        _sweep("table2_equal", "table2_throughput", 40, *both, equal),
        _sweep("table3_amoebanet", "table3_slow_links", 20, *images, *table3, **through_host),
        _sweep("table3_transformer", "table3_slow_links", 20, *text, *table3, **through_host),
        _sweep("bubble", "bubble", 20, *text, *long, "name=bubble"),
    ]


def _sweep(name: str, claim: str, minutes: float, *overrides: str, **variables: str) -> Step:
    words = *_TABLES, *overrides, "tracking=disabled", "hydra.sweep.dir={folder}/jobs"
    return Step(name, words, minutes, claim, claim, 2, variables)
