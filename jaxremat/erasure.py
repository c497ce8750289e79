"""`erased`: did the compiler keep the recomputation that a program asks for?

A compiler that merges recomputation with the forward pass (common subexpression elimination) makes every policy compile to
the same program, with the memory of no policy. That shows in the outcome: fewer convolutions and matrix products in the
optimized program than in the one that was handed in. Recomputation of other operations alone leaves no such trace: whether
that was kept is not seen here. XLA:CPU erases in jaxlib 0.11.0 and before, unless compiled with `jaxremat.compiler_options()`.
"""

import re
from typing import Any

from jaxremat.hlo import conv_and_dot_counts

_ASKED = {"convolutions": "stablehlo.convolution", "matrix products": "stablehlo.dot_general"}


def erased(lowered: Any, compiled: Any) -> str | None:
    """Says whether a compiler erased rematerialization.

    Args:
        lowered: what `jax.jit(f).lower(*args)` returned.
        compiled: what `lowered.compile()` returned.

    Returns:
        None where no convolution or matrix product was lost, or the program has no gates; else sentences that say what is
        missing, who took it, and how to keep it. Values that a policy stores or offloads are no recomputation.

    Example:
        >>> import jax, jax.numpy as jnp, jaxremat
        >>> def layer(w, x):
        ...     return jnp.tanh(x @ w)
        >>> def loss(w, x):
        ...     for _ in range(4):
        ...         x = jaxremat.remat(layer, "nothing")(w, x)
        ...     return x.sum()
        >>> step = jax.jit(jax.grad(loss), compiler_options=jaxremat.compiler_options())
        >>> lowered = step.lower(jnp.ones((64, 64)), jnp.ones((64, 64)))
        >>> erased(lowered, lowered.compile()) is None
        True
    """
    text = lowered.as_text()
    if "stablehlo.optimization_barrier" not in text:
        return None
    asked = {kind: _executed(text, op) for kind, op in _ASKED.items()}
    found = conv_and_dot_counts(compiled.as_text())
    # A compiler may write a product as a convolution and the other way round: only the sum tells.
    lost = sum(asked.values()) - found.convolutions - found.dots
    if lost <= 0:
        return None
    wanted = " and ".join(f"{count} {kind}" for kind, count in asked.items() if count)
    platform = next(iter(compiled.runtime_executable().local_devices())).platform
    remedy = "Compile with jax.jit(..., compiler_options=jaxremat.compiler_options())."
    if platform != "cpu":
        remedy = "Please report it with the program: its gates should have kept them."
    return (
        f"XLA:{platform.upper()} erased {lost} of the {wanted} that the program asks for: it merged their recomputation with the "
        "forward pass, so that what a policy recomputes is kept in memory after all (what it stores or offloads is not "
        f"concerned). {remedy}"
    )


def _executed(text: str, op: str) -> int:
    """How often an operation stands in a module, functions counted as often as they are called."""
    bodies = {
        m.group(1): m.group(2)
        for m in re.finditer(r"func\.func (?:public |private )?@([\w.\-]+)(.*?)\n  }", text, re.S)
    }
    counts = dict[str, int]()

    def count(name: str) -> int:
        if name not in counts:
            body = bodies.get(name, "")
            calls = re.findall(r"call @([\w.\-]+)", body)
            counts[name] = len(re.findall(re.escape(op) + r"\b", body)) + sum(count(callee) for callee in calls)
        return counts[name]

    return count("main")
