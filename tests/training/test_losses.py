"""The classification loss against sums written out."""

import pytest
import torch

import gpipe._compat.torchvision  # noqa: F401  (before timm)
from gpipe.training.cross_entropy import find_correct
from gpipe.training.losses import ClassificationLoss, MultiLabelLoss, TokenLoss

# isort: split
from timm.data.mixup import mixup_target


def random_logits(num_examples: int, num_classes: int, seed: int = 0) -> torch.Tensor:
    """Logits in double precision."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_examples, num_classes, generator=generator, dtype=torch.float64)


def smoothed_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, smoothing: float) -> torch.Tensor:
    """The definition: cross-entropy with (1 - s) on the target and s spread over all classes."""
    num_classes = logits.shape[1]
    wanted = torch.full_like(logits, smoothing / num_classes)
    wanted[torch.arange(len(targets)), targets] += 1.0 - smoothing
    logarithms = logits - logits.exp().sum(dim=1, keepdim=True).log()
    return -(wanted * logarithms).sum(dim=1).mean()


def test_the_loss_is_the_smoothed_cross_entropy() -> None:
    logits, targets = random_logits(6, 7), torch.tensor([0, 1, 6, 3, 3, 2])
    loss, _ = ClassificationLoss(label_smoothing=0.1)(logits, targets)
    torch.testing.assert_close(loss, smoothed_cross_entropy(logits, targets, 0.1), rtol=1e-12, atol=0)


def test_the_auxiliary_head_has_its_share() -> None:
    logits, auxiliary, targets = random_logits(4, 5), random_logits(4, 5, seed=1), torch.tensor([0, 1, 4, 3])
    loss, _ = ClassificationLoss(label_smoothing=0.1, auxiliary_weight=0.4)((logits, auxiliary), targets)
    expected = smoothed_cross_entropy(logits, targets, 0.1) + 0.4 * smoothed_cross_entropy(auxiliary, targets, 0.1)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_of_mixed_images_the_loss_is_the_soft_cross_entropy_smoothed_once(smoothing: float) -> None:
    """The same targets smoothed by timm, written out."""
    logits, auxiliary, labels = random_logits(6, 7), random_logits(6, 7, seed=1), torch.tensor([0, 1, 6, 3, 3, 2])
    wanted = mixup_target(labels, 7, 0.3, smoothing).double()

    def soft_cross_entropy(logits: torch.Tensor) -> torch.Tensor:
        return -(wanted * (logits - logits.exp().sum(dim=1, keepdim=True).log())).sum(dim=1).mean()

    loss, _ = ClassificationLoss(smoothing, auxiliary_weight=0.4)((logits, auxiliary), mixup_target(labels, 7, 0.3))
    expected = soft_cross_entropy(logits) + 0.4 * soft_cross_entropy(auxiliary)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def test_an_image_of_one_class_has_the_same_loss_and_accuracy_as_its_label() -> None:
    logits, labels = random_logits(6, 7), torch.tensor([0, 1, 6, 3, 3, 2])
    loss = ClassificationLoss(label_smoothing=0.1)
    (hard, hard_metrics), (soft, soft_metrics) = loss(logits, labels), loss(logits, mixup_target(labels, 7, 1.0))
    torch.testing.assert_close(soft, hard, rtol=1e-12, atol=0)
    assert soft_metrics == hard_metrics


def test_a_mixed_image_counts_as_one_of_its_larger_share() -> None:
    logits, labels = random_logits(50, 9), torch.arange(50) % 9
    assert ClassificationLoss()(logits, mixup_target(labels, 9, 0.7))[1] == ClassificationLoss()(logits, labels)[1]
    assert (
        ClassificationLoss()(logits, mixup_target(labels, 9, 0.2))[1] == ClassificationLoss()(logits, labels.flip(0))[1]
    )


def test_accuracies_count_as_sorting_does() -> None:
    logits, targets = random_logits(50, 9), torch.arange(50) % 9
    _, metrics = ClassificationLoss()(logits, targets)
    order = logits.argsort(dim=1, descending=True).tolist()
    for name, k in (("top1", 1), ("top5", 5)):
        expected = sum(int(target) in row[:k] for row, target in zip(order, targets, strict=True)) / 50
        assert metrics[name].item() == pytest.approx(expected)


def test_top5_exists_from_five_classes_on() -> None:
    targets = torch.tensor([0, 1])
    assert set(ClassificationLoss()(random_logits(2, 4), targets)[1]) == {"top1"}
    assert set(ClassificationLoss()(random_logits(2, 5), targets)[1]) == {"top1", "top5"}


def test_metrics_are_detached_scalars() -> None:
    logits = random_logits(3, 6).requires_grad_()
    _, metrics = ClassificationLoss(0.1)(logits, torch.tensor([0, 1, 2]))
    assert all(value.shape == () and not value.requires_grad for value in metrics.values())


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits, targets = random_logits(8, 100).bfloat16(), torch.arange(8)
    loss, _ = ClassificationLoss(0.1)(logits, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), smoothed_cross_entropy(logits.double(), targets, 0.1))
    mixed, _ = ClassificationLoss(0.1)(logits, mixup_target(targets, 100, 1.0))
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, loss)


def test_undefined_logits_are_not_correct_by_luck() -> None:
    logits = torch.full((3, 10), float("nan"))
    logits[:, 4] = 1.0
    assert not any(found.any() for found in find_correct(logits, torch.tensor([4, 4, 4]), (1, 5)))


@pytest.mark.parametrize("kind", [ClassificationLoss, MultiLabelLoss, TokenLoss])
@pytest.mark.parametrize("smoothing", [-0.5, 1.5])
def test_a_smoothing_that_is_no_share_is_refused(kind: type, smoothing: float) -> None:
    with pytest.raises(ValueError, match=f"label_smoothing is {smoothing}, expected 0 to 1"):
        kind(smoothing)


def test_of_tokens_each_counts_alike() -> None:
    logits, targets = torch.randn(3, 4, 7), torch.randint(7, (3, 4))
    loss, metrics = ClassificationLoss(label_smoothing=0.1)(logits, targets)
    expected, figures = ClassificationLoss(label_smoothing=0.1)(logits.reshape(12, 7), targets.reshape(12))
    assert torch.equal(loss, expected)
    assert all(torch.equal(metrics[name], value) for name, value in figures.items())
    assert metrics["top1"] == (logits.argmax(-1) == targets).float().mean()
