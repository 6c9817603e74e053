"""The recipes at the paper's scale: what they share, what they differ in, and that batch norm gets enough images."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose
from hydra.errors import ConfigCompositionException
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpipe.config import Autocast, ConfigError, ImagesConfig, RunConfig, to_plain, to_run
from gpipe.config.run import smallest_microbatch
from gpipe.data import open_image_set
from gpipe.data.epoch_loader import EpochLoader
from gpipe.data.images.catalogue import IMAGE_SETS
from gpipe.pipeline.microbatch import microbatch_sizes
from gpipe.planning.accelerator import find_accelerator
from gpipe.programs.precision import settle_precision

pytestmark = pytest.mark.usefixtures("composer")
CONF = Path(__file__).parents[2] / "conf"
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
SETS = ("cifar10", "cifar100", "stanford_cars", "oxford_pets", "food101", "fgvc_aircraft", "birdsnap")


@cache
def run_of(*overrides: str) -> RunConfig:
    return to_run(compose("train", overrides=list(overrides)))


def transfer(name: str = "transfer", *overrides: str) -> dict[str, Any]:
    return to_plain(run_of(f"+experiment={name}", "init_from=null", *overrides))


@pytest.mark.parametrize("name", ["transfer", "transfer_table"])
def test_fine_tuning_differs_from_imagenet_in_data_and_evaluation_only(name: str) -> None:
    imagenet = to_plain(run_of("+experiment=amoebanet_imagenet"))
    for data in SETS:
        found = transfer(name, f"data={data}")
        differing = {key for key in imagenet if found[key] != imagenet[key]}
        assert differing == {"name", "data", "trainer"} | ({"reproduction"} if name == "transfer_table" else set())
        changed = {key for key, value in imagenet["trainer"].items() if found["trainer"][key] != value}
        assert changed == {"evaluation"}
        assert found["trainer"]["evaluation"] == {**imagenet["trainer"]["evaluation"], "every_epochs": 10}
        expected = {
            "name": data,
            "image_size": 480,
            "channels": 3,
            "flip": True,
            "crop_scale": None,
            "center_crop": 1.0,
        }
        assert expected.items() <= found["data"].items()
        assert found["data"]["cutout"] > 0 == found["data"]["color_jitter"] and found["data"]["policy"] == "none"
        assert found["data"]["num_classes"] == IMAGE_SETS[data].table.num_classes


def test_the_alternative_recipe_is_that_of_kornblith() -> None:
    run = transfer("transfer_kornblith")
    expected = {
        "model": {"variant": "b", "auxiliary_head": False, "dropout": 0.0, "drop_path": 0.0},
        "optimizer": {"name": "sgd", "momentum": 0.9, "clip_norm": None},
        "schedule": {"name": "cosine", "warm_up_epochs": 0.0},
        "ema": {"decay": None},
        "trainer": {"batch_size": 256, "max_steps": 20_000, "label_smoothing": 0.0},
    }
    assert {part: {key: run[part][key] for key in values} for part, values in expected.items()} == expected


@pytest.mark.parametrize(("experiment", "batch_size"), [("transfer_kornblith", 256), ("transfer_kornblith_laptop", 64)])
def test_kornbliths_momentum_of_batch_norm_follows_from_the_steps_of_an_epoch(experiment: str, batch_size: int) -> None:
    for data in (*SETS, "digits", "mnist_5k"):
        table = IMAGE_SETS[data].table
        num_images = table.num_train_images if table else len(open_image_set(data, "train"))
        found = transfer(experiment, f"data={data}")
        steps = num_images // batch_size
        assert found["trainer"]["batch_size"] == batch_size
        assert 1 - found["model"]["batch_norm_momentum"] == pytest.approx(max(1 - 10 / steps, 0.9)), data
        reaches = found["trainer"]["num_epochs"] * steps >= (found["trainer"]["max_steps"] or 0)
        assert reaches or data not in SETS


def test_a_set_of_unknown_size_needs_its_momentum() -> None:
    with pytest.raises(
        Exception, match=r"from which model\.batch_norm_momentum follows: set model\.batch_norm_momentum"
    ):
        transfer("transfer_kornblith", "data=random_images")
    assert transfer("transfer_kornblith", "data=random_images", "model.batch_norm_momentum=0.05")


class Indices(EpochLoader[NDArray[np.int64]]):
    """Yields which examples are in this replica's part of each mini-batch."""

    def _read(self) -> list[NDArray[np.int64]]:
        return [own for _, own in self._parts()]


