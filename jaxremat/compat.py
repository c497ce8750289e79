"""The one file that touches JAX's private modules and the shapes of JAX's own objects that differ between versions.

Each use says in which versions it was seen. Everything else in the library goes through these functions.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from typing import Any

import jax
import numpy as np
from jax._src import ad_util as _ad_util  # zeros_like_aval: 0.10.2, 0.12.0
from jax._src import compiler as _compiler
from jax._src import config as _config  # trace_context, remat3: 0.10.2, 0.12.0
from jax._src import source_info_util as _source  # its functions and Scope: 0.10.2, 0.12.0
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import mlir as _mlir
from jax._src.lax import windowed_reductions as _windows  # _select_and_scatter: 0.10.2, 0.12.0
from jax._src.lax.lax import optimization_barrier_p  # 0.10.2, 0.12.0
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from jax.core import Tracer
from jax.extend import core as _core
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core import primitives as _primitives

from jaxremat.frames import is_library

Atom = Var | Literal

__all__ = ["Atom", "ClosedJaxpr", "DropVar", "JaxprEqn", "Literal", "Var"]


_SYMBOLIC = 1024  # what a symbolic dimension counts as where sizes are compared


def dimension(size: Any) -> int:
    """Returns a dimension of a shape as a number, also where `jax.export` has it as a symbol. `_evaluate`: 0.10.2, 0.12.0."""
    return int(size._evaluate(dict.fromkeys(size.get_vars(), _SYMBOLIC))) if hasattr(size, "get_vars") else int(size)


def primitive_names() -> frozenset[str]:
    """Returns the names of JAX's public primitives."""
    return frozenset(p.name for p in vars(_primitives).values() if isinstance(p, _core.Primitive))


def trace_key() -> Any:
    """Returns what, beside its arguments, decides how a function traces: x64, matmul precision, mesh, axis names, ..."""
    return _config.trace_context()


def program(invars: Sequence[Var], outvars: Sequence[Atom], eqns: Sequence[JaxprEqn]) -> ClosedJaxpr:
    """Returns a closed jaxpr without constants. In 0.12 `ClosedJaxpr` and `Jaxpr` are one class; both forms build there."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns)) if eqns else frozenset()
    info = _core.DebugInfo("jaxremat", "cut", None, None)
    return ClosedJaxpr(Jaxpr((), list(invars), list(outvars), list(eqns), effects, info), ())


def hoisted(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, Sequence[Any]]:
    """Returns a program whose first inputs are the constants of `closed`, and the constants."""
    variables, values = constants(closed)
    return program([*variables, *closed.jaxpr.invars], closed.jaxpr.outvars, closed.jaxpr.eqns), values


def constants(closed: ClosedJaxpr) -> tuple[Sequence[Var], Sequence[Any]]:
    """Returns the variables and the values of the constants of a closed jaxpr."""
    return closed.jaxpr.constvars, closed.consts


def new_var(aval: Any) -> Var:
    """Returns a fresh variable."""
    return Var(aval)


def barrier(operands: Sequence[Var], like: JaxprEqn) -> JaxprEqn:
    """Returns an `optimization_barrier` equation over `operands` with fresh outputs, attributed to the source of `like`."""
    outvars = [new_var(operand.aval) for operand in operands]
    return _core.new_jaxpr_eqn(
        list(operands), outvars, optimization_barrier_p, {}, frozenset(), like.source_info, like.ctx
    )


def scopes(eqn: JaxprEqn) -> tuple[str, ...]:
    """Returns the named scopes that an equation was traced in, outermost first, without the transformations' own."""
    stack = eqn.source_info.name_stack.stack
    return tuple(part for scope in stack if isinstance(scope, _source.Scope) for part in scope.name.split("/"))


def frames(eqn: JaxprEqn) -> Sequence[Any]:
    """Returns the code objects of the Python calls that made an equation, innermost first; empty where none is known."""
    traceback = eqn.source_info.traceback
    return traceback.raw_frames()[0] if traceback is not None else ()


def source_line(eqn: JaxprEqn) -> str:
    """Returns `file:line` of the user's code that made an equation, or an empty string.

    It is the innermost line outside of JAX, Flax, Optax and this library; where there is none, the innermost outside of JAX.
    """
    traceback = eqn.source_info.traceback
    frame = _user_frame(traceback) or (_source.user_frame(traceback) if traceback is not None else None)
    return f"{frame.file_name}:{frame.start_line}" if frame else ""


def is_made_by_user(eqn: JaxprEqn) -> bool:
    """Says whether a line of the user's code is known that made an equation."""
    return _user_frame(eqn.source_info.traceback) is not None


def _user_frame(traceback: Any) -> Any:
    frames = zip(*traceback.raw_frames()) if traceback is not None else ()
    return next((_source.raw_frame_to_frame(*at) for at in frames if not is_library(at[0].co_filename)), None)


def moved(eqn: JaxprEqn, outer: JaxprEqn, scopes: Sequence[str]) -> JaxprEqn:
    """Returns an equation of an inner jaxpr as it reads outside of the call `outer`.

    Its scopes stand below those of the call and `scopes`. Where it was made by a library's code alone, as inside of
    `jnp.var` (JAX keeps the Python calls up to the nearest `jit`), its source is that of the call.
    """
    stack = outer.source_info.name_stack
    for scope in scopes:
        stack = stack.extend(scope)
    inner = eqn.source_info
    traceback = inner.traceback if is_made_by_user(eqn) else outer.source_info.traceback
    return eqn.replace(source_info=inner.replace(traceback=traceback, name_stack=stack + inner.name_stack))


