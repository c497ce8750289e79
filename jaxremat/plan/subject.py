"""`Subject`: the function that is planned, traced once and cut under any policy; and `Picture`: what a cut is expected to need."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from jaxremat import compat
from jaxremat import policy as p
from jaxremat.arguments import name_of
from jaxremat.choice import Choice, choose
from jaxremat.compat import ClosedJaxpr, JaxprEqn
from jaxremat.errors import PolicyError
from jaxremat.fingerprint import fingerprint
from jaxremat.flops import FlopCount, count_equation
from jaxremat.graph import Graph
from jaxremat.inline import called, inline
from jaxremat.plan.candidate import Candidate
from jaxremat.plan.compilers import compiler_of
from jaxremat.plan.lifetimes import Lifetimes, Profile
from jaxremat.plan.objective import Link
from jaxremat.plan.operations import Operation, Operations
from jaxremat.program import Cut, Program, body_policy
from jaxremat.remat import Rematerialized, remat
from jaxremat.residuals import perturbed_inputs

_ANYTHING = p.Values((0,))


class Subject:
    """A function with the shapes of its arguments.

    Args:
        loss: the function, or what `remat` returned for it.
        args, kwargs: its arguments or their shapes.
        argnums: what is differentiated.

    Raises:
        PolicyError: the function has side effects, or computes nothing that could be stored or computed again.
        TypeError: it is no function; nothing at `argnums` can be differentiated.
    """

    def __init__(
        self, loss: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], argnums: int | Sequence[int]
    ) -> None:
        function: Any = loss if isinstance(loss, Rematerialized) else remat(loss, p.Nothing())
        if isinstance(loss, Rematerialized) and not isinstance(loss.policy, p.Everything):
            raise PolicyError(
                f"plan: needs a function without a policy; {name_of(loss)} is wrapped with {loss.policy!s:.60} already. Give it as it "
                "was before, or remat(loss, 'everything', ...) where it has static arguments."
            )
        try:
            traced, _, _ = function.program(*args, **kwargs)
        except TypeError as error:
            if "static" not in str(error):
                raise
            raise TypeError(
                f"{error} To plan it, give its static arguments first: functools.partial(loss, ...); or say which they are: "
                "remat(loss, 'everything', static_argnames=...)."
            ) from None
        self.function: ClosedJaxpr = traced.function
        self._closed_over = traced.closed_over
        self._flags = perturbed_inputs(function, traced, args, kwargs, argnums)
        if not inline(self.function.jaxpr.eqns, {})[0]:
            raise PolicyError(
                f"plan: {name_of(loss)} computes nothing from its arguments, so there is nothing to store or to compute again."
            )

    @cached_property
    def graph(self) -> Graph:
        """The graph with its scans in one piece: that whose values `values:` policies count."""
        return self._program(_ANYTHING).trace(self._flags)

    @cached_property
    def fingerprint(self) -> str:
        """Of the function, whatever is differentiated."""
        return fingerprint(self.function.jaxpr.invars, self.function.jaxpr.eqns)

    @cached_property
    def carries(self) -> list[tuple[int, int]]:
        """For every scan that the function runs, those inside of other scans' bodies left out, how many values its carry has.

        And of how many arrays it takes a slice for each step.
        """
        scans = (eqn for eqn in _equations(self.function.jaxpr.eqns, set()) if eqn.primitive.name == "scan")
        parts = (compat.scan_parts(eqn, eqn.invars) for eqn in scans)
        return [(len(carry), len(slices)) for _, carry, slices in parts]

    @property
    def scans(self) -> int:
        """How many scans these are."""
        return len(self.carries)

    @cached_property
    def _branches(self) -> bool:
        """Whether it has conditionals; those inside of scans left out."""
        return any(eqn.primitive.name == "cond" for eqn in _equations(self.function.jaxpr.eqns, set()))

    def decides_inside(self, policy: p.Policy) -> bool:
        """Returns whether a policy decides inside of scans' bodies or of branches: the function is differentiated anew for it."""
        inside = body_policy(policy)
        return bool(self.scans) or (self._branches and inside is not None and not isinstance(inside, p.Nothing))

    def cut(self, policy: p.Policy) -> Cut:
        """Returns the function's cut under a policy, which may fit nothing.

        Raises:
            PolicyError: the policy cannot be applied.
        """
        if self.decides_inside(policy):
            return self._program(policy).cut(self._flags)
        return Cut(choose(self.graph, policy), ())  # one trace serves all others

    def _program(self, policy: p.Policy) -> Program:
        return Program(self.function, self._closed_over, policy, is_inside=True)


def _equations(eqns: Iterable[JaxprEqn], seen: set[int]) -> Iterator[JaxprEqn]:
    """Yields the equations of a program, those of a function that it calls more than once a single time."""
    for eqn in eqns:
        body = called(eqn)
        if body is None:
            yield eqn
        elif id(body) not in seen:
            seen.add(id(body))
            yield from _equations(body.jaxpr.eqns, seen)


