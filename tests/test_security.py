"""No code from files, and no secrets in them: what the README's section on security promises."""

import ast
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose
from hydra.errors import HydraException

from gpipe.config import ConfigError, to_run
from gpipe.config.saved import from_plain
from gpipe.environment_secrets import find_secret, redact
from gpipe.launch.errors import one_message
from gpipe.run import start

ROOT = Path(__file__).parents[1]
PROGRAMS = [
    *sorted((ROOT / "src").rglob("*.py")),
    *sorted(ROOT.glob("*.py")),
    *sorted((ROOT / "experiments").glob("*.py")),
]
# Modules that unpickle, load code, unpack archives or fetch files: none is needed.
FORBIDDEN_MODULES = {
    "cPickle", "cloudpickle", "code", "dill", "ftplib", "joblib", "marshal", "pickle", "requests", "runpy", "shelve",
    "tarfile", "urllib", "yaml", "zipfile", "zipimport",
}  # fmt: skip
FORBIDDEN_CALLS = {
    "__import__", "all_gather_object", "broadcast_object_list", "call", "compile_command", "eval", "exec", "execfile",
    "fromstring", "gather_object", "get_class", "get_method", "get_object", "instantiate", "popen", "recv_object_list",
    "scatter_object_list", "send_object_list", "system", "unpack_archive", "unsafe_load",
}  # fmt: skip
FORBIDDEN_OF = {"torch": {"load", "hub"}, "joblib": {"load"}, "pickle": {"load", "loads"}, "hub": {"load"}}
# Imports of what no file names: our own modules when first asked for, and packages behind their guards.
IMPORT_BY_NAME = {
    "src/gpipe/__init__.py",
    "src/gpipe/data/__init__.py",
    "src/gpipe/_fairseq.py",
    "src/gpipe/_torchvision.py",
}
# Between processes that one study starts itself, on one machine.
OBJECTS_BETWEEN_PROCESSES = {"experiments/engine_overhead.py", "experiments/peer_measurements.py"}


def name_of(node: ast.expr) -> tuple[str, str]:
    """Return the last two names of what is called: ("torch", "load") of torch.load."""
    if isinstance(node, ast.Attribute):
        return name_of(node.value)[1], node.attr
    return "", node.id if isinstance(node, ast.Name) else ""


def dangers(tree: ast.AST) -> Iterator[str]:
    """Yield what in a program could run code that a file holds, unpack an archive, or start a shell."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"import {name}" for name in names if name.partition(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.Call):
            owner, name = name_of(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if name in FORBIDDEN_CALLS or name in FORBIDDEN_OF.get(owner, ()):
                yield f"{owner}.{name}"
            if name == "eval" and not owner:
                yield "eval"
            if owner in ("np", "numpy") and name == "load" and keywords.get("allow_pickle") != "False":
                yield "numpy.load without allow_pickle=False"
            if keywords.get("allow_pickle", "False") != "False" or keywords.get("shell", "False") != "False":
                yield f"{name} with allow_pickle or shell"
            if name == "import_module":
                yield "import_module"


def is_allowed(path: str, danger: str) -> bool:
    owner, _, name = danger.rpartition(".")
    return (
        (name == "import_module" and path in IMPORT_BY_NAME)
        or (name == "all_gather_object" and path in OBJECTS_BETWEEN_PROCESSES)
        or (name == "eval" and owner not in ("", "builtins"))  # the modules' mode
    )


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_program_loads_code_from_a_file(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    assert [danger for danger in dangers(ast.parse(path.read_text())) if not is_allowed(name, danger)] == []


@pytest.mark.parametrize(
    "program",
    [
        "import pickle", "from pickle import loads", "import yaml", "import tarfile", "import torch; torch.load(path)",
        "np.load(path)", "np.load(path, allow_pickle=True)", "np.load(path, allow_pickle=flag)", "eval(text)",
        "exec(text)", "dist.broadcast_object_list(values)", "hydra.utils.instantiate(config)", "os.system(text)",
        "subprocess.run(text, shell=True)", "shutil.unpack_archive(path)", "torch.hub.load(path)",
        "importlib.import_module(name)", "__import__(name)",
    ],
)  # fmt: skip
def test_the_search_finds_what_it_searches_for(program: str) -> None:
    assert [danger for danger in dangers(ast.parse(program)) if not is_allowed("src/gpipe/build.py", danger)]


# What a folder of configurations from elsewhere may try.
CODE = {
    "callback": "hydra: {callbacks: {mine: {_target_: os.system, command: touch sprung}}}",
    "method": "hydra: {callbacks: {mine: {_target_: gpipe.sweep.Path.touch, self: sprung}}}",
    "launcher": "hydra: {launcher: {_target_: torch.load, f: weights.pt}}",
    "sampler": "hydra: {sweeper: {sampler: {_target_: torch.hub.load}}}",
    "nested": "hydra: {sweeper: {params: {a: [{_target_: builtins.eval}]}}}",
    "interpolated": "hydra: {callbacks: {mine: {_target_: '${name}'}}}",
    "logging_factory": "hydra: {job_logging: {root: {}, formatters: {a: {'()': os.system, command: touch sprung}}}}",
    "logging_class": "hydra: {hydra_logging: {root: {}, handlers: {a: {class: logging.handlers.SMTPHandler}}}}",
    "logging_reference": "hydra: {job_logging: {root: {}, handlers: {a: {stream: 'ext://os.environ'}}}}",
    "environment": "hydra: {job: {env_set: {LD_PRELOAD: ./evil.so}}}",
    "shell_lines": "hydra: {launcher: {setup: [touch sprung]}}",
    "script_line": 'hydra: {launcher: {comment: "a\\ntouch sprung"}}',
    "function": "hydra: {sweeper: {custom_search_space: os.system}}",
    "model": "model: {_target_: os.system}",
}
_REFUSALS = {
    "environment": "env_set is LD_PRELOAD, expected nothing: no configuration may name code",
    "shell_lines": "setup is touch sprung, expected nothing",
    "script_line": "expected one line: it becomes a line of a job's script",
    "function": "custom_search_space is os.system, expected nothing",
    "model": "_target_",
}
SECRETS = {
    "${oc.env:WANDB_API_KEY}": "oc.env",
    "${oc.env:HOME}": "oc.env",
    "${oc.${name}:HOME}": "oc.",
    "before-Xy71kLqPz90mNb-after": "the value of the environment variable WANDB_API_KEY",
    "hf_abcdefghijklmnopqrstuvwxyz": "what looks like a token",
    "https://me:password@example.org/data": "what looks like a token or a password",
}
KEY = "Xy71kLqPz90mNb"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch) -> Path:
    """The folder in which programs run, and where configurations of somebody else lie."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "extra").mkdir(parents=True)
    return tmp_path


