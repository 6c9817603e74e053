"""A wrong setting is refused in one sentence, before anything is built."""

import math
import re
from dataclasses import dataclass, fields, is_dataclass, replace

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from gpipe.config import ConfigError, ModelConfig
from tests.config.composition import refusal_of, run_of

pytestmark = pytest.mark.usefixtures("composer")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.num_filter=3", "num_filter"),
        ("trainer.batchsize=3", "batchsize"),
        ("seeds=1", "seeds"),
        ("+trainer.batchsize=3", "trainer.batchsize is unknown"),
        ("+pipelines.num_stages=3", "pipelines is unknown"),
        ("+experiment=amoebanet_imagnet", "amoebanet_imagnet"),
        ("model=amoebanet_e", "amoebanet_e"),
        ("optimizer.momentum=0.5", "momentum"),  # the default is adamw
        ("optimizer.epsilon=small", "small"),
        ("seed=1.5", "1.5"),
        ("pipeline.num_stages=two", "two"),
        ("pipeline.rematerialize=sometimes", "sometimes"),
        ("data.crop_scale=[a,b]", "a"),
        ("data.policy=mixup", "mixup"),
        ("trainer.dry_run=perhaps", "perhaps"),
    ],
)
def test_an_unknown_key_name_or_a_wrong_type_is_refused(override: str, said: str) -> None:
    assert said in refusal_of(override)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("pipeline.num_stages=0", "pipeline.num_stages is 0, expected a number from 1 to 4096"),
        ("pipeline.partitions=[3,4,2]", "pipeline.partitions is [3, 4, 2], expected 2 (pipeline.num_stages)"),
        (
            "pipeline.partitions=[[0,4],[4,9]]",
            "pipeline.partitions is [[0, 4], [4, 9]], expected a list of single values, or null: set pipe",
        ),
        ("pipeline.partitions=[9,0]", "pipeline.partitions is [9, 0], expected"),
        ("pipeline.timeout_seconds=0", "pipeline.timeout_seconds is 0.0, expected a number from 1 to 1000000"),
        ("pipeline.timeout_seconds=2e6", "pipeline.timeout_seconds is 2000000.0, expected a number from 1 to 1000000"),
        ("launch.num_processes=3", "launch.num_processes is 3, expected 1, or 2 for one process per stage"),
        ("pipeline.stages_per_device=2", "pipeline.stages_per_device is 2, expected 1 with pipeline.schedule=gpipe;"),
        ("pipeline.schedule=interleaved_1f1b", "pipeline.stages_per_device is 1, expected 2 or more, and a divisor"),
        ("launch.num_threads=0", "launch.num_threads is 0, expected a number from 1 to 4096, or null"),
        ("model.num_layers=4", "model.num_layers is 4, expected a multiple of 3"),
        ("model.dropout=1", "model.dropout is 1.0, expected a number from 0 to less than 1"),
        ("model.family=transformer", "model.family is transformer"),
        ("data.channels=2", "data.channels is 2, expected 1 (grey) or 3 (colour)"),
        ("data.crop_scale=[0.5]", "data.crop_scale is [0.5], expected [smallest, largest]"),
        ("data.crop_scale=[0.5,2]", "data.crop_scale is [0.5, 2.0], expected [smallest, largest] shares of the area"),
        ("data.crop_aspect=[2,1]", "data.crop_aspect is [2.0, 1.0], expected [smallest, largest]"),
        ("data.mean=[-0.1]", "data.mean is [-0.1], expected a number in [0, 1] for each of data.channels=1, or null"),
        ("data.std=[0]", "data.std is [0.0], expected a number in (0, 1] for each of data.channels=1, or null"),
        ("data.std=[1,1]", "data.std is [1.0, 1.0], expected a number in (0, 1] for each of data.channels=1, or null"),
        ("data.cutout=-0.1", "data.cutout is -0.1, expected a number from 0 to less than 1"),
        ("data.mixup=-1", "data.mixup is -1.0, expected 0 or more, or null"),
        ("data.random_erasing=1.1", "data.random_erasing is 1.1, expected a probability from 0 to 1, or null"),
        ("optimizer.learning_rate=0", "optimizer.learning_rate is 0.0, expected a number above 0"),
        ("optimizer.name=sgd", "optimizer.name is sgd"),
        ("schedule.decay_rate=0", "schedule.decay_rate is 0.0, expected a factor in (0, 1]"),
        ("ema.decay=1", "ema.decay is 1.0, expected"),
        ("trainer.max_steps=0", "trainer.max_steps is 0, expected 1 or more, or null"),
        ("trainer.evaluation.every_epochs=0", "trainer.evaluation.every_epochs is 0, expected 1 or more, or null"),
        ("seed=-1", "seed is -1, expected 0 or more"),
        ("name=../elsewhere", "name is '../elsewhere', expected at most 100 letters"),
    ],
)
def test_a_wrong_value_gets_one_sentence(override: str, sentence: str) -> None:
    message = refusal_of(override)
    assert sentence in message
    assert "\n" not in message.strip()


WITHOUT_WARM_UP = ["schedule.name=inverse_square_root", "schedule.warm_up_epochs=0"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["trainer.evaluation.patience=1", "trainer.evaluation.every_epochs=null"],
            "trainer.evaluation.patience is 1, expected null where trainer.evaluation.every_epochs and every_steps are",
        ),
        (WITHOUT_WARM_UP, "schedule.warm_up_steps is None, expected 1 or more, or schedule.warm_up_epochs above 0, wi"),
        ([*WITHOUT_WARM_UP, "schedule.warm_up_steps=0"], "schedule.warm_up_steps is 0, expected 1 or more, or"),
        (
            ["+experiment=batch_size_examples_laptop", "trainer.max_steps=null"],
            "trainer.evaluation.every_steps: a number that it is computed from is null: set that number, or this",
        ),
    ],
)
def test_settings_that_do_not_fit_each_other_get_one_sentence(overrides: list[str], sentence: str) -> None:
    message = refusal_of(*overrides)
    assert sentence in message
    assert "\n" not in message.strip()


