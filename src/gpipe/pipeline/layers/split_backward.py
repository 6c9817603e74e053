"""A backward in two tasks: gradients of a stage's inputs, for which the stage before waits, and those of weights later.

    x ---> [convolution] ---> ...        input gradients     gx from g and w, at once; x and g are held
             w                           weight gradients    gw from x and g, whenever there is time

Convolutions and fully connected layers are deferred: half of the work of their backward makes the gradient of the
weight. Other layers with weights, such as norms, make all gradients at once. So do products whose weight is used twice
or computed from other tensors, those whose tensors are kept by hooks, and small ones, where waiting would cost more
than the work. The forward is unchanged.

The first task is an ordinary backward that stops short of the deferred weights: autograd asks each operation only for
the gradients that are needed. On its way it meets the gradient of each deferred product. The second task makes the
kernel's other call, with the operation's own arguments, and adds the result to the weight's `.grad`. It does so through
autograd if there is no gradient yet, if hooks want to see it, or if the product's weight was computed from the
parameter; otherwise directly, which is the same addition without a backward around it. So the bits are those of one
backward, and hooks of parameters run once.

Why not torch.autograd.grad twice: the second call would go through the activations again. torch's pipelining cuts the
graph at intermediate nodes (`torch/distributed/pipelining/_backward.py`): it keeps the whole graph until then, and
defers less where branches share intermediates, as in AmoebaNet's cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.nn import Parameter

from gpipe.pipeline._compat import run_backward

Roots: TypeAlias = Sequence[tuple[GradientEdge, Tensor | None]]
"""Where a backward starts, each with its gradient; None for a scalar."""

Differentiate: TypeAlias = Callable[[Tensor], Iterable[Tensor | None]]
"""The gradient of a product -> the gradients of its weight and, if it has one, its bias."""

CACHE_BYTES = 2**20
"""Gradients of weights go through autograd together up to about this size, that of a CPU core's cache."""

SMALL_PRODUCT = 2**23
"""Gradients of weights that take fewer FLOPs are not deferred. A CPU core computes this many in 0.2 ms, and deferring
costs a tenth of that (`experiments/split_cost.py`); a GPU computes them faster than it starts a kernel."""

_ACCUMULATE, _REENTRANT = "AccumulateGrad", "CheckpointFunctionBackward"
_TRANSPOSED = ["TBackward0"]


class _Product(NamedTuple):
    """A kind of operation that multiplies activations by a weight."""

    activations: int  # which of its inputs has them
    weights: tuple[int, ...]  # which inputs are the weight and, after it, the bias
    saved: str  # autograd's name for the activations
    prepare: Callable[[Any, Tensor, Sequence[int]], Differentiate]  # takes the operation, activations, wanted weights


class _End(NamedTuple):
    """Where the gradient of a product's weight goes."""

    edge: tuple[Node, int]  # the place in the graph to which autograd would pass it
    leaf: Any  # autograd's node that adds to the parameter's `.grad`
    is_own: bool  # whether the product's weight is the parameter
    is_transposed: bool  # whether it is the parameter transposed, as in a fully connected layer

    def add(self, gradient: Tensor) -> bool:
        """Add to the parameter's gradient; if that is autograd's task, do nothing and return False."""
        parameter = self.leaf.variable
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks or (found := parameter.grad) is None:
            return False
        if self.is_own:
            found.add_(gradient)
        elif self.is_transposed:
            found.add_(gradient.t())
        return self.is_own or self.is_transposed


class DeferredProduct(NamedTuple):
    """A product of activations and a weight, whose gradient of the weight is deferred."""

    node: Any  # autograd's operation, which holds its tensors until it has run
    kind: _Product
    wanted: list[int]  # which of its weights get a gradient
    ends: list[_End]  # where those go

    @property
    def inputs(self) -> Tensor:
        """The activations, detached: the graph before them has the gradients of the stage's input."""
        found: Tensor = getattr(self.node, f"_saved_{self.kind.saved}")
        return found.detach()

    def prepare(self, inputs: Tensor) -> Differentiate:
        """Return what makes the gradients of the weights; it holds the activations."""
        return self.kind.prepare(self.node, inputs, self.wanted)

    def find_ends(self) -> list[_End]:
        """Return where the gradients go: through autograd, if a hook wants to see that of the transposed weight."""
        weight = getattr(self.node, "_saved_mat2", None)
        is_hooked = weight is not None and weight._backward_hooks
        return [end._replace(is_transposed=False) for end in self.ends] if is_hooked else self.ends


