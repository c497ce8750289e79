"""`Operations`: a graph as the planner sees it: numbered values with sizes, and operations with costs.

Views, tags and broadcast constants are no values here: who reads one reads what it shows, or nothing. Neither are small
values, which are always stored, and inputs, transposed or not, which are there anyway. What is left is few enough to search.

An operation is *fused* where compilers compute it inside of its reader, element by element, and never write its result to
memory unless somebody needs all of it: a convolution, a matrix product, the caller. That makes the difference between
the bytes that autodiff keeps and those that a compiler allots.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax.numpy as jnp

from jaxremat import compat
from jaxremat.choice import small_worth_storing
from jaxremat.compat import JaxprEqn, Var
from jaxremat.flops import FlopCount, count_equation
from jaxremat.fusion import REDUCTIONS
from jaxremat.graph import CONSTANTS, Graph, Value, is_view, size_bytes
from jaxremat.plan.compilers import COMPILERS, Compiler

_PRODUCTS = frozenset(("mul", "square", "integer_pow"))


@dataclass(frozen=True, slots=True)
class Operation:
    """One equation, large values only.

    Attributes:
        reads: the values that it reads, by number.
        writes: the values that it makes.
        is_fused: it is computed inside of its readers, unless one of them needs its whole result.
        needs_whole: it reads whole arrays from memory, as a convolution does.
        contraction_flops: that it costs to run it again: of convolutions and matrix products, bodies of loops times their length.
        elementwise_flops: of all else.
        moved_bytes: what it reads and writes when it runs by itself, small values and inputs included.
        is_product: it multiplies element by element.
        multiplies: it is a reduction; one that needs whole arrays multiplies them itself.
        work_bytes: of memory that it needs while it runs, beside what it reads and writes.
        is_sum: it adds up cotangents, or a residual branch and its input, to which others are added in turn.
        narrows: what it reads itself may be written in half as many bytes.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    is_fused: bool
    needs_whole: bool
    contraction_flops: int
    elementwise_flops: int
    moved_bytes: int
    is_product: bool = False
    multiplies: bool = False
    work_bytes: int = 0
    is_sum: bool = False
    narrows: bool = False

    @property
    def flops(self) -> int:
        """All operations."""
        return self.contraction_flops + self.elementwise_flops


