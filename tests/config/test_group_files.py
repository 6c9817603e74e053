"""A file that is chosen on the command line is in force, or is refused, whatever the experiment says."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hydra import compose
from hydra._internal.config_repository import IConfigRepository
from hydra.conf import ConfigSourceInfo
from hydra.core.default_element import ResultDefault
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from gpipe.config import ConfigError, gate, name_sources, to_run
from gpipe.config.group_files import _load, drop_replaced_values

CONF = Path(__file__).parents[2] / "conf"
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
FILES = {
    group: sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    for group in ("model", "data", "pipeline", "optimizer", "launch", "tracking")
}
NUM_SAMPLES = 1  # times the experiments, more than all files of the largest group
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


class Merged:
    """The files that a composition merged, by what they have sections for, and for which groups they choose."""

    def __init__(self, defaults: list[ResultDefault], repo: IConfigRepository) -> None:
        self.defaults = list(defaults)
        self._files = {default.config_path: _load(default, repo) for default in defaults}
        self._sections = {path: list(file.config) for path, file in self._files.items() if file is not None}

    def load_config(self, path: str) -> ConfigResult | None:
        return self._files[path]

    def group_exists(self, group: str) -> bool:
        return (CONF / group).is_dir()

    def sections_left(self, *words: str) -> list[set[str]]:
        """Return what sections the files still have when later choices have removed theirs."""
        for path, sections in self._sections.items():
            self._files[path] = replace(self._files[path], config=OmegaConf.create(dict.fromkeys(sections)))
        drop_replaced_values(self.defaults, self, words)
        return [set(self._files[path].config) for path in self._sections]


def with_files(*overrides: str) -> tuple[DictConfig, Merged]:
    """Compose, and return the files that were merged too."""
    kept: list[Merged] = []

    def keep_and_drop(defaults: list[ResultDefault], repo: IConfigRepository, words: list[str]) -> None:
        kept.append(Merged(defaults, repo))
        drop_replaced_values(defaults, repo, words)

    with mock.patch.object(gate, "drop_replaced_values", keep_and_drop):
        return compose("train", overrides=[*overrides, "init_from=null"]), kept[-1]


@cache
def node_of(group: str, name: str) -> DictConfig:
    found = compose("train", overrides=[f"{group}={name}"])[group]
    assert isinstance(found, DictConfig)
    return found


def refusal_of(composed: DictConfig) -> str | None:
    try:
        to_run(composed)
    except ConfigError as refusal:
        return str(refusal)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_choice_in_every_experiment_replaces_its_values_and_fits_or_is_refused(experiment: str) -> None:
    """All of them: the test above has samples of what Hydra then makes of the files."""
    composed, files = with_files(word := f"+experiment={experiment}")
    usual = raw_with_choices(word)[1]
    before = files.sections_left(word)
    for group, names in FILES.items():
        own = composed[group]
        for name in names:
            is_usual = name == usual[group]
            left = [sections - (set() if is_usual else {group}) for sections in before]
            assert files.sections_left(word, f"{group}={name}") == left
            composed[group] = own if is_usual else node_of(group, name)
            message = refusal_of(composed)
            assert message is None or re.fullmatch(r".*\b[a-z_]+\.[a-z_]+\b.*[.]", message), message
        composed[group] = own


@pytest.mark.parametrize("group", FILES)
def test_a_choice_alone_is_in_force_and_leaves_the_rest_as_it_is(group: str) -> None:
    """The file that is chosen anyway, and another one: the test above goes over all."""
    experiment = "+experiment=transfer_size_laptop"  # which says something of each group
    alone, files = raw_with_choices(experiment)
    for name in {files[group], next(name for name in FILES[group] if name != files[group])}:
        in_force = alone[group] if name == files[group] else said_by(group, name)
        assert raw(experiment, f"{group}={name}") == {**alone, group: in_force}


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


@pytest.mark.parametrize(
    "word", ["ema.decay=0.5", "schedule.name=constant", "trainer.max_steps=1", "model.num_filters=8"]
)
def test_a_dict_changes_what_it_names_and_leaves_the_rest_of_its_section(word: str) -> None:
    section, _, inside = word.partition(".")
    experiment = "+experiment=amoebanet_imagenet_laptop"
    assert raw(experiment, f"{section}={{{inside.replace('=', ':')}}}") == raw(experiment, word)


def test_a_choice_in_an_inheriting_experiment_replaces_what_the_parent_says() -> None:
    parent, child = raw("+experiment=transformer_multilingual"), raw("+experiment=transformer_multilingual_laptop")
    assert parent["data"]["vocabulary_size"] == 64_000
    assert child["data"] == raw("model=translation_small", "data=multilingual_embedded")["data"]


@pytest.mark.parametrize("name", ["mine", "2026-11-30"])
def test_an_experiment_of_ones_own_is_one_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults: [amoebanet_imagenet_laptop, _self_]\nname: mine\nmodel: {num_filters: 24}\n"
    (tmp_path / "experiment" / f"{name}.yaml").write_text(text)
    own = [f"hydra.searchpath=[file://{tmp_path}]", f"+experiment={name}"]
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
