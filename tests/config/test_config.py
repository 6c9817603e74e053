"""What composes, and that the values of an experiment are those of its paper."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from hydra import compose
from omegaconf import MISSING, OmegaConf

from gpipe.config import ConfigError, RunConfig, to_plain, to_yaml
from gpipe.config.folders import job_folder
from gpipe.programs.complete import check_run_data
from tests.config.composition import refusal_of, run_of

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
pytestmark = pytest.mark.usefixtures("composer")
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
GROUPS = ("model", "data", "pipeline", "optimizer", "launch", "tracking")
# What a choice goes with that is not for the default model or data, by the beginning of its name.
PARTNER = {
    "transformer_lm": "data=random_tokens",
    "transformers": "data=random_tokens",
    **dict.fromkeys(("random_tokens", "text_folder"), "model=transformer_lm"),
    "translation": "data=multilingual_embedded",
    **dict.fromkeys(("multilingual", "parallel_text", "binarized"), "model=translation_small"),
}
CHOICES = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


def test_the_defaults_compose() -> None:
    run = run_of()
    assert run.data.name == "fashion_mnist_embedded"
    assert run.launch.num_processes == 1


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_under_its_name(experiment: str) -> None:
    run = run_of(f"+experiment={experiment}", "init_from=null")  # which a transfer does not choose
    assert run.name == re.sub("table2_(amoebanet_d|transformer_lm)", "table2_throughput", experiment)  # halves of it


@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if not name.endswith("_laptop")])
def test_every_experiment_has_a_laptop_variant_of_the_same_kind(experiment: str) -> None:
    paper, laptop = (run_of(f"+experiment={name}", "init_from=null") for name in (experiment, f"{experiment}_laptop"))
    assert (type(laptop.model), laptop.optimizer.name) == (type(paper.model), paper.optimizer.name)
    assert laptop.launch.device.value == "cpu"
    assert laptop.pipeline.num_stages <= 2


@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if name.endswith("_laptop")])
def test_the_command_of_a_laptop_experiment_names_its_data_or_they_come_with_the_packages(experiment: str) -> None:
    command = re.search(r"python train\.py .*", (CONF / "experiment" / f"{experiment}.yaml").read_text())
    assert command is not None
    if "data.root=" not in command[0]:
        check_run_data(run_of(f"+experiment={experiment}", "init_from=null"))


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_choice_of_every_group_composes(group: str, name: str) -> None:
    partner = next((each for beginning, each in PARTNER.items() if name.startswith(beginning)), None)
    words = [f"{group}={name}", *([partner] if partner else [])]
    if (group, name) == ("pipeline", "auto"):  # programs choose what it leaves open
        with pytest.raises(ConfigError, match=r"^pipeline\.num_stages is left to the planner, .* pipeline=auto\.$"):
            run_of(*words)
        return
    run = run_of(*words)
    assert group != "data" or run.data.name == name


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


@pytest.mark.parametrize("name", [name for group, name in CHOICES if group == "model" and name.startswith("amoebanet")])
def test_an_auxiliary_head_is_trained_or_refused(name: str) -> None:
    words = (f"model={name}", "model.auxiliary_head=true")
    assert to_plain(run_of(*words))["model"]["auxiliary_weight"] == 0.4
    with pytest.raises(ConfigError, match=r"^model\.auxiliary_weight is 0\.0, expected above 0 with"):
        run_of(*words, "model.auxiliary_weight=0")


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


def test_device_threads_are_refused_beside_another_way_to_run_layers() -> None:
    assert run_of("launch.device_threads=true").launch.device_threads
    for name in ("compile", "cuda_graphs"):
        message = refusal_of("launch.device_threads=true", f"trainer.{name}=true")
        assert f"launch.device_threads is true, expected false with trainer.{name}=true" in message


def test_cuda_graphs_are_refused_beside_what_cannot_be_captured() -> None:
    assert run_of("trainer.cuda_graphs=true", "pipeline.synchronize_batch_norm=true").trainer.cuda_graphs
    message = refusal_of("trainer.cuda_graphs=true", "trainer.compile=true")
    assert "trainer.cuda_graphs is true, expected false with trainer.compile=true" in message
    replicas = "pipeline.synchronize_batch_norm=true", "launch.num_replicas=2", "launch=process_per_stage"
    message = refusal_of("trainer.cuda_graphs=true", *replicas)
    assert "trainer.cuda_graphs is true, expected false with pipeline.synchronize_batch_norm=true and launch" in message


def test_an_interleaved_pipeline_has_a_process_for_several_stages() -> None:
    interleaved = ["pipeline=interleaved", "pipeline.num_stages=6", "launch=process_per_stage"]
    assert run_of(*interleaved).launch.num_processes == 3
    assert run_of(*interleaved, "pipeline.stages_per_device=3").launch.num_processes == 2
    assert "is 4, expected 2 or more, and a divisor of pipeline.num_stages=6:" in refusal_of(
        *interleaved, "pipeline.stages_per_device=4"
    )
    assert "launch.num_processes is 6, expected 1, or 3 for one process per 2 stages" in refusal_of(
        *interleaved, "launch.num_processes=6"
    )


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
def test_the_transfer_table_is_every_set_of_table_4_or_of_the_packages_with_five_seeds(scale: str) -> None:
    overrides = [f"+experiment=transfer_table{'_laptop' if scale == 'laptop' else ''}", "init_from=null"]
    params = compose("train", overrides=overrides, return_hydra_config=True).hydra.sweeper.params
    paper = {"cifar10", "cifar100", "stanford_cars", "oxford_pets", "food101", "fgvc_aircraft", "birdsnap"}
    assert set(params["data"].split(",")) == (paper if scale == "paper" else {"digits", "mnist_5k"})
    assert params["seed"] == "0,1,2,3,4"


def test_the_folder_of_a_job_can_be_typed_and_is_found_again(tmp_path: Path) -> None:
    def folder(number: int, *task: str) -> str:
        sweep = {"sweep": {"dir": str(tmp_path)}, "sweeper": {"params": {"data.image_size": 64, "seed": "0,1"}}}
        hydra = {**sweep, "job": {"num": number}, "overrides": {"task": list(task)}}
        root = OmegaConf.create({"hydra": hydra})
        return job_folder(",".join(sorted(word for word in task if "launch" not in word)), command, _root_=root)

    command = "-m\0seed=0,1\0trainer.max_steps=3\0trainer.dry_run=true"
    first = folder(3, "trainer.max_steps=3", "data=digits", "seed=1", "launch.num_threads=1")
    assert re.fullmatch(r"03_digits_seed1_[0-9a-f]{8}", first)
    shared = "data.image_size=64", "trainer.dry_run=True"
    assert re.fullmatch(r"00_seed0_[0-9a-f]{8}", folder(0, *shared, "seed=0")), "it has what is its own"
    (tmp_path / first).mkdir()
    assert folder(0, "seed=1", "launch.num_threads=2", "trainer.max_steps=3", "data=digits") == first
    assert re.fullmatch(r"00_runs-a-b_[0-9a-f]{8}", folder(0, "init_from=runs/a/b"))
    assert re.fullmatch(r"00_job_[0-9a-f]{8}", folder(0, "trainer.max_steps=3"))
    assert len({folder(0, f"{'k' * 150}.x={value * 150}") for value in "12"}) == 2


@pytest.mark.parametrize(
    ("group", "names"), [("launch", ("one_process", "process_per_stage")), ("tracking", ("offline", "disabled"))]
)
def test_what_changes_no_result_is_in_the_names_of_folders_if_a_sweep_varies_it(
    group: str, names: tuple[str, str], tmp_path: Path
) -> None:
    def folder(command: str, *task: str) -> str:
        root = compose("train", overrides=[*task, f"hydra.sweep.dir={tmp_path}"], return_hydra_config=True)
        return job_folder(root.hydra.job.override_dirname, command, _root_=root)

    found = {folder(f"-m\0seed=0,1\0{group}={','.join(names)}", f"{group}={name}", "seed=1") for name in names}
    assert len(found) == 2
    one = f"{group}={names[0]}"
    assert folder(f"-m\0seed=0,1\0{one}", one, "seed=1") == folder("-m\0seed=0,1", "seed=1") == "00_seed1_bb8c5544"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_begins_with_its_command_cost_and_result(name: str) -> None:
    text = (CONF / "experiment" / f"{name}.yaml").read_text()
    comment = text[: text.index("defaults:")]
    assert re.search(rf"python train.py (-m )?\+experiment={name}\b", comment)
    assert "Cost" in comment
    assert "Result" in comment


def _schemas(schema: type) -> Iterator[type]:
    """Yield a dataclass, those of its fields, and their subclasses."""
    yield schema
    for field in fields(schema):
        if isinstance(field.type, type) and hasattr(field.type, "__dataclass_fields__"):
            for known in (field.type, *field.type.__subclasses__()):
                if known.__module__.startswith("gpipe."):
                    yield from _schemas(known)