class Operations:
    """A graph's forward and backward pass over numbered values.

    Args:
        graph: the graph.
        compiler: how it treats what it could compute inside of a reader.
        work: for every scan of the forward pass what one step of its backward pass needs beside its inputs.

    Attributes:
        graph: the graph.
        compiler: as it was given.
        variables: for every number the variable; forward values first.
        sizes: for every number the bytes, padding included.
        narrow: the numbers of the values that are written in half of them where only those read it that narrow.
        forward: for every forward equation its operation. Those that serve derivatives alone cost nothing: the forward
            pass leaves them out where they are recomputed.
        backward: for every backward equation its operation.
        forward_values: how many of the numbers are forward values.
    """

    def __init__(self, graph: Graph, compiler: Compiler = COMPILERS["gpu"], work: Sequence[int] = ()) -> None:
        self.graph = graph
        self.compiler = compiler
        self.variables = list[Var]()
        self.sizes = list[int]()
        self._number = dict[Var, int]()
        convolutions = (e for e in (*graph.forward, *graph.backward) if e.primitive.name == "conv_general_dilated")
        self._images = {tuple(getattr(v.aval, "shape", ())) for e in convolutions for v in (e.invars[0], *e.outvars)}
        self._inputs = frozenset(graph.inputs)
        self.small = small_worth_storing(graph)
        for value in graph.values:
            is_own = graph.root(value.var) is value.var and value.size_bytes > graph.small_bytes
            if is_own and not self._shows_input(value) and not compat.is_on_host(value.var.aval):
                self._add(value.var)
        self.forward_values = len(self.variables)
        self._shown = dict[Var, int]()  # views in the backward pass
        operations = [self._operation(eqn) for eqn in graph.forward]
        # What serves derivatives alone runs once, in the forward pass or in the backward pass: it costs nothing more there.
        free = {"contraction_flops": 0, "elementwise_flops": 0, "moved_bytes": 0}
        self.forward = [op if i in graph.primal else replace(op, **free) for i, op in enumerate(operations)]
        for position in self._residual_sums():
            self.forward[position] = replace(self.forward[position], is_sum=True)
        for eqn in graph.backward:
            if is_view(eqn) and isinstance(eqn.invars[0], Var):
                if (shown := self.number(eqn.invars[0])) is not None:
                    self._shown[eqn.outvars[0]] = shown
                continue
            for var in eqn.outvars:
                size = size_bytes(var.aval)
                if size > graph.small_bytes and not (eqn.primitive.name in CONSTANTS and size > _read_bytes(eqn)):
                    self._add(var)
        self.backward = [self._operation(eqn) for eqn in graph.backward]
        read = {n for op in (*self.forward, *self.backward) if op.narrows for n in op.reads}
        self.narrow = frozenset(n for n in read if getattr(self.variables[n].aval, "dtype", None) == jnp.float32)
        # The derivatives of scans stand in the backward pass in reverse.
        loops = [i for i, eqn in enumerate(graph.backward) if eqn.primitive.name == "scan"]
        for position, work_bytes in zip(reversed(loops), work):
            self.backward[position] = replace(self.backward[position], work_bytes=work_bytes)

    def _shows_input(self, value: Value) -> bool:
        """Says whether a value is an input transposed: a product reads the input itself."""
        operand = value.eqn.invars[0] if value.eqn.primitive.name == "transpose" else None
        return operand is not None and self.graph.root(operand) in self._inputs

    def _residual_sums(self) -> list[int]:
        """The positions of forward sums of two large values that another such sum reads.

        Where what convolutions read is computed inside of them, what is computed from a sum alone is not written in its place,
        and the other sum may read that.
        """
        sums = [
            i
            for i, eqn in enumerate(self.graph.forward)
            if eqn.primitive.name == "add" and i in self.graph.primal and len(self.forward[i].reads) > 1
        ]
        read = {n for i in sums for n in self.forward[i].reads}
        if self.compiler.fuses_operands:
            for operation in reversed(self.forward):
                if operation.is_fused and len(operation.reads) == 1 and not read.isdisjoint(operation.writes):
                    read.update(operation.reads)
        return [i for i in sums if not read.isdisjoint(self.forward[i].writes)]

    def _add(self, var: Var) -> None:
        self._number[var] = len(self.variables)
        self.variables.append(var)
        self.sizes.append(self.compiler.size_bytes(var.aval, self._images))

    def number(self, var: Var) -> int | None:
        """Returns the number of the value that a variable is or shows; None for inputs and for what is small."""
        root = self.graph.root(var)
        if not isinstance(root, Var):
            return None
        return self._shown[root] if root in self._shown else self._number.get(root)

    def _operation(self, eqn: JaxprEqn) -> Operation:
        reads = [n for v in eqn.invars if isinstance(v, Var) and (n := self.number(v)) is not None]
        writes = [self._number[v] for v in eqn.outvars if v in self._number]
        name, compiler = eqn.primitive.name, self.compiler
        if not writes and not reads:
            return Operation((), (), True, False, 0, 0, 0)
        count = count_equation(eqn)
        moved = _read_bytes(eqn) + sum(size_bytes(v.aval) for v in eqn.outvars)
        return Operation(
            tuple(dict.fromkeys(reads)),
            tuple(writes),
            compiler.is_fused(eqn),
            compiler.needs_whole(eqn),
            count.dot_flops + count.conv_flops,
            count.elementwise_flops,
            moved,
            name in _PRODUCTS,
            name in REDUCTIONS,
            is_sum=name == "add_any",
            narrows=compiler.is_narrow(eqn),
        )

    @cached_property
    def least_sizes(self) -> list[int]:
        """For every number the bytes that it is written in at least, whatever the layout."""
        sizes = [size_bytes(var.aval) for var in self.variables]
        return [size // 2 if n in self.narrow else size for n, size in enumerate(sizes)]

    @cached_property
    def maker(self) -> list[int]:
        """For every forward value the position of the operation that makes it."""
        makers = [0] * self.forward_values
        for position, operation in enumerate(self.forward):
            for number in operation.writes:
                makers[number] = position
        return makers

    @cached_property
    def place(self) -> list[int]:
        """For every forward value the position of the operation by which it can be there.

        That is its maker, but for values that only derivative rules make, such as masks: JAX emits them behind the
        operation whose derivative they serve, while they can be made as soon as what they read is there.
        """
        places = list[int]()
        for position in self.maker:
            read = [] if position in self.graph.primal else [places[n] for n in self.forward[position].reads]
            places.append(max(read, default=position))
        return places

    @cached_property
    def read_backward(self) -> tuple[int, ...]:
        """The forward values that the backward pass reads."""
        read = dict.fromkeys(n for op in self.backward for n in op.reads if n < self.forward_values)
        return tuple(read)

    @cached_property
    def repeated_bytes(self) -> int:
        """The bytes of the forward values that an operation before computes as well: a compiler makes one of both."""
        return self._own_bytes(self.graph.repeated)

    def unmoved_bytes(self, moving: Collection[Var]) -> int:
        """Returns the bytes of the forward values that depend on none of these inputs."""
        moving = set(moving)
        unmoved = list[Var]()
        for eqn in self.graph.forward:
            if any(isinstance(v, Var) and v in moving for v in eqn.invars):
                moving.update(eqn.outvars)
            else:
                unmoved += eqn.outvars
        return self._own_bytes(unmoved)

    def _own_bytes(self, variables: Iterable[Var]) -> int:
        numbers = {n for v in variables if (n := self._number.get(v)) is not None and n < self.forward_values}
        return sum(self.sizes[n] for n in numbers)

    @cached_property
    def crossing(self) -> list[tuple[int, ...]]:
        """For every place behind a forward operation, the values that later operations of the outputs still read."""
        last = dict[int, int]()
        for position in sorted(self.graph.primal):
            for number in self.forward[position].reads:
                last[number] = position
        alive = list[int]()
        places = list[tuple[int, ...]]()
        for position, operation in enumerate(self.forward):
            if position in self.graph.primal:
                alive += operation.writes
            alive = [n for n in alive if last.get(n, -1) > position]
            places.append(tuple(alive))
        return places

    @cached_property
    def forward_count(self) -> FlopCount:
        """What the forward pass computes, as its outputs ask for."""
        total = FlopCount()
        for position in self.graph.primal:
            total += count_equation(self.graph.forward[position])
        return total


def _read_bytes(eqn: JaxprEqn) -> int:
    return sum(size_bytes(v.aval) for v in eqn.invars if isinstance(v, Var))