def bind(eqn: JaxprEqn, args: Sequence[Any], scope: str = "") -> list[Any]:
    """Binds an equation to values, under its own scopes, source and context; returns its outputs."""
    stack = _source.current_name_stack() + eqn.source_info.name_stack
    if scope:
        stack = stack.extend(scope)
    with _source.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def scoped(eqn: JaxprEqn, function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function` under the scopes, source and context of an equation."""
    stack = _source.current_name_stack() + eqn.source_info.name_stack
    with _source.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        return function(*args)


def tag(eqn: JaxprEqn) -> str | None:
    """Returns the tag that an equation gives its input, None where it gives none.

    Under `jax_remat3` a tag is no `name` equation: it is a `CheckpointName`, a parameter of the equation in 0.10.2 and
    0.12.0.1, where printed jaxprs show it as the primitive.
    """
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    inner: Any = eqn.params.get("_prim")
    return inner.name if type(inner).__name__ in ("CheckpointName", "CheckpointNameFwd") else None


def scan_parts(eqn: JaxprEqn, args: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Splits the arguments of a scan into constants, carry and what is scanned over.

    In 0.10.2 the equation holds their numbers, in 0.12.0.1 the tree of its arguments.
    """
    if "ft_in" in eqn.params:
        consts, carry, xs = map(list, eqn.params["ft_in"].update(list(args)).unpack())
        return consts, carry, xs
    first, last = eqn.params["num_consts"], eqn.params["num_consts"] + eqn.params["num_carry"]
    return list(args[:first]), list(args[first:last]), list(args[last:])


def select_and_scatter(operand: Any, source: Any, zero: Any, *, select: Any, window: Any, strides: Any) -> Any:
    """Returns zeros of the operand's shape to which each value of `source` is added where its window selects one.

    The primitive `select` compares two values; windows are not padded.
    """
    padding = [(0, 0)] * operand.ndim
    return _windows._select_and_scatter(
        operand, lambda x, y: select.bind(x, y), window, strides, padding, source, zero, jax.lax.add
    )


def varying_axes(aval: Any) -> frozenset[str]:
    """Returns the axes of the mesh over which a value differs inside of `shard_map` (the form of 0.10.2 and 0.12.0.1)."""
    return aval.manual_axis_type.varying


def is_on_host(aval: Any) -> bool:
    """Says whether a value is kept in host memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def is_traced(*values: Any) -> bool:
    """Says whether one of the values is a tracer."""
    return any(isinstance(value, Tracer) for value in values)


def as_function(program: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Returns a function that runs a program equation by equation."""
    return _core.jaxpr_as_fun(program)


def call(program: ClosedJaxpr, name: str, args: Sequence[Any]) -> list[Any]:
    """Calls a program as one `jit` equation, without tracing it again (parameters seen in 0.10.2 and 0.12.0.1).

    All parameters but the program and its name are those that JAX itself gives to a jitted function here and now, each
    repeated for every argument and result. Under `jax_remat3` tags are primitives that only a trace can lower.
    """
    if _config.remat3.value:

        def traced(*args: Any) -> list[Any]:
            return as_function(program)(*args)

        traced.__name__ = traced.__qualname__ = name
        return list(jax.jit(traced)(*args))
    params = dict(jax.make_jaxpr(jax.jit(lambda x: x))(0.0).eqns[0].params)
    for key in ("in_shardings", "in_layouts", "donated_invars"):
        params[key] = params[key] * len(args)
    for key in ("out_shardings", "out_layouts"):
        params[key] = params[key] * len(program.out_avals)
    return _primitives.jit_p.bind(*args, **(params | {"jaxpr": program, "name": name}))


def zeros(cotangent: Any) -> Any:
    """Returns the array that a symbolic zero stands for, with its sharding and its varying mesh axes."""
    return _ad_util.zeros_like_aval(cotangent.aval)


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


def running_platform() -> str | None:
    """Returns the platform of the device that computations go to by default, None before JAX has opened one.

    Asking JAX would open it. Under `private_cpu_device` nothing runs, so there is none (seen in 0.10.2 and 0.12.0.1).
    """
    default: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(default, str):
        return default
    if default is not None:
        return None if default is private_cpu_device() else default.platform
    return jax.default_backend() if _xla_bridge.backends_are_initialized() else None


@cache
def private_cpu_device() -> Any:
    """Returns a CPU device that JAX's own list of backends does not hold (seen in 0.10.2 and 0.12.0.1).

    Lowering asks for a default device even when it lowers for another platform. Under `jax.default_device` of this one
    it starts no backend, so that no attached accelerator is opened for a program that will not run there.
    """
    return _xla_bridge.make_cpu_client().local_devices()[0]


def compile_for_topology(stablehlo: bytes, devices: list[Any], options: dict[str, str]) -> Any:
    """Returns the executable of serialized StableHLO for devices of a topology (seen in 0.10.2 and 0.12.0.1).

    The public way, `jit(f).lower(...).compile()` with shardings on the devices, needs `f` itself in the process that
    compiles. Here that process is another one, and has the program alone.
    """
    with _mlir.make_ir_context():
        module = _mlir.ir.Module.parse(stablehlo)  # pyright: ignore[reportPrivateImportUsage]
    assignment = np.array(devices).reshape(1, -1)
    return devices[0].client.compile(
        module,
        executable_devices=_jax.DeviceList(tuple(devices)),
        compile_options=_compiler.get_compile_options(1, len(devices), assignment, env_options_overrides=options),
    )
