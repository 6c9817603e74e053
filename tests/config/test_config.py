"""What composes, what is refused, and that the values of an experiment are those of its paper."""

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from hydra import compose
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf

from gpipe.config import (
    ConfigError,
    ModelConfig,
    RunConfig,
    to_plain,
    to_run,
    to_yaml,
)
from gpipe.config.folders import job_folder

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
pytestmark = pytest.mark.usefixtures("composer")
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
GROUPS = ("model", "data", "pipeline", "optimizer", "launch", "tracking")
# What an experiment cannot do without and does not choose.
GIVEN = {name: ["init_from=null"] for name in EXPERIMENTS if name.startswith("transfer_") or name == "transfer"}
# What a choice goes with that is not for the default model or data, by the beginning of its name.
PARTNER = {
    "transformer_lm": "data=random_tokens",
    "random_tokens": "model=transformer_lm",
    "translation": "data=multilingual_embedded",
    **dict.fromkeys(("multilingual", "parallel_text", "binarized"), "model=translation_small"),
}
CHOICES = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


def composed(*overrides: str) -> DictConfig:
    return compose("train", overrides=list(overrides))


@cache
def run_of(*overrides: str) -> RunConfig:
    return to_run(composed(*overrides))


def refusal_of(*overrides: str) -> str:
    """Return the message with which a setting is refused, at composition or when the dataclasses are made."""
    with pytest.raises((HydraException, ConfigError)) as caught:
        run_of(*overrides)
    return f"{caught.value} {caught.value.__cause__ or ''}"


def test_the_defaults_compose() -> None:
    run = run_of()
    assert run.data.name == "fashion_mnist_embedded"
    assert run.launch.num_processes == 1


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_under_its_name(experiment: str) -> None:
    run = run_of(f"+experiment={experiment}", *GIVEN.get(experiment, []))
    assert run.name == re.sub("table2_(amoebanet_d|transformer_lm)", "table2_throughput", experiment)  # halves of it


@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if not name.endswith("_laptop")])
def test_every_experiment_has_a_laptop_variant_of_the_same_kind(experiment: str) -> None:
    paper, laptop = (run_of(f"+experiment={name}", "init_from=null") for name in (experiment, f"{experiment}_laptop"))
    assert (type(laptop.model), laptop.optimizer.name) == (type(paper.model), paper.optimizer.name)
    assert laptop.launch.device.value == "cpu"
    assert laptop.pipeline.num_stages <= 2


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_choice_of_every_group_composes(group: str, name: str) -> None:
    partner = next((each for beginning, each in PARTNER.items() if name.startswith(beginning)), None)
    run_of(f"{group}={name}", *([partner] if partner else []))


def test_amoebanet_imagenet_is_the_recipe_of_the_paper() -> None:
    run = to_plain(run_of("+experiment=amoebanet_imagenet"))
    expected = {
        "model": {
            "variant": "b", "num_layers": 18, "num_filters": 512, "dropout": 0.5, "drop_path": 0.3,
            "auxiliary_head": True, "auxiliary_weight": 0.4, "batch_norm_momentum": 0.0003, "batch_norm_epsilon": 0.001,
        },
        "data": {
            "name": "imagenet", "image_size": 480, "num_classes": 1000, "crop_scale": [0.1, 1.0], "center_crop": 0.875,
        },
        "pipeline": {"num_stages": 4, "num_microbatches": 32, "rematerialize": "always"},
        "optimizer": {
            "name": "rmsprop", "decay": 0.9, "momentum": 0.9, "epsilon": 1.0, "weight_decay": 4e-5,
            "learning_rate": 0.00125, "times_batch_size": True,
        },
        "schedule": {"name": "exponential", "warm_up_epochs": 3.0, "decay_rate": 0.97, "decay_epochs": 3.0},
        "ema": {"decay": 0.9999, "warm_up": True},
        "trainer": {"label_smoothing": 0.1, "autocast": "bfloat16"},
    }  # fmt: skip
    assert {part: {key: run[part][key] for key in values} for part, values in expected.items()} == expected


def test_laptop_scale_keeps_the_architecture_and_shrinks_it() -> None:
    paper, laptop = (run_of(f"+experiment=amoebanet_imagenet{suffix}") for suffix in ("", "_laptop"))
    assert to_plain(laptop)["model"]["variant"] == to_plain(paper)["model"]["variant"]
    assert to_plain(laptop)["model"]["num_filters"] < to_plain(paper)["model"]["num_filters"]
    assert laptop.data.name == "fashion_mnist_embedded"
    assert (laptop.pipeline.num_stages, laptop.launch.num_processes) == (2, 2)


