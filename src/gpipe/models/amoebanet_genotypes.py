"""The cells of AmoebaNet-A to D as data.

State 0 is the projected output of the previous cell, state 1 the output of the cell before it. Five pairwise sums, each
of two terms `operation@state`, make states 2 to 6. The output concatenates some states:

    state 0 ──┬── operation ──┐
              │               +── state 2 ── ... ── state 6
    state 1 ──┴── operation ──┘        concat ──► output

Sources: Real et al. 2019, "Regularized Evolution for Image Classifier Architecture Search", and the public TPU code
(tensorflow/tpu, models/official/amoeba_net). `amoebanet_operations` explains the operations.
"""

from dataclasses import dataclass

_TABLE = """
A normal     avg3@0+max3@0  sep3x2@1+none@1  none@0+avg3@1  sep3x2@0+sep5x2@2  avg3@5+sep3x2@0      concat 1,3,4,6
A reduction  sep3x2@1+avg3@0  max3@0+sep7x2@2  max3@1+max3@0  sep3x2@4+1x7_7x1@0  avg3@1+sep7x2@0   concat 2,3,4,5,6
B normal     1x1@1+max3@1  none@1+sep3x2@0  1x1@1+sep3x2@0  1x1@2+none@2  avg3@1+1x1@5               concat 0,3,4,6
B reduction  max2@0+max3@0  none@2+3x3@1  dil2sep5x2@2+max3@2  none@3+sep3x2@1  avg3@4+1x1@3         concat 5,6
C normal     avg3@0+sep3x2@0  none@0+sep3x2@0  avg3@2+sep3x2@1  none@0+sep3x2@1  avg3@3+sep3x2@0    concat 1,2,4,5,6
C reduction  max3@0+max3@0  sep7x2@2+sep3x2@0  sep7x2@0+max3@1  sep5x2@4+sep5x2@4  max3@1+sep3x2@1  concat 0,2,3,4,5,6
D normal     1x1@1+max3@1  none@1+1x7_7x1@0  1x1@0+1x7_7x1@0  max3@2+none@2  avg3@1+1x1@5            concat 0,3,4,6
D reduction  max2@0+max3@0  none@2+3x3@1  1x7_7x1@2+max3@2  none@3+max2@1  avg3@2+1x1@3              concat 4,5,6
"""


@dataclass(frozen=True)
class Term:
    """An operand of a pairwise sum: an `operation` on state number `state`."""

    operation: str
    state: int


@dataclass(frozen=True)
class CellGenotype:
    """One kind of cell: the sums that make states 2 to 6, the states of the output, and the stride."""

    sums: tuple[tuple[Term, Term], ...]
    concat: tuple[int, ...]
    stride: int


def _parse_table(table: str) -> dict[tuple[str, str], CellGenotype]:
    genotypes = {}
    for line in table.strip().splitlines():
        variant, kind, *sums, _, concat = line.split()
        terms = [Term(name, int(state)) for name, state in (text.split("@") for text in "+".join(sums).split("+"))]
        genotypes[variant, kind] = CellGenotype(
            sums=tuple(zip(terms[::2], terms[1::2], strict=True)),
            concat=tuple(map(int, concat.split(","))),
            stride=2 if kind == "reduction" else 1,
        )
    return genotypes


GENOTYPES = _parse_table(_TABLE)
"""(variant, kind) -> CellGenotype; variant is "A" to "D", kind "normal" or "reduction"."""
