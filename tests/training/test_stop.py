"""A training that is asked to stop is saved between two steps, and goes on as if it had never stopped."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from gpipe.checkpoint.folder import find_best, find_latest
from gpipe.training.endings import Stopped
from gpipe.training.evaluation import EvaluationMetrics
from gpipe.training.tracking import Tracker
from gpipe.training.trainer import Trainer
from tests.support.process_pool import ProcessPool
from tests.training.conftest import Undisturbed
from tests.training.small_run import NUM_LAYERS, small_trainer
from tests.training.test_trainer import assert_same_state, read_log


def ask_at(trainer: Trainer, step: int) -> None:
    """Ask for a stop while the step after `step` finished ones is under way."""
    trainer.asked_to_stop = lambda: "SIGTERM" if trainer.pipeline.step >= step else None


def stopped(trainer: Trainer) -> Stopped:
    with pytest.raises(Stopped) as found:
        trainer.train()
    trainer.tracker.close()
    return found.value


def test_it_is_saved_at_the_boundary_and_goes_on_with_other_stages(tmp_path: Path, whole: Undisturbed) -> None:
    step = random.Random(7).randrange(1, 11)
    run = small_trainer(tmp_path / "run", (1, 5))
    ask_at(run, step - 1)
    assert str(stopped(run)) == f"stopped by SIGTERM after step {step}: repeat the command to resume."
    path = find_latest(tmp_path / "run" / "checkpoints")
    assert path is not None and path.name == f"step-{step:08d}"
    resumed = small_trainer(tmp_path / "run", (2, 2, 2))
    assert resumed.resume()
    assert resumed.train().evaluation == whole.summary.evaluation
    assert_same_state(whole.trainer, resumed)
    assert read_log(tmp_path / "run") == read_log(whole.folder)


def test_before_the_first_step_there_is_nothing_to_save(tmp_path: Path) -> None:
    run = small_trainer(tmp_path)
    ask_at(run, 0)
    assert str(stopped(run)) == "stopped by SIGTERM before the first step: repeat the command to resume."
    assert run.pipeline.step == 0 and not (tmp_path / "checkpoints").exists()


def test_a_run_that_saves_nothing_says_so(tmp_path: Path) -> None:
    run = small_trainer(tmp_path, checkpoint_folder=None)
    ask_at(run, 3)
    error = stopped(run)
    assert error.step == 4 and not error.is_saved
    assert run.train_loader.num_closed == run.evaluation_loaders["test"].num_closed == 1
    assert str(error).endswith("after step 4: nothing is saved (trainer.checkpoints.keep=null).")


@pytest.mark.parametrize(("given", "best"), [((3.0, 1.0, 2.0), 8), ((3.0, 2.0, 1.0), 12), ((3.0, 4.0, 5.0), 4)])
def test_the_lowest_loss_is_saved_and_stays_the_best(tmp_path: Path, given: tuple[float, ...], best: int) -> None:
    losses = iter(given)

    class Losses(EvaluationMetrics):
        """Evaluations after steps 4, 8 and 12, whose losses are given."""

        def compute(self, sums: torch.Tensor) -> dict[str, float]:
            return super().compute(sums) | {"loss": next(losses)}

    folder, settings = tmp_path / "checkpoints", {"metrics": Losses(), "ema": None}
    run = small_trainer(tmp_path, **settings)
    ask_at(run, 3)
    assert stopped(run).step == 4
    assert find_best(folder) == folder / "step-00000004"
    resumed = small_trainer(tmp_path, **settings)
    ask_at(resumed, 5)
    assert resumed.resume() and stopped(resumed).step == 6  # without an evaluation
    assert find_best(folder) == folder / "step-00000004" != find_latest(folder)
    last = small_trainer(tmp_path, **settings)
    assert last.resume() and last.train().least_loss["step"] == best
    assert find_best(folder) == folder / f"step-{best:08d}"


def test_a_run_that_saves_nothing_more_names_the_step_that_it_goes_on_from(tmp_path: Path) -> None:
    first = small_trainer(tmp_path)
    ask_at(first, 3)
    stopped(first)
    again = small_trainer(tmp_path, keep_checkpoints=None)
    ask_at(again, 5)
    assert again.resume()
    assert str(stopped(again)).endswith("after step 6: nothing after step 4 is saved (trainer.checkpoints.keep=null).")


def test_a_stop_in_the_last_step_comes_too_late(tmp_path: Path) -> None:
    run = small_trainer(tmp_path)
    ask_at(run, 11)
    assert run.train().num_steps == 12
    assert run.train_loader.num_closed == run.evaluation_loaders["test"].num_closed == 1


def test_a_stop_at_the_end_of_an_epoch_has_its_evaluation(tmp_path: Path, whole: Undisturbed) -> None:
    run = small_trainer(tmp_path / "run")
    ask_at(run, 3)
    assert stopped(run).step == 4
    resumed = small_trainer(tmp_path / "run")
    resumed.resume()
    resumed.train()
    assert read_log(tmp_path / "run") == read_log(whole.folder)


def ask_one_in_evaluation(rank: int, folder: Path, asked: int) -> int:
    """Train in a job of which one process is asked to stop in its first evaluation; return the finished steps."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "stage"))
    tracker = Tracker(folder, enabled=rank == 0, mode="disabled")
    trainer = small_trainer(folder, (2, 4), mesh=mesh, tracker=tracker)
    loader = trainer.evaluation_loaders["test"]
    if rank == asked:
        trainer.asked_to_stop = lambda: "SIGTERM" if loader.num_fetched else None
    step = stopped(trainer).step
    trainer.pipeline.close()
    return step


