"""`Lifetimes`: how many bytes are in use when, for any stored set; the planner's picture of a compiler.

The picture: operations run in program order, what is recomputed just before it is needed, and an array lives from the
operation that writes it to the last one that reads it. What is fused is not written (see `operations`): who reads it reads
what it is made of. An element-by-element operation may write over an operand that nobody reads after it.

The bytes in use at a step of the backward pass fall into parts that do not depend on each other: the inputs, the
backward pass' own values, and what derives from the forward pass, stored or recomputed. So the last part can be found for
one segment of the function at a time.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxremat.compat import Var
from jaxremat.graph import size_bytes
from jaxremat.plan.operations import Operation, Operations

_NOBODY = frozenset[int]()


@dataclass(frozen=True)
class Profile:
    """Bytes in use through a part of the program.

    Attributes:
        most_bytes: the most at any step, the backward pass' own values included where it is a part of that.
        recomputed: positions of the forward operations that run again, one entry each time.
    """

    most_bytes: int
    recomputed: tuple[int, ...]


class Lifetimes:
    """Finds the bytes in use under stored sets of one graph."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        graph = operations.graph
        self.input_bytes = sum(size_bytes(v.aval) for v in graph.inputs)
        results = [operations.number(g) for g in graph.gradients if isinstance(g, Var)]
        self._results = {n for n in results if n is not None}
        outs = [operations.number(v) for v in graph.outputs if isinstance(v, Var)]
        self._outputs = {n for n in outs if n is not None}

    @cached_property
    def own_bytes(self) -> np.ndarray:
        """For every backward operation the bytes of the backward pass' own values while it runs, gradients included."""
        own = range(self.operations.forward_values, len(self.operations.sizes))
        return self._live(self.operations.backward, counted=own, results=self._results & set(own))

    @cached_property
    def forward_bytes(self) -> np.ndarray:
        """For every forward operation the bytes of forward values while it runs, were nothing kept for later."""
        operations = [
            op if position in self.operations.graph.primal else _NOTHING
            for position, op in enumerate(self.operations.forward)
        ]
        return self._live(operations, results=self._outputs)

    def without_remat(self) -> int:
        """Returns the most bytes in use where nothing is recomputed but what the compiler recomputes by fusion."""
        together = [*self.operations.forward, *self.operations.backward]
        live = self._live(together, results=self._results | self._outputs)
        return self.input_bytes + int(live.max(initial=0))

    def peak_bytes(self, stored: Collection[int]) -> int:
        """Returns the most bytes in use in forward and backward pass under a stored set (numbers of values)."""
        forward = self._forward_peak(stored)
        backward = self.backward(stored, given=_NOBODY, window=range(len(self.operations.backward)))
        return self.input_bytes + max(forward, backward.most_bytes)

    def _forward_peak(self, stored: Collection[int]) -> int:
        """The forward pass under a stored set; what is stored lives to the end."""
        wanted = self.operations.graph.primal | self.operations.graph.ancestors(
            self.operations.variables[n] for n in stored
        )
        operations = [op if position in wanted else _NOTHING for position, op in enumerate(self.operations.forward)]
        live = self._live(operations, results=self._outputs | set(stored))
        return int(live.max(initial=0))

    def backward(self, stored: Collection[int], given: Collection[int], window: Iterable[int]) -> Profile:
        """Returns the bytes in use in a part of the backward pass.

        Args:
            stored: the numbers of the values that are stored, and freed after their last use here.
            given: values that are there, counted by somebody else.
            window: positions of the backward operations of this part, in order.
        """
        program = list[Operation]()
        times = list[int]()
        recomputed = list[int]()
        there = set(stored) | set(given)
        gate = set[int]()  # what passed the gate that is open
        gated = set[int]()  # cotangents that passed one: a gate is no fusion, so they are written
        forward, maker, first = self.operations.forward, self.operations.maker, self.operations.forward_values
        for time in window:
            operation = self.operations.backward[time]
            todo = [n for n in operation.reads if n < first and n not in there]
            if todo:
                again = set[int]()
                frontier = set[int]()
                while todo:
                    number = todo.pop()
                    if number in stored or number in given:
                        frontier.add(number)
                    elif number not in there and maker[number] not in again:
                        again.add(maker[number])
                        todo += forward[maker[number]].reads
                if not frontier <= gate or not gate:
                    gate = frontier
                    gated.add(max(operation.reads))
                for position in sorted(again):
                    program.append(forward[position])
                    times.append(time)
                    recomputed.append(position)
                    there.update(forward[position].writes)
            program.append(operation)
            times.append(time)
        if not program:
            return Profile(0, ())
        live = self._live(program, counted=range(first), there=stored, written=gated, given=given)
        return Profile(int((live + self.own_bytes[times]).max(initial=0)), tuple(recomputed))

    def _live(
        self, program: Sequence[Operation], *, counted: range | None = None, **values: Collection[int]
    ) -> np.ndarray:
        every = range(len(self.operations.sizes))
        return _live(program, self.operations.sizes, counted=every if counted is None else counted, **values)


