"""`Program`: a traced function with a policy, differentiated through its cut.

Under differentiation the gradient graph of the function is cut as the policy says: a `custom_vjp` whose forward pass returns
the stored values, and whose backward pass recomputes the rest just in time. The bodies of scans and branches of conditionals are
programs too, with what the policy means inside of them.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from jaxremat import compat
from jaxremat import policy as p
from jaxremat.choice import Choice, check_matches, choose
from jaxremat.compat import ClosedJaxpr, JaxprEqn
from jaxremat.errors import PolicyError, RematWarning
from jaxremat.forward import forward_program
from jaxremat.frames import user_stacklevel
from jaxremat.graph import Graph, run, trace_gradient
from jaxremat.inline import called
from jaxremat.lint import waste
from jaxremat.rewrite import Backward, backward_program


@dataclass(frozen=True, eq=False)
class Cut:
    """A choice made true: the two programs, for one set of inputs whose gradients are asked for.

    `is_body` says whether they run inside of a loop.
    """

    choice: Choice
    inner: Sequence["Program"]
    is_body: bool = False
    _backward: dict[tuple[bool, ...], tuple[Backward, Callable[..., Any]]] = field(default_factory=dict)

    @cached_property
    def forward(self) -> Callable[..., list[Any]]:
        """Runs inputs -> [outputs, stored values]."""
        return runner(forward_program(self.choice, self.is_body), "remat_forward")

    def backward(self, zero: tuple[bool, ...]) -> tuple[Backward, Callable[..., list[Any]]]:
        """Returns the backward program for these zero cotangents, and what runs it."""
        if zero not in self._backward:
            program = backward_program(self.choice, zero, self.is_body)
            self._backward[zero] = program, runner(program.program, "remat_backward")
        return self._backward[zero]

    @property
    def matches(self) -> dict[str, int]:
        """For every selector of the policy its matches, those inside of scan bodies included."""
        total = dict(self.choice.matches)
        for choice in self.inside():
            for selector, count in choice.matches.items():
                total[selector] = total.get(selector, 0) + count
        return total

    def inside(self) -> Iterator[Choice]:
        """Yields what is chosen inside of the bodies of scans and branches, and of those inside of them."""
        for program in self.inner:
            if (cut := program.last_cut) is not None:
                yield cut.choice
                yield from cut.inside()


class Program:
    """A traced function with a policy: calls of it are differentiated through its cut.

    Args:
        function: the function as a program; its first inputs are the arrays that it closes over.
        closed_over: those arrays.
        policy: what to store.
        is_inside: whether it is a body inside of another program, which then checks the policy's selectors.
        warned: the warnings that were given and are not repeated; those that this gives are added.
        times: how often a body runs in one run of the program that it is inside of.
        conditional: for a branch the equation that runs it or another one.
        is_branch: whether it is inside of a branch of a conditional, whose residuals stay on the device: JAX takes those of
            the other branches to be zeros there, and under `vmap` selects among all of them.
    """

    def __init__(
        self,
        function: ClosedJaxpr,
        closed_over: Sequence[Any],
        policy: p.Policy,
        is_inside: bool = False,
        warned: set[str] | None = None,
        times: int = 1,
        is_branch: bool = False,
        conditional: JaxprEqn | None = None,
    ) -> None:
        self.function, self.closed_over, self.policy, self.is_inside = function, tuple(closed_over), policy, is_inside
        self.times, self.is_branch, self.conditional = times, is_branch, conditional
        self._warned = set[str]() if warned is None else warned
        self.cuts = dict[tuple[bool, ...], Cut]()
        self._primal = runner(function, "remat_primal")
        self._call = jax.custom_vjp(lambda *inputs: self._primal(*inputs))
        self._call.defvjp(self._forward, self._backward, symbolic_zeros=True)

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Runs the program on its array arguments."""
        return self._call(*self.closed_over, *leaves)

    def cut(self, perturbed: tuple[bool, ...]) -> Cut:
        """Returns the cut for the inputs whose gradients are asked for; traced once."""
        if perturbed not in self.cuts:
            graph, inner = self._traced(perturbed)
            choice = choose(graph, self._policy_for(graph))
            cut = Cut(choice.on_device() if self.is_branch else choice, inner, self.times > 1)
            if not self.is_inside:
                check_matches(cut.matches, graph, self.policy)
                for message in waste(cut.choice, cut.inside()):
                    if message not in self._warned:
                        warnings.warn(message, RematWarning, stacklevel=user_stacklevel())
                        self._warned.add(message)
            self.cuts[perturbed] = cut
        return self.cuts[perturbed]

    @property
    def last_cut(self) -> Cut | None:
        """The cut that counts: JAX differentiates a body anew as it learns what its carry depends on. None before it does."""
        return next(reversed(self.cuts.values()), None)

    def _policy_for(self, graph: Graph) -> p.Policy:
        """The policy, but where a plan for a body meets an intermediate form of it.

        JAX differentiates a body more than once while it learns what its carry depends on; only the last time counts.
        """
        policy = self.policy
        other = isinstance(policy, p.Values) and policy.program not in ("", graph.fingerprint)
        return p.Nothing() if self.is_inside and other else policy

    def trace(self, perturbed: tuple[bool, ...]) -> Graph:
        """Returns the graph that the policy chooses from, for the inputs whose gradients are asked for."""
        return self._traced(perturbed)[0]

    def _traced(self, perturbed: tuple[bool, ...]) -> tuple[Graph, Sequence["Program"]]:
        evaluate = _Evaluator(self.policy, self.is_branch)
        return trace_gradient(self.function, perturbed, evaluate), evaluate.inner

    def _forward(self, *inputs: Any) -> tuple[list[Any], "_Residuals"]:
        cut = self.cut(tuple(bool(i.perturbed) for i in inputs))
        graph = cut.choice.graph
        values = [i.value for i in inputs]
        outs = cut.forward(*values, *graph.constants)
        outs, stored = outs[: len(graph.outputs)], outs[len(graph.outputs) :]
        # Only inputs that some backward pass can read are kept; JAX hands them on without a copy.
        read = cut.choice.inputs_read
        return outs, _Residuals([*stored, *(x if v in read else None for v, x in zip(graph.inputs, values))], cut)

    def _backward(self, residuals: "_Residuals", cotangents: Sequence[Any]) -> tuple[Any, ...]:
        graph = residuals.cut.choice.graph
        zero = tuple(isinstance(ct, SymbolicZero) or v is None for ct, v in zip(cotangents, graph.cotangents))
        backward, run = residuals.cut.backward(zero)
        names = (*residuals.cut.choice.kept, *graph.inputs)
        values = dict(zip(names, [*residuals.values, *graph.constants]))
        given = [
            compat.zeros(ct) if isinstance(ct := cotangents[i], SymbolicZero) else ct for i in backward.cotangents
        ]  # fmt: skip
        found = dict(zip(backward.gradients, run(*(values[v] for v in backward.reads), *given)))
        return tuple(found.get(i) for i in range(len(self.function.in_avals)))


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class _Residuals:
    """What the forward pass hands to the backward pass: arrays, and the cut that they belong to."""

    values: list[Any]
    cut: Cut

    def tree_flatten(self) -> tuple[list[Any], Cut]:
        return self.values, self.cut

    @classmethod
    def tree_unflatten(cls, cut: Cut, values: Any) -> "_Residuals":
        return cls(list(values), cut)


