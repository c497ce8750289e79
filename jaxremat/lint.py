"""`waste`: what a policy costs for nothing, each with the reason and the remedy.

A policy that works can still waste: store more than no policy would, or recompute a whole function at once, which keeps
everything alive again at the worst moment. None of this is an error; `remat` gives a `RematWarning` for each.
"""

from collections.abc import Iterable, Iterator

from jaxremat import policy as p
from jaxremat.choice import Choice
from jaxremat.compat import Var, running_platform
from jaxremat.graph import size_bytes
from jaxremat.segments import LAYERS
from jaxremat.text import human_bytes

# Recomputing less than this many layers at once is no waste worth a word.
_FEW_LAYERS = 3


def waste(choice: Choice, inside: Iterable[Choice] = ()) -> Iterator[str]:
    """Yields a sentence for every way in which a choice wastes memory or time.

    Args:
        choice: what a policy stores of a function.
        inside: what it stores inside of the bodies of the function's scans and branches.

    Example:
        >>> import jax, jax.numpy as jnp, warnings, jaxremat
        >>> def loss(w, x):
        ...     for _ in range(4):
        ...         x = jnp.tanh(x @ w)
        ...     return x.sum()
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     _ = jax.grad(jaxremat.remat(loss, "nothing"))(jnp.eye(8), jnp.ones((4, 8)))
        >>> "segments:sqrt" in str(caught[0].message)
        True
    """
    yield from _recomputed_at_once(choice)
    yield from _stores_more(choice)
    yield from _no_products(choice)
    yield from _no_convolutions(choice)
    yield from _unstable_keys(choice)
    yield from _offloaded_to_itself(choice, inside)


def _layers(choice: Choice) -> list[str]:
    return [
        choice.graph.forward[i].primitive.name
        for i in choice.recomputed
        if choice.graph.forward[i].primitive.name in LAYERS
    ]  # fmt: skip


def _recomputed_at_once(choice: Choice) -> Iterator[str]:
    """A loss is a whole function: its backward pass begins where its forward pass ended."""
    is_loss = all(ct is None or size_bytes(ct.aval) <= 8 for ct in choice.graph.cotangents)
    if isinstance(choice.policy, p.Nothing) and is_loss and not choice.large and len(_layers(choice)) >= _FEW_LAYERS:
        yield (
            "nothing: the wrapped function returns a scalar, so it is a whole loss, and all of it is recomputed as soon as it "
            f"has ended ({len(_layers(choice))} matrix products and convolutions): the peak does not fall. Wrap each block, "
            "or use segments:sqrt."
        )


def _stores_more(choice: Choice) -> Iterator[str]:
    graph = choice.graph
    roots = {root for v in graph.residuals if isinstance(root := graph.root(v), Var) and root in graph.value_of}
    plain = sum(graph.value_of[v].size_bytes for v in roots)
    if choice.stored_bytes > plain + graph.small_bytes:
        yield (
            f"{choice.policy}: stores {human_bytes(choice.stored_bytes)}, more than the {human_bytes(plain)} that are kept "
            "without any policy, as it stores values that are cheap to make from others. Drop selectors, or use everything."
        )


def _no_products(choice: Choice) -> Iterator[str]:
    """Bodies of scans are looked into elsewhere: there may be products. Convolutions have a sentence of their own."""
    if choice.graph.rewritten or "conv_general_dilated" in _layers(choice):
        return
    for selector in ("dots", "dots_no_batch"):
        if choice.matches.get(selector) == 0 and choice.recomputed:
            yield (
                f"{choice.policy}: the function holds nothing that {selector} stores, so all of it is recomputed. "
                "Choose by name or operation, or use everything."
            )


def _no_convolutions(choice: Choice) -> Iterator[str]:
    parts = choice.policy.parts if isinstance(choice.policy, p.Union) else (choice.policy,)
    convolutions = _layers(choice).count("conv_general_dilated")
    if p.DotsNoBatch() in parts and convolutions:
        yield (
            f"{choice.policy}: dots_no_batch stores no convolution, as in JAX, and {convolutions} are recomputed. "
            "Use dots, or ops:conv=store."
        )


def _unstable_keys(choice: Choice) -> Iterator[str]:
    for index in sorted(choice.recomputed):
        eqn = choice.graph.forward[index]
        if eqn.primitive.name == "random_bits" and "rbg" in str(eqn.invars[0].aval):
            yield (
                "random bits of an rbg key are recomputed. Under automatic partitioning the compiler may cut the two "
                "computations differently, and then they draw different bits: store them (ops:random_bits=store, or dropout), "
                "or use threefry keys."
            )
            return


def _offloaded_to_itself(choice: Choice, inside: Iterable[Choice]) -> Iterator[str]:
    offloads = any(mark.host for each in (choice, *inside) for mark in each.kept.values())
    if offloads and running_platform() == "cpu":
        yield (
            f"{choice.policy}: this runs on a CPU, whose memory is the host's: what is offloaded stays where it is, and nothing "
            "is saved by it. Store it, or run on a GPU or TPU."
        )