_NOTHING = Operation((), (), True, False, 0, 0, 0)


def _live(
    program: Sequence[Operation],
    sizes: Sequence[int],
    *,
    counted: range,
    there: Collection[int] = _NOBODY,
    results: Collection[int] = _NOBODY,
    written: Collection[int] = _NOBODY,
    given: Collection[int] = _NOBODY,
) -> np.ndarray:
    """Returns the bytes in use while each operation of a program runs.

    Args:
        program: operations in order.
        sizes: for every value its bytes.
        counted: the values that count.
        there: values that are there from the start, until their last use.
        results: values that live to the end.
        written: values that are written to memory whoever reads them.
        given: values that are there and do not count.
    """
    end = len(program)
    whole = {*results, *written} | _read_whole(program)
    born = dict.fromkeys(there, 0)
    last = dict.fromkeys(there, -1)
    made_of = dict[int, frozenset[int]]()  # for what is not written, what its readers read instead
    for step, operation in enumerate(program):
        sources = _NOBODY
        for number in operation.reads:
            sources |= {number} if number in born else made_of.get(number, _NOBODY)
        in_memory = [n for n in operation.writes if not operation.is_fused or n in whole]
        if in_memory or not operation.writes:
            last.update(dict.fromkeys(sources, step))
            born.update(dict.fromkeys(in_memory, step))
            last.update(dict.fromkeys(in_memory, step))
        made_of.update(dict.fromkeys((n for n in operation.writes if n not in born), sources))
    last.update({n: end for n in results if n in born})
    lives = {n: (born[n], last[n]) for n in born if last[n] >= 0 and n in counted and n not in given}
    ending = dict[int, list[int]]()
    for number, (_, until) in lives.items():
        ending.setdefault(until, []).append(sizes[number])
    change = np.zeros(end + 2, np.int64)
    for number, (start, until) in lives.items():
        if start < end and program[start].is_fused and until > start and sizes[number] in ending.get(start, ()):
            ending[start].remove(sizes[number])
            start += 1  # it is written over an operand that ends here
        change[start] += sizes[number]
        change[until + 1] -= sizes[number]
    return np.cumsum(change[: max(end, 1)])


def _read_whole(program: Sequence[Operation]) -> set[int]:
    """The values that some operation reads from memory as a whole."""
    whole = set[int]()
    factors = dict[int, tuple[int, ...]]()  # of products that a reduction computes itself
    for operation in program:
        if operation.needs_whole:
            for number in operation.reads:
                whole.update(factors.get(number, (number,)) if operation.multiplies else (number,))
        elif operation.is_product and operation.reads:
            factors.update(dict.fromkeys(operation.writes, operation.reads))
    return whole