@pytest.mark.parametrize("asked", [0, 1])
def test_a_stop_in_an_evaluation_costs_no_further_step(tmp_path: Path, processes: ProcessPool, asked: int) -> None:
    assert processes.run(2, ask_one_in_evaluation, tmp_path, asked) == [4, 4]


def compiled_trainer(folder: Path, stop_after: float = math.inf) -> tuple[Trainer, list[int]]:
    """Build a trainer of compiled layers that is asked to stop while graph number `stop_after` is compiled."""
    torch._dynamo.reset()
    trainer, graphs = small_trainer(folder, num_epochs=1), []
    trainer.asked_to_stop = lambda: "SIGTERM" if len(graphs) >= stop_after else None
    trainer.pipeline.compile(trainer.asked_to_stop, backend=lambda graph, _: graphs.append(1) or graph)
    return trainer, graphs


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_stop_while_layers_are_compiled_leaves_the_step_for_the_next_session(tmp_path: Path) -> None:
    whole, graphs = compiled_trainer(tmp_path / "whole")
    num_graphs, log = [0], whole.tracker.log
    whole.tracker.log = lambda values: (num_graphs.append(len(graphs)), log(values))
    whole.train()
    for step in (0, 3):  # the first, and the first with a smaller mini-batch
        folder = tmp_path / f"run{step}"
        run, graphs = compiled_trainer(folder, num_graphs[step] + 1)
        where = f"after step {step}" if step else "before the first step"
        assert str(stopped(run)) == f"stopped by SIGTERM {where}: repeat the command to resume."
        assert len(graphs) == num_graphs[step] + 1
    resumed, _ = compiled_trainer(folder)
    assert resumed.resume()
    resumed.train()
    assert_same_state(whole, resumed)


def ask_one_that_compiles(rank: int, folder: Path, asked: int) -> str:
    """Train in a job of which one process is asked to stop once the smaller mini-batch has one graph there."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "stage"))
    tracker = Tracker(folder, enabled=rank == 0, mode="disabled")
    trainer = small_trainer(folder, (2, 4), mesh=mesh, tracker=tracker, num_epochs=1)
    graphs: list[int] = []

    def ask() -> str | None:
        return "SIGTERM" if rank == asked and 3 in graphs else None

    def compile_(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(trainer.pipeline.step)
        return graph

    trainer.asked_to_stop = ask
    trainer.pipeline.compile(ask, backend=compile_)
    error = stopped(trainer)
    trainer.pipeline.close()
    return str(error)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("asked", [0, 1])
def test_the_step_that_one_process_abandons_is_left_by_all(tmp_path: Path, processes: ProcessPool, asked: int) -> None:
    found = processes.run(2, ask_one_that_compiles, tmp_path, asked)
    assert found == ["stopped by SIGTERM after step 3: repeat the command to resume."] * 2
    resumed = small_trainer(tmp_path)
    assert resumed.resume() and resumed.pipeline.step == 3


def ask_one(rank: int, folder: Path, shape: tuple[int, int], asked: int) -> tuple[str, int]:
    """Train in a job of which one process is asked to stop in its sixth step."""
    num_stages = shape[1]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "stage"))
    partitions = [NUM_LAYERS - num_stages + 1] + [1] * (num_stages - 1)
    tracker = Tracker(folder, enabled=rank == 0, mode="disabled")
    trainer = small_trainer(folder, partitions, mesh=mesh, tracker=tracker)
    if rank == asked:
        ask_at(trainer, 5)
    error = stopped(trainer)
    trainer.pipeline.close()
    return str(error), trainer.pipeline.step


@pytest.mark.parametrize("asked", [0, 1, 3])
@pytest.mark.parametrize("shape", [(1, 4), (2, 2)], ids=str)
def test_whichever_process_is_asked_all_stop_at_one_step(
    tmp_path: Path, processes: ProcessPool, shape: tuple[int, int], asked: int
) -> None:
    found = processes.run(4, ask_one, tmp_path, shape, asked)
    assert set(found) == {("stopped by SIGTERM after step 6: repeat the command to resume.", 6)}
    resumed = small_trainer(tmp_path)
    assert resumed.resume() and resumed.pipeline.step == 6
    assert all(torch.isfinite(parameter).all() for parameter in resumed.pipeline.parameters())