@pytest.mark.parametrize("experiment", ["amoebanet_imagenet", "amoebanet_imagenet_laptop"])
def test_a_value_on_the_command_line_wins_over_the_experiment(experiment: str) -> None:
    run = run_of(f"+experiment={experiment}", "model.num_filters=40", "trainer.num_epochs=7")
    assert to_plain(run)["model"]["num_filters"] == 40
    assert run.trainer.num_epochs == 7


def test_a_choice_on_the_command_line_wins_over_the_experiment() -> None:
    run = run_of("+experiment=amoebanet_imagenet_laptop", "model=amoebanet_a", "optimizer=sgd")
    assert to_plain(run)["model"]["variant"] == "a"
    assert run.optimizer.name == "sgd"


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
        ("pipeline.num_stages=0", "pipeline.num_stages is 0, expected 1 or more"),
        ("pipeline.num_microbatches=0", "pipeline.num_microbatches is 0, expected 1 or more"),
        ("pipeline.partitions=[3,4,2]", "pipeline.partitions is [3, 4, 2], expected 2 (pipeline.num_stages)"),
        ("pipeline.partitions=[9,0]", "pipeline.partitions is [9, 0], expected"),
        ("pipeline.timeout_seconds=0", "pipeline.timeout_seconds is 0.0, expected a number above 0"),
        ("launch.num_processes=3", "launch.num_processes is 3, expected 1, or 2 for one process per stage"),
        ("pipeline.stages_per_device=2", "pipeline.stages_per_device is 2, expected 1 with pipeline.schedule=gpipe;"),
        ("pipeline.schedule=interleaved_1f1b", "pipeline.stages_per_device is 1, expected 2 or more"),
        ("launch.num_threads=0", "launch.num_threads is 0, expected 1 or more, or null"),
        ("model.num_layers=4", "model.num_layers is 4, expected a multiple of 3"),
        ("model.dropout=1", "model.dropout is 1.0, expected a number from 0 to less than 1"),
        ("model.family=transformer", "model.family is transformer"),
        ("data.channels=2", "data.channels is 2, expected 1 (grey) or 3 (colour)"),
        ("data.crop_scale=[0.5]", "data.crop_scale is [0.5], expected [smallest, largest]"),
        ("data.crop_scale=[0.5,2]", "data.crop_scale is [0.5, 2.0], expected shares of the area"),
        ("data.crop_aspect=[2,1]", "data.crop_aspect is [2.0, 1.0], expected [smallest, largest]"),
        ("data.cutout=1", "data.cutout is 1.0, expected a number from 0 to less than 1"),
        ("data.cutout=-0.1", "data.cutout is -0.1, expected a number from 0 to less than 1"),
        ("data.mixup=-1", "data.mixup is -1.0, expected 0 or more, or null"),
        ("data.cutmix=-0.5", "data.cutmix is -0.5, expected 0 or more, or null"),
        ("data.random_erasing=1.1", "data.random_erasing is 1.1, expected a probability from 0 to 1, or null"),
        ("optimizer.learning_rate=0", "optimizer.learning_rate is 0.0, expected a number above 0"),
        ("optimizer.name=sgd", "optimizer.name is sgd"),
        ("schedule.decay_rate=0", "schedule.decay_rate is 0.0, expected a factor in (0, 1]"),
        ("ema.decay=1", "ema.decay is 1.0, expected"),
        ("trainer.batch_size=0", "trainer.batch_size is 0, expected 1 or more"),
        ("trainer.max_steps=0", "trainer.max_steps is 0, expected 1 or more, or null"),
        ("trainer.num_untimed_steps=-1", "trainer.num_untimed_steps is -1, expected 0 or more"),
        ("trainer.evaluation.every_epochs=0", "trainer.evaluation.every_epochs is 0, expected 1 or more, or null"),
        ("seed=-1", "seed is -1, expected 0 or more"),
        ("name=../elsewhere", "name is '../elsewhere', expected at most 100 letters"),
    ],
)
def test_a_wrong_value_gets_one_sentence(override: str, sentence: str) -> None:
    message = refusal_of(override)
    assert sentence in message
    assert "\n" not in message.strip()


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
            replace(run)
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


def test_a_transfer_needs_a_checkpoint_to_begin_with() -> None:
    assert "init_from is not set, expected the run or checkpoint" in refusal_of("+experiment=transfer")
    assert run_of("+experiment=transfer", "init_from=runs/some").init_from == "runs/some"


@pytest.mark.parametrize("data", ["cifar10", "birdsnap", "digits"])
def test_a_transfer_sees_whole_images_at_the_papers_size(data: str) -> None:
    run = to_plain(run_of("+experiment=transfer", f"data={data}", "init_from=null"))
    assert (run["data"]["name"], run["data"]["crop_scale"], run["data"]["center_crop"]) == (data, None, 1.0)
    assert run["data"]["image_size"] == (64 if data == "digits" else 480)
    table = ["data.image_size=64", "data.channels=1"]  # hydra.sweeper.params of transfer_table_laptop
    laptop = to_plain(run_of("+experiment=transfer_laptop", f"data={data}", "init_from=null", *table))
    assert (laptop["data"]["name"], laptop["data"]["image_size"], laptop["data"]["channels"]) == (data, 64, 1)


