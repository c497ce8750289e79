"""`Labels`: the names by which a policy finds a value: its operation, its module path, its tags.

An operation is recognised by what was called, never by shapes: the equation's primitive, the jitted or custom-derivative
functions and the named scopes round it, and the Python functions that made it (`jax.nn.gelu`, `BatchNorm.__call__`),
which JAX keeps with every equation.
"""

import re
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType

from jaxremat import compat
from jaxremat.compat import JaxprEqn

# Names of operations in the field, beside every primitive's own name. The names on the right are primitives.
PRIMITIVE_OPS = {
    "conv_general_dilated": "conv",
    "dot_general": "dot",
    "ragged_dot_general": "dot",
    "reduce_window_max": "max_pool",
}
# Functions and modules that make these operations, wherever they are defined.
CALLED_OPS = frozenset(
    [
        "attention",
        "avg_pool",
        "batch_norm",
        "celu",
        "cross_entropy",
        "dropout",
        "elu",
        "gelu",
        "glu",
        "group_norm",
        "hard_sigmoid",
        "hard_silu",
        "hard_tanh",
        "instance_norm",
        "layer_norm",
        "leaky_relu",
        "log_sigmoid",
        "log_softmax",
        "logsumexp",
        "max_pool",
        "mish",
        "relu",
        "relu6",
        "rms_norm",
        "selu",
        "sigmoid",
        "silu",
        "softmax",
        "softplus",
        "soft_sign",
        "squareplus",
        "swish",
        "tanh",
        "weight_norm",
        "batch_norm_relu",
    ]
)
_ALIASES = {
    "dot_product_attention": "attention",
    "self_attention": "attention",
    "multi_head_dot_product_attention": "attention",
    "multi_head_attention": "attention",
    "dot_product_attention_weights": "attention",
    "swish": "silu",
    "standardize": "softmax",
    "re_lu": "relu",
    "si_lu": "silu",
    "bn": "batch_norm",
    "ln": "layer_norm",
    "softmax_cross_entropy_with_integer_labels": "cross_entropy",
    "softmax_cross_entropy": "cross_entropy",
}
_CALL = re.compile(r"(?:jit|called|custom_jvp|custom_vjp)\((.*)\)")


@dataclass(frozen=True)
class Labels:
    """What a value is called.

    Attributes:
        op: the most telling operation name: the field's name where there is one, else the primitive's.
        ops: all operation names that fit.
        path: the module path, `block_0/conv1`.
        names: its tags.
    """

    op: str
    ops: frozenset[str]
    path: str
    names: tuple[str, ...] = ()

    def tagged(self, names: list[str]) -> "Labels":
        """Returns the labels with these tags beside those that are there."""
        return replace(self, names=tuple(dict.fromkeys((*self.names, *names))))

    def under(self, outer: "Labels") -> "Labels":
        """Returns the labels of a value in the body of an equation that has the labels `outer`."""
        path = "/".join(part for part in (outer.path, self.path) if part)
        return replace(self, path=path, ops=self.ops | outer.ops)


def labels_of(eqn: JaxprEqn) -> Labels:
    """Returns the labels of an equation's outputs, without their tags.

    Example:
        >>> import jax
        >>> from jaxremat.labels import labels_of
        >>> eqns = jax.make_jaxpr(lambda x: jax.nn.gelu(x))(1.0).jaxpr.eqns
        >>> {labels_of(eqn).op for eqn in eqns}
        {'gelu'}
    """
    primitive = eqn.primitive.name
    called = tuple(dict.fromkeys(called_names(eqn)))
    field = PRIMITIVE_OPS.get(primitive)
    # jnp.einsum names a scope by its formula.
    path = "/".join(scope for scope in compat.scopes(eqn) if not (_CALL.fullmatch(scope) or "->" in scope))
    telling = field or next((name for name in called if name in CALLED_OPS), primitive)
    return Labels(telling, frozenset({primitive, *called, *((field,) if field else ())}), path)


def called_names(eqn: JaxprEqn) -> list[str]:
    """Returns the names of calls, scopes and Python functions round an equation, innermost first."""
    names = list[str]()
    for scope in reversed(compat.scopes(eqn)):
        call = _CALL.fullmatch(scope)
        if call:
            names.append(_normal(call.group(1)))
        elif (name := _normal(scope)) in CALLED_OPS:
            names.append(name)
    return names + python_names(eqn)


def python_names(eqn: JaxprEqn) -> list[str]:
    """Returns the names of the Python functions that made an equation, as far as they make operations, innermost first."""
    return [name for code in compat.frames(eqn) if (name := _called_op(code))]


@cache
def _called_op(code: CodeType) -> str | None:
    """The operation that a Python function or a module's method makes, None where it makes none by name."""
    parts = code.co_qualname.replace(".<locals>", "").split(".")
    if "lax" in code.co_filename.split("/") or "numpy" in code.co_filename.split("/"):
        return None  # jnp and lax functions are named by their primitives
    for part in reversed(parts):
        if (name := _normal(part)) in CALLED_OPS:
            return name
    return None


@cache
def _normal(name: str) -> str:
    """`BatchNorm_0` and `batch_norm` are one name: snake case, without numbering and private marks."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    snake = re.sub(r"_?\d+$", "", snake) if snake not in CALLED_OPS else snake
    snake = snake.strip("_").removesuffix("_deprecated")
    return _ALIASES.get(snake, snake)
