"""What recomputation costs: operations, bytes moved, or time on the target by its roofline."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxremat.errors import PolicyError, did_you_mean
from jaxremat.plan.operations import Operation
from jaxremat.targets import Target

OBJECTIVES = ("flops", "bytes", "time")


@dataclass(frozen=True)
class Link:
    """What it costs to keep a byte in host memory: to send it there and to fetch it again, nothing else running meanwhile.

    Attributes:
        cost: in the objective.
        flops: the operations that the chip could do in that time.
    """

    cost: float
    flops: float


def link_of(objective: str, target: Target) -> Link:
    """Returns what it costs to keep a byte in the memory of a target's host.

    Raises:
        PolicyError: the target's rates are unknown, or the host's memory is its own.
    """
    flops, memory, host = target.flops_per_second, target.bytes_per_second, target.host_bytes_per_second
    if target.kind == "local" and target.specification == "cpu":
        raise PolicyError(
            "plan: offload=True keeps values in host memory, and on a CPU that is the memory that the budget is about. Name the "
            "chip to plan for, such as target='h100', or leave offload out."
        )
    if flops is None or memory is None or host is None:
        raise PolicyError(
            f"plan: offload=True needs the rates of the chip and of its link to the host, which are not known for {target.name}. "
            "Name a target such as 'h100'."
        )
    seconds = 2 / host
    return Link({"flops": flops, "bytes": memory, "time": 1.0}[objective] * seconds, flops * seconds)


def cost_of(objective: str, target: Target) -> Callable[[Operation], float]:
    """Returns the cost of running an operation again.

    Args:
        objective: `flops`: floating point operations. `bytes`: read and written, fused operations at what they read and
            write alone. `time`: seconds by the roofline, the larger of operations over the chip's rate and bytes over
            its memory's (Williams et al., "Roofline", 2009).
        target: whose rates count, for `time`.

    Raises:
        PolicyError: there is no such objective, or the target's rates are unknown.
    """
    if objective == "flops":
        return lambda operation: operation.flops
    if objective == "bytes":
        return lambda operation: operation.moved_bytes
    if objective == "time":
        if target.flops_per_second is None or target.bytes_per_second is None:
            raise PolicyError(
                f"plan: objective='time' needs the rates of the chip, which are not known for {target.name}. "
                "Name a target such as 'h100', or use objective='flops'."
            )
        rate, bandwidth = target.flops_per_second, target.bytes_per_second
        return lambda operation: max(operation.flops / rate, operation.moved_bytes / bandwidth)
    raise PolicyError(
        f"plan: objective must be one of {', '.join(OBJECTIVES)}; got {objective!r}.{did_you_mean(str(objective), OBJECTIVES)}"
    )