def compose_with(folder: Path, text: str, *overrides: str) -> None:
    """Compose train.py's configuration with a file of somebody else's."""
    (folder / "conf" / "extra" / "evil.yaml").write_text(f"# @package _global_\n{text}\n")
    search = f"hydra.searchpath=[file://{folder / 'conf'}]"
    compose("train", overrides=[search, *overrides, "+extra=evil"], return_hydra_config=True)


@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize("kind", CODE)
def test_a_config_that_names_code_is_refused_before_anything_is_made_of_it(kind: str, elsewhere: Path) -> None:
    choices = {"launcher": "submitit_slurm"} if kind in ("shell_lines", "script_line") else {}
    choices |= {"sweeper": "optuna"} if kind in ("sampler", "function") else {}
    with pytest.raises(HydraException, match=_REFUSALS.get(kind, "expected none: no configuration may name code")):
        compose_with(elsewhere, CODE[kind], *(f"hydra/{group}={name}" for group, name in choices.items()))
    assert not (elsewhere / "sprung").exists()


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
    assert composed.hydra.callbacks.sweep_end._target_ == "gpipe.sweep.SweepEnd"


@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize("value", SECRETS)
def test_a_setting_that_holds_a_secret_is_refused_without_repeating_it(
    value: str, elsewhere: Path, monkeypatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    texts = [f"name: oc.env\ntracking: {{project: '{value}'}}", f"hydra: {{sweep: {{dir: '{value}'}}}}"]
    for text in texts:
        with pytest.raises((HydraException, ConfigError, ValueError)) as refused:
            compose_with(elsewhere, text)
            to_run(compose("train", overrides=[f"tracking.project='{value}'"]))
        assert KEY not in f"{refused.value}{refused.value.__cause__}"
    with pytest.raises((HydraException, ValueError), match=SECRETS[value].partition(" or ")[0]) as refused:
        to_run(compose("train", overrides=[f"tracking.project='{value}'"]))
    assert KEY not in f"{refused.value}{refused.value.__cause__}"


@pytest.mark.usefixtures("composer")
def test_a_copy_of_the_environment_is_refused_without_repeating_it(elsewhere: Path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with pytest.raises(HydraException, match="env_set is WANDB_API_KEY, expected nothing") as refused:
        compose_with(elsewhere, "hydra: {job: {env_copy: [WANDB_API_KEY]}}")
    assert KEY not in str(refused.value)


def test_settings_that_were_saved_are_not_interpolated() -> None:
    with pytest.raises(ConfigError, match=r"have an interpolation, \$\{\.\.\.\}, expected values"):
        from_plain({"name": "${oc.env:HOME}"})


def environment_of(**values: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), **values}


def test_the_program_itself_runs_nothing_of_a_folder_of_configurations(elsewhere: Path) -> None:
    """What is refused is refused before Hydra's own start: its log, its callbacks, its launcher."""
    (elsewhere / "conf" / "extra" / "evil.yaml").write_text(f"# @package _global_\n{CODE['logging_factory']}\n")
    command = [sys.executable, str(ROOT / "train.py"), "--config-dir", "conf", "+extra=evil"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=elsewhere, env=environment_of(), check=False)
    assert done.returncode == 1 and "no configuration may name code to run; remove it." in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in elsewhere.iterdir()] == ["conf"]