class Picture:
    """A cut in numbers, with what goes on inside of the bodies of its scans.

    Attributes:
        graph: the cut's graph.
        operations: the same in numbers.
        lifetimes: of its values.
        inside: the pictures of the bodies, and how often each runs.
        runs: the same, those together of which one alone runs, the branches of a conditional.
    """

    def __init__(
        self,
        cut: Cut,
        cost: Callable[[Operation], float],
        platform: str,
        link: Link | None = None,
        by_cost: bool = False,
    ) -> None:
        self._cost, self._link, self._by_cost = cost, link, by_cost
        self.choice = cut.choice
        self.graph = cut.choice.graph
        self.inside = [
            (program.times, Picture(last, cost, platform, link, by_cost))
            for program in cut.inner
            if (last := program.last_cut) is not None
        ]
        either = dict[int, tuple[int, list[Picture]]]()
        for program, (times, picture) in zip(
            (q for q in cut.inner if q.last_cut is not None), self.inside, strict=True
        ):
            either.setdefault(id(program.conditional or program), (times, []))[1].append(picture)
        self.runs = list(either.values())
        work = [picture.work_bytes for times, picture in self.inside if times > 1]
        self.operations = Operations(self.graph, compiler_of(platform), work)
        self.lifetimes = Lifetimes(self.operations)
        self._counts = dict[int, FlopCount]()

    @property
    def work_bytes(self) -> int:
        """What one run of the backward pass of this body needs at most, beside its inputs."""
        return self._profile(self.choice).most_bytes

    def stored(self, choice: Choice) -> frozenset[int]:
        """Returns the numbers of the values that a choice from this graph stores."""
        return frozenset(n for var in choice.kept if (n := self.operations.number(var)) is not None)

    def host(self, choice: Choice) -> frozenset[int]:
        """Returns those of them that it keeps in host memory."""
        there = (var for var, mark in choice.kept.items() if mark.host)
        return frozenset(n for var in there if (n := self.operations.number(var)) is not None)

    def host_bytes(self, choice: Choice) -> int:
        """Returns the bytes that go to the host, the bodies included."""
        own = sum(self.operations.sizes[n] for n in self.host(choice))
        return own + sum(times * picture.host_bytes(picture.choice) for times, picture in self.inside)

    def _again(self, choice: Choice) -> dict[int, int]:
        return {n: level for var, level in choice.again.items() if (n := self.operations.number(var)) is not None}

    def _profile(self, choice: Choice) -> Profile:
        window = range(len(self.operations.backward))
        return self.lifetimes.backward(self.stored(choice), (), window, self._again(choice), self.host(choice))

    def _runs_again(self, choice: Choice) -> Iterable[int]:
        """The forward equations that run again, those that run several times as often.

        What the forward pass leaves out, as it serves derivatives alone, runs a first time when it is recomputed.
        """
        if not choice.again:
            return choice.run_twice
        runs = list(self._profile(choice).recomputed)
        for index in {*runs} - choice.run_twice:
            runs.remove(index)
        return runs

    def _count(self, index: int) -> FlopCount:
        if index not in self._counts:
            self._counts[index] = count_equation(self.graph.forward[index])
        return self._counts[index]

    def recomputed(self, choice: Choice) -> FlopCount:
        """Returns what the backward pass computes again under a choice from this graph, the bodies included."""
        total = FlopCount()
        for index in self._runs_again(choice):
            total += self._count(index)
        for times, pictures in self.runs:
            counts = [picture.recomputed(picture.choice) for picture in pictures]
            total += max(counts, key=lambda c: (c.dot_flops + c.conv_flops, c.elementwise_flops)).times(times)
        return total

    def cost(self, choice: Choice) -> float:
        """Returns the cost of that, and of what goes to the host and back."""
        own = sum(self._cost(self.operations.forward[index]) for index in self._runs_again(choice))
        if self._link is not None:
            own += self._link.cost * sum(self.operations.sizes[n] for n in self.host(choice))
        return own + sum(times * max(q.cost(q.choice) for q in pictures) for times, pictures in self.runs)

    def candidate(self, choice: Choice, policy: p.Policy) -> Candidate:
        """Returns a choice from this graph as a candidate."""
        peak = self.lifetimes.peak_bytes(self.stored(choice), self._again(choice), self.host(choice))
        host_bytes = self.host_bytes(choice)
        return Candidate(
            policy,
            peak,
            self.recomputed(choice),
            self.cost(choice),
            host_bytes,
            host_bytes * self._link.flops if self._link is not None else 0.0,
            self._by_cost,
            tuple(self.choices(choice)),
        )

    def choices(self, choice: Choice) -> Iterable[tuple[int, Choice]]:
        """Yields a choice from this graph and those inside of it, each with how often it is made."""
        yield 1, choice
        for times, picture in self.inside:
            for more, inner in picture.choices(picture.choice):
                yield times * more, inner
