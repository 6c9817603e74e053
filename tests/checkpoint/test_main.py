"""python -m gpipe.checkpoint: verify, describe, and export a file that plain models load."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import gpipe.models  # before timm, which imports torchvision
from tests.training.small_run import SmallRun, small_run

# isort: split
import timm

from gpipe.checkpoint.__main__ import main
from gpipe.checkpoint.content import Content
from gpipe.checkpoint.manifest import Position
from gpipe.checkpoint.saver import Saver
from gpipe.pipeline.batch_norm import convert_batch_norm
from gpipe.pipeline.engine import Pipeline
from gpipe.training.checkpoints import get_tensors
from gpipe.training.ema import Ema
from tests.support.program_server import run_program
from tests.support.tied_model import TABLE, loss, mini_batch, tied_layers

POSITION = Position(step=3, epoch=1, batch=2, seed=4)
CONFIG = {"name": "small", "data": {"name": "digits"}, "model": {"family": "small", "width": 8}, "seed": 4}


@pytest.fixture(scope="module")
def trained() -> SmallRun:
    run = small_run((1, 2, 3))
    run.train(3)
    return run


@pytest.fixture
def checkpoint(trained: SmallRun, tmp_path: Path) -> Path:
    return trained.save(tmp_path / "run" / "checkpoints", POSITION, config=CONFIG, is_best=True)


def plain_layers() -> nn.Sequential:
    """The small network as anyone would write it, without anything of this package."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)),
        nn.Sequential(nn.ReLU(), nn.Dropout(0.2)),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)),
        nn.Linear(8, 6),
    )


@pytest.mark.parametrize(("options", "kind"), [([], "ema"), (["--weights"], "weights")])
def test_the_plain_model_computes_the_same_as_the_pipeline(
    checkpoint: Path, trained: SmallRun, options: list[str], kind: str
) -> None:
    output = checkpoint.parent / "model.safetensors"
    assert main(["export", str(checkpoint.parents[1]), "--output", str(output), *options]) == 0
    plain = plain_layers()
    plain.load_state_dict(load_file(output))
    images = torch.randn(1, 1, 6, 6)  # one micro-batch, as in the plain model
    layers = trained.ema.module if kind == "ema" else None
    assert torch.equal(plain.eval()(images), trained.pipeline.evaluate(images, layers=layers))
    assert [path.name for path in output.parent.glob(".*")] == []


@pytest.mark.parametrize(("options", "is_stale"), [([], False), (["--weights"], True)])
def test_weights_whose_batch_norms_were_never_estimated_are_exported_with_a_warning(
    trained: SmallRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], is_stale: bool
) -> None:
    config = CONFIG | {"trainer": {"evaluation": {"statistics_batches": 8, "raw": False}}}
    checkpoint = trained.save(tmp_path, POSITION, config=config, results={"evaluated_step": POSITION.step})
    assert main(["export", str(checkpoint), "--output", str(tmp_path / "model.safetensors"), *options]) == 0
    said = (
        f"warning: {checkpoint} was evaluated with trainer.evaluation.raw=false: beside the averages, the batch norms"
    )
    warned = capsys.readouterr().err
    assert warned.startswith(said) if is_stale else warned == ""


def test_timm_loads_the_exported_file(tmp_path: Path) -> None:
    size = {"num_layers": 3, "num_filters": 16, "num_classes": 10}
    model = gpipe.models.amoebanet_d(**size)
    layers = convert_batch_norm(gpipe.models.amoebanet_d(**size))
    pipeline = Pipeline(layers, nn.functional.cross_entropy, [4, len(layers) - 4], 2)
    pipeline.train_step((torch.randn(4, 3, 32, 32), torch.randint(10, (4,))))
    saver = Saver(tmp_path, pipeline)
    saver.save(Content(POSITION, get_tensors(pipeline, Ema(pipeline.layers))))
    saver.wait()
    output = tmp_path / "amoebanet.safetensors"
    assert main(["export", str(tmp_path), "--output", str(output)]) == 0
    loaded = timm.create_model("amoebanet_d", checkpoint_path=str(output), **size)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    images = torch.randn(1, 3, 32, 32)  # one micro-batch, as in the plain model
    assert torch.equal(loaded.eval()(images), pipeline.evaluate(images))


def test_a_name_that_nobody_would_take_for_such_a_file_is_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = checkpoint.parent / "model.pt"
    assert main(["export", str(checkpoint.parents[1]), "--output", str(output)]) == 1
    assert capsys.readouterr().err == f"error: --output is {output}, expected a name that ends with .safetensors.\n"
    assert not output.exists()


def test_a_tied_parameter_is_exported_under_each_of_its_names(tmp_path: Path) -> None:
    pipeline = Pipeline(tied_layers("meta"), loss, (2, 2, 2), 3, seed=3)
    pipeline.train_step(mini_batch(0))
    saver = Saver(tmp_path, pipeline)
    saver.save(Content(POSITION, get_tensors(pipeline)))
    saver.wait()
    output = tmp_path / "tied.safetensors"
    assert main(["export", str(tmp_path), "--output", str(output)]) == 0
    plain, tensors = tied_layers("cpu"), load_file(output)
    plain.load_state_dict(tensors)
    assert len({plain.get_parameter(name.removeprefix("layers.")).data_ptr() for name in TABLE}) == 1
    for name, tensor in pipeline.layers.state_dict().items():
        assert torch.equal(plain.state_dict()[name], tensor), name


def test_an_existing_file_is_not_overwritten(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = checkpoint.parent / "model.safetensors"
    output.write_text("something dear", encoding="utf-8")
    assert main(["export", str(checkpoint), "--output", str(output)]) == 1
    assert capsys.readouterr().err == f"error: {output} exists: remove it, or name another file with --output.\n"
    assert output.read_text(encoding="utf-8") == "something dear"


@pytest.mark.parametrize("name", ["", "latest", "best", "step-00000003"])
def test_a_good_checkpoint_is_ok_by_each_of_its_names(
    checkpoint: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(checkpoint.parent / name)]) == 0
    assert capsys.readouterr().out == f"{checkpoint}: ok\n"


def test_each_damaged_file_is_named(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / "ema-0.safetensors").unlink()
    with (checkpoint / "weights-2.safetensors").open("ab") as file:
        file.write(b"\0")
    assert main(["verify", str(checkpoint)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert "ema-0.safetensors is missing" in first and "weights-2.safetensors does not match" in second


def test_the_description_has_step_settings_layers_and_sizes(
    checkpoint: Path, trained: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["describe", str(checkpoint)]) == 0
    text = capsys.readouterr().out
    assert "step       3: mini-batch 2 of epoch 1, seed 4" in text
    assert 'model      family "small", width 8' in text and "optimizer  RMSpropTF" in text
    weights = trained.pipeline.layers.state_dict()
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    assert f"weights    {len(weights)} tensors, {num_bytes / 1024:.1f} KiB, in 2 files" in text
    assert [line.split()[0] for line in text.splitlines()[-4:]] == ["0", "3", "4", "5"]


def test_the_exit_status_is_that_of_main(tmp_path: Path) -> None:
    done = run_program("gpipe.checkpoint", "verify", str(tmp_path), warn="error")
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path} has no checkpoint: name a run's folder or a checkpoint's.\n"
