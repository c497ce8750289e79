"""`Lifetimes`: how many bytes are in use when, for any stored set; the planner's picture of a compiler.

The picture: operations run in program order, what is recomputed just before it is needed, and an array lives from the
operation that writes it to the last one that reads it. What is fused is not written (see `operations`): who reads it reads
what it is made of. An element-by-element operation may write over an operand that nobody reads after it.

The bytes in use at a step of the backward pass fall into parts that do not depend on each other: the inputs, the
backward pass' own values, and what derives from the forward pass, stored or recomputed. So the last part can be found for
one segment of the function at a time.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from jaxremat.compat import Var
from jaxremat.graph import size_bytes
from jaxremat.plan.operations import Operation, Operations

# At most this part of what is in use is in another memory.
_PART_NEAR = 4

_NOBODY = frozenset[int]()
_NO_LEVELS: Mapping[int, int] = {}


def _every(_number: int) -> bool:
    return True


@dataclass(frozen=True)
class Profile:
    """Bytes in use through a part of the program.

    Attributes:
        most_bytes: the most at any step, the backward pass' own values included where it is a part of that.
        recomputed: positions of the forward operations that run again, one entry each time.
        narrow: the stored values that are there in half of their bytes.
    """

    most_bytes: int
    recomputed: tuple[int, ...]
    narrow: frozenset[int] = _NOBODY


class Lifetimes:
    """Finds the bytes in use under stored sets of one graph.

    Attributes:
        operations: the graph in numbers.
        input_bytes: of the function's inputs.
        fixed_bytes: these and the gradients that are small, for which memory is set aside as for all: in use whatever is stored;
            less what is in another memory, so that it can be negative.
    """

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        graph = operations.graph
        self.input_bytes = sum(size_bytes(v.aval) for v in graph.inputs)
        results = [operations.number(g) for g in graph.gradients if isinstance(g, Var)]
        self._results = {n for n in results if n is not None}
        outs = [operations.number(v) for v in graph.outputs if isinstance(v, Var)]
        self._outputs = {n for n in outs if n is not None}
        gradients = sum(size_bytes(g.aval) for g in graph.gradients if isinstance(g, Var))
        large = sum(operations.sizes[n] for n in self._results)
        self.fixed_bytes = self.input_bytes + max(0, gradients - large)
        if near := operations.compiler.near_bytes_at_peak:
            # Of a small program as much of it is not used.
            self.fixed_bytes -= min(near, self.without_remat() // _PART_NEAR)

    @cached_property
    def own_bytes(self) -> np.ndarray:
        """For every backward operation the bytes of the backward pass' own values while it runs, gradients included."""
        first = self.operations.forward_values
        results = {n for n in self._results if n >= first}
        return self._live(self.operations.backward, counted=lambda n: n >= first, results=results)

    @cached_property
    def forward_bytes(self) -> np.ndarray:
        """For every forward operation the bytes of forward values while it runs, were nothing kept for later."""
        return self._live(self._forward, results=self._outputs) + self._gradient_bytes

    @cached_property
    def forward_ends(self) -> dict[int, int]:
        """For every forward value that is written then, the last operation that needs it to be there."""
        lives, _ = _lives(self._forward, results=self._outputs, first=self.operations.forward_values)
        return {number: last for number, (_, last) in lives.items()}

    @cached_property
    def _forward(self) -> list[Operation]:
        """The forward pass, as its outputs ask for."""
        primal = self.operations.graph.primal
        return [op if position in primal else _NOTHING for position, op in enumerate(self.operations.forward)]

    def without_remat(self) -> int:
        """Returns the most bytes in use where nothing is recomputed but what the compiler recomputes by fusion."""
        together = [*self.operations.forward, *self.operations.backward]
        live = self._live(together, results=self._results | self._outputs)
        return max(self.input_bytes, self.fixed_bytes + int(live.max(initial=0)))

    def peak_bytes(
        self, stored: Collection[int], again: Mapping[int, int] = _NO_LEVELS, host: Collection[int] = _NOBODY
    ) -> int:
        """Returns the most bytes in use in forward and backward pass.

        Args:
            stored: the numbers of the stored values.
            again: further values that are kept when they were recomputed, and their levels, from 2 on.
            host: those of the stored values that are kept in host memory.
        """
        recomputation = self._recomputation(stored, _NOBODY, range(len(self.operations.backward)), again, host)
        live, narrow = _live(
            recomputation.program,
            [*self.operations.sizes, *recomputation.extra_sizes],
            there=set(stored).difference(host),
            results=self._results,
            first=self.operations.forward_values,
            written=recomputation.gated,
            narrow=self.operations.narrow,
        )
        work = np.array([operation.work_bytes for operation in recomputation.program] or [0], np.int64)
        most = max(self._forward_peak(stored, narrow, host), int((live + work).max(initial=0)))
        return max(self.input_bytes, self.fixed_bytes + most)

    def _forward_peak(self, stored: Collection[int], narrow: Collection[int], host: Collection[int] = _NOBODY) -> int:
        """The forward pass under a stored set; what is stored lives to the end, on the device or on the host."""
        wanted = self.operations.graph.primal | self.operations.graph.ancestors(
            self.operations.variables[n] for n in stored
        )
        operations = [op if position in wanted else _NOTHING for position, op in enumerate(self.operations.forward)]
        # What goes to the host has gone when the next such value is made.
        going = sorted(host, key=self.operations.maker.__getitem__)
        for gone, number in pairwise(going):
            position = self.operations.maker[number]
            operations[position] = replace(operations[position], reads=(*operations[position].reads, gone))
        kept = set(stored).difference(host)
        # What is kept is kept as the backward pass reads it.
        narrow = self.operations.narrow.difference(kept).union(kept.intersection(narrow))
        live = self._live(operations, results=self._outputs, kept=kept, written=host, narrow=narrow)
        return int(live.max(initial=0)) + self._gradient_bytes

    @cached_property
    def _gradient_bytes(self) -> int:
        """What is set aside for gradients before the backward pass begins."""
        first = self.operations.forward_values
        return sum(self.operations.sizes[n] for n in self._results if n >= first)

    def backward(
        self,
        stored: Collection[int],
        given: Collection[int],
        window: Iterable[int],
        again: Mapping[int, int] = _NO_LEVELS,
        host: Collection[int] = _NOBODY,
    ) -> Profile:
        """Returns the bytes in use in a part of the backward pass.

        Args:
            stored: the numbers of the values that are stored, and freed after their last use here.
            given: values that are there, counted by somebody else.
            window: positions of the backward operations of this part, in order.
            again: further values that are kept when they were recomputed, and their levels, from 2 on.
            host: those of the stored values that are kept in host memory.
        """
        recomputation = self._recomputation(stored, given, window, again, host)
        first = self.operations.forward_values
        program, times = recomputation.program, recomputation.times
        if not program:
            return Profile(0, ())
        # What operations need while they run is in the backward pass' own bytes.
        sizes = [*self.operations.sizes, *recomputation.extra_sizes]
        live, narrow = _live(
            program,
            sizes,
            counted=lambda n: n < first or n >= len(self.operations.sizes),
            there=set(stored).difference(host),
            first=first,
            written=recomputation.gated,
            given=given,
            narrow=self.operations.narrow,
        )
        most = int((live + self.own_bytes[times]).max(initial=0))
        return Profile(most, tuple(recomputation.recomputed), frozenset(narrow.intersection(stored)))

    def _recomputation(
        self,
        stored: Collection[int],
        given: Collection[int],
        window: Iterable[int],
        again: Mapping[int, int],
        host: Collection[int],
    ) -> "_Recomputation":
        recomputation = _Recomputation(self.operations, stored, given, again, host)
        operations, idle, wants = self.operations.backward, self._idle, self._wants
        for time in window:
            if time not in idle:
                recomputation.run(time, operations[time], wants[time])
        return recomputation

    @cached_property
    def _idle(self) -> set[int]:
        """The backward operations that neither read nor write what has a number."""
        return {t for t, operation in enumerate(self.operations.backward) if not (operation.reads or operation.writes)}

    @cached_property
    def _wants(self) -> list[tuple[int, ...]]:
        """For every backward operation the forward values that it reads."""
        first = self.operations.forward_values
        return [tuple(n for n in operation.reads if n < first) for operation in self.operations.backward]

    def _live(
        self,
        program: Sequence[Operation],
        *,
        counted: Callable[[int], bool] = _every,
        results: Collection[int],
        kept: Collection[int] = _NOBODY,
        written: Collection[int] = _NOBODY,
        narrow: Collection[int] | None = None,
    ) -> np.ndarray:
        narrow = self.operations.narrow if narrow is None else narrow
        first, sizes = self.operations.forward_values, self.operations.sizes
        live, _ = _live(
            program, sizes, counted=counted, results=results, kept=kept, first=first, written=written, narrow=narrow
        )
        return live + np.array([operation.work_bytes for operation in program] or [0], np.int64)


