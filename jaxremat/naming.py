"""`name`: the tag by which a `names:` policy finds a value."""

from typing import TypeVar

import jax
from jax.extend.core.primitives import name_p

from jaxremat.errors import PolicyError
from jaxremat.policy import is_tag

T = TypeVar("T")


def name(x: T, tag: str) -> T:
    """Returns `x` tagged, so that the policy `names:TAG` can store it.

    The tag is the same as JAX's `checkpoint_name`, whose tags count as well. Under the experimental flag `jax_remat3` JAX tags
    in another way, which cannot be vectorized: there this stays as it is, and `jax.checkpoint` does not see it.

    Args:
        x: an array of any shape, or a pytree of arrays, each of which gets the tag.
        tag: a word without blanks, commas, `+` and `=`; slashes group tags for globs, as in `names:block*/conv`.

    Returns:
        `x` itself: same structure, values and gradients. Outside differentiation the tag costs nothing.

    Raises:
        PolicyError: `tag` could not be spelt in a policy.

    Example:
        >>> import jax, jax.numpy as jnp, jaxremat
        >>> def f(x):
        ...     h = jaxremat.name(jnp.sin(x), "h")
        ...     return jnp.cos(h).sum()
        >>> g = jaxremat.remat(f, "names:h")
        >>> bool(jnp.allclose(jax.grad(g)(jnp.ones(3)), jax.grad(f)(jnp.ones(3))))
        True
    """
    if not is_tag(tag):
        raise PolicyError(
            f"name: a tag is a word without blanks, commas, + and =, so that a policy can spell it; got {tag!r}."
        )
    return jax.tree.map(lambda leaf: name_p.bind(leaf, name=tag), x)
