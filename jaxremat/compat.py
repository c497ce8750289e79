"""The one file that touches JAX's private modules and the shapes of JAX's own objects that differ between versions.

Each use says in which versions it was seen. Everything else in the library goes through these functions.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax._src import ad_util as _ad_util  # zeros_like_aval: 0.10.2, 0.12.0
from jax._src import config as _config  # trace_context: 0.10.2, 0.12.0
from jax._src import source_info_util as _source  # NameStack, Scope, user_context, user_frame: 0.10.2, 0.12.0
from jax._src.lax.lax import optimization_barrier_p  # 0.10.2, 0.12.0
from jax.core import Tracer
from jax.extend import core as _core
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var

Atom = Var | Literal

__all__ = ["Atom", "ClosedJaxpr", "DropVar", "JaxprEqn", "Literal", "Var"]


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
    """Returns `file:line` of the user's code that made an equation, or an empty string."""
    frame = _source.user_frame(eqn.source_info.traceback) if eqn.source_info.traceback is not None else None
    return f"{frame.file_name}:{frame.start_line}" if frame else ""


def moved(eqn: JaxprEqn, outer: JaxprEqn, scope: str) -> JaxprEqn:
    """Returns an equation of an inner jaxpr as it reads outside of the call `outer`: its scopes below those of the call."""
    stack = outer.source_info.name_stack.extend(scope) + eqn.source_info.name_stack
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


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


def is_traced(*values: Any) -> bool:
    """Says whether one of the values is a tracer."""
    return any(isinstance(value, Tracer) for value in values)


def as_function(program: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Returns a function that runs a program equation by equation."""
    return _core.jaxpr_as_fun(program)


def zeros(cotangent: Any) -> Any:
    """Returns the array that a symbolic zero stands for, with its sharding and its varying mesh axes."""
    return _ad_util.zeros_like_aval(cotangent.aval)