class _Recomputation:
    """Backward operations with what is recomputed just before each, as the rewriting of the gradient does it.

    Attributes:
        program: the operations in order.
        times: for each of them the backward operation that it belongs to.
        recomputed: positions of the forward operations that run again, one entry each time.
        gated: cotangents that passed a gate: it is no fusion, so they are written.
        extra_sizes: of values that are recomputed on the way to others and dropped: they have numbers of their own.
    """

    def __init__(
        self,
        operations: Operations,
        stored: Collection[int],
        given: Collection[int],
        again: Mapping[int, int],
        host: Collection[int],
    ) -> None:
        self._operations, self._again = operations, again
        self.program = list[Operation]()
        self.times = list[int]()
        self.recomputed = list[int]()
        self.gated = set[int]()
        self.extra_sizes = list[int]()
        self._starts = set(stored) | set(given)  # where recomputation starts
        self._there = set(self._starts)
        self._gate = set[int]()
        self._to_fetch = set(host)

    def run(self, time: int, operation: Operation, wants: Sequence[int]) -> None:
        """Adds a backward operation and the recomputation of the forward values that it wants."""
        if wants:
            if wanted := [n for n in wants if n not in self._there]:
                self._remake(time, operation, wanted)
            if self._to_fetch:
                self._fetch(time, wants)
        self.program.append(operation)
        self.times.append(time)

    def _remake(self, time: int, operation: Operation, wanted: Sequence[int]) -> None:
        """Adds the recomputation of forward values, level by level."""
        missing, frontier = self._missing(wanted)
        while self._again and (steps := self._steps(missing)):
            self._recompute(time, *self._missing(steps), operation, only=set(steps))
            self._starts.update(steps)
            missing, frontier = self._missing(wanted)
        if missing:
            self._recompute(time, missing, frontier, operation)

    def _fetch(self, time: int, wanted: Iterable[int]) -> None:
        """Adds the copies of values in host memory that are not there yet."""
        for number in self._to_fetch.intersection(wanted):
            self._to_fetch.remove(number)
            self.program.append(Operation((), (number,), False, False, 0, 0, 0))
            self.times.append(time)

    def _missing(self, wanted: Iterable[int]) -> tuple[list[int], set[int]]:
        """Forward operations to run again, in order, and the values that they start from."""
        maker, forward, there, starts = self._operations.maker, self._operations.forward, self._there, self._starts
        again = set[int]()
        frontier = set[int]()
        todo = list(wanted)
        while todo:
            number = todo.pop()
            if number in starts:
                frontier.add(number)
            elif number not in there and maker[number] not in again:
                again.add(maker[number])
                todo += forward[maker[number]].reads
        return sorted(again), frontier

    def _steps(self, missing: Sequence[int]) -> list[int]:
        """The values of the lowest level that are to be kept, and are recomputed now."""
        made = (n for position in missing for n in self._operations.forward[position].writes)
        on_the_way = [n for n in made if n in self._again and n not in self._there]
        lowest = min((self._again[n] for n in on_the_way), default=0)
        return [n for n in on_the_way if self._again[n] == lowest]

    def _recompute(
        self,
        time: int,
        missing: Sequence[int],
        frontier: set[int],
        operation: Operation,
        only: Collection[int] | None = None,
    ) -> None:
        if not frontier <= self._gate or not self._gate:
            self._gate = frontier
            self.gated.add(max(operation.reads))
        if self._to_fetch:
            self._fetch(time, frontier)
        passing = dict[int, int]()
        for position in missing:
            forward = self._operations.forward[position]
            if only is not None:
                for number in forward.writes:
                    if number not in only:
                        passing[number] = len(self._operations.sizes) + len(self.extra_sizes)
                        self.extra_sizes.append(self._operations.sizes[number])
                forward = replace(
                    forward,
                    reads=tuple(passing.get(n, n) for n in forward.reads),
                    writes=tuple(passing.get(n, n) for n in forward.writes),
                )
            self.program.append(forward)
            self.times.append(time)
            self.recomputed.append(position)
            self._there.update(n for n in forward.writes if n < len(self._operations.sizes))