@pytest.mark.parametrize(
    ("experiment", "data"),
    [
        ("amoebanet_imagenet", "imagenet"),
        *((name, data) for name in ("transfer", "transfer_kornblith") for data in SETS),
    ],
)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_every_micro_batch_of_an_epoch_has_images_enough(experiment: str, data: str, num_replicas: int) -> None:
    replicas = [f"launch.num_replicas={num_replicas}"] if num_replicas > 1 else []
    run = run_of(f"+experiment={experiment}", "init_from=null", f"data={data}", *replicas)
    table = IMAGE_SETS[data].table
    assert table is not None
    sizes = set()
    for replica in range(num_replicas):
        loader = Indices(
            table.num_train_images, run.trainer.batch_size // num_replicas, 0, shuffle=True, replica_index=replica,
            num_replicas=num_replicas, drop_last=True, noun="image",
        )  # fmt: skip
        sizes |= set(map(len, loader))
    smallest = min(min(microbatch_sizes(size, run.pipeline.num_microbatches)) for size in sizes)
    assert smallest >= to_plain(run)["model"]["min_microbatch_size"] == 8


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num_examples=st.integers(1, 5000), num_microbatches=st.integers(1, 300))
def test_the_smallest_micro_batch_is_that_of_the_pipeline(num_examples: int, num_microbatches: int) -> None:
    assert smallest_microbatch(num_examples, num_microbatches) == min(microbatch_sizes(num_examples, num_microbatches))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.batch_size=32"], "trainer.batch_size=32 makes micro-batches of 1 images with"),
        (["pipeline.num_microbatches=256"], "makes micro-batches of 4 images with pipeline.num"),
        (["launch.num_replicas=8"], "of 4 images on each of launch.num_replicas=8 with"),
        (["trainer.batch_size=250"], "makes micro-batches of 7 images"),  # 26 of 8, 6 of 7
        (["trainer.batch_size=7"], "makes micro-batches of 1 images"),
    ],
)
def test_micro_batches_too_small_for_batch_norm_are_refused_with_the_remedy(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_of("+experiment=amoebanet_imagenet", *overrides)
    message = str(caught.value)
    assert said in message and "at least model.min_microbatch_size=8" in message
    share = "set pipeline.synchronize_batch_norm=true, " if "replicas" in said else ""
    assert message.endswith(f"raise trainer.batch_size, {share}or lower pipeline.num_microbatches.")
    assert run_of("+experiment=amoebanet_imagenet", *overrides, "model.min_microbatch_size=1")
    assert run_of("+experiment=amoebanet_imagenet", "trainer.batch_size=280")  # 24 micro-batches of 9 images, 8 of 8


def test_replicas_that_share_statistics_count_together() -> None:
    overrides = ["+experiment=amoebanet_imagenet", "launch.num_replicas=8", "pipeline.synchronize_batch_norm=true"]
    assert run_of(*overrides)
    with pytest.raises(ConfigError, match=r"of 8 images over all launch\.num_replicas=8 with"):
        run_of(*overrides, "pipeline.num_microbatches=128", "model.min_microbatch_size=9")


@pytest.mark.parametrize(
    "experiment", [name for name in EXPERIMENTS if not name.endswith("_laptop") or name.startswith(("amoeba", "bil"))]
)
def test_an_experiment_with_two_replicas_has_the_processes_for_them(experiment: str) -> None:
    overrides = [f"+experiment={experiment}", "init_from=null"]
    one, two = run_of(*overrides), run_of(*overrides, "launch.num_replicas=2")
    assert one.launch.num_processes == one.pipeline.num_stages
    assert two.launch.num_processes == 2 * two.pipeline.num_stages
    launched, alone = to_plain(two), to_plain(one)
    keeps_tokens = experiment == "batch_size"  # of its micro-batches, so that M is smaller
    assert {key for key in alone if launched[key] != alone[key]} == {"launch", *(["pipeline"] if keeps_tokens else [])}


@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if not name.endswith("_laptop")])
def test_on_an_h100_every_recipe_multiplies_in_bfloat16_and_has_the_channels_of_images_last(experiment: str) -> None:
    run = run_of(f"+experiment={experiment}", "init_from=null")
    trainer = settle_precision(run, find_accelerator("h100")).trainer
    assert (trainer.autocast, trainer.channels_last) == (Autocast.bfloat16, isinstance(run.data, ImagesConfig))


@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if name.endswith("_laptop")])
def test_on_a_laptop_every_recipe_computes_in_float32(experiment: str) -> None:
    run = run_of(f"+experiment={experiment}", "init_from=null")
    trainer = settle_precision(run, find_accelerator("cpu")).trainer
    assert (trainer.autocast, trainer.channels_last) == (Autocast.none, False)


