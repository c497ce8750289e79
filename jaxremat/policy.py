"""Policies: what a training step stores for its backward pass, as frozen values with one spelling.

A policy says which values of a forward pass are *stored* for the backward pass; the rest is *recomputed* there. It holds
no function and no state: `parse(str(policy)) == policy`, so the spelling serves command lines, records and cache keys.

    everything                  all residuals: no rematerialization
    nothing                     the inputs of the wrapped function
    dots                        outputs of matrix products and convolutions
    dots_no_batch               outputs of matrix products without batch dimensions (no convolutions)
    names:conv_out,block*/bn    values tagged `jaxremat.name(x, "...")`; globs
    ops:conv=store,relu=recompute,*=recompute
                                by operation; `=store`, `=recompute` or `=offload`; first rule that fits; `*` is the rest
    paths:*/Conv_*,head         values made inside these module paths; globs
    segments:4, segments:sqrt   values at the borders of n segments, cut at the narrowest waists
    values:3,17                 the forward values with these positions in `jaxremat.residuals`; what a plan resolves to.
                                values:3,17/5: 5 is kept when it was recomputed, to recompute what lies behind it;
                                values:3,17^: 17 is kept in host memory
    loops:POLICY|4*POLICY       one for the function and one for the body of each scan, which may be cut into runs of steps;
                                loops:POLICY|8:POLICY>POLICY: one for its first 8 steps, another one for those that follow
    offload:POLICY              what POLICY would store, in host memory
    budget:2GiB, budget:60%, budget:fits
                                what the planner chooses so that the compiled peak stays within the bytes
    a+b                         the union
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax

from jaxremat.errors import PolicyError, did_you_mean

ACTIONS = ("store", "recompute", "offload")

# The bytes of the units that sizes are spelt in.
UNITS = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_TAG = re.compile(r"[^\s,+=]+")
_OFFLOAD = ("device", "pinned_host")  # from, to: where JAX's own policies move offloaded values


class Policy:
    """The base of all policies: frozen, hashable, comparable values.

    `str(policy)` is its spelling, `a + b` the union of two, `policy.to_jax()` the object that `jax.checkpoint` takes.

    Example:
        >>> import jaxremat
        >>> policy = jaxremat.parse("names:conv_out") + jaxremat.parse("dots")
        >>> str(policy)
        'dots+names:conv_out'
        >>> jaxremat.parse(str(policy)) == policy
        True
    """

    def __add__(self, other: Policy) -> Policy:
        if not isinstance(other, Policy):
            return NotImplemented
        return union(self.resolved(), other.resolved())

    def __repr__(self) -> str:
        return f"jaxremat.parse({str(self)!r})"

    def resolved(self) -> Policy:
        """Returns the policy that is applied; of a plan the one that it found, of any other itself."""
        return self

    def planned_for(self) -> str:
        """Returns the fingerprint of the function that a plan was made for; empty for a policy that fits any."""
        return ""

    def to_jax(self) -> Callable[..., Any]:
        """Returns the policy as an object for `jax.checkpoint(policy=...)` and `flax.linen.remat(policy=...)`.

        Equal policies return the same object, so that JAX does not trace a second time.

        Raises:
            PolicyError: JAX has no policy with this meaning.

        Example:
            >>> import jax, jaxremat
            >>> jaxremat.parse("dots").to_jax() is jax.checkpoint_policies.dots_saveable
            True
        """
        return _to_jax(self.resolved())


@dataclass(frozen=True, repr=False)
class Everything(Policy):
    """Store all that autodiff asks for: no rematerialization."""

    def __str__(self) -> str:
        return "everything"


@dataclass(frozen=True, repr=False)
class Nothing(Policy):
    """Store the inputs of the wrapped function alone."""

    def __str__(self) -> str:
        return "nothing"


@dataclass(frozen=True, repr=False)
class Dots(Policy):
    """Store the outputs of matrix products and convolutions."""

    def __str__(self) -> str:
        return "dots"


@dataclass(frozen=True, repr=False)
class DotsNoBatch(Policy):
    """Store the outputs of matrix products without batch dimensions; as in JAX, convolutions are not among them."""

    def __str__(self) -> str:
        return "dots_no_batch"


@dataclass(frozen=True, repr=False)
class Names(Policy):
    """Store values tagged with `jaxremat.name`; `patterns` are globs over the tags."""

    patterns: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", _patterns(self.patterns, "names", "a tag given to jaxremat.name"))

    def __str__(self) -> str:
        return "names:" + ",".join(self.patterns)


@dataclass(frozen=True, repr=False)
class Paths(Policy):
    """Store values made inside module paths; `patterns` are globs over contiguous parts of a path."""

    patterns: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", _patterns(self.patterns, "paths", "a module path such as block_0/conv1"))

    def __str__(self) -> str:
        return "paths:" + ",".join(self.patterns)


@dataclass(frozen=True, repr=False)
class Ops(Policy):
    """Decide by operation: `rules` are (operation, action) pairs, the first that fits a value counts, `*` comes last.

    A value that no rule fits is recomputed.
    """

    rules: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        table = dict[str, str]()
        for op, action in self.rules:
            if action not in ACTIONS:
                raise PolicyError(
                    f"ops:{op}={action}: an action is one of {', '.join(ACTIONS)}; got {action!r}."
                    f"{did_you_mean(action, ACTIONS)}"
                )
            if op != "*" and not re.fullmatch(r"\w+", op):
                raise PolicyError(
                    f"ops: an operation is a word such as conv, relu, batch_norm, a primitive's name, or *; got {op!r}."
                )
            if table.setdefault(op, action) != action:
                raise PolicyError(f"ops: {op} is given two actions, {table[op]} and {action}: keep one.")
        if not table:
            raise PolicyError("ops: needs at least one rule, such as ops:conv=store,*=recompute; got none.")
        rest = table.pop("*", None)
        rules = tuple(table.items()) + ((("*", rest),) if rest else ())
        object.__setattr__(self, "rules", rules)

    def __str__(self) -> str:
        return "ops:" + ",".join(f"{op}={action}" for op, action in self.rules)


@dataclass(frozen=True, repr=False)
class Segments(Policy):
    """Store the values at the borders of `count` segments; None stands for the square root of the number of layers."""

    count: int | None

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise PolicyError(f"segments: needs a count of at least 1, or sqrt; got {self.count}.")

    def __str__(self) -> str:
        return f"segments:{'sqrt' if self.count is None else self.count}"


@dataclass(frozen=True, repr=False)
class Values(Policy):
    """Store exactly the forward values with these positions in `jaxremat.residuals`; what a planner emits.

    `program`, if given, is the fingerprint of the program that the positions were found in; in any other they are refused.
    `again` has further levels, if any: values that are recomputed once, kept from then on, and start the recomputation of
    what lies behind them; what is recomputed on the way to them is dropped and recomputed once more. `host` has those of the
    positions that are kept in host memory.
    """

    positions: tuple[int, ...]
    program: str = ""
    again: tuple[tuple[int, ...], ...] = ()
    host: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        every = [i for level in (self.positions, *self.again) for i in level]
        if not self.positions or not all(self.again) or min(every) < 0:
            raise PolicyError(f"values: needs positions of 0 and more, such as values:3,17; got {self.positions}.")
        if len(set(every)) < sum(len(set(level)) for level in (self.positions, *self.again)):
            raise PolicyError(
                f"values: a position stands on one level; got {'/'.join(map(str, (self.positions, *self.again)))}."
            )
        if not set(self.host) <= set(self.positions):
            raise PolicyError(
                f"values: what is kept in host memory is stored, so its positions are among {self.positions}; got {self.host}."
            )
        object.__setattr__(self, "again", tuple(tuple(sorted(set(level))) for level in self.again))
        object.__setattr__(self, "host", tuple(sorted(set(self.host))))
        if self.program and not re.fullmatch(r"[0-9a-f]+", self.program):
            raise PolicyError(
                f"values: a program's fingerprint is hexadecimal, as in values:3@9f86d081; got {self.program!r}."
            )
        object.__setattr__(self, "positions", tuple(sorted(set(self.positions))))

    def __str__(self) -> str:
        first = ",".join(f"{i}^" if i in self.host else str(i) for i in self.positions)
        levels = "/".join([first, *(",".join(map(str, level)) for level in self.again)])
        return f"values:{levels}" + (f"@{self.program}" if self.program else "")


@dataclass(frozen=True)
class Part:
    """What some steps of a scan store.

    Attributes:
        policy: of the body.
        run: above 0 these steps are cut into runs of so many: only the carry before each run is stored, and a run is computed
            again when the backward pass reaches it, storing what its policy says.
        steps: how many steps they are, in the order in which they run; 0 for all that are left.
    """

    policy: Policy
    run: int = 0
    steps: int = 0

    def __str__(self) -> str:
        return (f"{self.steps}:" if self.steps else "") + (f"{self.run}*" if self.run else "") + str(self.policy)


@dataclass(frozen=True, repr=False)
class Loops(Policy):
    """`outer` for the function itself, and of its scans, in program order, what their bodies store: a `Part` or several."""

    outer: Policy
    bodies: tuple[tuple[Part, ...], ...]

    def __post_init__(self) -> None:
        inside = (Nothing, Everything, Dots, DotsNoBatch, Names, Paths, Ops, Values)
        parts = [part for body in self.bodies for part in body]
        spelt = all(
            isinstance(p, inside) and not set(str(p)) & {"|", ">"} for p in (self.outer, *(q.policy for q in parts))
        )
        runs = all(part.run == 0 or part.run > 1 for part in parts)
        steps = all(body and body[-1].steps == 0 and all(part.steps > 0 for part in body[:-1]) for body in self.bodies)
        if not (spelt and self.bodies and runs and steps):
            raise PolicyError(
                "loops: needs a policy and one for each scan, such as loops:nothing|dots; loops:nothing|4*dots, where runs are of "
                f"2 steps or more; or loops:nothing|8:nothing>dots, where all parts but the last have their steps; got {self}."
            )

    def __str__(self) -> str:
        return f"loops:{'|'.join([str(self.outer), *('>'.join(map(str, body)) for body in self.bodies)])}"


@dataclass(frozen=True, repr=False)
class Offload(Policy):
    """Keep what `policy` would store in host memory. Make it with `offload`, which spreads over unions."""

    policy: Policy

    def __post_init__(self) -> None:
        if isinstance(self.policy, Nothing | Offload | Budget | Union | Loops):
            raise PolicyError(
                f"offload: needs one policy that stores something, such as offload:names:conv_out; got {self.policy}."
            )

    def __str__(self) -> str:
        return f"offload:{self.policy}"


@dataclass(frozen=True, repr=False)
class Budget(Policy):
    """What the planner chooses so that the compiled peak stays within `amount`.

    `amount` is a number of bytes (int), a fraction of the peak without rematerialization (float), or ``"fits"``: the
    target's memory.
    """

    amount: int | float | str

    def __post_init__(self) -> None:
        amount = self.amount
        good = (
            amount == "fits"
            or (isinstance(amount, int) and not isinstance(amount, bool) and amount > 0)
            or (isinstance(amount, float) and 0 < amount <= 1)
        )
        if not good:
            raise PolicyError(
                "budget: needs a size such as 2GiB, 500MB, 60% (at most 100%) or fits; in Python also bytes as an int above 0, or a "
                f"part of the peak without remat as a float up to 1; got {amount!r}."
            )

    def __str__(self) -> str:
        if isinstance(self.amount, str):
            return f"budget:{self.amount}"
        if isinstance(self.amount, float):
            return f"budget:{self.amount * 100:.12g}%"
        for unit in ("TiB", "GiB", "MiB", "KiB"):
            if self.amount % UNITS[unit] == 0:
                return f"budget:{self.amount // UNITS[unit]}{unit}"
        return f"budget:{self.amount}"


@dataclass(frozen=True, repr=False)
class Union(Policy):
    """Store what any of the parts stores. Make it with `union` or `+`, which bring it to its normal form."""

    parts: tuple[Policy, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.parts))


def union(*policies: Policy) -> Policy:
    """Returns the policy that stores what any of `policies` stores, in normal form: `a + b == b + a`, `a + a == a`.

    Raises:
        PolicyError: one of several parts is a budget, which chooses the whole stored set by itself.

    Example:
        >>> from jaxremat.policy import union
        >>> from jaxremat.spelling import parse
        >>> str(union(parse("names:b"), parse("nothing"), parse("names:a")))
        'names:a,b'
    """
    parts = list[Policy]()
    for policy in policies:
        parts += policy.parts if isinstance(policy, Union) else [policy]
    distinct = list(dict.fromkeys(parts))
    if len(distinct) > 1 and any(isinstance(p, Budget) for p in distinct):
        raise PolicyError(
            f"{'+'.join(map(str, distinct))}: a budget chooses the whole stored set and stands alone; drop the other parts."
        )
    if Everything() in distinct:
        return Everything()
    merged: list[Policy] = [p for p in distinct if not isinstance(p, Nothing | Names | Paths | Values)]
    if names := [n for p in distinct if isinstance(p, Names) for n in p.patterns]:
        merged.append(Names(tuple(names)))
    if paths := [n for p in distinct if isinstance(p, Paths) for n in p.patterns]:
        merged.append(Paths(tuple(paths)))
    for program in dict.fromkeys(p.program for p in distinct if isinstance(p, Values)):
        of_program = [p for p in distinct if isinstance(p, Values) and p.program == program]
        if len(of_program) == 1:
            merged += of_program
        elif any(p.again for p in of_program):
            raise PolicyError(
                f"{'+'.join(map(str, of_program))}: values with several levels stand alone; drop the other positions."
            )
        else:
            positions = tuple(i for p in of_program for i in p.positions)
            on_device = {i for p in of_program for i in p.positions if i not in p.host}
            merged.append(Values(positions, program, host=tuple(i for i in positions if i not in on_device)))
    merged.sort(key=str)
    if not merged:
        return Nothing()
    return merged[0] if len(merged) == 1 else Union(tuple(merged))


def offload(policy: Policy) -> Policy:
    """Returns the policy that keeps in host memory what `policy` would store.

    Raises:
        PolicyError: `policy` stores nothing, already offloads, or is a budget.

    Example:
        >>> from jaxremat.policy import offload
        >>> from jaxremat.spelling import parse
        >>> str(offload(parse("dots+names:a")))
        'offload:dots+offload:names:a'
    """
    if isinstance(policy, Union):
        return union(*map(offload, policy.parts))
    return Offload(policy)


def _patterns(patterns: Iterable[str], kind: str, meaning: str) -> tuple[str, ...]:
    patterns = tuple(patterns)
    for pattern in patterns:
        if not _TAG.fullmatch(pattern):
            raise PolicyError(f"{kind}: each pattern is {meaning}, without blanks, commas, + or =; got {pattern!r}.")
    if not patterns:
        raise PolicyError(f"{kind}: needs at least one pattern; got none.")
    return tuple(sorted(set(patterns)))


def is_tag(text: str) -> bool:
    """Says whether `text` can be a tag: a word without blanks, commas, `+` and `=`, which the grammar uses itself."""
    return isinstance(text, str) and bool(_TAG.fullmatch(text))


@cache
def _to_jax(policy: Policy) -> Callable[..., Any]:
    jax_policies = jax.checkpoint_policies
    match policy:
        case Everything():
            return jax_policies.everything_saveable
        case Nothing():
            return jax_policies.nothing_saveable
        case Dots():
            return jax_policies.dots_saveable
        case DotsNoBatch():
            return jax_policies.dots_with_no_batch_dims_saveable
        case Names(patterns) if not any(set(p) & set("*?[") for p in patterns):
            return jax_policies.save_only_these_names(*patterns)
        case Offload(Names(patterns)) if not any(set(p) & set("*?[") for p in patterns):
            source, host = _OFFLOAD
            return jax_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=list(patterns),
                offload_src=source,
                offload_dst=host,
            )
        case Offload(DotsNoBatch()):
            return jax_policies.offload_dot_with_no_batch_dims(*_OFFLOAD)
        case Union(parts) if not any(isinstance(p, Offload) for p in parts):
            first, *rest = map(_to_jax, parts)
            for other in rest:
                first = jax_policies.save_from_both_policies(first, other)
            return first
    raise PolicyError(
        f"JAX has no policy that means {policy}: its policies see one primitive or one exact name at a time. "
        f"Apply it with jaxremat.remat(f, {str(policy)!r})."
    )