@pytest.mark.parametrize("key", ["seed", "trainer", "trainer.max_steps", "model"])
def test_to_delete_a_setting_is_refused_in_one_sentence(key: str) -> None:
    sentence = f"~{key} deletes {key}, expected a value of every setting: set {key}=..., or leave that word out."
    assert refusal_of(f"~{key}").strip() == sentence


def test_what_is_no_setting_may_be_deleted() -> None:
    assert run_of("~debug", "~hydra/callbacks") == run_of()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e300])
@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer=rmsprop"],
        ["optimizer=sgd"],
        ["model=transformer_lm", "data=random_tokens", "optimizer=adafactor"],
        ["model=translation_small", "data=multilingual_embedded"],
    ],
)
def test_no_number_of_any_settings_is_beyond_counting(overrides: list[str], value: float) -> None:
    run = run_of(*overrides, "trainer.max_hours=1", "optimizer.clip_norm=1")
    sections = {"": run} | {f"{field.name}.": getattr(run, field.name) for field in fields(run)}
    places = [
        (place, section, field.name)
        for place, section in sections.items()
        if is_dataclass(section)
        for field in fields(section)
        if isinstance(getattr(section, field.name), float)
    ]
    assert len(places) >= 12
    for place, section, name in places:
        before = getattr(section, name)
        setattr(section, name, value)
        with pytest.raises(
            ConfigError, match=f"^{place}{name} is {re.escape(str(value))}, expected a finite number of at m"
        ):
            replace(section)
        setattr(section, name, before)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "pipeline.timeout_seconds=inf",
            "pipeline.timeout_seconds is inf, expected a finite number of at most 1e+09:",
        ),
        (
            "trainer.max_hours=inf",
            "trainer.max_hours is inf, expected a finite number of at most 1e+09, or null",
        ),
        ("optimizer.clip_norm=inf", "optimizer.clip_norm is inf, expected"),
        ("data.crop_aspect=[1,inf]", "data.crop_aspect is [1.0, inf], expected"),
        ("seed=9223372036854775808", "seed is 9223372036854775808, expected a whole number of at most 64 bits"),
    ],
)
def test_a_number_that_no_checkpoint_can_keep_gets_one_sentence(override: str, sentence: str) -> None:
    assert sentence in refusal_of(override)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["model=transformer_lm"],
            "data.name is fashion_mnist_embedded, but model.family is transformer_lm, which exp",
        ),
        (["data=random_tokens"], "data.name is random_tokens, but model.family is amoebanet, which expects images, su"),
    ],
)
def test_a_model_with_the_wrong_kind_of_data_is_refused_in_one_sentence(overrides: list[str], said: str) -> None:
    message = refusal_of(*overrides)
    assert message.startswith(said) and "\n" not in message.strip()


def test_a_mini_batch_must_divide_over_the_replicas() -> None:
    assert "a multiple of launch.num_replicas=3" in refusal_of("launch.num_replicas=3", "trainer.batch_size=64")


@pytest.mark.parametrize("method", ["mixup", "cutmix"])
@pytest.mark.parametrize(("batch_size", "num_replicas"), [(17, 1), (34, 2)])
def test_images_are_mixed_in_pairs_on_each_replica(method: str, batch_size: int, num_replicas: int) -> None:
    sizes = [f"trainer.batch_size={batch_size}", f"launch.num_replicas={num_replicas}", "pipeline.num_microbatches=1"]
    message = refusal_of(f"data.{method}=0.2", *sizes)
    assert f"trainer.batch_size is {batch_size}, expected a multiple of 2 x launch.num_replicas=" in message
    assert "\n" not in message.strip()
    assert run_of(f"data.{method}=0", *sizes) and run_of(*sizes)


def test_another_models_key_is_refused() -> None:
    @dataclass
    class OtherConfig(ModelConfig):
        family: str = "other"
        feedforward_size: int = MISSING

    ConfigStore.instance().store(group="model", name="other", node=OtherConfig)
    assert "num_filters" in refusal_of("model=other", "model.num_filters=3")
    assert "feedforward_size" in refusal_of("model.feedforward_size=3")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.num_heads=3", "model.model_size is 256, expected an even multiple of model.num_heads=3"),
        ("data.vocabulary_size=1", "data.vocabulary_size is 1, expected 2 or more"),
    ],
)
def test_a_wrong_value_of_a_transformer_or_of_tokens_gets_one_sentence(override: str, sentence: str) -> None:
    assert sentence in refusal_of("model=transformer_lm_small", "data=random_tokens", override)


def test_checkpoints_that_are_asked_for_and_forbidden_are_refused() -> None:
    message = refusal_of("trainer.checkpoints.keep=null", "trainer.checkpoints.every_steps=5")
    assert "trainer.checkpoints.every_steps is 5, expected null where trainer.checkpoints.keep is null" in message


@pytest.mark.parametrize("place", ["model", "data", "optimizer", "trainer"])
def test_a_config_that_names_code_is_refused(place: str) -> None:
    assert "_target_" in refusal_of(f"{place}._target_=os.system")
    assert f"{place}._target_ is unknown" in refusal_of(f"+{place}._target_=os.system")
