"""Counts the floating point operations of a jaxpr: what a step computes, whoever compiles it.

The convention is that of XLA's `HloCostAnalysis`: a multiply-add is two operations; a convolution counts the products
of real inputs alone, not those with padding or with the holes of a dilated input; a reduction of n values to one is
n - 1. Arithmetic, comparisons and transcendental functions are one operation an element, and are kept apart from the
contractions, because a compiler merges and repeats them as it likes.

Unlike XLA's own analysis the body of a scan is counted as often as it runs, and the body of a `shard_map` on every
shard: a count is that of the whole program over all its chips. Of a `cond` the dearest branch is counted. Equations
whose results nobody reads are not counted. The length of a `while` loop is not known from its jaxpr.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

_ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp cos cosh digamma div eq erf erf_inv
    erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter
    not or pow rem round rsqrt sign sin sinh sqrt square sub tan tanh xor""".split()  # noqa: SIM905
)
_RUNNING = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})
_REDUCTIONS = frozenset(
    {"reduce", "argmax", "argmin"} | {f"reduce_{op}" for op in ("sum", "max", "min", "prod", "and", "or", "xor")}
)
_SCATTERS = frozenset({f"scatter{dash}{op}" for dash in "-_" for op in ("add", "mul", "min", "max", "sub")})
_WINDOWS = frozenset({"reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"})
# Their jaxprs are scalar functions applied per element: nothing to walk into.
_SCALAR_BODIES = _REDUCTIONS | _SCATTERS | _WINDOWS | frozenset(("scatter", "sort", "select_and_scatter"))
# Programs of their own in another language than jaxprs, and algorithms whose work depends on who provides them.
_OPAQUE = frozenset(
    {"pallas_call", "ffi_call", "tpu_custom_call", "triton_kernel_call", "pure_callback", "io_callback"}
    | {"cholesky", "eig", "eigh", "fft", "geqrf", "hessenberg", "householder_product", "lu", "ormqr", "qr", "schur"}
    | {"svd", "triangular_solve", "tridiagonal", "tridiagonal_solve"}
)


class OpCounts(NamedTuple):
    """How many convolutions and matrix products a program holds, each loop body once."""

    convolutions: int
    dots: int


@dataclass(frozen=True)
class FlopCount:
    """Operations of one run of a jaxpr, over all chips.

    Attributes:
        dot_flops: of matrix products.
        conv_flops: of convolutions.
        elementwise_flops: of arithmetic, comparisons, transcendental functions and reductions, one an element.
        loops: how many scans of more than one step and `while` loops there are: XLA counts their bodies once.
        unknown_loops: how many loops of unknown length there are; their body is counted once.
        uncounted: primitives whose work a jaxpr does not tell, such as `pallas_call` and `eigh`.
    """

    dot_flops: int = 0
    conv_flops: int = 0
    elementwise_flops: int = 0
    loops: int = 0
    unknown_loops: int = 0
    uncounted: tuple[str, ...] = ()

    @property
    def flops(self) -> int | None:
        """All operations, or None where the jaxpr does not say how often a loop runs."""
        return None if self.unknown_loops else self.dot_flops + self.conv_flops + self.elementwise_flops

    def __add__(self, other: FlopCount) -> FlopCount:
        return FlopCount(
            self.dot_flops + other.dot_flops,
            self.conv_flops + other.conv_flops,
            self.elementwise_flops + other.elementwise_flops,
            self.loops + other.loops,
            self.unknown_loops + other.unknown_loops,
            tuple(dict.fromkeys(self.uncounted + other.uncounted)),
        )

    def times(self, n: int) -> FlopCount:
        """Returns the count of `n` runs."""
        return FlopCount(
            self.dot_flops * n, self.conv_flops * n, self.elementwise_flops * n,
            self.loops, self.unknown_loops, self.uncounted,
        )  # fmt: skip