class WeightGradients:
    """The gradients of weights that wait."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Differentiate, list[_End], Tensor, Any, list[tuple[str, Tensor, int]]]] = []

    def note(
        self, product: DeferredProduct, position: Callable[[], Any]
    ) -> Callable[[tuple[Tensor | None, ...]], None]:
        """Return a hook that defers the gradients of a product's weights, once the product's own is there."""

        def note(gradients: tuple[Tensor | None, ...]) -> None:
            if gradients[0] is not None:
                inputs = product.inputs
                pairs = ("input", inputs), ("output's gradient", gradients[0])
                seen = [(what, tensor, tensor._version) for what, tensor in pairs]
                self._waiting.append((product.prepare(inputs), product.find_ends(), gradients[0], position(), seen))

        return note

    def parameters(self) -> Iterator[Parameter]:
        """Yield the weights."""
        for _, ends, *_ in self._waiting:
            for end in ends:
                yield end.leaf.variable

    def gradients(self) -> Iterator[Tensor]:
        """Yield the gradients of the products, from which those of the weights will be made."""
        for _, _, gradient, *_ in self._waiting:
            yield gradient

    @torch.no_grad()
    def compute(self, on_position: Callable[[Any], None] = lambda _: None) -> None:
        """Make the gradients, and add them to the weights' `.grad`; `on_position` is told where each belongs.

        Raises:
            RuntimeError: the input of a product, or the gradient of its output, was changed in place; autograd raises
                the same for its own tensors.
        """
        self._waiting.reverse()
        made: list[tuple[GradientEdge, Tensor]] = []
        while self._waiting:
            differentiate, ends, gradient, position, seen = self._waiting.pop()
            on_position(position)
            for what, tensor, version in seen:
                if tensor._version != version:
                    raise RuntimeError(
                        f"the {what} of a product, of shape {tuple(tensor.shape)}, was changed in place before the "
                        "gradient of its weight was computed from it: change a copy instead (.clone())"
                    )
            for end, value in zip(ends, differentiate(gradient), strict=True):
                if value is not None and not end.add(value):
                    made.append((GradientEdge(*end.edge), value))
            del differentiate, gradient, value, seen, tensor
            # Small gradients together, since each call of backward takes time. Large ones one by one: each is added
            # while it is in the CPU's cache, and its memory is then free for the next.
            if made and (not self._waiting or sum(value.nbytes for _, value in made) > CACHE_BYTES):
                run_backward([edge for edge, _ in made], [value for _, value in made])
                made.clear()


def run_split_backward(roots: Roots, position: Callable[[], Any] = lambda: None) -> WeightGradients:
    """Run a backward except for the gradients of weights that can wait, and return those.

    position: returns where the backward is; `WeightGradients.compute` passes that to `on_position`.
    """
    edges, seeds = [root for root, _ in roots], [seed for _, seed in roots]
    waiting = WeightGradients()
    leaves, products = find_products(edge.node for edge in edges)
    if not products:
        run_backward(edges, seeds)
        return waiting
    hooks = [product.node.register_prehook(waiting.note(product, position)) for product in products]
    try:
        run_backward(edges, seeds, leaves)
    finally:
        for hook in hooks:
            hook.remove()
    return waiting


def find_products(roots: Iterable[Node]) -> tuple[list[Tensor], list[DeferredProduct]]:
    """Go through a graph; return the leaves that do not wait, and the products whose weights can."""
    uses: dict[Any, int] = dict.fromkeys(roots, 1)
    met: list[tuple[Any, _Product, Any]] = []
    leaves: dict[Any, Tensor] = {}
    stack: list[Any] = list(uses)
    while stack:
        node = stack.pop()
        name = type(node).__name__
        if name == _ACCUMULATE:
            leaves[node] = node.variable
            continue
        if name == _REENTRANT:
            return [], []  # it runs a whole backward of its own, and refuses to be a part of one
        edges = node.next_functions
        if (kind := _PRODUCTS.get(name)) is not None:
            met.append((node, kind, edges))
        for following, _ in edges:
            if following in uses:
                uses[following] += 1
            elif following is not None:
                uses[following] = 1
                stack.append(following)
    products = []
    for node, kind, edges in met:
        wanted = [which for which in kind.weights if edges[which][0] is not None]
        # A frozen weight has no gradient. Without activations to differentiate, the first task would not get here.
        if (
            kind.weights[0] in wanted
            and edges[kind.activations][0] is not None
            and _can_wait(node, kind)
            and _count_flops(node, edges[kind.weights[0]]) >= SMALL_PRODUCT
        ):
            ends = [end for which in wanted if (end := _find_end(edges[which], uses)) is not None]
            if len(ends) == len(wanted):
                for end in ends:
                    del leaves[end.leaf]
                products.append(DeferredProduct(node, kind, wanted, ends))
    return list(leaves.values()), products


def _count_flops(product: Any, weight: tuple[Any, int]) -> int:
    """Return the work of a weight's gradient: each value of the weight is used at each position of the output.

    product: an operation whose output has its channels in the second dimension.
    """
    node, place = weight
    output: list[int] = product._input_metadata[0].shape
    size: int = math.prod(node._input_metadata[place].shape)
    return 2 * size * math.prod(output) // max(output[1], 1)


def _can_wait(node: Any, kind: _Product) -> bool:
    """Return whether an operation is a product alone and holds its tensors itself; under a checkpoint, hooks do."""
    is_scaled = kind is _PRODUCTS["AddmmBackward0"] and not node._saved_alpha == node._saved_beta == 1
    return getattr(node, f"_raw_saved_{kind.saved}").unpack_hook is None and not is_scaled


def _find_end(edge: tuple[Any, int], uses: dict[Any, int]) -> _End | None:
    """Return the leaf at the end of a chain of operations that nothing else uses; None if there is none."""
    node = edge[0]
    names: list[str] = []
    while node is not None and uses[node] == 1:
        if (name := type(node).__name__) == _ACCUMULATE:
            return _End(edge, node, not names, names == _TRANSPOSED)
        names.append(name)
        following = node.next_functions
        node = following[0][0] if len(following) == 1 else None
    return None


def _prepare_convolution(node: Any, inputs: Tensor, wanted: Sequence[int]) -> Differentiate:
    weight = node._saved_weight
    settings = (
        node._saved_bias_sym_sizes_opt, node._saved_stride, node._saved_padding, node._saved_dilation,
        node._saved_transposed, node._saved_output_padding, node._saved_groups, [False, 1 in wanted, 2 in wanted],
    )  # fmt: skip

    def differentiate(gradient: Tensor) -> list[Tensor | None]:
        found = torch.ops.aten.convolution_backward(gradient, inputs, weight, *settings)
        return [found[which] for which in wanted]

    return differentiate


def _prepare_product(node: Any, inputs: Tensor, wanted: Sequence[int]) -> Differentiate:
    """Prepare the gradients of inputs @ weight, or bias + inputs @ weight, as torch does: in the weight's layout."""
    strides, sizes = node._saved_mat2_sym_strides, node._saved_mat2_sym_sizes
    is_transposed = strides[0] == 1 and strides[1] == sizes[0]
    inputs = inputs.conj()  # does nothing to real numbers
    summand, place = node.next_functions[0]
    bias_sizes = [summand._input_metadata[place].shape] if len(wanted) == 2 else []

    def differentiate(gradient: Tensor) -> list[Tensor | None]:
        of_weight = gradient.t().mm(inputs).t() if is_transposed else inputs.t().mm(gradient)
        return [of_weight, *(gradient.sum_to_size(size) for size in bias_sizes)]

    return differentiate


_PRODUCTS = {
    "ConvolutionBackward0": _Product(0, (1, 2), "input", _prepare_convolution),
    "AddmmBackward0": _Product(1, (2, 0), "mat1", _prepare_product),
    "MmBackward0": _Product(0, (1,), "self", _prepare_product),
}
