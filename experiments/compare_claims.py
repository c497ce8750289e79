"""What is said of rematerialization beside what the comparison measured, claim by claim."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.compare_records import Framework, Result
from experiments.compare_table import NAMES, Group, groups, mib

LEAST, MOST = 0.5, 2.0  # more time for recomputing everything, as the article has it


@dataclass(frozen=True)
class Finding:
    """A claim, where it was put to the test, and what came out."""

    claim: str
    where: str
    measured: str


def findings(results: Sequence[Result]) -> list[Finding]:
    """Returns what the results say of each claim; claims that nothing was measured for are left out."""
    found = list[Finding]()
    for group in groups(results):
        for framework in NAMES:
            plain = _measured(group, framework, "everything")
            if plain is None:
                continue
            where = f"{group.model}, {NAMES[framework]}"
            if (again := _measured(group, framework, "nothing")) is not None and plain.step_seconds:
                more = statistics.median(again.step_seconds) / statistics.median(plain.step_seconds) - 1
                found.append(
                    Finding(
                        "Recomputing everything costs 50-200 % more time", where, f"{more:+.0%} a step{_beside(more)}"
                    )
                )
            if (sqrt := _measured(group, framework, "segments:sqrt")) is not None and plain.kept_bytes:
                part = sqrt.kept_bytes / plain.kept_bytes
                found.append(Finding("Segments need O(√n) of the memory", where, _share(sqrt, plain, part)))
            for policy in group.policies:
                if policy.startswith("ops:") and (chosen := _measured(group, framework, policy)) is not None:
                    part = chosen.kept_bytes / plain.kept_bytes
                    found.append(
                        Finding(f"A table of operations saves memory: {policy}", where, _share(chosen, plain, part))
                    )
    return sorted(found, key=lambda finding: finding.claim)


def _measured(group: Group, framework: Framework, policy: str) -> Result | None:
    result = group.find(framework, policy)
    return result if result is not None and result.status == "measured" else None


def _beside(more: float) -> str:
    return ", less than that" if more < LEAST else ", more than that" if more > MOST else ", as is said"


def _share(result: Result, plain: Result, part: float) -> str:
    kept = f"keeps {mib(result.kept_bytes)} of {mib(plain.kept_bytes)} MiB ({part:.0%})"
    if result.peak_bytes is None or not plain.peak_bytes:
        return kept
    return f"{kept}; peak {mib(result.peak_bytes)} of {mib(plain.peak_bytes)} MiB ({result.peak_bytes / plain.peak_bytes:.0%})"


POLICIES = (
    ("`everything`", "what autodiff asks for; no rematerialization"),
    ("`nothing`", "the inputs of each block; the block is computed again in the backward pass"),
    ("`dots`", "the results of matrix products and convolutions"),
    ("`names:...`", "values tagged with names that fit, such as `conv_out`"),
    ("`ops:...`", "results by the operation that made them; the first rule that fits counts, and `*` fits all"),
    (
        "`segments:sqrt`",
        "what crosses the borders of about √n segments of n layers; the last segment is not computed again",
    ),
    (
        "`budget:...`",
        "JAX: what a planner chooses for a peak of that size. PyTorch: what `torch.compile` chooses for its "
        "`activation_memory_budget`, a part of what is kept without; bytes are turned into it",
    ),
)

HOW_TAKEN = (
    (
        "kept, JAX",
        "traced: `jaxremat.residuals` of the loss under the policy; what autodiff keeps, not what XLA makes of it.",
    ),
    (
        "kept, PyTorch",
        "counted: storages that autograd's saved tensors, the inputs of checkpointed regions and selective checkpointing's cache "
        "hold after the forward pass, each storage once; parameters, statistics and the batch left out.",
    ),
    ("peak, JAX", "compiled: temporary bytes that XLA allots to the whole step, above its arguments and results."),
    (
        "peak, PyTorch",
        "measured: the largest sum of the allocator's events in one step that the profiler saw (on CUDA "
        "`max_memory_allocated`), above parameters, optimizer state and batch. Scratch memory of kernels that bypasses the "
        "allocator is not in it.",
    ),
    (
        "step",
        "measured: forward, backward and update on one batch, after a warm-up; median and quartiles; the policies of a model "
        "and framework took turns. XLA's convolutions on CPUs are slow beside PyTorch's: compare policies within a framework, "
        "not the frameworks by their times.",
    ),
    (
        "conv+dot again",
        "JAX: convolutions and matrix products of the gradient's program, less those without a policy. PyTorch: run by modules "
        "during the backward pass. A dash: a compiled program, whose inside nobody counts.",
    ),
    (
        "accuracy",
        "on the test set after the steps that are named: from the same initial weights, over the same batches. Dropout masks "
        "differ between frameworks, and with them the losses of `vit`.",
    ),
)
