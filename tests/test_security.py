"""No configuration can name code to run: what the README's section on security promises."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from hydra import compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.singleton import Singleton
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, OmegaConf

from gpipe.config import ConfigError
from gpipe.config.gate import refuse
from gpipe.config.saved import from_plain
from tests.support.foreign_config import compose_with, write_config
from tests.support.listeners import listeners
from tests.support.program_server import Program
from tests.support.train_program import TRAIN
from tests.test_secrets import TINY

ROOT = Path(__file__).parents[1]
# What a folder of configurations from elsewhere may try.
CODE = {
    "callback": "hydra: {callbacks: {mine: {_target_: os.system, command: touch sprung}}}",
    "method": "hydra: {callbacks: {mine: {_target_: gpipe.programs.sweep.Path.touch, self: sprung}}}",
    "launcher": "hydra: {launcher: {_target_: torch.load}}",
    "sampler": "hydra: {sweeper: {sampler: {_target_: torch.hub.load}}}",
    "nested": "hydra: {sweeper: {params: {a: [{_target_: builtins.eval}]}}}",
    "interpolated": "hydra: {callbacks: {mine: {_target_: '${name}'}}}",
    "logging_factory": "hydra: {job_logging: {root: {}, formatters: {a: {'()': os.system, command: touch sprung}}}}",
    "logging_class": "hydra: {hydra_logging: {root: {}, handlers: {a: {class: logging.handlers.SMTPHandler}}}}",
    "logging_reference": "hydra: {job_logging: {root: {}, handlers: {a: {stream: 'ext://os.environ'}}}}",
    "environment": "hydra: {job: {env_set: {LD_PRELOAD: ./evil.so}}}",
    "emptied variable": "hydra: {job: {env_set: {CUDA_VISIBLE_DEVICES: ''}}}",
    "shell_lines": "hydra: {launcher: {setup: [touch sprung]}}",
    "script_line": 'hydra: {launcher: {comment: "a\\ntouch sprung"}}',
    "function": "hydra: {sweeper: {custom_search_space: os.system}}",
    "model": "model: {_target_: os.system}",
    "log_file": "hydra: {job_logging: {root: {handlers: [file]}, handlers: {file: {filename: .bashrc}}}}",
    "log_class": "hydra: {hydra_logging: {root: {}, handlers: {a: {class: logging.FileHandler, filename: .bashrc}}}}",
    "log_callback": "hydra: {callbacks: {mine: {_target_: logging.FileHandler, filename: .bashrc, mode: w}}}",
    "log_name": "hydra: {job: {name: ../.bashrc}}",
    "run_folder": "hydra: {run: {dir: '${name}/../..'}}",
    "absolute_folder": "hydra: {sweep: {dir: '${hydra.runtime.cwd}'}}",
    "output_folder": "hydra: {output_subdir: ../..}",
    "submitit_folder": "hydra: {launcher: {submitit_folder: /tmp}}",
    "job_output": "hydra: {launcher: {additional_parameters: {output: .bashrc}}}",
    "study": "hydra: {sweeper: {storage: 'sqlite:///.bashrc'}}",
    "job_words": "hydra: {sweeper: {params: {hydra.run.dir: /tmp}}}",
    "added_words": "hydra: {sweeper: {params: {+hydra.callbacks.mine._target_: os.system}}}",
    "chosen_words": "hydra: {sweeper: {params: {hydra/job_logging: evil}}}",
    "preset_words": "hydra: {overrides: {hydra: [hydra.run.dir=/tmp]}}",
    "reproduction": "reproduction: ../elsewhere",
    "cache": "defaults: [_self_, override /data: parallel_text, override /model: transformer_lm]\ndata: {cache: .ssh}",
}
_REFUSAL = "expected (none: no configuration may name code|nothing, because a configuration may name no file)"
_REFUSALS = {
    "environment": "env_set.LD_PRELOAD is set, expected nothing, because",
    "emptied variable": "env_set.CUDA_VISIBLE_DEVICES is set, expected nothing, because",
    "shell_lines": "setup.0 is 'touch sprung', expected nothing, because",
    "script_line": "expected a word without blanks or slashes, because a configuration may name no file",
    "function": "custom_search_space is 'os.system', expected nothing, because",
    "model": "_target_",
    "run_folder": r"hydra.run.dir is '\$\{name\}/../..', expected a folder in runs/",
    "absolute_folder": "expected a folder in runs/",
    "submitit_folder": "submitit_folder is '/tmp', expected a folder in runs/",
    "log_name": r"job.name is '../.bashrc', expected letters",
    "reproduction": "expected letters",
}
_OF_SLURM = ("shell_lines", "script_line", "submitit_folder", "job_output")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch) -> Path:
    """The folder in which programs run, and where the configurations of somebody else lie."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize("kind", CODE)
