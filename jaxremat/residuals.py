"""`residuals`: the ledger of what is kept for the backward pass, value by value, and why.

Exact and read from the trace: what autodiff under a policy keeps, not what a compiler makes of it (which may recompute
cheap values by itself, or keep more). The table says so in its title.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxremat import compat
from jaxremat import policy as p
from jaxremat.arguments import static_positions
from jaxremat.choice import Choice
from jaxremat.compat import Var
from jaxremat.graph import CONSTANTS, Graph, Value, size_bytes
from jaxremat.program import Cut, Program
from jaxremat.remat import Rematerialized
from jaxremat.rows import Decision, Row, render
from jaxremat.text import human_bytes


@dataclass(frozen=True)
class Residuals:
    """What is kept for the backward pass. Prints as a table; `to_text(every_row=True)` and `to_json` give all rows.

    Attributes:
        policy: the policy that chose, `everything` for a function without one.
        rows: the values in program order, then the inputs that are read again.
        matches: for every selector of the policy how many values it fits, bodies of scans included.
    """

    policy: str
    rows: Sequence[Row]
    matches: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """The bytes that are kept, on the device and in host memory, inputs not counted: they are there anyway."""
        return sum(row.kept_bytes for row in self.rows)

    @property
    def host_bytes(self) -> int:
        """The part of `total_bytes` that is kept in host memory."""
        return sum(row.kept_bytes for row in self.rows if row.decision == "offloaded")

    @property
    def recomputed(self) -> dict[str, int]:
        """How many values of each operation are computed again."""
        return dict(Counter(row.op for row in self.rows if row.decision == "recomputed"))

    def by(self, label: Literal["op", "path", "name"]) -> dict[str, int]:
        """Returns the kept bytes per operation, module path or tag, largest first; untagged values under ''.

        Raises:
            ValueError: `label` is none of the three.
        """
        of: dict[str, Callable[[Row], str]] = {
            "op": lambda row: row.op,
            "path": lambda row: row.path,
            "name": lambda row: ",".join(row.names),
        }
        if label not in of:
            raise ValueError(f"residuals: group by one of {', '.join(of)}; got {label!r}.")
        totals = Counter[str]()
        for row in self.rows:
            if row.kept_bytes:
                totals[of[label](row)] += row.kept_bytes
        return dict(totals.most_common())

    def to_json(self) -> str:
        """Returns one JSON document: policy, totals, matches and all rows."""
        document = {
            "policy": self.policy,
            "total_bytes": self.total_bytes,
            "host_bytes": self.host_bytes,
            "matches": dict(self.matches),
            "rows": [asdict(row) for row in self.rows],
        }
        return json.dumps(document)

    def to_text(self, every_row: bool = False) -> str:
        """Returns the table that the ledger prints as, or with `every_row` one with a line for each value.

        In the first, values that repeat from block to block share a line, and small and free ones are left out.

        Example:
            >>> import jax, jax.numpy as jnp, jaxremat
            >>> def loss(w, x):
            ...     for i in range(4):
            ...         with jax.named_scope(f"block_{i}"):
            ...             x = jnp.sin(x @ w)
            ...     return x.sum()
            >>> ledger = jaxremat.residuals(jaxremat.remat(loss, "dots"), jnp.ones((8, 8)), jnp.ones((2, 8)))
            >>> [line.split()[1:5] for line in ledger.to_text().splitlines() if "stored" in line]
            [['4', 'stored', 'dot', 'block_*']]
            >>> [line.split()[1:4] for line in ledger.to_text(every_row=True).splitlines() if "stored" in line][:2]
            [['stored', 'dot', 'block_0'], ['stored', 'dot', 'block_1']]
        """
        title = f"Residuals under {self.policy} (from the trace): {human_bytes(self.total_bytes)} kept"
        title += f", {human_bytes(self.host_bytes)} of it in host memory" if self.host_bytes else ""
        matched = ", ".join(f"{selector} {count}" for selector, count in self.matches.items())
        return "\n".join([title, render(self.rows, every_row), *([f"Matches: {matched}"] if matched else ())])

    def __str__(self) -> str:
        return self.to_text()


def residuals(f: Callable[..., Any], *args: Any, argnums: int | Sequence[int] = 0, **kwargs: Any) -> Residuals:
    """Returns what is kept for the backward pass of `f`, value by value.

    Args:
        f: a function that `jaxremat.remat` returned, or any other: then it is what plain reverse mode keeps.
        *args: its arguments; `jax.ShapeDtypeStruct` does where only shapes matter. Nothing is computed.
        argnums: the arguments that are differentiated, as for `jax.grad`.
        **kwargs: its keyword arguments.

    Returns:
        The ledger. Views are counted with the value that they show, broadcast constants as 0, and what a scan's body
        keeps times the scan's length.

    Raises:
        PolicyError: the policy does not fit the function.
        TypeError: the arguments at `argnums` hold nothing that can be differentiated.

    Example:
        >>> import jax, jax.numpy as jnp, jaxremat
        >>> def loss(w, x):
        ...     return jnp.tanh(jnp.tanh(x @ w) @ w).sum()
        >>> w, x = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32)
        >>> jaxremat.residuals(jaxremat.remat(loss, "dots"), w, x).by("op")
        {'dot': 256}
        >>> jaxremat.residuals(loss, w, x).total_bytes >= 256
        True
    """
    function = f if isinstance(f, Rematerialized) else Rematerialized(f, p.Everything(), (), ())
    program, _, _ = function.program(*args, **kwargs)
    return ledger(program.cut(perturbed_inputs(function, program, args, kwargs, argnums)))


def ledger(cut: Cut) -> Residuals:
    """Returns the ledger of a cut."""
    choice = cut.choice
    graph = choice.graph
    rows = [_row(choice, value) for value in graph.values]
    read = {v for i in choice.recomputed for v in graph.forward[i].invars if isinstance(v, Var)} | set(
        graph.read_backward
    )
    rows += [_input_row(v) for v in graph.inputs if v in read]
    return Residuals(str(choice.policy), rows, cut.matches)


def perturbed_inputs(
    function: Rematerialized,
    program: Program,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    argnums: int | Sequence[int],
) -> tuple[bool, ...]:
    """Returns for every input of a traced function whether `argnums` ask for its gradient.

    Raises:
        TypeError: they name nothing that can be differentiated.
    """
    asked = {argnums} if isinstance(argnums, int) else set(argnums)
    if wrong := [n for n in asked if not isinstance(n, int) or isinstance(n, bool) or not -len(args) <= n < len(args)]:
        raise TypeError(
            f"argnums counts the positional arguments of the call, from 0, and it has {len(args)}; got "
            f"{', '.join(sorted(map(repr, wrong)))}."
        )
    asked = {n % len(args) for n in asked}
    static = static_positions(function.static_argnums, len(args))
    flags = [False] * len(program.closed_over)
    for position, arg in enumerate(args):
        if position not in static:
            leaves = jax.tree.leaves(arg)
            flags += [position in asked and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]
    flags += [False] * (len(program.function.in_avals) - len(flags))
    if not any(flags):
        raise TypeError(
            f"argnums={argnums} names no floating-point array, so there is no backward pass; "
            f"the function was called with {len(args)} positional arguments."
        )
    return tuple(flags)


def _row(choice: Choice, value: Value) -> Row:
    decision, why = _decision(choice, value)
    aval: Any = value.var.aval
    labels = choice.graph.labels[value.var]
    source = compat.source_line(value.eqn)
    return Row(
        value.position, labels.op, labels.path, labels.names, source, aval.shape, str(aval.dtype), value.size_bytes, decision, why
    )  # fmt: skip


def _input_row(var: Var) -> Row:
    aval: Any = var.aval
    why = "an input of the function, read again in the backward pass"
    return Row(None, "input", "", (), "", aval.shape, str(aval.dtype), size_bytes(aval), "free", why)


def _decision(choice: Choice, value: Value) -> tuple[Decision, str]:
    graph = choice.graph
    if value.var in choice.kept:
        mark = choice.kept[value.var]
        is_on_host = mark.host or compat.is_on_host(value.var.aval)
        return ("offloaded" if is_on_host else "stored"), mark.selector
    if (root := graph.root(value.var)) is not value.var:
        shown = (
            f"value {graph.value_of[root].position}" if isinstance(root, Var) and root in graph.value_of else "an input"
        )
        return "free", f"a view of {shown}"
    if value.eqn.primitive.name in CONSTANTS and not value.size_bytes:
        return "free", "broadcast constant"
    if value.index in choice.recomputed:
        return "recomputed", _why_recomputed(choice, graph, value)
    if value.var in choice.marks:
        return (
            "free",
            f"{choice.marks[value.var].selector} fits, but neither the backward pass nor recomputation reads it",
        )
    return "free", "not read by the backward pass"


def _why_recomputed(choice: Choice, graph: Graph, value: Value) -> str:
    if any(v in choice.kept for v in value.eqn.outvars):
        return "made again together with another output of its equation"
    if isinstance(choice.policy, p.Nothing):
        return "nothing is stored but inputs"
    if 0 < value.size_bytes <= graph.small_bytes:
        return "small, and made from what is there"
    return "no selector stores it"
