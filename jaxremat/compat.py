"""The one file that touches JAX's private modules; each use says in which versions it was seen to work."""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata
from typing import Any

import jax
import numpy as np
from jax._src import compiler, xla_bridge
from jax._src.interpreters import mlir
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]


def compiler_options(platform: str | None = None) -> dict[str, str]:
    """Returns the options under which the compiler of a platform keeps rematerialization, for `jax.jit` and `compile`.

    XLA:CPU of jaxlib 0.11.0 and before removes the barriers of rematerialization and then merges the recomputation
    with the forward pass, so that every policy compiles to the same program. Elsewhere nothing is needed.

    Args:
        platform: as `jax.default_backend()` names it ("cpu", "gpu", "cuda", "rocm", "tpu"), which is also the default.

    Returns:
        Options, often none, for `jax.jit(f, compiler_options=...)`.

    Example:
        >>> import jax
        >>> step = jax.jit(lambda x: x + 1, compiler_options=compiler_options())
        >>> int(step(1))
        2
    """
    if platform is None:
        platform = jax.default_backend()
    numbers = tuple(int(n) for n in re.findall(r"\d+", metadata.version("jaxlib"))[:3])
    return {"xla_disable_hlo_passes": "cse_barrier_expander"} if platform == "cpu" and numbers <= (0, 11, 0) else {}


@cache
def private_cpu_device() -> Any:
    """Returns a CPU device that JAX's own list of backends does not hold (seen in 0.10.2 and 0.12.0.1).

    Lowering asks for a default device even when it lowers for another platform. Under `jax.default_device` of this one
    it starts no backend, so that no attached accelerator is opened for a program that will not run there.
    """
    return xla_bridge.make_cpu_client().local_devices()[0]


def compile_for_topology(stablehlo: bytes, devices: list[Any], options: dict[str, str]) -> Any:
    """Returns the executable of serialized StableHLO for devices of a topology (seen in 0.10.2 and 0.12.0.1).

    The public way, `jit(f).lower(...).compile()` with shardings on the devices, needs `f` itself in the process that
    compiles. Here that process is another one, and has the program alone.
    """
    with mlir.make_ir_context():
        module = mlir.ir.Module.parse(stablehlo)  # pyright: ignore[reportPrivateImportUsage]
    assignment = np.array(devices).reshape(1, -1)
    return devices[0].client.compile(
        module,
        executable_devices=_jax.DeviceList(tuple(devices)),
        compile_options=compiler.get_compile_options(1, len(devices), assignment, env_options_overrides=options),
    )
