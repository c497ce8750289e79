"""Flags: static arguments that are none are refused, and a flag that was passed as an array is named with its remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxremat

X = jnp.ones((4, 4))


def scaled(x, scale=1.0, train=True, *, rows=2):
    y = jnp.sin(x) if train else jnp.cos(x)
    return scale * y.reshape(rows, -1).sum()


def many(*xs, **options):
    return sum(jnp.sin(x).sum() for x in xs if options.get("used", True))


@pytest.mark.parametrize(
    ("f", "options", "says"),
    [
        (scaled, {"static_argnums": 3}, "has 3: x, scale, train; got 3"),
        (scaled, {"static_argnums": (1, -4)}, "got -4"),
        (scaled, {"static_argnums": 7}, "static_argnums"),
        (scaled, {"static_argnums": True}, "takes int values; got True"),
        (scaled, {"static_argnums": "train"}, "takes int values"),
        (scaled, {"static_argnums": None}, "takes int values; got None"),
        (scaled, {"static_argnames": "trian"}, "Did you mean 'train'"),
        (scaled, {"static_argnames": ("train", "mode")}, "got 'mode'"),
        (scaled, {"static_argnames": (2,)}, "takes str values; got 2"),
        (lambda x, /: x, {"static_argnames": "x"}, "it has none; got 'x'"),
    ],
)
@pytest.mark.parametrize("policy", ["dots", "everything"])
def test_static_arguments_that_are_none(f, options, says, policy):
    with pytest.raises(TypeError, match=r"^remat: static_arg") as caught:
        jaxremat.remat(f, policy, **options)
    assert says in str(caught.value)


def test_a_position_before_the_first_argument_of_a_call():
    with pytest.raises(TypeError, match="counts from the end of the positional arguments, and the call has 1"):
        jaxremat.remat(many, "nothing", static_argnums=-2)(X)


@pytest.mark.parametrize(
    "options",
    [
        {"static_argnums": 2, "static_argnames": "rows"},
        {"static_argnums": -1, "static_argnames": "rows"},
        {"static_argnames": ("train", "rows")},
    ],
)
@pytest.mark.parametrize(
    "call", [lambda g: g(X, 1.0, False), lambda g: g(X, 1.0, train=False), lambda g: g(X, train=False, rows=4)]
)
def test_a_static_argument_is_static_by_position_and_by_name(options, call):
    g = jaxremat.remat(scaled, "nothing", **options)
    assert jnp.allclose(call(g), scaled(X, train=False))
    # A flag that is left at its default leaves the other arguments as they are.
    assert jnp.allclose(jax.grad(g)(X), jnp.cos(X))


def test_functions_of_any_arguments_take_any_static_ones():
    g = jaxremat.remat(many, "nothing", static_argnums=-1, static_argnames="used")
    assert float(g(X, 0.0, used=True)) == pytest.approx(float(many(X)))


@pytest.mark.parametrize(
    ("f", "call", "error", "names", "remedy"),
    [
        (
            scaled,
            lambda g: g(X, 1.0, True),
            jax.errors.TracerBoolConversionError,
            "'train' (True)",
            "static_argnames='train'",
        ),
        (scaled, lambda g: g(X, rows=4, train=1), Exception, "'rows' (4) and 'train' (1)", "static_argnames='rows'"),
        (lambda x, n, /: x[:n].sum(), lambda g: g(X, 2), IndexError, "number 1 (2)", "static_argnums=1"),
        (lambda x, n: jnp.zeros((n,)).sum() + x.sum(), lambda g: g(X, 2), TypeError, "'n' (2)", "static_argnames='n'"),
        (lambda x, n: sum(x.sum() for _ in range(n)), lambda g: g(X, 2), TypeError, "'n' (2)", "static_argnames='n'"),
    ],
)
def test_a_flag_that_was_passed_as_an_array(f, call, error, names, remedy):
    with pytest.raises(TypeError, match="asks in Python for the value of its argument") as caught:
        call(jaxremat.remat(f, "nothing", static_argnames="rows" if "rows" not in names and f is scaled else ()))
    assert names in str(caught.value)
    assert remedy in str(caught.value)
    assert "'scale'" not in str(caught.value)  # a number that may well be traced
    assert isinstance(caught.value.__cause__, error)


def test_a_gradient_with_a_flag_that_was_passed_as_an_array():
    g = jaxremat.remat(scaled, "nothing", static_argnames="rows")
    with pytest.raises(TypeError, match="static_argnames='train'"):
        jax.value_and_grad(g)(X, 1.0, True)


@pytest.mark.parametrize("flag", [np.bool_(True), jnp.array(True), np.array(1)[()]])
def test_a_flag_that_is_a_scalar_array(flag):
    with pytest.raises(TypeError, match=r"value of its argument 'train' \(.*static_argnames='train' of jaxremat.remat"):
        jaxremat.remat(scaled, "nothing", static_argnames="rows")(X, 1.0, flag)


@pytest.mark.parametrize("outer", [jax.jit, lambda g: jaxremat.remat(g, "nothing")])
def test_a_flag_that_is_traced_outside(outer):
    g = jaxremat.remat(lambda x, train: scaled(x, train=train), "nothing")
    with pytest.raises(TypeError, match=r"'train' \(traced already\).*and likewise of the jax.jit or remat round it"):
        outer(g)(X, True)


def test_an_error_that_no_static_argument_mends_stays_as_it_is():
    def branching(x, scale):
        return x * scale if x.sum() > 0 else x

    with pytest.raises(jax.errors.TracerBoolConversionError):
        jaxremat.remat(branching, "nothing")(X, 2.0)

    def wrong(x, scale):
        raise TypeError(f"of the user's own, {scale is not None}")

    with pytest.raises(TypeError, match=r"^of the user's own, True"):
        jaxremat.remat(wrong, "nothing")(X, 2.0)


def test_what_is_no_array_is_named():
    with pytest.raises(TypeError, match=r"got str \('train'\) in argument 'mode'.*static_argnames='mode'"):
        jaxremat.remat(lambda x, mode: x.sum(), "dots")(X, "train")
    with pytest.raises(TypeError, match=r"got str \('train'\) in argument 'options'"):
        jaxremat.remat(lambda x, options: x.sum(), "dots")(X, options={"mode": "train"})


def test_the_ledger_of_a_function_with_a_static_argument_left_out():
    g = jaxremat.remat(scaled, "nothing", static_argnames=("rows", "train"))
    assert jaxremat.residuals(g, X).total_bytes == 0
