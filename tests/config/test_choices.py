"""A file that is chosen on the command line is in force, or is refused, whatever the experiment says."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra import compose
from hydra.conf import ConfigSourceInfo
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from gpipe.config import ConfigError, name_sources, to_run

CONF = Path(__file__).parents[2] / "conf"
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
FILES = {
    group: sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    for group in ("model", "data", "pipeline", "optimizer", "launch", "tracking")
}
NUM_SAMPLES = 2  # times the experiments, more than all files of the largest group
pytestmark = pytest.mark.usefixtures("composer")


def raw(*overrides: str) -> dict[str, Any]:
    """Compose without resolving interpolations, so that a value that follows from another one is what its file says."""
    return raw_with_choices(*overrides)[0]


def raw_with_choices(*overrides: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Compose likewise, and return the file that is chosen of each group too."""
    composed = compose("train", overrides=[*overrides, "init_from=null"], return_hydra_config=True)
    choices = dict(composed.hydra.runtime.choices)
    plain = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key != "hydra"}, choices


@cache
def said_by(group: str, name: str) -> Any:
    """What a file of a group says by itself, without an experiment."""
    return raw(f"{group}={name}")[group]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_choice_is_in_force_in_every_experiment(experiment: str) -> None:
    """Choose in all groups at once, other files with each experiment; an experiment is not told which file it is."""
    alone, files = raw_with_choices(f"+experiment={experiment}")
    for number in range(NUM_SAMPLES):
        sample = NUM_SAMPLES * EXPERIMENTS.index(experiment) + number
        chosen = {group: names[sample % len(names)] for group, names in FILES.items()}
        found = raw(f"+experiment={experiment}", *(f"{group}={name}" for group, name in chosen.items()))
        others = {group: said_by(group, name) for group, name in chosen.items() if name != files[group]}
        assert found == {**alone, **others}


@pytest.mark.parametrize("group", FILES)
def test_every_choice_alone_is_in_force_or_refused_and_leaves_the_rest_as_it_is(group: str) -> None:
    experiment = "+experiment=transfer_kornblith_laptop"  # which says something of each group
    alone, files = raw_with_choices(experiment)
    for name in FILES[group]:
        composed = compose("train", overrides=[experiment, f"{group}={name}", "init_from=null"])
        in_force = alone[group] if name == files[group] else said_by(group, name)
        assert OmegaConf.to_container(composed, resolve=False) == {**alone, group: in_force}
        try:
            to_run(composed)
        except ConfigError as refusal:
            message = str(refusal)
        else:
            message = "."
        assert message.endswith(".") and "\n" not in message


def test_an_interleaved_pipeline_at_laptop_scale_has_two_devices() -> None:
    run = to_run(compose("train", overrides=["+experiment=amoebanet_imagenet_laptop", "pipeline=interleaved"]))
    assert (run.pipeline.num_stages, run.pipeline.stages_per_device, run.launch.num_processes) == (4, 2, 2)


def test_values_on_the_command_line_are_said_of_the_chosen_file() -> None:
    words = ["+experiment=amoebanet_imagenet_laptop", "model.num_filters=24", "model=amoebanet_c"]
    expected = {**raw("model=amoebanet_c")["model"], "num_filters": 24}
    assert raw(*words)["model"] == expected


def test_to_choose_the_file_that_is_chosen_anyway_changes_nothing() -> None:
    words = [
        "+experiment=amoebanet_imagenet_laptop",
        "model=amoebanet_b",
        "data=fashion_mnist_embedded",
        "pipeline=gpipe",
    ]
    assert raw(*words) == raw(words[0])


def test_a_choice_in_an_inheriting_experiment_replaces_what_the_parent_says() -> None:
    parent, child = raw("+experiment=transformer_multilingual"), raw("+experiment=transformer_multilingual_laptop")
    assert parent["data"]["vocabulary_size"] == 64_000
    assert child["data"] == raw("model=translation_small", "data=multilingual_embedded")["data"]


def test_an_experiment_of_ones_own_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults: [amoebanet_imagenet_laptop, _self_]\nname: mine\nmodel: {num_filters: 24}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    own = [f"hydra.searchpath=[file://{tmp_path}]", "+experiment=mine"]
    inherited = raw("+experiment=amoebanet_imagenet_laptop")
    assert raw(*own) == {**inherited, "name": "mine", "model": {**inherited["model"], "num_filters": 24}}
    assert raw(*own, "model=amoebanet_d_small")["model"] == raw()["model"]


def test_data_of_ones_own_is_one_file_that_inherits_from_its_kind(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cats.yaml").write_text("defaults: [image_folder, _self_]\nroot: cats\nnum_classes: 2\n")
    found = raw(f"hydra.searchpath=[file://{tmp_path}]", "data=cats")["data"]
    assert found == {**raw("data=image_folder")["data"], "root": "cats", "num_classes": 2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: cats\nnum_classes: 2", "data.num_classes is known only in a file that inherits from another one"),
        ("- a list", "the file: Invalid type assigned: list is not a subclass of DataConfig"),
        ("defaults: [digits, _self_]\nseeds: 1", "data.seeds: Key 'seeds' not in 'ImagesConfig'"),
    ],
)
def test_what_is_wrong_with_a_file_of_ones_own_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cats.yaml").write_text(text)
    with pytest.raises(ConfigCompositionException) as refused:
        raw(f"hydra.searchpath=[file://{tmp_path}]", "data=cats")
    (sentence,) = str(refused.value).splitlines()
    assert sentence.startswith(f"In 'data/cats': {said}")


def test_where_settings_were_found_is_said_as_on_a_command_line(tmp_path: Path) -> None:
    search = f"hydra.searchpath=[file://{tmp_path}]"
    composed = compose("train", overrides=[search], return_hydra_config=True)
    assert name_sources(composed.hydra) == [search]
    composed.hydra.runtime.config_sources.append(ConfigSourceInfo(f"{Path.cwd()}/my conf", "file", "command-line"))
    composed.hydra.job.config_name = "mine"
    assert name_sources(composed.hydra) == ["--config-dir", "my conf", "--config-name", "mine", search]
