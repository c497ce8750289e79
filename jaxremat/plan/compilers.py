"""`Compiler`: how one of XLA's compilers lays out arrays, and what it computes inside of a reader, as far as they differ."""

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax

from jaxremat import compat
from jaxremat.compat import JaxprEqn
from jaxremat.fusion import CONTRACTIONS, FUSED, REDUCTIONS
from jaxremat.graph import size_bytes


@dataclass(frozen=True)
class Compiler:
    """What distinguishes a compiler, measured by what it allots.

    Attributes:
        fuses_reductions: it computes inside of a reduction what that folds. XLA:CPU does so only where the innermost axes
            alone are folded.
        fuses_operands: it computes inside of a convolution or matrix product what that reads, element by element.
        narrows: what convolutions and matrix products of default precision alone read is written in half as many bytes, as
            bfloat16, which is what they compute with.
        lanes, sublanes: arrays are laid out in tiles of so many 4-byte words in two of their dimensions, which are padded to
            that; 1 where they are not.
        near_bytes: of memory beside the main one, where it puts what it can, and which no peak counts.
        near_bytes_at_peak: so much of it is in use when most is.
    """

    fuses_reductions: bool = True
    fuses_operands: bool = False
    narrows: bool = False
    lanes: int = 1
    sublanes: int = 1
    near_bytes: int = 0
    near_bytes_at_peak: int = 0

    def is_fused(self, eqn: JaxprEqn) -> bool:
        """Says whether an equation is computed inside of its readers, unless one of them needs its whole result."""
        return eqn.primitive.name in FUSED or (self.fuses_operands and _is_one_hot(eqn))

    def needs_whole(self, eqn: JaxprEqn) -> bool:
        """Says whether an equation reads whole arrays from memory."""
        name = eqn.primitive.name
        if name in REDUCTIONS:
            return not (self.fuses_reductions or _folds_rows(eqn))
        return not self.is_fused(eqn) and not (self.fuses_operands and name in CONTRACTIONS)

    def is_narrow(self, eqn: JaxprEqn) -> bool:
        """Says whether what an equation reads may be written in half as many bytes."""
        return self.narrows and eqn.primitive.name in CONTRACTIONS and _is_of_default_precision(eqn)

    def size_bytes(self, aval: Any, images: Collection[tuple[int, ...]] = ()) -> int:
        """Returns the bytes of an array with its padding, in the layout that needs least of those that are chosen.

        Args:
            aval: its type.
            images: the shapes of what convolutions read and give.
        """
        size = size_bytes(aval)
        shape = [compat.dimension(d) for d in getattr(aval, "shape", ())]
        if self.lanes == 1 or len(shape) < 2 or not size:
            return size
        sublanes = self.sublanes * max(1, 4 * math.prod(shape) // size)
        last = len(shape) - 1
        if tuple(shape) in images:  # features or the batch go along the lanes, never a dimension of space
            pairs = [(0, last), *((last, i) for i in range(last))]
        else:
            pairs = list(itertools.permutations(range(len(shape)), 2))
        return int(size * min(_padding(shape[i], self.lanes) * _padding(shape[j], sublanes) for i, j in pairs))


# The memory beside the main one is the vector memory of v5e and v6e, and its part in use that of a chain of 16 convolutions.
COMPILERS = {
    "cpu": Compiler(fuses_reductions=False),
    "gpu": Compiler(),
    "tpu": Compiler(
        fuses_operands=True, narrows=True, lanes=128, sublanes=8, near_bytes=128 << 20, near_bytes_at_peak=96 << 20
    ),
}


def compiler_of(platform: str) -> Compiler:
    """Returns the compiler of a platform, as JAX names it; one that is not known counts as that of GPUs."""
    return COMPILERS.get(platform, COMPILERS["gpu"])


def _padding(dimension: int, multiple: int) -> float:
    return -(-dimension // multiple) * multiple / dimension


def _is_one_hot(eqn: JaxprEqn) -> bool:
    """Says whether an equation scatters one number along each row of an array: where the index is, and nothing elsewhere."""
    if eqn.primitive.name != "scatter-add":
        return False
    numbers = eqn.params["dimension_numbers"]
    rank = len(getattr(eqn.outvars[0].aval, "shape", ()))
    return not numbers.update_window_dims and len(numbers.operand_batching_dims) == rank - 1


def _is_of_default_precision(eqn: JaxprEqn) -> bool:
    precision = eqn.params["precision"]
    precisions = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (None, jax.lax.Precision.DEFAULT) for p in precisions)


def _folds_rows(eqn: JaxprEqn) -> bool:
    """Says whether a reduction folds the innermost axes alone."""
    folded: Any = eqn.invars[0].aval
    axes, rank = eqn.params["axes"], len(folded.shape)
    return sorted(axes) == list(range(rank - len(axes), rank))
