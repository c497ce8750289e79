"""`choose`: policy x graph -> what is stored.

A policy *marks* values. From what the backward pass reads, the choice walks up the forward pass: an input is free, a
marked value is stored, any other value is recomputed, and so its own inputs are needed too. What is marked but never
reached this way is not stored: nobody would read it. Views (reshapes, tags) are followed to the value they show.

Small values (statistics, keys, scalars) are stored under every policy but `values:`: they cost nothing, and left out they
chain one block's recomputation to the next.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from weakref import WeakKeyDictionary

from jaxremat import compat
from jaxremat import policy as p
from jaxremat.compat import Atom, Var, primitive_names
from jaxremat.errors import PolicyError, did_you_mean
from jaxremat.graph import Graph, Value
from jaxremat.labels import CALLED_OPS, PRIMITIVE_OPS
from jaxremat.segments import borders

SMALL = "small: statistics, keys and scalars are always stored"
INSIDE = "decided inside of the scan's body"


@dataclass(frozen=True)
class Mark:
    """Why a value may be kept: `selector` is the part of the policy that fits it, `host` says where it is kept."""

    selector: str
    host: bool = False


@dataclass(frozen=True, eq=False)
class Choice:
    """What is stored of a graph's forward values, and what follows from it.

    Attributes:
        graph: the graph.
        policy: the policy that chose.
        kept: the stored values in program order, with their marks.
        recomputed: indices of forward equations that the backward pass runs again.
        marks: every value that the policy asked for, needed or not.
        matches: for every selector of the policy the number of values that it fits.
        again: values that are kept when they were recomputed, and on which level: what lies behind one of level 2 is
            recomputed from it, and what was recomputed on the way to it, once more.
    """

    graph: Graph
    policy: p.Policy
    kept: Mapping[Var, Mark]
    recomputed: frozenset[int]
    marks: Mapping[Var, Mark]
    matches: Mapping[str, int]
    again: Mapping[Var, int] = field(default_factory=dict)

    @cached_property
    def run_twice(self) -> frozenset[int]:
        """Indices of the recomputed equations that the forward pass runs, too.

        The others serve derivatives alone, such as masks, and nothing that is stored is made of them: the forward pass
        leaves them out.
        """
        return self.recomputed & (self.graph.primal | self.graph.ancestors(self.kept))

    @cached_property
    def inputs_read(self) -> frozenset[Var]:
        """The inputs of the function that the backward pass reads, or the recomputation for it."""
        again = (v for index in self.recomputed for v in self.graph.forward[index].invars)
        return frozenset(self.graph.inputs) & {*self.graph.read_backward, *(v for v in again if isinstance(v, Var))}

    @cached_property
    def stored_bytes(self) -> int:
        """The bytes that are kept from the forward pass for the backward pass, beside the function's inputs."""
        return sum(self.graph.value_of[var].size_bytes for var in self.kept)

    @cached_property
    def large(self) -> Mapping[Var, Mark]:
        """Those of the stored values that are not small, with their marks."""
        graph = self.graph
        return {v: mark for v, mark in self.kept.items() if graph.value_of[v].size_bytes > graph.small_bytes}

    def on_device(self) -> "Choice":
        """Returns the choice that stores on the device what this one stores in host memory."""
        return replace(self, kept={var: replace(mark, host=False) for var, mark in self.kept.items()})


def choose(graph: Graph, policy: p.Policy) -> Choice:
    """Returns what `policy` stores of `graph`.

    Args:
        graph: a function's forward and backward pass.
        policy: any policy but a budget.

    Raises:
        PolicyError: the policy is a budget, or names positions that the graph does not have.
    """
    given = policy
    if isinstance(policy, p.Loops):  # what scans keep is stored where `outer` says so, and computed again elsewhere
        policy = policy.outer
    matches = dict[str, int]()
    marks = dict[Var, Mark]()
    for part in policy.parts if isinstance(policy, p.Union) else (policy,):
        for var, mark in _marks(graph, part, matches).items():
            if var not in marks or (marks[var].host and not mark.host):
                marks[var] = mark
    exact = isinstance(policy, p.Values)
    if not exact and not isinstance(given, p.Loops):
        for index in graph.rewritten:
            marks |= {v: Mark(INSIDE) for v in graph.forward[index].outvars if v not in marks}
    kept, recomputed = _walk(graph, marks, small=not exact)
    order = sorted(kept, key=lambda var: graph.value_of[var].position)
    levels = policy.again if isinstance(policy, p.Values) else ()
    again = {graph.values[i].var: number for number, level in enumerate(levels, 2) for i in level}
    return Choice(graph, given, {var: kept[var] for var in order}, recomputed, marks, matches, again)


def small_and_marked(graph: Graph, marks: Mapping[Var, Mark]) -> list[Var]:
    """Returns what is stored if these values may be, and the small ones that are worth it, in program order."""
    kept, _ = _walk(graph, marks, small=True)
    return sorted(kept, key=lambda var: graph.value_of[var].position)


