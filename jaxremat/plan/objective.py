"""What recomputation costs: operations, bytes moved, or time on the target by its roofline."""

from collections.abc import Callable

from jaxremat.errors import PolicyError, did_you_mean
from jaxremat.plan.operations import Operation
from jaxremat.targets import Target

OBJECTIVES = ("flops", "bytes", "time")


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