def test_a_config_that_names_code_is_refused_before_anything_is_made_of_it(kind: str, elsewhere: Path) -> None:
    choices = {"hydra/launcher": "submitit_slurm"} if kind in _OF_SLURM else {}
    choices |= {"hydra/sweeper": "optuna"} if kind in ("sampler", "function", "study") else {}
    with pytest.raises(HydraException, match=_REFUSALS.get(kind, _REFUSAL)):
        compose_with(elsewhere, CODE[kind], *(f"{group}={name}" for group, name in choices.items()))
    assert not (elsewhere / "sprung").exists()


@pytest.mark.usefixtures("composer")
def test_a_job_that_a_launcher_starts_elsewhere_is_guarded_too(elsewhere: Path, monkeypatch) -> None:
    """It composes for itself, also what a search puts into its words; launchers hand it Hydra's state as a pickle."""
    state = cloudpickle.dumps(Singleton.get_state())
    for name in ("load_configuration", "_process_config_searchpath", "_compose_config_from_defaults_list"):
        monkeypatch.setattr(ConfigLoaderImpl, name, getattr(ConfigLoaderImpl, name).__wrapped__)
    compose_with(elsewhere, CODE["run_folder"])  # as in a process that has not been told
    cloudpickle.loads(state)
    with pytest.raises(HydraException, match="expected a folder in runs/"):
        compose_with(elsewhere, CODE["run_folder"])


@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize(
    "choice",
    [
        "launcher=basic",
        "launcher=submitit_local",
        "launcher=slurm",
        "sweeper=basic",
        "sweeper=optuna",
        "job_logging=default",
    ],
)
def test_the_launchers_sweepers_and_logs_that_are_known_pass(choice: str) -> None:
    composed = compose("train", overrides=[f"hydra/{choice}"], return_hydra_config=True)
    assert composed.hydra.callbacks.sweep_end._target_ == "gpipe.programs.sweep.SweepEnd"


@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize(
    "word", ["hydra.run.dir=/elsewhere", "hydra.job_logging.root.level=DEBUG", "hydra.verbose=true"]
)
def test_the_command_line_may_name_a_folder(word: str) -> None:
    composed = compose("train", overrides=[word], return_hydra_config=True)
    place, _, value = word.partition("=")
    assert str(OmegaConf.select(composed, place)).lower() == value.lower()


@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize(
    "words",
    [
        ['hydra.launcher.setup=["module load cuda"]', "hydra/launcher=slurm"],
        ["+hydra.callbacks.mine._target_=hydra.experimental.callback.Callback"],
        ["hydra.launcher._target_=somewhere.Launcher"],
        ["+hydra.job.env_set.OMP_PROC_BIND=close"],
    ],
    ids=" ".join,
)
def test_the_users_own_command_line_may_name_code_and_a_file_may_not(words: list[str], elsewhere: Path) -> None:
    compose("train", overrides=words)
    compose_with(elsewhere, "seed: 1", *words)
    with pytest.raises(HydraException, match=_REFUSAL):
        compose_with(elsewhere, CODE["logging_factory"], *words)
    with pytest.raises(HydraException, match=r"env_set.LD_PRELOAD is set, expected nothing, because"):
        compose_with(elsewhere, CODE["environment"], *words)