def _walk(graph: Graph, marks: Mapping[Var, Mark], small: bool) -> tuple[dict[Var, Mark], frozenset[int]]:
    kept = dict[Var, Mark]()
    recomputed = set[int]()
    cheap = small_worth_storing(graph) if small else frozenset()
    todo = [var for var in graph.read_backward if var in graph.maker]
    seen = set(todo)
    while todo:
        var = todo.pop()
        if var in marks:
            kept[var] = marks[var]
            continue
        if var in cheap:
            kept[var] = Mark(SMALL)
            continue
        index = graph.maker[var]
        if index not in recomputed:
            recomputed.add(index)
            fresh = [
                v for v in graph.forward[index].invars if isinstance(v, Var) and v in graph.maker and v not in seen
            ]
            seen.update(fresh)
            todo += fresh
    return kept, frozenset(recomputed)


# Equations that round each element by itself, the same way wherever a compiler puts them, or do not round at all.
_EXACT_NAMES = """
    abs add add_any and bitcast_convert_type broadcast_in_dim ceil clamp concatenate convert_element_type copy
    custom_jvp_call div eq expand_dims floor gather ge gt integer_pow iota is_finite le lt max min mul name ne neg not or pad
    population_count random_clone random_fold_in random_seed random_split random_unwrap random_wrap rem reshape rev round
    select_n shift_left shift_right_arithmetic shift_right_logical sign slice split sqrt square squeeze stop_gradient sub transpose
    xor"""
_EXACT = frozenset(_EXACT_NAMES.split())


_small_of = WeakKeyDictionary[Graph, frozenset[Var]]()


def small_worth_storing(graph: Graph) -> frozenset[Var]:
    """Returns small values made from large ones, such as sums over a batch, that drag no large one into the forward pass.

    What is computed from small values alone is recomputed from them: that costs nothing, and a compiler that fuses it
    with its reader rounds as it would without rematerialization. Sums and approximated functions (`exp`, `rsqrt`) are the
    exception: compilers round them one way in a vector and another way alone, so they are taken from the forward pass.
    """
    if graph not in _small_of:
        _small_of[graph] = frozenset(_small(graph))
    return _small_of[graph]


def _small(graph: Graph) -> Iterator[Var]:
    for value in graph.values:
        if compat.is_on_host(value.var.aval):  # what the body of a scan keeps there, stacked
            yield value.var
        if not 0 < value.size_bytes <= graph.small_bytes or graph.root(value.var) is not value.var:
            continue
        made = [v for v in value.eqn.invars if isinstance(v, Var) and v in graph.maker]
        worth = any(graph.value_of[v].size_bytes > graph.small_bytes for v in made)
        worth |= value.eqn.primitive.name not in _EXACT
        in_forward_pass = value.index in graph.primal or all(graph.maker[v] in graph.primal for v in made)
        if worth and in_forward_pass:
            yield value.var


def _marks(graph: Graph, policy: p.Policy, matches: dict[str, int]) -> dict[Var, Mark]:
    match policy:
        case p.Nothing():
            return {}
        case p.Everything():
            return {v: Mark("everything") for v in _roots(graph, graph.residuals)}
        case p.Dots():
            return _select(graph, "dots", lambda v: v.eqn.primitive.name in PRIMITIVE_OPS_DOTS, matches)
        case p.DotsNoBatch():
            return _select(graph, "dots_no_batch", _is_dot_without_batch, matches)
        case p.Names(patterns):
            return _first_of(
                graph,
                [
                    (f"names:{g}", lambda v, g=g: any(fnmatchcase(n, g) for n in graph.labels[v.var].names))
                    for g in patterns
                ],
                matches,
            )
        case p.Paths(patterns):
            return _first_of(
                graph,
                [(f"paths:{g}", lambda v, g=g: path_fits(graph.labels[v.var].path, g)) for g in patterns],
                matches,
            )
        case p.Ops(rules):
            return _ops(graph, rules, matches)
        case p.Values(positions, program, again, host):
            if program and program != graph.fingerprint:
                raise PolicyError(
                    f"values: this choice was made for the program {program}; the wrapped function is {graph.fingerprint}: "
                    "its code, its arguments' shapes, what is differentiated or the version of JAX differ. Plan again, or spell a "
                    "policy by names or operations."
                )
            beyond = [i for level in (positions, *again) for i in level if i >= len(graph.values)]
            if beyond:
                raise PolicyError(
                    f"values: this function has {len(graph.values)} forward values, 0 to {len(graph.values) - 1}; "
                    f"got {', '.join(map(str, beyond))}. jaxremat.residuals lists them."
                )
            return {graph.values[i].var: Mark(f"values:{i}", host=i in host) for i in positions}
        case p.Segments():
            return {v: Mark(why) for v, why in borders(graph, policy.count).items()}
        case p.Offload(inner):
            host = _marks(graph, inner, matches)
            return {var: Mark(f"offload:{mark.selector}", host=True) for var, mark in host.items()}
    raise PolicyError(
        f"choose: needs a policy that says what is stored; got {policy}, which only says how much. Plan first: jaxremat.plan."
    )