def runner(program: ClosedJaxpr, name: str) -> Callable[..., list[Any]]:
    """Returns a function that runs a program: one call equation where it is traced, equation by equation where it is not.

    Without `jit` round it, a program then rounds as the function itself would.
    """
    run = compat.as_function(program)
    return lambda *args: compat.call(program, name, args) if compat.is_traced(*args) else run(*args)


def body_policy(policy: p.Policy) -> p.Policy | None:
    """Returns what a policy means inside of a scan's body; None where it says nothing about it.

    Positions count the values of the wrapped function itself. The border of segments inside of a scan is the carry.
    """
    match policy:
        case p.Values() | p.Loops():
            return None
        case p.Segments() | p.Offload(p.Segments()):
            return p.Nothing()
        case p.Union(parts):
            inside = [q for part in parts if (q := body_policy(part)) is not None]
            return p.union(*inside) if inside else None
        case p.Offload(p.Values()):
            return None
    return policy


class _Evaluator:
    """Binds a function's equations to values, deciding inside of scans and branches, and marking custom derivatives.

    Calls of jitted functions stay calls, so that JAX's derivative adds up cotangents in the order that it always does.
    """

    def __init__(self, policy: p.Policy, is_branch: bool = False) -> None:
        self.policy, self.is_branch = body_policy(policy), is_branch
        self.inner = list[Program]()
        self._loops = policy if isinstance(policy, p.Loops) else None
        self._next_loop = 0
        self._calls = dict[int, tuple[ClosedJaxpr, Callable[..., Any]]]()

    def rewrites(self, eqn: JaxprEqn) -> bool:
        """Says whether this decides inside of an equation's body."""
        if self._loops is not None:
            return eqn.primitive.name == "scan"
        if self.policy is None:
            return False
        return eqn.primitive.name == "scan" or (eqn.primitive.name == "cond" and not isinstance(self.policy, p.Nothing))

    def __call__(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        if self.rewrites(eqn):
            return list(compat.scoped(eqn, self._scan if eqn.primitive.name == "scan" else self._cond, eqn, args))
        if eqn.primitive.name == "custom_jvp_call":
            return compat.bind(eqn, args, f"custom_jvp({eqn.params['call_jaxpr'].jaxpr.debug_info.func_name})")
        body = called(eqn)
        if body is not None and self._is_special(body):
            return list(compat.scoped(eqn, self._call_of(eqn, body), *args))
        return compat.bind(eqn, args)

    def _is_special(self, body: ClosedJaxpr) -> bool:
        for eqn in body.jaxpr.eqns:
            inside = called(eqn)
            if self.rewrites(eqn) or eqn.primitive.name == "custom_jvp_call" or (inside and self._is_special(inside)):
                return True
        return False

    def _call_of(self, eqn: JaxprEqn, body: ClosedJaxpr) -> Callable[..., Any]:
        if id(body) not in self._calls:

            def call(*args: Any) -> list[Any]:
                return run(body, args, self)

            call.__name__ = call.__qualname__ = eqn.params.get("name", eqn.primitive.name)
            self._calls[id(body)] = body, jax.jit(call)
        return self._calls[id(body)][1]

    def _body(
        self, closed: ClosedJaxpr, policy: p.Policy, times: int = 1, conditional: JaxprEqn | None = None
    ) -> "Program":
        is_branch = self.is_branch or conditional is not None
        program = Program(
            *compat.hoisted(closed),
            policy,
            is_inside=True,
            times=times,
            is_branch=is_branch,
            conditional=conditional,
        )
        self.inner.append(program)
        return program

    def _parts_of_scan(self, length: int) -> Sequence[p.Part]:
        """The parts of the next scan, each with its number of steps."""
        if self._loops is None:
            assert self.policy is not None
            return (p.Part(self.policy, steps=length),)
        number, self._next_loop = self._next_loop, self._next_loop + 1
        if number >= len(self._loops.bodies):
            raise PolicyError(
                f"{self._loops}: needs a policy for every scan of the function; got {len(self._loops.bodies)}, and there are more."
            )
        *parts, last = self._loops.bodies[number]
        left = length - sum(part.steps for part in parts)
        if parts and left < 1:
            raise PolicyError(
                f"{self._loops}: scan number {number} has {length} steps, and its first {len(parts)} parts {length - left}; leave "
                "one or more to the last part."
            )
        parts = (*parts, replace(last, steps=left))
        for part in parts:
            if part.run and (part.steps % part.run or part.run == part.steps):
                raise PolicyError(
                    f"{self._loops}: scan number {number} has {part.steps} steps{' in one of its parts' * (len(parts) > 1)}, which "
                    f"cannot be cut into runs of {part.run}; use a divisor."
                )
        return parts

    def _scan(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        consts, carry, xs = compat.scan_parts(eqn, args)
        parts, carries = self._parts_of_scan(eqn.params["length"]), len(carry)
        if len(parts) == 1:
            return self._part_of_scan(eqn, consts, carry, xs, parts[0])
        # Arrays begin with the last step where steps run backwards. The gradient of `split` is one concatenation.
        order = -1 if eqn.params["reverse"] else 1
        pieces = [jax.lax.split(x, [part.steps for part in parts[::order]])[::order] for x in xs]
        stacked = list[Sequence[Any]]()
        for number, part in enumerate(parts):
            outs = self._part_of_scan(eqn, consts, carry, [piece[number] for piece in pieces], part)
            carry = outs[:carries]
            stacked.append(outs[carries:])
        return [*carry, *(jax.lax.concatenate(ys, 0) for ys in zip(*stacked[::order], strict=True))]

    def _part_of_scan(
        self, eqn: JaxprEqn, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any], part: p.Part
    ) -> list[Any]:
        length, run = part.steps, part.run
        if not run:
            return self._scanned(eqn, consts, init, xs, length, self._body(eqn.params["jaxpr"], part.policy, length))
        runs = [x.reshape(length // run, run, *x.shape[1:]) for x in xs]
        body = compat.as_function(eqn.params["jaxpr"])

        def one_run(*inputs: Any) -> list[Any]:
            same, rest = inputs[: len(consts)], inputs[len(consts) :]
            return _scan_over(eqn, lambda *xs: body(*same, *xs), rest[: len(init)], rest[len(init) :], run)

        traced = jax.make_jaxpr(one_run)(*consts, *init, *(x[0] for x in runs))
        program = self._body(traced, p.Loops(p.Nothing(), ((p.Part(part.policy),),)), length // run)
        outs = self._scanned(eqn, consts, init, runs, length // run, program)
        return [*outs[: len(init)], *(y.reshape(length, *y.shape[2:]) for y in outs[len(init) :])]

    def _scanned(
        self,
        eqn: JaxprEqn,
        consts: Sequence[Any],
        init: Sequence[Any],
        xs: Sequence[Any],
        length: int,
        program: "Program",
    ) -> list[Any]:
        return _scan_over(eqn, lambda *inputs: program([*consts, *inputs]), init, xs, length)

    def _cond(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        index, *operands = args
        assert self.policy is not None
        branches = [self._body(branch, self.policy, conditional=eqn) for branch in eqn.params["branches"]]
        return jax.lax.switch(index, [lambda *xs, branch=branch: branch(xs) for branch in branches], *operands)


def _scan_over(
    eqn: JaxprEqn, step: Callable[..., Sequence[Any]], init: Sequence[Any], xs: Sequence[Any], length: int
) -> list[Any]:
    """Scans in the manner of an equation with another body: `step(*carry, *slices)` gives the next carry and the outputs."""

    def body(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outs = list(step(*carry, *slices))
        return outs[: len(init)], outs[len(init) :]

    params = eqn.params
    final, stacked = jax.lax.scan(
        body, list(init), list(xs), length=length, reverse=params["reverse"], unroll=min(params["unroll"], length)
    )
    return [*final, *stacked]
