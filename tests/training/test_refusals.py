"""What a trainer refuses when it is made."""

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.training.small_run import RandomImages, small_run, small_trainer


@pytest.mark.parametrize("name", ["num_epochs", "max_steps", "save_every_steps", "timeline_every_steps"])
def test_counts_below_one_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        small_trainer(tmp_path, **{name: 0})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("learning_rate", 0.1, "learning_rate is 0.1: give a function of the number of finished steps, or None"),
        ("train_loader", DataLoader(TensorDataset(torch.ones(4, 3))), "train_loader is of type DataLoader, which"),
        ("evaluation_loaders", {"test": [1, 2]}, "test is of type list, which cannot resume within an epoch: give"),
        ("autocast", nullcontext(), "autocast is a context, but each step needs its own: give a function that creates"),
        ("evaluation_autocast", torch.autocast("cpu"), "evaluation_autocast is a context, but each step needs its own"),
        ("metrics", F.mse_loss, "metrics is of type function: give an object with the methods of"),
    ],
)
def test_what_the_trainer_is_given_is_what_it_needs(tmp_path: Path, name: str, value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(said)}"):
        replace(small_trainer(tmp_path), **{name: value})


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    message = "^the optimiser has parameters that the pipeline does not train: create it from pipeline.named_parameters"
    with pytest.raises(ValueError, match=message):
        small_trainer(tmp_path, optimizer=torch.optim.SGD(small_run().pipeline.named_parameters()))


def test_an_optimizer_that_computes_the_loss_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="the optimiser LBFGS computes the loss several times per step"):
        small_trainer(tmp_path, optimizer=torch.optim.LBFGS([torch.ones(1, requires_grad=True)]))


@pytest.mark.parametrize("name", ["train_loader", "test"])
def test_a_loader_without_mini_batches_is_refused(tmp_path: Path, name: str) -> None:
    empty = RandomImages(0, shuffle=False)
    loaders = {name: empty} if name == "train_loader" else {"evaluation_loaders": {name: empty}}
    with pytest.raises(ValueError, match=f"^{name} has 0 mini-batches, expected 1 or more: check its data"):
        small_trainer(tmp_path, **loaders)
