"""Rematerialization policies applied to the PyTorch networks: which regions are checkpointed, and what they keep.

    everything                  plain autograd
    nothing                     `torch.utils.checkpoint` (non-reentrant) round each block
    dots, dots_no_batch, names, ops, paths, and unions of these
                                selective checkpointing of each block: what the policy chooses is cached
    segments:n                  one checkpoint round each of n runs of consecutive parts, the last left out, as
                                `checkpoint_sequential` does for networks that are a `Sequential`
    budget:...                  `torch.compile` with `activation_memory_budget`; bytes become its ratio

PyTorch computes the whole of a region again when the backward pass enters it, so a region round the whole network
(`regions="net"`) saves no memory at the peak; blocks are what is usual and what `auto` means here.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch._dynamo
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import jaxremat
from experiments.policies import Regions
from experiments.torch_models import Network, as_logits
from experiments.torch_ops import OPS, Modules, Operation, list_operations
from jaxremat import PolicyError
from jaxremat import policy as p

Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Witness:
    """Who is told what checkpointing holds: results that selective checkpointing caches, and the inputs of regions."""

    cached: Callable[[Any], None] | None = None
    region_input: Callable[[torch.Tensor], None] | None = None


@dataclass
class Applied:
    """A network under a policy.

    Attributes:
        forward: images of shape (batch, 3, 32, 32) to logits.
        regions: where the policy was applied.
        matches: for each selector of the policy how many operations it fits in one forward pass.
        note: what a reader of the figures must know, or an empty string.
        compiled: whether `forward` is a compiled program, whose inside hooks cannot see.
        witness: set its fields to be told what checkpointing holds.
    """

    forward: Forward
    regions: Regions
    matches: dict[str, int]
    note: str = ""
    compiled: bool = False
    witness: Witness = field(default_factory=Witness)


@dataclass(frozen=True)
class Rule:
    """One selector of a policy: its spelling, what it fits, and whether that is stored."""

    selector: str
    fits: Callable[[Operation], bool]
    stores: bool = True


def apply(
    network: Network,
    policy: jaxremat.Policy,
    asked: Literal["auto", "net", "block"] = "auto",
    *,
    kept_without_policy: Callable[[], int] | None = None,
    compiler: str = "inductor",
) -> Applied:
    """Returns the network's forward pass under a policy.

    Args:
        network: of `torch_models.build`; its parameters are shared, not copied.
        policy: a value of `jaxremat.parse`.
        asked: where to apply it; `auto` is each block.
        kept_without_policy: gives the bytes that plain autograd keeps for the backward pass of a batch; `budget:` in
            bytes needs it.
        compiler: the backend of `torch.compile` for `budget:`.

    Raises:
        PolicyError: PyTorch cannot express the policy, or one of its selectors fits no operation of the network.

    Example:
        >>> import jaxremat
        >>> from experiments import torch_models, torch_policies
        >>> net = torch_models.build("net")
        >>> torch_policies.apply(net, jaxremat.parse("ops:conv=store,*=recompute")).matches
        {'ops:conv': 2, 'ops:*': 9}
    """
    regions: Regions = "block" if asked == "auto" else asked
    if isinstance(policy, p.Everything):
        return Applied(network, regions, {})
    if isinstance(policy, p.Nothing):
        witness = Witness()
        return Applied(_in_regions(network, regions, partial(_checkpointed, witness)), regions, {}, witness=witness)
    if isinstance(policy, p.Segments):
        return _segmented(network, policy, asked)
    if isinstance(policy, p.Budget):
        return _budgeted(network, policy, asked, kept_without_policy, compiler)
    return _selective(network, policy, regions)


def _checkpointed(witness: Witness, call: Forward, **options: Any) -> Forward:
    def region(x: torch.Tensor) -> torch.Tensor:
        if witness.region_input is not None:
            witness.region_input(x)
        result: Any = checkpoint(call, x, use_reentrant=False, **options)
        return result

    return region


def _in_regions(network: Network, regions: Regions, wrap: Callable[[Forward], Forward]) -> Forward:
    if regions == "net":
        return wrap(network)
    return partial(_compose, [wrap(part.call) if part.is_block else part.call for part in network.parts()])


def _compose(calls: Sequence[Forward], images: torch.Tensor) -> torch.Tensor:
    x = images
    for call in calls:
        x = call(x)
    return as_logits(x)


def _selective(network: Network, policy: jaxremat.Policy, regions: Regions) -> Applied:
    parts = policy.parts if isinstance(policy, p.Union) else (policy,)
    tables = [_rules(part) for part in parts]
    operations = list_operations(network)
    matches = {rule.selector: 0 for rules in tables for rule in rules}
    for operation in operations:
        for rules in tables:
            # An operation is decided by the first rule of `ops:` that fits; other selectors may share one.
            fitting = [rule for rule in rules if rule.fits(operation)]
            for rule in fitting[:1] if rules and rules[0].selector.startswith("ops:") else fitting:
                matches[rule.selector] += 1
    for selector, count in matches.items():
        if not count and selector != "ops:*":
            context = f"{policy}: " if len(matches) > 1 else ""
            raise PolicyError(context + _no_match(selector, operations))
    modules = Modules(network)
    witness = Witness()

    def decide(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        operation = modules.operation(func)
        if operation is None or not any(_stores(rules, operation) for rules in tables):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if witness.cached is not None:
            witness.cached(context.op_output)
        return CheckpointPolicy.MUST_SAVE

    contexts = partial(create_selective_checkpoint_contexts, decide)
    forward = _in_regions(network, regions, partial(_checkpointed, witness, context_fn=contexts))
    return Applied(forward, regions, matches, witness=witness)


def _stores(rules: Sequence[Rule], operation: Operation) -> bool:
    return next((rule.stores for rule in rules if rule.fits(operation)), False)


def _rules(policy: jaxremat.Policy) -> list[Rule]:
    match policy:
        case p.Dots():
            return [Rule("dots", lambda operation: operation.label in ("conv", "dot"))]
        case p.DotsNoBatch():
            return [Rule("dots_no_batch", lambda operation: operation.label == "dot" and not operation.batched)]
        case p.Names(patterns):
            return [Rule(f"names:{glob}", partial(_name_fits, glob=glob)) for glob in patterns]
        case p.Paths(patterns):
            return [Rule(f"paths:{glob}", partial(_path_fits, glob=glob)) for glob in patterns]
        case p.Ops(rules):
            return [_op_rule(op, action) for op, action in rules]
    reasons = {
        p.Offload: "here PyTorch has no rule that moves a chosen value to the host",
        p.Values: "positions count the values of a JAX trace, which PyTorch does not have",
        p.Segments: "segments are regions and choose no operations, so they form no union",
        p.Budget: "a budget chooses everything by itself",
    }
    raise PolicyError(f"PyTorch cannot express {policy}: {reasons[type(policy)]}.")


def _op_rule(op: str, action: str) -> Rule:
    if op != "*" and op not in OPS:
        raise PolicyError(
            f"PyTorch cannot express ops:{op}={action}: operations here are {', '.join(OPS)} and *; got {op!r}."
            f"{_did_you_mean(op, OPS)}"
        )
    if action == "offload":
        raise PolicyError(
            f"PyTorch cannot express ops:{op}=offload: selective checkpointing keeps a value on its device or not at all; "
            "use store or recompute."
        )
    return Rule(f"ops:{op}", lambda operation: op in ("*", operation.label), action == "store")


def _name_fits(operation: Operation, glob: str) -> bool:
    return bool(operation.name) and fnmatchcase(operation.name, glob)


def _path_fits(operation: Operation, glob: str) -> bool:
    """Whether `glob` fits some run of consecutive parts of the operation's path, as `paths:` does in jaxremat."""
    parts, length = operation.path.split("/"), glob.count("/") + 1
    return any(fnmatchcase("/".join(parts[i : i + length]), glob) for i in range(len(parts) - length + 1))