_NOTHING = Operation((), (), True, False, 0, 0, 0)


def _lives(
    program: Sequence[Operation],
    *,
    there: Collection[int] = _NOBODY,
    results: Collection[int] = _NOBODY,
    kept: Collection[int] = _NOBODY,
    first: int,
    written: Collection[int] = _NOBODY,
    narrow: Collection[int] = _NOBODY,
) -> tuple[dict[int, tuple[int, int]], set[int]]:
    """Returns for every value that is written to memory the first and the last step of a program at which it is there.

    And those of `narrow` that are there in half of their bytes.

    Args:
        program: operations in order.
        there: values that are there from the start, until their last use.
        results: values that live to the end; memory is set aside for them before the program begins.
        kept: values that live to the end from when they are made.
        first: the least number of the backward pass' own values.
        written: values that are written to memory whoever reads them.
        narrow: values that may be written in half of their bytes: those are where only such operations read them, each by
            itself, as take no more.
    """
    end = len(program)
    narrow = set(narrow).difference(results)
    whole = {*results, *kept, *written} | _read_whole(program)
    born = dict.fromkeys(there, 0)
    last = dict.fromkeys(there, -1)
    made_of = dict[int, frozenset[int]]()  # for what is not written, what its readers read instead
    for step, operation in enumerate(program):
        sources = _NOBODY
        for number in operation.reads:
            if number in born:
                sources |= {number}
            elif number in made_of:
                sources |= made_of[number]
        fused, writes = operation.is_fused, operation.writes
        if operation.is_sum:
            # Written where it is made, its terms can go: a fusion of ever more terms would keep them all.
            own = sum(first <= n for n in sources)
            fused = own < 2 if own else len(sources) < 2
        is_run = not fused or not writes
        for number in writes:
            if not fused or number in whole:
                born[number] = last[number] = step
                is_run = True
            elif number not in born:
                made_of[number] = sources
        if is_run:
            for number in sources:
                last[number] = step
            if narrow and not (fused and not writes):  # a view reads nothing
                narrow -= sources.difference(operation.reads) if operation.narrows else sources
    last.update({n: end for n in (*results, *kept) if n in born})
    born.update({n: 0 for n in results if n in born})
    return {n: (born[n], last[n]) for n in born if last[n] >= 0}, narrow


def _live(
    program: Sequence[Operation],
    sizes: Sequence[int],
    *,
    counted: Callable[[int], bool] = _every,
    given: Collection[int] = _NOBODY,
    **how: Any,
) -> tuple[np.ndarray, set[int]]:
    """Returns the bytes in use while each operation of a program runs, and what is there in half of its bytes.

    Args:
        program: operations in order.
        sizes: for every value its bytes.
        counted: says whether a value counts.
        given: values that are there and do not count.
        **how: as for `_lives`.
    """
    end = len(program)
    lives, narrow = _lives(program, **how)
    lives = {n: life for n, life in lives.items() if counted(n) and n not in given}
    if narrow:
        sizes = list(sizes)
        for number in narrow:
            sizes[number] //= 2
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
    return np.cumsum(change[: max(end, 1)]), narrow


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
