"""The same for nnx: modules on `jaxremat.ops`, `remat` for classes and bound methods, and a scope for each module.

The modules have Flax's names, arguments and variables, so that checkpoints interchange. Where an option has no
counterpart among the operations (a mask, groups of devices, a norm whose row is spread over devices), and in evaluation,
Flax's own computation runs, which keeps more.
"""

from collections.abc import Callable, Sequence
from functools import cache, wraps
from types import MethodType
from typing import Any, TypeVar

import jax
from flax import nnx

from jaxremat import ops
from jaxremat import policy as p
from jaxremat.flax.arguments import Arguments, arguments_of
from jaxremat.flax.linen import axes_of
from jaxremat.remat import remat

Model = TypeVar("Model", bound=nnx.Module)


def _promoted(module: Any, x: jax.Array, *more: Any) -> tuple[Any, ...]:
    """Returns x, scale and bias in the module's type of computation, as Flax's norms take them."""
    parameters = (None if v is None else v[...] for v in more)
    return module.promote_dtype((x, *parameters), dtype=module.dtype)


class BatchNorm(nnx.BatchNorm):
    """`flax.nnx.BatchNorm` whose training mode keeps its input and two statistics a channel; see `ops.batch_norm`."""

    def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: jax.Array | None = None) -> jax.Array:
        """Returns x normalized by the batch's statistics, or by the running ones."""
        running = self.use_running_average if use_running_average is None else use_running_average
        if running or running is None or mask is not None or self.axis_index_groups is not None:
            return super().__call__(x, use_running_average, mask=mask)
        # The running statistics take part in the choice of the type, as in Flax.
        x, _, _, scale, bias = _promoted(self, x, self.mean, self.var, self.scale, self.bias)
        y, mean, variance = ops.batch_norm(
            x,
            scale,
            bias,
            axis=self.axis,
            epsilon=self.epsilon,
            dtype=self.dtype,
            use_fast_variance=self.use_fast_variance,
            axis_name=self.axis_name,
        )
        # Variables may be references, which no tangent may enter.
        mean, variance = jax.lax.stop_gradient((mean, variance))
        self.mean[...] = self.momentum * self.mean[...] + (1 - self.momentum) * mean
        self.var[...] = self.momentum * self.var[...] + (1 - self.momentum) * variance
        return y


class LayerNorm(nnx.LayerNorm):
    """`flax.nnx.LayerNorm` that keeps its input and two statistics a row; see `ops.layer_norm`."""

    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        """Returns x normalized."""
        if mask is not None or self.axis_name is not None or self.axis_index_groups is not None:
            return super().__call__(x, mask=mask)
        x, scale, bias = _promoted(self, x, self.scale, self.bias)
        return ops.layer_norm(
            x,
            scale,
            bias,
            epsilon=self.epsilon,
            reduction_axes=axes_of(self.reduction_axes),
            feature_axes=axes_of(self.feature_axes),
            dtype=self.dtype,
            use_fast_variance=self.use_fast_variance,
        )


class RMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm` that keeps its input and a statistic a row; see `ops.rms_norm`."""

    def __call__(self, x: Any, mask: jax.Array | None = None) -> jax.Array:
        """Returns x normalized."""
        if mask is not None or self.axis_name is not None or self.axis_index_groups is not None:
            return super().__call__(x, mask=mask)
        x, scale = _promoted(self, x, self.scale)
        return ops.rms_norm(
            x,
            scale,
            epsilon=self.epsilon,
            reduction_axes=axes_of(self.reduction_axes),
            feature_axes=axes_of(self.feature_axes),
            dtype=self.dtype,
        )


class GroupNorm(nnx.GroupNorm):
    """`flax.nnx.GroupNorm` that keeps its input and two statistics a channel; see `ops.group_norm`."""

    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        """Returns x normalized."""
        spread = self.axis_name is not None or self.axis_index_groups is not None
        if mask is not None or spread or self.reduction_axes is not None:
            return super().__call__(x, mask=mask)
        x, scale, bias = _promoted(self, x, self.scale, self.bias)
        return ops.group_norm(
            x,
            scale,
            bias,
            num_groups=self.num_groups,
            epsilon=self.epsilon,
            dtype=self.dtype,
            use_fast_variance=self.use_fast_variance,
        )


class Dropout(nnx.Dropout):
    """`flax.nnx.Dropout` that keeps one bit an element; see `ops.dropout`."""

    def __call__(self, inputs: Any, *, deterministic: bool | None = None, rngs: Any = None) -> jax.Array:
        """Returns the inputs with elements set to 0 at the rate, the others divided by its complement."""
        off = self.deterministic if deterministic is None else deterministic
        source = self.rngs if rngs is None else rngs
        if off or off is None or self.rate in (0.0, 1.0) or source is None:
            return super().__call__(inputs, deterministic=deterministic, rngs=rngs)
        if isinstance(source, nnx.Rngs):
            source = source[self.rng_collection]
        key = source() if isinstance(source, nnx.RngStream) else source
        return ops.dropout(inputs, self.rate, key, broadcast_dims=self.broadcast_dims)


def scoped(model: Model, name: str | None = None) -> Model:
    """Opens a named scope round every call of the model and its submodules, so that `paths:` and ledgers know them.

    Linen does this by itself. The scopes are the attributes' names (`blocks_0` for an element of a list), below `name`.
    Variables, their paths and the types' names stay; each module's class becomes a subclass of what it was, in place.

    Args:
        model: an nnx module.
        name: the outermost scope; `None` for the name of the model's class.

    Returns:
        The same object.

    Raises:
        TypeError: `model` is no nnx module.

    Example:
        >>> import jax.numpy as jnp, jaxremat
        >>> from flax import nnx
        >>> from jaxremat.flax.nnx import scoped
        >>> class Net(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.fc = nnx.Linear(4, 4, rngs=rngs)
        ...     def __call__(self, x):
        ...         return jnp.tanh(self.fc(x)).sum()
        >>> net = scoped(Net(nnx.Rngs(0)))
        >>> {row.path for row in jaxremat.residuals(lambda x: net(x), jnp.ones((2, 4))).rows if row.op == "dot"}
        {'Net/fc'}
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"jaxremat.flax.nnx.scoped: needs a flax.nnx.Module; got {model!r:.80}.")
    modules = {path: module for path, module in nnx.iter_modules(model) if callable(module)}
    for path, module in modules.items():
        above = max((path[:i] for i in range(len(path)) if path[:i] in modules), key=len, default=())
        scope = "_".join(map(str, path[len(above) :])) or name or type(model).__name__
        cls = type(module)
        module.__class__ = _scoped_class(getattr(cls, "_unscoped", cls), scope)
    return model


@cache
def _scoped_class(cls: type[nnx.Module], scope: str) -> type[nnx.Module]:
    method: Callable[..., Any] = cls.__call__  # type: ignore[attr-defined]

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(scope):
            return method(self, *args, **kwargs)

    return _subclass(cls, {"__call__": call, "_unscoped": cls})


def remat_class(target: type[nnx.Module], policy: p.Policy, static: str | Sequence[str]) -> type[nnx.Module]:
    """Returns the class with its calls under `policy`; see `jaxremat.flax.remat`."""
    method: Callable[..., Any] = target.__call__  # type: ignore[attr-defined]
    arguments = arguments_of(method, static, f"{target.__name__}.__call__")

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _call(method, policy, arguments, self, args, kwargs)

    return _subclass(target, {"__call__": call})


def remat_method(method: MethodType, policy: p.Policy, static: str | Sequence[str]) -> Callable[..., Any]:
    """Returns a function like a bound method, under `policy`; see `jaxremat.flax.remat`."""
    function: Callable[..., Any] = method.__func__
    module: Any = method.__self__
    arguments = arguments_of(function, static, f"{type(module).__name__}.{function.__name__}")

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _call(function, policy, arguments, module, args, kwargs)

    return call


def _subclass(cls: type[nnx.Module], members: dict[str, Any]) -> Any:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (cls,), members | names)


def _call(
    method: Callable[..., Any],
    policy: p.Policy,
    arguments: Arguments,
    module: nnx.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Calls the method with its module's state and its arrays through `jaxremat.remat`, and puts the new state back."""
    arrays, join = arguments.split(args, kwargs)
    graph, state = nnx.split((module, arrays))

    def pure(state: Any) -> tuple[Any, Any]:
        before = {path: jax.tree.leaves(variable) for path, variable in nnx.to_flat_state(state)}
        inner, arrays = nnx.merge(graph, state)
        again = join(arrays)
        out = method(inner, *again.args[1:], **again.kwargs)
        graph_after, state_after = nnx.split((inner, arrays))
        if graph_after != graph:
            raise ValueError(
                f"jaxremat.flax.remat: a call under a policy may change the values of variables, not which there are; "
                f"{type(module).__name__}.{method.__name__} adds, removes or replaces some. Make them before the call."
            )
        return out, _changed(before, state_after)

    out, changed = remat(pure, policy)(state)
    nnx.update((module, arrays), changed)
    return out


def _changed(before: dict[Any, list[Any]], after: Any) -> Any:
    """Returns the variables that hold other arrays than before; parameters, mostly, are no results of a call."""
    new = [
        (path, variable)
        for path, variable in nnx.to_flat_state(after)
        if any(a is not b for a, b in zip(before[path], jax.tree.leaves(variable), strict=True))
    ]
    return nnx.from_flat_state(new)