def test_1f1b_is_a_name_like_any_other() -> None:
    run = run_of("pipeline.schedule=1f1b")
    assert run.pipeline.schedule.value == to_plain(run)["pipeline"]["schedule"] == "1f1b"


def test_batch_norm_is_synchronised_where_there_is_one() -> None:
    assert not run_of().pipeline.synchronize_batch_norm
    assert run_of("pipeline.synchronize_batch_norm=true").pipeline.synchronize_batch_norm
    message = refusal_of("pipeline.synchronize_batch_norm=true", "model=transformer_lm", "data=random_tokens")
    assert "pipeline.synchronize_batch_norm is true, expected false with model.family=transformer_lm" in message


def test_an_interleaved_pipeline_has_a_process_for_several_stages() -> None:
    interleaved = ["pipeline=interleaved", "pipeline.num_stages=6", "launch=process_per_stage"]
    assert run_of(*interleaved).launch.num_processes == 3
    assert run_of(*interleaved, "pipeline.stages_per_device=3").launch.num_processes == 2
    assert "is 4, expected a divisor of pipeline.num_stages=6:" in refusal_of(
        *interleaved, "pipeline.stages_per_device=4"
    )
    assert "launch.num_processes is 6, expected 1, or 3 for one process per 2 stages" in refusal_of(
        *interleaved, "launch.num_processes=6"
    )


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


def test_the_transformers_are_those_of_tables_2_and_3() -> None:
    for name, num_layers in (("transformer_lm", 48), ("transformer_lm_24", 24)):
        run = to_plain(run_of(f"model={name}", "data=random_tokens"))
        expected = {"num_layers": num_layers, "model_size": 2048, "feedforward_size": 8192, "num_heads": 32}
        assert expected.items() <= run["model"].items()
        assert {"vocabulary_size": 32_000, "sequence_length": 1024}.items() <= run["data"].items()


@pytest.mark.parametrize("scale", ["paper", "laptop"])
def test_the_throughput_table_is_the_grid_of_table_2(scale: str) -> None:
    overrides = [f"+experiment=table2_throughput{'_laptop' if scale == 'laptop' else ''}"]
    params = compose("train", overrides=overrides, return_hydra_config=True).hydra.sweeper.params
    assert params["pipeline.num_stages"] == ("2,4,8" if scale == "paper" else "1,2")
    assert params["pipeline.num_microbatches"] == "1,4,32"
    found = [run_of(*overrides, f"experiment={half}") for half in params["experiment"].split(",")]
    families = [(run.model.family, run.data.name) for run in found]
    assert families == [("amoebanet", "random_images"), ("transformer_lm", "random_tokens")]
    if scale == "paper":
        assert [to_plain(run)["model"]["num_layers"] for run in found] == [18, 48]
    for run in found:
        assert (run.optimizer.name, run.pipeline.rematerialize.value) == ("rmsprop", "always")
        assert run.launch.num_processes == run.pipeline.num_stages and run.launch.pin_cores
        assert run.trainer.evaluation.every_epochs is None and run.trainer.checkpoints.keep is None


def test_the_throughput_tables_mini_batch_grows_with_m_unless_it_is_given() -> None:
    sizes = [4, 16, 128]
    for num_microbatches, size in zip((1, 4, 32), sizes, strict=True):
        overrides = ["+experiment=table2_throughput", f"pipeline.num_microbatches={num_microbatches}"]
        assert run_of(*overrides).trainer.batch_size == size
        assert run_of(*overrides, "trainer.batch_size=128").trainer.batch_size == 128


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
        ("model.num_layers=0", "model.num_layers is 0, expected 1 or more"),
        ("model.num_heads=3", "model.model_size is 256, expected an even multiple of model.num_heads=3"),
        ("model.dropout=1", "model.dropout is 1.0, expected a number from 0 to less than 1"),
        ("data.vocabulary_size=1", "data.vocabulary_size is 1, expected 2 or more"),
        ("data.sequence_length=0", "data.sequence_length is 0, expected 1 or more"),
        ("data.num_test=0", "data.num_test is 0, expected 1 or more"),
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


def test_nothing_instantiates_what_a_config_names() -> None:
    sources = [*(ROOT / "src" / "gpipe").rglob("*.py"), ROOT / "train.py"]
    names = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.Name)
    }
    assert names.isdisjoint({"instantiate", "get_class", "get_method", "get_object"})
    assert not any("_target_" in path.read_text() for path in CONF.rglob("*.yaml"))


