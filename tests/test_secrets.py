"""Secrets of the environment stay there: in no setting, file or message."""

import pickle
from pathlib import Path

import pytest
from hydra import compose
from hydra.errors import HydraException
from omegaconf import OmegaConf

from gpipe.config import to_run
from gpipe.environment_secrets import find_secret, redact
from gpipe.launch.errors import report_errors
from gpipe.programs.train import launch_training
from tests.support.foreign_config import compose_with

ROOT = Path(__file__).parents[1]
SECRETS = {
    "${oc.env:WANDB_API_KEY}": "reads the secret WANDB_API_KEY by oc.env",
    "${oc.${name}:WANDB_API_KEY}": "reads the secret WANDB_API_KEY by oc.env",
    "${oc.env:COPY}": "reads the secret COPY by oc.env",
    "before-Xy71kLqPz90mNb-after": "the value of the environment variable WANDB_API_KEY",
    "hf_abcdefghijklmnopqrstuvwxyz": "what looks like a token",
    "https://me:password@example.org/data": "what looks like a token or a password",
}
KEY = "Xy71kLqPz90mNb"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch) -> Path:
    """The folder in which programs run, and where the configurations of somebody else lie."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize("value", SECRETS)
def test_a_setting_that_holds_a_secret_is_refused_without_repeating_it(
    value: str, elsewhere: Path, monkeypatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("COPY", f"a copy: {KEY}")
    texts = {"tracking.project": "tracking: {project: '%s'}", "hydra.sweep.dir": "hydra: {sweep: {dir: '%s'}}"}
    for place, text in texts.items():
        with pytest.raises((HydraException, ValueError), match=SECRETS[value]) as refused:
            OmegaConf.select(compose_with(elsewhere, f"name: env\n{text % value}"), place)
        assert KEY not in f"{refused.value}{refused.value.__cause__}"


@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize(
    ("key", "default", "expected"),
    [
        ("seed", "4", 4),
        ("optimizer.learning_rate", "0.5", 0.5),
        ("optimizer.learning_rate", "1e-3", 1e-3),
        ("ema.warm_up", "false", False),
        ("data.root", "null", None),
    ],
)
def test_the_default_of_a_variable_may_be_of_any_type(key: str, default: str, expected: object, monkeypatch) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    assert OmegaConf.select(compose("train", overrides=[f"{key}=${{oc.env:NOWHERE,{default}}}"]), key) == expected


@pytest.mark.usefixtures("composer")
def test_a_setting_may_read_a_harmless_variable(elsewhere: Path, monkeypatch) -> None:
    monkeypatch.setenv("DATASETS", "/data/sets")
    monkeypatch.delenv("NOWHERE", raising=False)
    words = ["data.root=${oc.env:DATASETS}/images", "tracking.project=${oc.env:NOWHERE,gpipe}"]
    run = to_run(compose("train", overrides=words))
    assert (run.data.root, run.tracking.project) == ("/data/sets/images", "gpipe")
    with pytest.raises(HydraException, match=r"data\.root is .*the environment variable NOWHERE is not set"):
        compose("train", overrides=["data.root=${oc.env:NOWHERE}"])
    with pytest.raises(HydraException, match=r"hydra\.run\.dir is .*expected a folder in runs/"):
        compose_with(elsewhere, "hydra: {run: {dir: '${oc.env:DATASETS}'}}")


@pytest.mark.usefixtures("composer")
def test_a_copy_of_the_environment_is_refused_without_repeating_it(elsewhere: Path, monkeypatch) -> None:
    for name, said in (("WANDB_API_KEY", "has the value of the environment"), ("PLAIN", "is set, expected nothing")):
        monkeypatch.setenv(name, KEY)
        with pytest.raises(HydraException, match=f"env_set.{name} {said}") as refused:
            compose_with(elsewhere, f"hydra: {{job: {{env_copy: [{name}]}}}}")
        assert KEY not in str(refused.value)
        monkeypatch.delenv(name)


class Trap:
    """Leave a file behind when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("sprung"),)


TINY = (
    "model=transformer_lm_small", "data=random_tokens", "model.num_layers=1", "model.model_size=16",
    "model.feedforward_size=16", "model.num_heads=1", "data.vocabulary_size=20", "data.sequence_length=8",
    "data.num_train=8", "trainer.batch_size=4", "trainer.max_steps=1", "trainer.evaluation.every_epochs=null",
    "trainer.timeline_every_steps=null", "launch.num_threads=1", "launch.device=cpu",
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
    for name in ("run", "again"):
        (elsewhere / name).mkdir()
    launch_training(run, elsewhere / "run", list(TINY))
    assert next((elsewhere / "run").glob("wandb/offline-run-*/*.wandb"), None) is not None
    files = [path for path in (elsewhere / "run" / "checkpoints").rglob("*.safetensors") if path.is_file()]
    for path in files:
        path.write_bytes(pickle.dumps(Trap()))
    resumed = to_run(
        compose("train", overrides=[*TINY, "trainer.max_steps=2", f"trainer.resume_from={elsewhere / 'run'}"])
    )
    with pytest.raises(SystemExit):
        launch_training(resumed, elsewhere / "again", list(TINY))
    refusal = (elsewhere / "again" / "error.txt").read_text().splitlines()[0]
    assert files and str(elsewhere / "run" / "checkpoints") in refusal
    assert not (elsewhere / "sprung").exists()
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
        with pytest.raises(SystemExit), report_errors(folder, debug):
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
