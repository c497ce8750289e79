"""What `remat` refuses: one message with what was required, what arrived and what to do."""

import jax
import jax.numpy as jnp
import pytest
from programs import data, network, weights

import jaxremat


def refused(error, policy, *fragments, f=network, args=None):
    with pytest.raises(error) as caught:
        jax.grad(jaxremat.remat(f, policy))(*(args or (weights(), data())))
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "fragments"),
    [
        ("names:hh0", ["'names:hh0' matches no value", "Did you mean 'h0'", "h0, h1, h2"]),
        ("names:h0,q*", ["'names:q*' matches no value"]),
        ("ops:rellu=store", ["No operation has this name", "Did you mean 'relu'"]),
        ("ops:conv=store", ["'ops:conv' matches no value", "dot"]),
        ("ops:dot=store,gelu=recompute", ["'ops:gelu' matches no value"]),
        ("paths:block_7", ["'paths:block_7' matches no value", "no module path"]),
        ("offload:names:nothing_like_it", ["matches no value"]),
        ("names:h0+names:zzz", ["'names:zzz' matches no value"]),
        ("values:100000", ["forward values, 0 to", "100000", "jaxremat.residuals"]),
        ("segments:900", ["at most", "segments:sqrt"]),
        ("budget:2GiB", ["what is stored", "only says how much", "jaxremat.plan(f, *args, budget='2GiB')"]),
        ("values:3@0123abcd", ["made for the program 0123abcd", "Plan again"]),
    ],
)
def test_policies_that_cannot_apply(policy, fragments):
    refused(jaxremat.PolicyError, policy, *fragments)


def message_of(policy):
    with pytest.raises(jaxremat.PolicyError) as caught:
        jax.grad(jaxremat.remat(network, policy))(weights(), data())
    return str(caught.value)


def test_a_selector_that_fits_nothing_is_said_once():
    assert message_of("names:hh0").startswith("'names:hh0' matches no value of the wrapped function.")
    assert message_of("names:hh0").count("hh0") == 1
    # Of several, the message says which.
    assert message_of("names:h0,hh0").startswith("names:h0,hh0: 'names:hh0' matches")


def test_what_was_refused_is_not_suggested():
    # An operation of the field that the network does not have; the message lists those that it has.
    assert "Did you mean" not in message_of("ops:gelu=store")
    # A primitive that it does not have is an operation, too.
    assert "No operation has this name" not in message_of("ops:sin=store")
    said = message_of("ops:dot=store,dot_general=recompute")
    assert "'ops:dot_general' decides no value, as rules before it fit all that it fits" in said
    assert "Did you mean" not in said


def test_a_selector_that_fits_no_value_of_a_scan_either():
    def scanned(ws, x):
        return jax.lax.scan(lambda x, w: (jaxremat.name(x @ w, "inside"), None), x, jnp.stack(ws))[0].sum()

    refused(jaxremat.PolicyError, "names:outside", "'names:outside' matches no value", f=scanned)
    jax.grad(jaxremat.remat(scanned, "names:inside"))(weights(), data())


@pytest.mark.parametrize(
    "policy", [jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.save_only_these_names("h0"), None, 3]
)
def test_policies_of_other_libraries(policy):
    with pytest.raises(TypeError, match=r"'dots' or a jaxremat policy; got .*opaque"):
        jaxremat.remat(network, policy)


@pytest.mark.parametrize("f", [3, None, "dots"])
def test_what_is_no_function(f):
    with pytest.raises(TypeError, match="needs a function"):
        jaxremat.remat(f, "dots")


def test_side_effects_name_the_equation():
    ref = jax.new_ref(jnp.zeros(()))

    def effectful(ws, x):
        ref[...] = x.sum()
        return network(ws, x)

    refused(
        jaxremat.PolicyError, "dots", "free of side effects", "swap", "test_refusals.py", "Move it out", f=effectful
    )


def test_ordered_callbacks():
    def spoken(ws, x):
        jax.debug.print("{}", x.sum(), ordered=True)
        return network(ws, x)

    refused(jaxremat.PolicyError, "names:h0", "free of side effects", "debug", f=spoken)


def test_an_output_that_is_not_differentiable():
    with pytest.raises(TypeError, match="grad requires real"):
        jax.grad(jaxremat.remat(lambda x: x.argmax(), "nothing"))(data())


def test_a_rule_that_cannot_be_differentiated():
    def looped(x):
        return jax.lax.while_loop(lambda c: c.sum() < 100, lambda c: c * 2, jnp.abs(x) + 1).sum()

    with pytest.raises(ValueError, match=r"[Rr]everse-mode differentiation does not work"):
        jax.grad(jaxremat.remat(looped, "nothing"))(data())


def test_forward_mode():
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(jaxremat.remat(network, "dots"), (weights(), data()), (weights(), data()))


def test_an_argument_that_is_no_array():
    with pytest.raises(TypeError, match=r"must be arrays.*got str.*static_argnums"):
        jaxremat.remat(lambda x, mode: x.sum(), "dots")(data(), "train")


def test_a_static_argument_that_cannot_be_hashed():
    with pytest.raises(TypeError, match="static arguments must be hashable"):
        jaxremat.remat(lambda x, sizes: x.sum(), "dots", static_argnums=1)(data(), [1, 2])


def test_a_tag_that_no_policy_can_spell():
    for tag in ("a b", "a,b", "a+b", "a=b", "", 3):
        with pytest.raises(jaxremat.PolicyError, match="a tag is a word"):
            jaxremat.name(data(), tag)