def count_flops(jaxpr: Jaxpr | ClosedJaxpr) -> FlopCount:
    """Returns the operations of one run of `jaxpr` (of `jax.make_jaxpr(f)(*args)` or `jax.jit(f).trace(*args).jaxpr`).

    Args:
        jaxpr: any jaxpr, open or closed.

    Returns:
        A `FlopCount`; exact integers, derived from shapes alone.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> a, b = jnp.zeros((3, 5)), jnp.zeros((5, 7))
        >>> count_flops(jax.make_jaxpr(jnp.dot)(a, b)).dot_flops == 2 * 3 * 5 * 7
        True
        >>> def loop(a):
        ...     return jax.lax.scan(lambda c, _: (c @ c, None), a, None, length=10)[0]
        >>> count_flops(jax.make_jaxpr(loop)(jnp.zeros((4, 4)))).dot_flops == 10 * 2 * 4**3
        True

    Reference:
        `xla/service/hlo_cost_analysis.cc` of OpenXLA, for the convention.
    """
    inner = _open(jaxpr)
    return _count(inner, [True] * len(inner.outvars))


def count_equation(eqn: Any) -> FlopCount:
    """Returns the operations of one equation, all of whose results are read.

    Args:
        eqn: an equation of a jaxpr.
    """
    return _count_equation(eqn, [True] * len(eqn.outvars))


def conv_and_dot_counts(jaxpr: Jaxpr | ClosedJaxpr) -> OpCounts:
    """Returns how many convolutions and matrix products a program written from `jaxpr` would hold.

    Every loop body and every branch counts once, as in the text of a compiled program (`jaxremat.hlo`), so that the two
    can be compared: fewer in the compiled one means that the compiler merged or removed some.

    Args:
        jaxpr: any jaxpr, open or closed.

    Returns:
        The counts, of equations whose results are read.
    """
    inner = _open(jaxpr)
    return _conv_and_dot_counts(inner, [True] * len(inner.outvars))


def _conv_and_dot_counts(jaxpr: Jaxpr, wanted: Sequence[bool]) -> OpCounts:
    convolutions = dots = 0
    for eqn, live in _live_equations(jaxpr, wanted):
        if eqn.primitive.name == "conv_general_dilated":
            convolutions += 1
        elif eqn.primitive.name in ("dot_general", "ragged_dot", "ragged_dot_general"):
            dots += 1
        elif eqn.primitive.name not in _SCALAR_BODIES:
            for sub in _sub_jaxprs(eqn):
                part = _conv_and_dot_counts(sub, _wanted(sub, live))
                convolutions, dots = convolutions + part.convolutions, dots + part.dots
    return OpCounts(convolutions, dots)


def _count(jaxpr: Jaxpr, wanted: Sequence[bool]) -> FlopCount:
    total = FlopCount()
    for eqn, live in _live_equations(jaxpr, wanted):
        total += _count_equation(eqn, live)
    return total


def _count_equation(eqn: Any, live: Sequence[bool]) -> FlopCount:
    name, params = eqn.primitive.name, eqn.params
    out_size = sum(_size(v) for v in eqn.outvars)
    if name in ("dot_general", "ragged_dot", "ragged_dot_general"):
        return FlopCount(dot_flops=_dot_flops(eqn))
    if name == "conv_general_dilated":
        return FlopCount(conv_flops=_conv_flops(eqn))
    if name in _ELEMENTWISE:
        return FlopCount(elementwise_flops=out_size)
    if name in _REDUCTIONS:
        return FlopCount(elementwise_flops=max(0, _size(eqn.invars[0]) - _size(eqn.outvars[0])))
    if name in _RUNNING:
        return FlopCount(elementwise_flops=out_size)
    if name in _WINDOWS:
        return FlopCount(elementwise_flops=out_size * (math.prod(params["window_dimensions"]) - 1))
    if name in _SCATTERS:
        return FlopCount(elementwise_flops=_size(eqn.invars[-1]))
    if name in _OPAQUE:
        return FlopCount(uncounted=(name,))
    if name in _SCALAR_BODIES:
        return FlopCount()
    if name == "scan":
        # A carry that only the next step reads is still carried: the whole body counts.
        body = count_flops(params["jaxpr"]).times(params["length"])
        return body + FlopCount(loops=int(params["length"] > 1))
    if name == "while":
        once = count_flops(params["cond_jaxpr"]) + count_flops(params["body_jaxpr"])
        return once + FlopCount(loops=1, unknown_loops=1)
    if name == "cond":
        counts = [_count(_open(branch), live) for branch in params["branches"]]
        return max(counts, key=lambda c: c.dot_flops + c.conv_flops + c.elementwise_flops)
    if name == "shard_map":
        return _count(_open(params["jaxpr"]), live).times(_shards(params))
    total = FlopCount()
    for sub in _sub_jaxprs(eqn):
        total += _count(sub, _wanted(sub, live))
    return total