@pytest.mark.parametrize(
    ("overrides", "num_gpus"),
    [
        (["+experiment=amoebanet_imagenet"], 4),
        (["+experiment=amoebanet_imagenet", "launch.num_replicas=2"], 8),
        (["+experiment=amoebanet_imagenet", "launch=one_process"], 4),
        (["+experiment=amoebanet_imagenet", "launch=one_process", "launch.gpus_per_node=2"], 2),
        (["+experiment=amoebanet_imagenet", "launch.device=cpu"], 0),
        (["+experiment=transformer_multilingual", "model=translation_t64_16384_32", "launch.gpus_per_node=null"], 16),
        (["pipeline=interleaved", "launch=process_per_stage", "launch.num_replicas=3", "trainer.batch_size=96"], 6),
        ([], 2),
    ],
)
def test_a_job_on_slurm_has_a_gpu_for_each_process_or_stage(overrides: list[str], num_gpus: int) -> None:
    composed = compose("train", overrides=["hydra/launcher=slurm", *overrides], return_hydra_config=True)
    assert composed.hydra.launcher.gpus_per_node == num_gpus


def test_a_job_on_slurm_that_needs_more_gpus_than_a_node_has_is_refused() -> None:
    overrides = ["hydra/launcher=slurm", "+experiment=amoebanet_imagenet", "launch.num_replicas=4"]
    message = r"a job of 16 processes .* a node has 8 .* one torchrun per node"
    with pytest.raises(ConfigCompositionException, match=message):
        compose("train", overrides=overrides, return_hydra_config=True)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_papers_experiments_have_the_papers_pipeline(experiment: str) -> None:
    """GPipe's schedule, and nothing that is left to the planner but the cut: else the settings would be refused."""
    pipeline = run_of(f"+experiment={experiment}", "init_from=null").pipeline
    assert pipeline.schedule.value == "gpipe" and pipeline.stages_per_device == 1


@pytest.mark.parametrize("batch_size", [1_024, 4_096, 16_384])
def test_with_the_examples_fixed_every_mini_batch_reads_as_many_tokens_and_is_evaluated_as_often(
    batch_size: int,
) -> None:
    run = run_of("+experiment=batch_size_examples_laptop", f"trainer.batch_size={batch_size}")
    steps, evaluation = run.trainer.max_steps, run.trainer.evaluation
    assert steps is not None and evaluation.every_steps is not None
    assert 0 <= 614_400 - steps * batch_size < batch_size
    assert 10 <= steps // evaluation.every_steps <= 12 and evaluation.patience is None
    assert run.schedule.warm_up_steps == 10 < steps
    steps_fixed = run_of("+experiment=batch_size_laptop", f"trainer.batch_size={batch_size}")
    assert steps_fixed.trainer.max_steps == 150


@pytest.mark.parametrize("num_replicas", [1, 2, 8])
@pytest.mark.parametrize(("experiment", "num_tokens"), [("batch_size", 4096), ("batch_size_laptop", 1024)])
def test_micro_batches_of_table_5_have_as_many_tokens_with_replicas(
    experiment: str, num_tokens: int, num_replicas: int
) -> None:
    words = f"+experiment={experiment}", f"launch.num_replicas={num_replicas}", "trainer.batch_size=1000000"
    num_microbatches = run_of(*words).pipeline.num_microbatches
    assert num_microbatches == 1_000_000 // (num_replicas * num_tokens)
    assert num_tokens <= 1_000_000 / num_replicas / num_microbatches < 1.02 * num_tokens


@pytest.mark.parametrize("num_images", [50, 100, 500])
def test_transfers_with_few_images_have_mini_batches_and_as_many_steps_whatever_their_number(num_images: int) -> None:
    overrides = [f"data.max_images={num_images}", "data.validation_images=100", "init_from=null"]
    run = run_of("+experiment=transfer_few_laptop", "data=digits", *overrides)
    epoch = num_images // run.trainer.batch_size
    assert epoch >= 1 and run.trainer.max_steps == 400 <= epoch * run.trainer.num_epochs
    assert run.trainer.evaluation.statistics_batches == 1 and run.schedule.warm_up_steps == 20


@pytest.mark.parametrize("experiment", ["deep_training", "deep_training_laptop"])
def test_gradients_of_deep_trainings_are_not_clipped_and_the_training_goes_on_after_the_warm_up(
    experiment: str,
) -> None:
    run = run_of(f"+experiment={experiment}")
    # A limit that is never reached logs the norm; the deepest models on record stay below 10.
    assert run.optimizer.clip_norm is not None and run.optimizer.clip_norm >= 1e9
    assert run.trainer.max_steps is not None and run.schedule.warm_up_steps is not None
    assert run.trainer.max_steps >= 2 * run.schedule.warm_up_steps
