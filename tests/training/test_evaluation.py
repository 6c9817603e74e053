"""Evaluation over uneven batches and over replicas equals, to the last bit, that of one process on all examples."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from gpipe.pipeline.engine import Pipeline
from gpipe.training.evaluation import EvaluationMetrics, MultiLabelMetrics, TokenMetrics, choose_batches, evaluate
from gpipe.training.loader import number_batches
from gpipe.training.losses import MultiLabelLoss
from tests.support.process_pool import ProcessPool
from tests.training.small_run import NUM_LAYERS, RandomImages, small_layers

Figures = dict[str, dict[str, float]]
# Mini-batches: as many for each of two replicas, one more for the first, and fewer than replicas.
NUM_IMAGES = {"even": 15, "uneven": 18, "fewer": 3}


class Sentences:
    """Mini-batches of tokens in two languages, padded with 1."""

    def __init__(self, num_batches: int = 5) -> None:
        self.num_batches = num_batches
        self.batch_numbers: Sequence[int] | None = None
        self.wait_seconds, self.num_replaced = 0.0, 0

    def set_epoch(self, epoch: int) -> None:
        self.batch_numbers = None

    def close(self) -> None:
        """Keep nothing."""

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        for number in number_batches(self):
            generator = torch.Generator().manual_seed(number)
            tokens = torch.randint(1, 9, (3, 4 + number), generator=generator)
            yield tokens, {"tokens": tokens, "language": torch.tensor([0, 1, number % 2])}


def evaluate_all(pipeline: Pipeline, sentences: Pipeline) -> Figures:
    found = {name: evaluate(pipeline, RandomImages(num, 4, shuffle=False)) for name, num in NUM_IMAGES.items()}
    found["some"] = evaluate(pipeline, RandomImages(50, 4, shuffle=False), max_batches=5)
    return {**found, "sentences": evaluate(sentences, Sentences(), metrics=TokenMetrics(["de", "fr"]))}


def in_process(rank: int, num_replicas: int) -> Figures:
    torch.set_num_threads(1)
    num_stages = dist.get_world_size() // num_replicas
    mesh = init_device_mesh("cpu", (num_replicas, num_stages), mesh_dim_names=("replica", "stage"))
    pipelines = [
        Pipeline(layers, F.cross_entropy, [1] * (num_stages - 1) + [len(layers) - num_stages + 1], 2, mesh=mesh)
        for layers in (small_layers(), sentence_layers())
    ]
    found = evaluate_all(pipelines[0], pipelines[1])
    for pipeline in pipelines:
        pipeline.close()
    return found


def sentence_layers() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9))


@pytest.mark.slow
@pytest.mark.parametrize(("num_replicas", "num_stages"), [(1, 2), (2, 1), (2, 2)])
def test_replicas_and_stages_change_no_bit(processes: ProcessPool, num_replicas: int, num_stages: int) -> None:
    alone = [Pipeline(layers, F.cross_entropy, [len(layers)], 2) for layers in (small_layers(), sentence_layers())]
    expected = evaluate_all(alone[0], alone[1])
    assert len({str(figures) for figures in expected.values()}) == 5
    for found in processes.run(num_replicas * num_stages, in_process, num_replicas):
        assert found == expected


@settings(max_examples=20, deadline=None)
@given(num_images=st.integers(1, 30), batch_size=st.integers(1, 9))
def test_the_batches_are_measured_once_each(num_images: int, batch_size: int) -> None:
    loader = RandomImages(num_images, batch_size, shuffle=False)
    pipeline = Pipeline(small_layers(), F.cross_entropy, [NUM_LAYERS], 2)
    metrics = EvaluationMetrics()
    whole = metrics.compute(metrics.measure(pipeline.evaluate(loader.images), loader.labels))
    found = evaluate(pipeline, loader)
    assert (found["top1"], found["top5"]) == (whole["top1"], whole["top5"])
    assert found["loss"] == pytest.approx(whole["loss"], rel=1e-5)


@given(num_batches=st.integers(1, 60), max_batches=st.integers(1, 70))
def test_a_limit_chooses_as_many_mini_batches_spread_evenly_from_end_to_end(num_batches: int, max_batches: int) -> None:
    chosen = list(choose_batches(num_batches, max_batches))
    assert len(chosen) == min(num_batches, max_batches)
    to_first, *distances, to_end = np.diff([-1, *chosen, num_batches])
    assert max(distances, default=0) - min(distances, default=0) <= 1
    assert min(to_first, *distances, to_end) >= 1 and abs(to_first - to_end) <= 1
    assert max(to_first, *distances, to_end) <= math.ceil(num_batches / len(chosen)) + (len(chosen) == 1)
    assert list(choose_batches(num_batches, None)) == list(range(num_batches))


@pytest.mark.parametrize(("max_batches", "chosen"), [(1, [2]), (2, [1, 3]), (4, [0, 1, 3, 4]), (5, [0, 1, 2, 3, 4])])
def test_a_limit_leaves_the_chosen_mini_batches(max_batches: int, chosen: list[int]) -> None:
    pipeline, loader = Pipeline(small_layers(), F.cross_entropy, [NUM_LAYERS], 2), RandomImages(18, 4, shuffle=False)
    indices = np.concatenate([np.arange(18)[4 * number : 4 * number + 4] for number in chosen])
    same = RandomImages(len(indices), 4, shuffle=False)
    same.images, same.labels = loader.images[indices], loader.labels[indices]
    assert evaluate(pipeline, loader, max_batches=max_batches) == evaluate(pipeline, same)


class OtherLength(Sentences):
    """A loader whose length is not the number of its mini-batches."""

    def __init__(self, num_batches: int, length: int) -> None:
        super().__init__(num_batches)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        self.batch_numbers = range(self.num_batches)
        return super().__iter__()


@pytest.mark.parametrize(("num_batches", "length", "expected"), [(0, 0, 1), (0, 2, 2), (2, 3, 3), (3, 2, 2)])
def test_a_set_without_mini_batches_or_with_another_number_than_it_says_is_refused(
    num_batches: int, length: int, expected: int
) -> None:
    pipeline = Pipeline(sentence_layers(), F.cross_entropy, [2], 2)
    said = f"^the evaluation set gave {num_batches} mini-batches, expected {expected}: check its split, and"
    with pytest.raises(ValueError, match=said):
        evaluate(pipeline, OtherLength(num_batches, length), metrics=TokenMetrics(["de", "fr"]))


def test_a_set_without_targets_is_refused() -> None:
    metrics = EvaluationMetrics()
    with pytest.raises(ValueError, match=r"^the evaluation set gave 0 targets, expected 1 or more: check its data"):
        metrics.compute(metrics.measure(torch.ones(2, 0, 9), torch.ones(2, 0).long()))


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), num_classes=st.integers(2, 12))
def test_uneven_batches_give_what_the_concatenation_gives(sizes: list[int], num_classes: int) -> None:
    generator = torch.Generator().manual_seed(sum(sizes))
    logits = torch.randn(sum(sizes), num_classes, generator=generator)
    targets = torch.randint(num_classes, (sum(sizes),), generator=generator)
    metrics = EvaluationMetrics()
    batches = [metrics.measure(*part) for part in zip(logits.split(sizes), targets.split(sizes), strict=True)]
    result, expected = metrics.compute(torch.stack(batches).sum(0)), metrics.compute(metrics.measure(logits, targets))
    assert result["top1"] == expected["top1"] == (logits.argmax(dim=1) == targets).sum().item() / sum(sizes)
    assert result.get("top5") == expected.get("top5")
    assert ("top5" in result) == (num_classes >= 5)
    assert result["loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-5)


def test_every_token_counts_once() -> None:
    logits, targets = torch.randn(5, 4, 7), torch.randint(7, (5, 4))
    metrics = EvaluationMetrics()
    tokens = metrics.measure(logits[:2], targets[:2]) + metrics.measure(logits[2:], targets[2:])
    rows = metrics.measure(logits.reshape(20, 7), targets.reshape(20))
    assert metrics.compute(tokens) == pytest.approx(metrics.compute(rows), rel=1e-12)


def test_targets_that_cross_entropy_ignores_do_not_count() -> None:
    logits, targets = torch.randn(5, 4, 7), torch.randint(7, (5, 4))
    logits[1, 2, 0], targets[1, 2], targets[4] = -math.inf, -100, -100
    metrics, kept = EvaluationMetrics(), targets != -100
    found = metrics.compute(metrics.measure(logits, targets))
    assert found == pytest.approx(metrics.compute(metrics.measure(logits[kept], targets[kept])), rel=1e-12)
    assert found["loss"] == pytest.approx(F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item(), rel=1e-5)


def test_figures_of_several_labels_are_those_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 7, generator=generator)
    targets = (torch.rand(40, 7, generator=generator) < 0.3).float()
    metrics = MultiLabelMetrics()
    sums = [metrics.measure(logits[start : start + 9], targets[start : start + 9]) for start in range(0, 40, 9)]
    found = metrics.compute(torch.stack(sums).sum(0))
    assert found["f1"] == pytest.approx(f1_score(targets, logits >= 0, average="micro"))
    assert found["loss"] == pytest.approx(F.binary_cross_entropy_with_logits(logits, targets).item())
    assert found["top1"] == pytest.approx(float(np.mean([targets[i, logits[i].argmax()] for i in range(40)])))
    loss, figures = MultiLabelLoss(0.2, 0.5)((logits, 2 * logits), targets)
    parts = [F.binary_cross_entropy_with_logits(each, targets * 0.8 + 0.1) for each in (logits, 2 * logits)]
    assert loss.item() == pytest.approx((parts[0] + 0.5 * parts[1]).item())
    assert figures["top1"].item() == pytest.approx(found["top1"])


@pytest.mark.parametrize(
    ("outputs", "targets", "said"),
    [
        (torch.ones(4, 1), torch.ones(4, 1), "the outputs are float32 [4, 1] and the targets float32 [4, 1], but"),
        ({"a": torch.ones(4, 2)}, torch.ones(4).long(), "the outputs are of type dict and the targets int64 [4], but"),
        (torch.ones(4, 2), torch.ones(3).long(), "the outputs are float32 [4, 2] and the targets int64 [3], but"),
    ],
)
def test_the_metrics_of_classes_refuse_other_outputs(outputs: Any, targets: Any, said: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(said)} without metrics=... an evaluation expects"):
        EvaluationMetrics().measure(outputs, targets)