@pytest.mark.usefixtures("composer")
def test_another_launcher_that_is_installed_may_be_chosen_on_the_command_line(elsewhere: Path) -> None:
    plugin = {"_target_": "hydra_plugins.other.OtherLauncher", "folder": "/scratch"}
    ConfigStore.instance().store(group="hydra/launcher", name="other", node=plugin, provider="other")
    composed = compose_with(elsewhere, "seed: 1", "hydra/launcher=other")
    assert composed.hydra.launcher == plugin
    with pytest.raises(HydraException, match=r"launcher.folder is '/home', expected nothing"):
        compose_with(elsewhere, "hydra: {launcher: {folder: /home}}", "hydra/launcher=other")
    with pytest.raises(HydraException, match=r"launcher._target_ is hydra_plugins.other.OtherLauncher, expected none"):
        compose_with(elsewhere, "defaults: [_self_, override /hydra/launcher: other]")


DOUBLINGS = [f"    a{n + 1}: ${{hydra.sweeper.params.a{n}}}${{hydra.sweeper.params.a{n}}}" for n in range(30)]
INTERPOLATIONS = "\n".join(["hydra:", "  sweeper:", "   params:", "    a0: xx", *DOUBLINGS])
BOMB = "\n".join(["a0: &a0 [1, 2]", *(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}, *a{n}]" for n in range(30))])


@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "a: &a [1, {b: *a}]",
            r"evil.yaml has an alias to what contains it in line 2, so it never ends: remove \*a\.",
        ),
        (BOMB, r"evil.yaml stands for more than 10,000 values, with its aliases: shorten it\."),
        (f"a: {'[' * 3000}", r"evil.yaml is nested more than 50 levels deep: flatten it\."),
        ("#" * 2**20, r"evil.yaml has 1,048,\d+ bytes, expected at most 1,048,576: it holds no settings\."),
        (f"seed: {'9' * 5000}", r"extra/evil cannot be read: Exceeds the limit \(4300 digits\) .*: correct it there\."),
        (INTERPOLATIONS, r"params.a\d+ is \$\{.*, whose interpolations stand for too many values or characters: write"),
        ("defaults: [evil]", r"extra/evil is one of more than 500 files that defaults lists name, perhaps in a circle"),
    ],
    ids=["cycle", "bomb", "deep", "long", "digits", "interpolations", "includes"],
)
def test_a_file_without_end_is_one_sentence(text: str, said: str, elsewhere: Path) -> None:
    with pytest.raises(ConfigCompositionException, match=said) as refused:
        compose_with(elsewhere, text)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.usefixtures("composer")
def test_a_file_that_is_no_text_is_named(elsewhere: Path) -> None:
    write_config(elsewhere, "")
    (elsewhere / "conf" / "extra" / "evil.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigCompositionException, match=r"evil.yaml is not UTF-8, expected a YAML file: convert it"):
        compose("train", overrides=[f"hydra.searchpath=[file://{elsewhere / 'conf'}]", "+extra=evil"])


def test_settings_that_were_saved_are_not_interpolated() -> None:
    with pytest.raises(ConfigError, match=r"have an interpolation, \$\{\.\.\.\}, expected values"):
        from_plain({"name": "${oc.env:HOME}"})


def environment_of(**values: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), **values}


# Hydra writes into it what it says of a sweep, line by line.
BASHRC = """
hydra:
  hydra_logging:
    version: 1
    formatters: {simple: {format: "touch sprung # %(message)s"}}
    handlers: {file: {class: logging.FileHandler, filename: .bashrc, formatter: simple}}
    root: {level: DEBUG, handlers: [file]}
    disable_existing_loggers: false
"""


@pytest.mark.parametrize("text", [CODE["logging_factory"], BASHRC], ids=["factory", "lines of a shell"])
def test_the_program_itself_runs_nothing_of_a_folder_of_configurations(text: str, elsewhere: Path) -> None:
    """What is refused is refused before Hydra's own start: its log, its callbacks, its launcher."""
    write_config(elsewhere, text)
    (elsewhere / ".bashrc").touch()
    arguments = ("-m", "--config-dir", "conf", "+extra=evil", "trainer.dry_run=true")
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=elsewhere, env=environment_of(), check=False)
    subprocess.run(["bash", "--rcfile", ".bashrc", "-i", "-c", "true"], cwd=elsewhere, check=True, capture_output=True)
    assert not (elsewhere / "sprung").exists()
    assert (elsewhere / ".bashrc").read_text() == ""
    assert done.returncode == 1 and len(done.stderr.splitlines()) < 4, done.stderr
    assert "a configuration may name no file" in done.stderr or "no configuration may name code" in done.stderr
    assert sorted(path.name for path in elsewhere.iterdir()) == [".bashrc", "conf"]