class Trap:
    """Leave a file behind when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("sprung"),)


TINY = (
    "trainer.max_steps=1", "trainer.batch_size=16", "trainer.evaluation_batch_size=500", "model.num_filters=8",
    "data.image_size=32", "schedule.warm_up_epochs=0", "launch.num_threads=1", "launch.device=cpu",
    "trainer.evaluate_every_epochs=null",
)  # fmt: skip
PLANTED = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_planted0planted0planted0planted0",
    "AWS_SECRET_ACCESS_KEY": "planted/secret+of/a/cloud0",
    "AWS_SESSION_TOKEN": "planted-session-of-a-cloud",
    "PGPASSWORD": "planted correct horse",
}


@pytest.mark.usefixtures("composer")
def test_no_secret_of_the_environment_and_no_pickle_has_a_part_in_a_run(elsewhere: Path, monkeypatch, capfd) -> None:
    """A training leaves no secret; then its checkpoint's files become pickles, and going on is refused, and logged."""
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    run = to_run(compose("train", overrides=[*TINY]))
    start(run, elsewhere / "run", list(TINY))
    assert next((elsewhere / "run").glob("wandb/offline-run-*/*.wandb"), None) is not None
    files = [path for path in (elsewhere / "run" / "checkpoints").rglob("*.safetensors") if path.is_file()]
    for path in files:
        path.write_bytes(pickle.dumps(Trap()))
    resumed = to_run(
        compose("train", overrides=[*TINY, "trainer.max_steps=2", f"trainer.resume_from={elsewhere / 'run'}"])
    )
    with pytest.raises(SystemExit):
        start(resumed, elsewhere / "again", list(TINY))
    assert files and (elsewhere / "again" / "error.txt").is_file() and not (elsewhere / "sprung").exists()
    captured = capfd.readouterr()
    written = {str(path): path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()}
    written |= {"output": captured.out.encode(), "errors": captured.err.encode()}
    assert len(written) > 12
    assert [
        (path, name) for path, text in written.items() for name, value in PLANTED.items() if value.encode() in text
    ] == []


def test_an_error_that_repeats_a_secret_is_shown_and_kept_without_it(elsewhere: Path, monkeypatch, capfd) -> None:
    monkeypatch.setenv("WANDB_API_KEY", PLANTED["WANDB_API_KEY"])
    for debug in (False, True):
        folder = elsewhere / str(debug)
        with pytest.raises(SystemExit), one_message(folder, debug):
            raise RuntimeError(f"the server refused the key {PLANTED['WANDB_API_KEY']} of hf_{'a1' * 15}")
        text = (folder / "error.txt").read_text() + capfd.readouterr().err
        assert PLANTED["WANDB_API_KEY"] not in text and "a1a1" not in text
        assert "the server refused the key <WANDB_API_KEY> of <secret>" in text


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("WANDB_API_KEY", True), ("HF_TOKEN", True), ("AWS_ACCESS_KEY_ID", True), ("AWS_SECRET_ACCESS_KEY", True),
        ("PGPASSWORD", True), ("MYSQL_PWD", True), ("npm_config__authToken", True), ("MY_CREDENTIALS", True),
        ("PWD", False), ("OLDPWD", False), ("HOME", False), ("TOKENIZERS_PARALLELISM", False), ("KEYBOARD", False),
    ],
)  # fmt: skip
def test_a_variable_is_a_secret_by_its_name(name: str, is_secret: bool, monkeypatch) -> None:
    monkeypatch.setenv(name, "some-long-value-of-it")
    text = "project some-long-value-of-it!"
    assert find_secret(text) == (f"the value of the environment variable {name}" if is_secret else None)
    assert redact(text) == (f"project <{name}>!" if is_secret else text)


def test_a_secret_within_another_is_taken_out_too(monkeypatch) -> None:
    monkeypatch.setenv("SHORT_TOKEN", "abcdefgh")
    monkeypatch.setenv("LONG_TOKEN", "abcdefghijkl")
    monkeypatch.setenv("TINY_TOKEN", "1")
    assert redact("abcdefghijkl abcdefgh 1") == "<LONG_TOKEN> <SHORT_TOKEN> 1"


@pytest.mark.parametrize("path", sorted((ROOT / "conf").rglob("*.yaml")), ids=lambda path: str(path.relative_to(ROOT)))
def test_our_own_settings_read_no_environment(path: Path) -> None:
    assert "oc.env" not in path.read_text() and find_secret(path.read_text()) is None