PRIMITIVE_OPS_DOTS = frozenset(name for name, op in PRIMITIVE_OPS.items() if op in ("dot", "conv"))


def _is_dot_without_batch(value: Value) -> bool:
    if value.eqn.primitive.name != "dot_general":
        return False
    _, (lhs_batch, rhs_batch) = value.eqn.params["dimension_numbers"]
    return not lhs_batch and not rhs_batch


def _roots(graph: Graph, variables: Sequence[Atom]) -> list[Var]:
    """The forward values that `variables` show, views followed; inputs and broadcast constants are left out."""
    roots = [graph.root(v) for v in variables]
    return [v for v in dict.fromkeys(roots) if isinstance(v, Var) and v in graph.maker and graph.value_of[v].size_bytes]


def _select(graph: Graph, selector: str, fits: Callable[[Value], bool], matches: dict[str, int]) -> dict[Var, Mark]:
    chosen = [value.var for value in graph.values if value.index not in graph.rewritten and fits(value)]
    matches[selector] = matches.get(selector, 0) + len(chosen)
    return {v: Mark(selector) for v in _roots(graph, chosen)}


def _first_of(
    graph: Graph, rules: Sequence[tuple[str, Callable[[Value], bool]]], matches: dict[str, int]
) -> dict[Var, Mark]:
    marks = dict[Var, Mark]()
    for selector, fits in rules:
        for var, mark in _select(graph, selector, fits, matches).items():
            marks.setdefault(var, mark)
    return marks


def _ops(graph: Graph, rules: Sequence[tuple[str, str]], matches: dict[str, int]) -> dict[Var, Mark]:
    chosen = dict[Var, Mark]()
    for op, _ in rules:
        matches.setdefault(f"ops:{op}", 0)
    for value in graph.values:
        for op, action in rules if value.index not in graph.rewritten else ():
            if op == "*" or op in graph.labels[value.var].ops:
                matches[f"ops:{op}"] += 1
                if action != "recompute" and isinstance(root := graph.root(value.var), Var) and root in graph.maker:
                    chosen.setdefault(root, Mark(f"ops:{op}={action}", host=action == "offload"))
                break
    return {v: m for v, m in chosen.items() if graph.value_of[v].size_bytes}


def path_fits(path: str, pattern: str) -> bool:
    """Says whether a glob fits a contiguous part of a module path, or the whole of it.

    Example:
        >>> from jaxremat.choice import path_fits
        >>> path_fits("ResNet/block_0/Conv_0", "*/Conv_*"), path_fits("ViT/head", "head"), path_fits("ViT/head", "hea")
        (True, True, False)
    """
    parts = path.split("/")
    return any(
        fnmatchcase("/".join(parts[start:end]), pattern)
        for start in range(len(parts))
        for end in range(start + 1, len(parts) + 1)
    )


def check_matches(matches: Mapping[str, int], graph: Graph, policy: p.Policy) -> None:
    """Raises a PolicyError where a selector of the policy fits no value: most likely it is misspelt.

    Args:
        matches: for every selector its number of matches, those inside of scan bodies included.
        graph: where to look for near matches.
        policy: for the message.
    """
    context = f"{policy}: " if len(matches) > 1 else ""  # of one selector, the message would say the name twice
    for selector, count in matches.items():
        kind, _, word = selector.partition(":")
        if count or kind not in ("names", "paths", "ops") or word == "*":
            continue
        known = {
            "names": [name for labels in graph.labels.values() for name in labels.names],
            "paths": [
                part for labels in graph.labels.values() for part in (labels.path, *labels.path.split("/")) if part
            ],
            "ops": [op for labels in graph.labels.values() for op in sorted(labels.ops)],
        }[kind]
        known = list(dict.fromkeys(known))
        what = {"names": "tag", "paths": "module path", "ops": "operation"}[kind]
        decided_here = (graph.labels[v.var] for v in graph.values if v.index not in graph.rewritten)
        if kind == "ops" and any(word in labels.ops for labels in decided_here):
            raise PolicyError(
                f"{policy}: {selector!r} decides no value, as rules before it fit all that it fits. Move it before them, or drop it."
            )
        is_operation = kind == "ops" and word in {*CALLED_OPS, *PRIMITIVE_OPS.values(), *primitive_names()}
        exists = " No operation has this name." if kind == "ops" and not is_operation else ""
        near = "" if is_operation else did_you_mean(word, known)
        there = (
            f" It has: {', '.join(sorted(known)[:12])}{', ...' if len(known) > 12 else ''}."
            if known
            else f" It has no {what}s."
        )
        raise PolicyError(f"{context}{selector!r} matches no value of the wrapped function.{exists}{near}{there}")