# What files and classes may look like, and where any text may be: it is shown, or Hydra overwrites it, or it is the
# value of a setting in a job's words, which are checked in their turn.
HOSTILE = (
    "/outside",
    "../outside",
    "runs/../../outside",
    "${data.root}",
    "a\ntouch sprung",
    "a --output=b",
    "ext://os",
)
SETTINGS = {  # what Hydra's refer to
    "name": "train",
    "data": {"root": "/outside"},
    "pipeline": {"num_stages": 2, "stages_per_device": 1},
    "launch": {"num_replicas": 1, "device": "cuda", "num_processes": 2, "gpus_per_node": 8},
}
CLASS_NAMES = ("os.system", "logging.handlers.SMTPHandler", "gpipe.programs.sweep.Path.touch")
CLASS = {"new": {"_target_": "logging.FileHandler"}}
TEXT = re.compile(
    r"hydra\.(runtime\.(?!output_dir)|job\.(override_dirname|config_name)|sweeper\.(params|search_space)\.)"
)
CHOICES = (
    (),
    ("launcher=slurm", "sweeper=optuna", "sweeper/sampler=cmaes", "job_logging=default", "hydra_logging=default"),
    ("launcher=submitit_local", "sweeper=optuna", "sweeper/sampler=grid", "job_logging=stdout", "hydra_logging=none"),
    ("sweeper=optuna", "sweeper/sampler=motpe", "job_logging=none"),
    ("sweeper=optuna", "sweeper/sampler=nsgaii"),
    ("sweeper=optuna", "sweeper/sampler=tpe"),
)


def places(node: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield every place below a node, as the keys that lead there, and what is there."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield (*path, key), node[key]
        if isinstance(node[key], dict | list):
            yield from places(node[key], (*path, key))


def passes(config: DictConfig) -> bool:
    try:
        refuse(config)
    except HydraException:
        return False
    return True


@pytest.mark.usefixtures("composer")
def test_nothing_of_hydras_own_settings_names_a_file_or_a_class(monkeypatch) -> None:
    """A hostile value at every place of Hydra's schema, with each launcher, sweeper, sampler and log, one by one."""
    monkeypatch.setattr(os, "environ", {})  # which is searched for secrets each time
    tried: set[str] = set()
    for choices in CHOICES:
        composed = compose("train", overrides=[f"hydra/{choice}" for choice in choices], return_hydra_config=True)
        hydra = OmegaConf.to_container(composed.hydra, resolve=False, enum_to_str=True)
        for prose in ("help", "hydra_help"):
            del hydra[prose]
        hydra["overrides"] = {"hydra": [], "task": []}  # the name of a job's folder is made of them
        config = OmegaConf.create({**SETTINGS, "hydra": hydra})
        assert passes(config)
        for path, value in places(hydra, ("hydra",)):
            place = ".".join(map(str, path))
            if place in tried:
                continue
            tried.add(place)
            node: Any = reduce(lambda outer, key: outer._get_node(key), path[:-1], config)
            for attempt in (*HOSTILE, CLASS, *(CLASS_NAMES if path[-1] in ("_target_", "class") else ())):
                node[path[-1]] = attempt
                assert not passes(config) or (TEXT.match(place) and attempt is not CLASS), (place, attempt)
            node[path[-1]] = value
    assert len(tried) > 100


def test_a_run_on_one_host_listens_on_the_loopback_interface_alone(tmp_path: Path) -> None:
    words = [*TINY, "launch=process_per_stage", "pipeline.num_stages=2", "tracking=offline"]
    program = Program(TRAIN, *words, folder=tmp_path, output=Path(os.devnull))
    found = set()
    while program.poll() is None:
        found |= listeners(program.pid)
        time.sleep(0.2)
    assert program.poll() == 0
    assert len(found) >= 3  # the store's, and one of each process
    assert [(address, port) for address, port in found if not address.is_loopback] == []