def _live_equations(jaxpr: Jaxpr, wanted: Sequence[bool]) -> Iterator[tuple[Any, list[bool]]]:
    """Yields, last first, the equations that something wanted depends on, and which of their results are read."""
    read = {v for v, is_wanted in zip(jaxpr.outvars, wanted) if is_wanted and not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        live = [v in read for v in eqn.outvars]
        if any(live) or eqn.effects:
            read.update(v for v in eqn.invars if not isinstance(v, Literal))
            yield eqn, live


def _sub_jaxprs(eqn: Any) -> list[Jaxpr]:
    if eqn.primitive.name == "custom_linear_solve":
        return [_open(eqn.params["jaxprs"].solve)]  # the others serve its derivatives
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (Jaxpr, ClosedJaxpr)):
                found.append(_open(item))
    return found


def _open(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _wanted(jaxpr: Jaxpr, live: Sequence[bool]) -> Sequence[bool]:
    """Returns which results of a sub-jaxpr are read: those of its equation, where there is one for each."""
    return live if len(live) == len(jaxpr.outvars) else [True] * len(jaxpr.outvars)


def _shards(params: dict[str, Any]) -> int:
    sizes = dict(params["mesh"].shape)
    return math.prod(sizes[axis] for axis in params.get("manual_axes", sizes))


def _size(v: Any) -> int:
    return math.prod(getattr(v.aval, "shape", ()))


def _dot_flops(eqn: Any) -> int:
    if eqn.primitive.name != "dot_general":
        # Each row of the left operand meets one group's matrix.
        lhs, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        return 2 * math.prod(out) * lhs[-1]
    (lhs_contracting, _), _ = eqn.params["dimension_numbers"]
    lhs = eqn.invars[0].aval.shape
    return 2 * _size(eqn.outvars[0]) * math.prod(lhs[i] for i in lhs_contracting)


def _conv_flops(eqn: Any) -> int:
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    lhs, rhs, out = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    lhs_spec, rhs_spec, out_spec = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    products = out[out_spec[0]] * out[out_spec[1]] * rhs[rhs_spec[1]]
    for i, (low, _) in enumerate(params["padding"]):
        products *= _taps(
            lhs[lhs_spec[2 + i]], rhs[rhs_spec[2 + i]], out[out_spec[2 + i]], params["window_strides"][i], low,
            params["lhs_dilation"][i], params["rhs_dilation"][i],
        )  # fmt: skip
    return 2 * products


def _taps(n: int, kernel: int, out: int, stride: int, low: int, lhs_dilation: int, rhs_dilation: int) -> int:
    """Returns how many pairs (output position, kernel position) of one axis meet a real input.

    Output o and kernel position k read position o·stride + k·rhs_dilation − low of the dilated input, which is real
    where it lies inside and lhs_dilation divides it.
    """
    end = (n - 1) * lhs_dilation + 1 if n else 0
    steps = ((out, stride), (kernel, rhs_dilation))
    (outer, outer_step), (inner, inner_step) = sorted(steps)  # the loop runs over the shorter one
    return sum(_multiples(inner, inner_step, i * outer_step - low, end, lhs_dilation) for i in range(outer)
    )  # fmt: skip


def _multiples(count: int, step: int, start: int, end: int, divisor: int) -> int:
    """Returns how many j in [0, count) have 0 ≤ start + j·step < end and divisor | start + j·step."""
    first, last = max(0, -(start // step)), min(count, -((start - end) // step))
    common = math.gcd(step, divisor)
    if start % common or first >= last:
        return 0
    period = divisor // common
    residue = (-start // common) * pow(step // common, -1, period) % period if period > 1 else 0
    first += (residue - first) % period
    return max(0, -((first - last) // period))
