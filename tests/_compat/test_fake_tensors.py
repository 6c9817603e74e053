"""Tensors without data beside torch's own: the same of everything that can be seen of them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, library
from torch._subclasses.fake_tensor import FakeTensorMode

from gpipe._compat.fake_tensors import QuickFakeTensorMode
from gpipe.planning import profile
from gpipe.planning.profile import profile_layers
from tests.support.layer_zoo import KINDS, LENGTH, NUM_CLASSES, SIZE, build

aten = torch.ops.aten
REFUSED = {"quantised", "sometimes", "experts", "backward hook"}  # they look at values, or warn


def describe(kind: str, autocast: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Return the profiles of two equal layers and the loss, or why there are none."""
    example = torch.zeros(4, LENGTH, SIZE), torch.zeros(4, dtype=torch.long)

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        logits = outputs["main"] if isinstance(outputs, dict) else outputs
        return torch.nn.functional.cross_entropy(logits.reshape(4, -1)[:, :NUM_CLASSES], targets)

    try:
        return profile_layers(build([kind] * 2), loss, example, autocast=autocast)
    except ValueError as refusal:
        return str(refusal)


def autocast_bfloat16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "autocast"),
    [(kind, nullcontext) for kind in KINDS]
    + [(kind, autocast_bfloat16) for kind in ("linear", "conv2d", "batch norm 2d", "lstm", "encoder", "spectrum")],
)
def test_layers_are_described_as_with_torchs_own(
    kind: str, autocast: Callable[[], AbstractContextManager[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = describe(kind, autocast)
    assert isinstance(found, str) == (kind in REFUSED), found
    monkeypatch.setattr(profile, "QuickFakeTensorMode", FakeTensorMode)
    describe(kind, autocast)  # torch's own holds what is new to it for a while, which a ledger sees
    assert found == describe(kind, autocast)


def test_a_description_does_not_depend_on_what_was_described_before() -> None:
    FakeTensorMode.cache_clear()
    assert describe("lstm", nullcontext) == describe("lstm", nullcontext)


def take_middle(x: Tensor) -> Tensor:
    """Return a part of new memory, as an operation of a stranger's may."""
    return x.new_zeros(10)[2:5]


middle = library.custom_op("gpipe_tests::middle", take_middle, mutates_args=())
middle.register_fake(take_middle)


def look(found: Any, given: list[Tensor]) -> Any:
    """Return all that can be seen of a tensor: of its memory, which of the given ones have it too."""
    if isinstance(found, list | tuple):
        return [look(one, given) for one in found]
    if not isinstance(found, Tensor):
        return found
    storage = found.untyped_storage()
    sharing = [index for index, one in enumerate(given) if one.untyped_storage()._cdata == storage._cdata]
    is_given = [index for index, one in enumerate(given) if one is found]
    where = found.storage_offset(), storage.nbytes(), sharing, is_given, found.is_conj(), found.is_neg()
    return found.shape, found.stride() if found.layout is torch.strided else None, found.dtype, found.device, *where


def make_tensors() -> Iterator[list[Tensor]]:
    """Make tensors that an operation takes: of other shapes, types and strides each time, and the first ones again."""
    for size, dtype in (
        (4, torch.float32),
        (4, torch.float64),
        (6, torch.float32),
        (4, torch.int64),
        (4, torch.float32),
    ):
        yield [torch.ones(2, size, 6, dtype=dtype), torch.ones(2, 6, size, dtype=dtype).transpose(1, 2)]
        yield [torch.ones(2, 6, size, dtype=dtype).transpose(1, 2), torch.ones(2, size, 6, dtype=dtype)]
        yield [torch.ones(2, size, 12, dtype=dtype)[:, :, 6:], torch.ones(1, 1, 6, dtype=dtype)]


def in_other_memory(x: Tensor, _: Tensor) -> Any:
    """Give a tensor other memory, where a view of it does not follow."""
    view = x[0]
    aten.set_(x, x.clone())
    return look(view, [x])


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "of a list": lambda x, y: aten.cat([x, y.expand_as(x)], -1),
    "of a list of one": lambda x, _: aten.cat([x], -1),
    "several results": lambda x, _: aten.sort(x, -1),
    "no result for some": lambda x, _: aten.native_layer_norm(x.double(), [6], None, None, 1e-5),
    "a number": lambda x, _: [aten.pow(x, 2), aten.pow(x, 2.0), aten.pow(x, True)],
    "numbers in a list": lambda x, _: [aten.sum(x, [0], True), aten.sum(x, [1], False)],
    "by a name": lambda x, _: [aten.sum(x, dtype=torch.float64), aten.sum(x)],
    "a tensor by a name": lambda x, y: aten.where(x > 0, x, other=y.expand_as(x)),
    "a type": lambda x, _: [aten._to_copy(x, dtype=torch.float16), aten._to_copy(x)],
    "a memory format": lambda x, _: aten.clone(x, memory_format=torch.contiguous_format),
    "in place": lambda x, y: [aten.add_(x, y), x],
    "in place, of a list": lambda x, y: [aten.index_put_(x, [torch.zeros(1, dtype=torch.long)], y[:1, :1, :1]), x],
    "in place, with no result": lambda x, y: [aten._foreach_add_([x, y], 1), x],
    "into a tensor": lambda x, y: [torch.add(x, 1, out=x), x],
    "turned in place": lambda x, _: [aten.transpose_(x, 0, 1), x],
    "grown in place": lambda x, _: [aten.resize_(x, [3, 9, 9]), x],
    "of other memory in place": lambda x, y: [aten.set_(x, y), x],
    "of equal other memory in place": in_other_memory,
    "a part of new memory": lambda x, _: middle(x),
    "a known number": lambda x, _: torch.tensor(1.0).add_(x.ndim).mul_(2).item(),
    "a view of a known number": lambda x, _: torch.tensor([[x.ndim]]).t().item(),
    "a view": lambda x, _: [aten.t(x[0]), aten.unsqueeze(x, 0), aten.expand(x[:, :, :1], [2, -1, 6]), x[0, 1:, 2]],
    "several views": lambda x, _: [aten.split(x, 1), aten.unbind(x)],
    "a view that says it is none": lambda x, _: aten._unsafe_view(x.contiguous(), [2, -1]),
    "made of nothing": lambda x, _: [aten.new_empty(x, [3]), torch.zeros(3), torch.arange(6)],
    "overlapping": lambda x, _: aten.as_strided(x, [2, 2], [1, 1]) + 1,
    "empty": lambda x, _: x[:0] * 2,
    "complex": lambda x, _: [(x + 0j).clone(), (x + 0j).conj().clone(), torch.view_as_real(x + 0j)],
    "negative": lambda x, _: [(x + 0j).imag.clone(), (x + 0j).conj().imag.clone()],
    "random": lambda x, _: [torch.bernoulli(x.float()), torch.randn_like(x, dtype=torch.float32)],
    "a product of whole numbers": lambda x, _: x.long() / 2,
}


@pytest.mark.parametrize("of_real", [False, True], ids=["", "of tensors with data"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_results_are_torchs(operation: str, of_real: bool) -> None:
    """By hand, as no layer has all of them: each is looked at when it is new and when it is known."""
    run = OPERATIONS[operation]

    def results(mode: FakeTensorMode) -> list[Any]:
        found = []
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            try:
                with nullcontext() if of_real else mode:
                    tensors = list(make_tensors())
                with mode:
                    for given in tensors:
                        try:
                            found.append((look(run(*given), given), look(given, given)))
                        except Exception as error:  # noqa: BLE001 - the same one is looked for
                            found.append(type(error))
            finally:
                torch.set_default_dtype(torch.float32)
        return found

    quick = QuickFakeTensorMode(allow_non_fake_inputs=of_real)
    assert results(quick) == results(FakeTensorMode(allow_non_fake_inputs=of_real))