def test_values_that_change_a_result_are_in_yaml_only() -> None:
    free = {"family", "name", "debug", "resume_from", "dry_run"}  # names of the class itself, and what is not a value
    for schema in _schemas(RunConfig):
        set_here = {field.name for field in fields(schema) if field.default is not MISSING}
        assert set_here <= free, schema.__name__


def test_settings_survive_yaml() -> None:
    run = run_of("+experiment=amoebanet_imagenet")
    assert OmegaConf.to_container(OmegaConf.create(to_yaml(run))) == to_plain(run)


def test_the_commands_of_the_help_compose() -> None:
    text = OmegaConf.load(CONF / "train.yaml").hydra.help.template
    assert "$APP_CONFIG_GROUPS" in text
    commands = re.findall(r"python train.py (.*)", text)
    for command in commands:
        run_of(*(word for word in command.partition("  ")[0].split() if word != "-m" and "," not in word))
    assert len(commands) >= 4


@pytest.mark.parametrize("search", sorted(path.stem for path in (CONF / "search").glob("*.yaml")))
def test_a_search_composes_with_optuna(search: str) -> None:
    hydra = compose("train", overrides=[f"+search={search}"], return_hydra_config=True).hydra
    assert (hydra.runtime.choices["hydra/sweeper"], hydra.sweeper.direction) == ("optuna", "maximize")


def test_a_job_on_slurm_has_a_gpu_a_stage_and_is_queued_again_at_its_time_limit() -> None:
    overrides = ["hydra/launcher=slurm", "pipeline.num_stages=4", "hydra.launcher.partition=gpus"]
    hydra = compose("train", overrides=overrides, return_hydra_config=True).hydra
    assert hydra.launcher._target_.endswith("SlurmLauncher")
    assert (hydra.launcher.gpus_per_node, hydra.launcher.tasks_per_node, hydra.launcher.partition) == (4, 1, "gpus")
    assert hydra.launcher.max_num_timeout > 0 and hydra.launcher.signal_delay_s >= 120


@pytest.mark.parametrize("scale", ["paper", "laptop"])
def test_the_transfer_table_is_every_set_of_table_4_with_five_seeds(scale: str) -> None:
    overrides = [f"+experiment=transfer_table{'_laptop' if scale == 'laptop' else ''}", "init_from=null"]
    params = compose("train", overrides=overrides, return_hydra_config=True).hydra.sweeper.params
    paper = {"cifar10", "cifar100", "stanford_cars", "oxford_pets", "food101", "fgvc_aircraft", "birdsnap"}
    assert set(params["data"].split(",")) == paper | ({"digits", "mnist_5k"} if scale == "laptop" else set())
    assert params["seed"] == "0,1,2,3,4"


def test_the_folder_of_a_job_can_be_typed_and_is_found_again(tmp_path: Path) -> None:
    def folder(number: int, *task: str) -> str:
        hydra = {"sweep": {"dir": str(tmp_path)}, "job": {"num": number}, "overrides": {"task": list(task)}}
        root = OmegaConf.create({"hydra": hydra})
        return job_folder(",".join(sorted(word for word in task if "launch" not in word)), command, _root_=root)

    command = "-m\0seed=0,1\0trainer.max_steps=3"
    first = folder(3, "trainer.max_steps=3", "data=digits", "seed=1", "launch.num_threads=1")
    assert re.fullmatch(r"03_digits_seed1_[0-9a-f]{8}", first)
    (tmp_path / first).mkdir()
    assert folder(0, "seed=1", "launch.num_threads=2", "trainer.max_steps=3", "data=digits") == first
    assert re.fullmatch(r"00_runs-a-b_[0-9a-f]{8}", folder(0, "init_from=runs/a/b"))
    assert re.fullmatch(r"00_job_[0-9a-f]{8}", folder(0, "trainer.max_steps=3"))
    assert len({folder(0, f"{'k' * 150}.x={value * 150}") for value in "12"}) == 2


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_begins_with_its_command_cost_and_result(name: str) -> None:
    text = (CONF / "experiment" / f"{name}.yaml").read_text()
    comment = text[: text.index("defaults:")]
    assert re.search(rf"python train.py (-m )?\+experiment={name}\b", comment)
    assert "Cost" in comment
    assert "Result" in comment


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "data").glob("*.yaml")))
def test_a_data_file_is_called_like_its_data_set(name: str) -> None:
    assert composed(f"data={name}").data.name == name


def _schemas(schema: type) -> Iterator[type]:
    """Yield a dataclass, those of its fields, and their subclasses."""
    yield schema
    for field in fields(schema):
        if isinstance(field.type, type) and hasattr(field.type, "__dataclass_fields__"):
            for known in (field.type, *field.type.__subclasses__()):
                if known.__module__.startswith("gpipe."):
                    yield from _schemas(known)
