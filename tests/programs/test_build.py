"""Settings become the objects that they describe."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose

from gpipe.config import ConfigError, to_run
from gpipe.programs.build import build_layers, build_pipeline, build_tracker, build_trainer
from gpipe.programs.layout import share_layout
from gpipe.programs.workloads import workload_of
from gpipe.training.endings import Stopped
from gpipe.training.trainer import Trainer
from tests.programs.small_runs import ALONE, LANGUAGE_MODEL, SMALL, TRANSLATION, run_of

pytestmark = pytest.mark.usefixtures("composer")


def trainer_of(folder: Path, *overrides: str) -> Trainer:
    run = run_of(*overrides)
    layers = build_layers(run)
    pipeline = build_pipeline(run, layers, share_layout(run, layers, ALONE), ALONE)
    with build_tracker(run, folder, [], enabled=False) as tracker:
        return build_trainer(run, pipeline, ALONE, folder, tracker, lambda timeline: None)


def test_the_model_is_described_without_memory() -> None:
    layers = build_layers(run_of("+experiment=amoebanet_imagenet", "trainer.batch_size=1024"))
    assert all(parameter.is_meta for parameter in layers.parameters())


FINE_TUNED = ("seed=3", "init_from=elsewhere")


@pytest.mark.parametrize(
    ("model", "softmax"),
    [(SMALL, "fully_connected.weight"), ((*SMALL[1:], "model=timm", "model.name=test_resnet"), "fc.weight")],
    ids=["ours", "timm"],
)
def test_a_softmax_layer_drawn_anew_is_not_the_one_that_a_run_with_the_same_seed_began_with(
    model: tuple[str, ...], softmax: str
) -> None:
    drawn = []
    for words in (["seed=3"], FINE_TUNED, [*FINE_TUNED, "pipeline.num_stages=2"]):
        run = to_run(compose("train", overrides=[*model, *words]))
        layers = build_layers(run)
        pipeline = build_pipeline(run, layers, share_layout(run, layers, ALONE), ALONE)
        drawn += [value for name, value in pipeline.layers.state_dict().items() if name.endswith(softmax)]
        pipeline.close()
    scratch, tuned, tuned_in_two_stages = drawn
    assert not (tuned == scratch).any()
    assert torch.equal(tuned, tuned_in_two_stages), "the draw does not depend on the number of stages"


def test_two_fine_tunings_in_a_row_with_one_seed_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ("trainer.max_steps=1", "trainer.evaluation.every_epochs=null", "schedule.warm_up_epochs=0")
    for name in ("first", "second", "third", "fourth"):
        (tmp_path / name).mkdir()
    trainer_of(tmp_path / "first", *short).train()
    trainer_of(tmp_path / "second", *short, f"init_from={tmp_path / 'first'}").train()
    assert "warning" not in capsys.readouterr().out
    trainer_of(tmp_path / "third", *short, f"init_from={tmp_path / 'second'}")
    assert "warning: " in (said := capsys.readouterr().out) and "was fine-tuned with seed=0 too, so this" in said
    trainer_of(tmp_path / "fourth", *short, f"init_from={tmp_path / 'second'}", "seed=1")
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "is_replaced"), [(SMALL, True), (LANGUAGE_MODEL, False), (TRANSLATION, False)], ids=["images", "lm", "mt"]
)
def test_the_softmax_layer_of_images_is_for_other_classes_and_that_of_text_for_the_same_tokens(
    model: tuple[str, ...], is_replaced: bool
) -> None:
    workload = workload_of(to_run(compose("train", overrides=list(model))))
    layers = torch.nn.ModuleDict({str(index): layer for index, layer in enumerate(workload.layers())})
    assert bool(workload.replaced(layers, {})) == is_replaced


def test_the_peak_learning_rate_follows_the_batch_size(tmp_path: Path) -> None:
    overrides = ["optimizer=rmsprop", "schedule.name=constant", "schedule.warm_up_epochs=0"]
    trainer = trainer_of(tmp_path, *overrides, "trainer.batch_size=20")
    assert trainer.learning_rate(0) == pytest.approx(0.00125 * 20)
    assert trainer_of(tmp_path, *overrides, "optimizer.times_batch_size=false").learning_rate(0) == 0.00125


def test_a_step_to_profile_that_training_does_not_reach_is_refused(tmp_path: Path) -> None:
    trainer_of(tmp_path, "trainer.max_steps=3", "trainer.profile_step=2")
    with pytest.raises(
        ConfigError, match=r"^trainer\.profile_step is 3, expected less than the 3 steps of the training"
    ):
        trainer_of(tmp_path, "trainer.max_steps=3", "trainer.profile_step=3")


WARM_UP = ("schedule.warm_up_epochs=0", "schedule.warm_up_steps=100000", "trainer.num_epochs=1")


@pytest.mark.parametrize("curve", ["cosine", "exponential"])
def test_a_warm_up_that_max_steps_cuts_short_is_a_warning(
    curve: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_of(tmp_path, *WARM_UP, f"schedule.name={curve}", "trainer.max_steps=3")
    assert (
        "warning: schedule.warm_up_steps=100000 gives 100000 warm-up steps, but training has 3 (trainer.max_steps=3), "
        "so the learning rate only rises." in capsys.readouterr().out
    )
    rates = [trainer.learning_rate(step) for step in range(3)]
    assert rates == sorted(set(rates))


def test_a_cosine_whose_warm_up_is_longer_than_its_epochs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        ConfigError, match=r"gives 100000 warm-up steps, but training has \d+ \(trainer\.num_epochs=1\)"
    ):
        trainer_of(tmp_path, *WARM_UP, "schedule.name=cosine", "trainer.max_steps=null")
    with pytest.raises(ConfigError, match=r"schedule\.warm_up_epochs=1\.5 gives \d+ warm-up steps"):
        trainer_of(tmp_path, *WARM_UP[2:], "schedule.name=cosine", "schedule.warm_up_epochs=1.5")
    capsys.readouterr()
    trainer_of(tmp_path, *WARM_UP, "schedule.name=exponential")
    assert "(trainer.num_epochs=1), so the learning rate only rises." in capsys.readouterr().out


def test_a_warm_up_that_fits_is_no_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer_of(tmp_path, "schedule.warm_up_epochs=0", "schedule.warm_up_steps=3", "trainer.max_steps=3")
    assert "warm-up" not in capsys.readouterr().out


def test_settings_reach_the_optimiser_and_the_average(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, "optimizer=rmsprop", "optimizer.decay=0.8", "optimizer.clip_norm=2", "ema.decay=null"
    )
    assert {group["alpha"] for group in trainer.optimizer.param_groups} == {0.8}
    assert trainer.max_gradient_norm == 2
    assert trainer.ema is None


def test_autocast_and_the_memory_format_reach_the_layers(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "trainer.autocast=bfloat16", "trainer.channels_last=true")
    with trainer.autocast():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    kernels = [parameter for parameter in trainer.pipeline.parameters() if parameter.ndim == 4]
    assert all(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels)


@pytest.mark.parametrize(
    ("model", "tries"), [(SMALL, True), (LANGUAGE_MODEL, True), (TRANSLATION, False)], ids=["images", "tokens", "text"]
)
def test_cudnn_tries_kernels_where_shapes_stay_and_bits_may_differ(model: tuple[str, ...], tries: bool) -> None:
    for deterministic in (False, True):
        run = to_run(compose("train", overrides=[*model, f"trainer.deterministic={str(deterministic).lower()}"]))
        layers = build_layers(run)
        build_pipeline(run, layers, share_layout(run, layers, ALONE), ALONE).close()
        assert torch.backends.cudnn.benchmark is (tries and not deterministic)


def test_training_images_are_mixed_and_counted_and_test_images_are_left_alone(tmp_path: Path) -> None:
    overrides = ["data.mixup=0.8", "data.cutmix=1", "data.random_erasing=0.25"]
    trainer = trainer_of(tmp_path, *overrides)
    for loader in (trainer.train_loader, trainer.statistics_loader):
        images, targets = next(iter(loader))
        assert images.shape == (16, 1, 32, 32) and targets.shape == (16, 10) and targets.is_floating_point()
        assert trainer.count_targets(targets) == 16
    assert trainer.count_targets(torch.arange(16)) == 16
    test_images, labels = next(iter(trainer.evaluation_loaders["test"]))
    plain_images, plain_labels = next(iter(trainer_of(tmp_path).evaluation_loaders["test"]))
    assert torch.equal(test_images, plain_images) and torch.equal(labels, plain_labels)


def test_few_images_are_trained_on_and_the_validation_images_are_evaluated_first(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "data.max_images=50", "data.validation_images=20", "seed=3")
    counts = {name: sum(len(labels) for _, labels in found) for name, found in trainer.evaluation_loaders.items()}
    assert counts == {"valid": 20, "test": 1_000} and list(counts) == ["valid", "test"], "the first set's figures count"
    assert len(trainer.train_loader) == 3, "of 16 images each; two are left out"
    for other in ("seed=3", "seed=4"):
        again = trainer_of(tmp_path, "data.validation_images=20", other).evaluation_loaders["valid"]
        images, same = (next(iter(loader))[0] for loader in (trainer.evaluation_loaders["valid"], again))
        assert torch.equal(images, same) == (other == "seed=3")
    assert list(trainer_of(tmp_path).evaluation_loaders) == ["test"]


def test_more_images_than_there_are_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"but fashion_mnist_embedded has 6,000 training images: lower them"):
        trainer_of(tmp_path, "data.max_images=5990", "data.validation_images=20")


def test_a_number_of_classes_that_the_data_do_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.num_classes is 9, but fashion_mnist_embedded has 10"):
        trainer_of(tmp_path, "data.num_classes=9")


def test_a_transformers_settings_and_vocabulary_reach_its_layers_loss_and_loaders(tmp_path: Path) -> None:
    tokens = ("model=transformer_lm_small", "data=random_tokens", "data.vocabulary_size=40", "data.sequence_length=5")
    overrides = [*tokens, "model.num_layers=2", "trainer.batch_size=6", "trainer.checkpoints.keep=null"]
    run = to_run(compose("train", overrides=["tracking=disabled", *overrides]))
    layers = build_layers(run)
    assert len(layers) == 4 and all(parameter.is_meta for parameter in layers.parameters())
    assert (layers[0].num_embeddings, layers[-1].out_features) == (40, 40)
    pipeline = build_pipeline(run, layers, share_layout(run, layers, ALONE), ALONE)
    with build_tracker(run, tmp_path, [], enabled=False) as tracker:
        trainer = build_trainer(run, pipeline, ALONE, tmp_path, tracker, lambda timeline: None)
    inputs, targets = next(iter(trainer.train_loader))
    assert inputs is not None and inputs.shape == targets.shape == (6, 5)
    assert workload_of(run).loss_weight(targets) == 30
    assert (trainer.examples, trainer.set_drop_path, trainer.keep_checkpoints) == ("sequences", None, None)


def test_a_run_that_saves_nothing_more_goes_on_from_what_it_has_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    length = ("schedule.warm_up_epochs=0", "trainer.max_steps=3", "trainer.evaluation.every_epochs=null")
    first = trainer_of(tmp_path, *length)
    first.asked_to_stop = lambda: "SIGTERM" if first.pipeline.step else None
    with pytest.raises(Stopped, match="after step 2: repeat the command to resume"):
        first.train()
    again = trainer_of(tmp_path, *length, "trainer.checkpoints.keep=null")
    assert again.pipeline.step == 2 and "resuming after step 2" in capsys.readouterr().out
    assert again.train().num_steps == 3
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000002"]
    folder = tmp_path / "checkpoints"
    assert f"warning: training ended after step 3, but the newest checkpoint in {folder} is of step 2, because " in (
        capsys.readouterr().out
    )


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which has no checkpoint"):
        trainer_of(tmp_path, f"trainer.resume_from={tmp_path / 'nowhere'}")


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "train"),
        (["+experiment=short_runs_laptop", "tracking=online", "launch.num_threads=1"], "train"),
        (["optimizer.learning_rate=0.1", "seed=2", "hydra.run.dir=x"], "learning_rate=0.1 seed=2"),
        (["init_from=" + 80 * "a"], "init_from=" + 51 * "a" + "..."),
    ],
)
def test_a_run_is_named_after_what_distinguishes_it(
    overrides: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("gpipe.programs.build.Tracker", lambda folder, **names: given.update(names))
    build_tracker(run_of(), tmp_path, overrides, enabled=True)
    assert (given["name"], given["group"]) == (name, "train")
    assert given["tags"] == ["amoebanet", "fashion_mnist_embedded", "K=2", "M=8"]
    assert given["config"]["command"].startswith("python train.py") and given["config"]["packages"]["torch"]