def _no_match(selector: str, operations: Sequence[Operation]) -> str:
    kind, _, word = selector.partition(":")
    known = {
        "names": {operation.name for operation in operations},
        "paths": {part for operation in operations for part in (operation.path, *operation.path.split("/"))},
        "ops": {operation.label for operation in operations},
    }.get(kind, {operation.label for operation in operations}) - {""}
    return (
        f"{selector!r} matches no operation of the PyTorch network.{_did_you_mean(word, known)} "
        f"It has: {', '.join(sorted(known)[:12])}{', ...' if len(known) > 12 else ''}."
    )


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, sorted(known), n=3)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def _segmented(network: Network, policy: p.Segments, asked: str) -> Applied:
    if asked == "block":
        raise PolicyError(
            f"PyTorch cuts a whole network into segments: use --regions net or auto; got block for {policy}."
        )
    calls = [part.call for part in network.parts()]
    count = policy.count
    if count is None:
        layers = sum(operation.label in ("conv", "dot") for operation in list_operations(network))
        count = min(math.ceil(math.sqrt(layers)), len(calls))
    if count > len(calls):
        raise PolicyError(
            f"{policy}: this network has {len(calls)} parts, so PyTorch cuts it into at most {len(calls)} segments; ask for "
            "fewer, or for segments:sqrt."
        )
    cuts = [list(indices) for indices in np.array_split(np.arange(len(calls)), count)]
    segments = [partial(_compose_as_is, [calls[i] for i in indices]) for indices in cuts]
    witness = Witness()
    forward = partial(_compose, [*(_checkpointed(witness, segment) for segment in segments[:-1]), segments[-1]])
    note = f"{count} segments of {'+'.join(str(len(cut)) for cut in cuts)} parts"
    return Applied(forward, "net", {}, note, witness=witness)


def _compose_as_is(calls: Sequence[Forward], x: torch.Tensor) -> torch.Tensor:
    for call in calls:
        x = call(x)
    return x


def _budgeted(
    network: Network, policy: p.Budget, asked: str, kept_without_policy: Callable[[], int] | None, compiler: str
) -> Applied:
    if asked == "block":
        raise PolicyError(
            f"PyTorch compiles a whole network under a budget: use --regions net or auto; got block for {policy}."
        )
    amount = policy.amount
    if isinstance(amount, str):
        raise PolicyError(
            f"PyTorch cannot express {policy}: its budget is a ratio and knows no device; use bytes or a percentage."
        )
    if isinstance(amount, float):
        ratio, source = amount, "as asked"
    elif kept_without_policy is None:
        raise PolicyError(f"{policy}: a budget in bytes needs a batch, so that it can be turned into PyTorch's ratio.")
    else:
        kept_bytes = kept_without_policy()
        ratio = min(1.0, amount / kept_bytes)
        source = f"{amount} of the {kept_bytes} bytes that plain autograd keeps"
    note = f"activation_memory_budget {ratio:.4g}, {source}; it bounds what is kept, not the peak"
    compile_graph: Any = torch._dynamo.lookup_backend(compiler)

    def backend(graph: Any, examples: Any) -> Any:
        # A backend of its own for each ratio: programs are looked up by backend, but not by the setting.
        with functorch_config.patch(activation_memory_budget=ratio):
            return compile_graph(graph, examples)

    forward: Any = torch.compile(network, dynamic=False, backend=backend)
    return Applied(forward, "net", {}, note, compiled=True)
