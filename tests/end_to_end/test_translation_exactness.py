"""Translation through a pipeline is the plain model's training: dropout, lengths, tied tables and token weights."""

import functools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import gpipe
from gpipe.data.text.tokenizer import PADDING
from gpipe.models import translation_transformer
from gpipe.training.losses import TokenLoss, count_tokens
from tests.end_to_end.translation_case import CUTS, Case, Outcome, batches, run, run_in_processes
from tests.support.process_pool import ProcessPool

run_once = functools.cache(run)
TIES = ("inputs", "output", "all")


def assert_bitwise_equal(found: Outcome, expected: Outcome) -> None:
    """Compare everything that both have; a process knows only its own layers."""
    assert (found.reports, found.norms) == (expected.reports, expected.norms)
    for kind in ("gradients", "weights"):
        for name, value in getattr(found, kind).items():
            assert np.array_equal(value, getattr(expected, kind)[name]), f"{kind} of {name}"
    if found.logits is not None:
        assert np.array_equal(found.logits, expected.logits)


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_stages_in_one_process_train_the_plain_model(num_stages: int, mode: str) -> None:
    assert_bitwise_equal(run(Case(num_stages, rematerialize=mode)), run_once(Case(1, rematerialize="never")))


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_process_per_stage_trains_the_plain_model(num_stages: int, processes: ProcessPool) -> None:
    cases = [Case(num_stages, tied=tied) for tied in TIES] + [Case(num_stages, schedule="1f1b")]
    for outcomes in processes.run(num_stages, run_in_processes, cases):
        for case, found in zip(cases, outcomes, strict=True):
            assert_bitwise_equal(
                found, run_once(Case(1, rematerialize="never", tied=case.tied, schedule=case.schedule))
            )


@pytest.mark.parametrize("tied", TIES)
def test_tied_tables_stay_equal_while_they_train(tied: str) -> None:
    tables = {"layers.0.embedding.weight", "layers.4.embedding.weight", "layers.9.weight"}
    names = {"inputs": {"0", "4"}, "output": {"4", "9"}, "all": {"0", "4", "9"}}[tied]
    found = run_once(Case(1, rematerialize="never", tied=tied)).weights
    equal = {table for table in tables if table.split(".")[1] in names}
    first, *others = [found[table] for table in equal]
    assert all(np.array_equal(first, other) for other in others)
    assert not any(np.array_equal(first, found[table]) for table in tables - equal)


@pytest.mark.parametrize("num_microbatches", [1, 3, 5])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_micro_batches_of_different_numbers_of_tokens_give_the_mini_batchs_gradient(
    num_stages: int, num_microbatches: int
) -> None:
    """Against plain autograd over the whole mini-batch, with tables that are really one parameter."""
    sizes = {"vocabulary_size": 4000, "model_size": 16, "head_size": 12, "tied": "all"}
    torch.manual_seed(0)
    plain = translation_transformer(3, 24, 2, **sizes).double()
    layers = translation_transformer(3, 24, 2, **sizes).double()
    layers.load_state_dict(plain.state_dict())
    ((inputs, targets),) = batches(1)
    tokens = targets["tokens"]
    counts = [int((part != PADDING).sum()) for part in tokens.chunk(num_microbatches)]
    assert num_microbatches == 1 or len(set(counts)) > 1
    loss = F.cross_entropy(plain(inputs).flatten(0, 1), tokens.flatten(), ignore_index=PADDING)
    loss.backward()
    pipeline = gpipe.Pipeline(layers, TokenLoss(), CUTS[num_stages], num_microbatches, loss_weight=count_tokens)
    report = pipeline.train_step((inputs, targets))
    assert math.isclose(report.loss, loss.item(), rel_tol=1e-12)
    expected = dict(plain.named_parameters(remove_duplicate=False))
    for name, parameter in pipeline.named_parameters():
        other = expected[name.removeprefix("layers.")].grad
        assert parameter.grad is not None and other is not None
        assert (parameter.grad - other).abs().max() <= 1e-12 * max(1.0, other.abs().max()), name
