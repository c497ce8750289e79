"""Policies as values: spellings, normal forms, errors, and what JAX can express.

| question | tests |
| --- | --- |
| does every spelling come back? | test_round_trip, test_equal_policies_are_one_value, test_random_policies |
| are JAX's names and ambiguous words handled? | test_jax_names, test_ambiguous_words |
| does bad text say what to do? | test_bad_text, test_not_text |
| does JAX get the same object each time? | test_to_jax |
"""

import jax
import jax.ad_checkpoint
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxremat import PolicyError, parse
from jaxremat import policy as p
from jaxremat.spelling import parse_size

SPELLINGS = [
    "everything",
    "nothing",
    "dots",
    "dots_no_batch",
    "names:conv_out",
    "names:block*/bn,conv_out",
    "ops:conv=store,relu=recompute,batch_norm=store,*=recompute",
    "ops:dot=offload",
    "paths:*/Conv_*,head",
    "segments:4",
    "segments:sqrt",
    "values:3,17",
    "values:3,17^",
    "values:3^/5@9f86d081",
    "offload:names:conv_out",
    "offload:dots",
    "budget:2GiB",
    "budget:60%",
    "budget:fits",
    "budget:1000001",
    "dots+names:a",
    "dots+offload:names:a",
]


@pytest.mark.parametrize("text", SPELLINGS)
def test_round_trip(text):
    policy = parse(text)
    assert str(policy) == text
    assert parse(str(policy)) == policy
    assert hash(parse(text)) == hash(policy)
    assert eval(repr(policy), {"jaxremat": __import__("jaxremat")}) == policy
    assert parse(policy) is policy


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("names:b,a,b", "names:a,b"),
        ("names:a+dots", "dots+names:a"),
        ("dots+dots", "dots"),
        ("values:3^+values:3,5^", "values:3,5^"),
        ("nothing+dots", "dots"),
        ("everything+dots", "everything"),
        ("names:a+names:b", "names:a,b"),
        ("names: a , b ", "names:a,b"),
        ("ops:*=recompute,conv=store", "ops:conv=store,*=recompute"),
        ("budget:1024MiB", "budget:1GiB"),
        ("budget:1.5 kib", "budget:1536"),
        ("values:3,3,1", "values:1,3"),
    ],
)
def test_equal_policies_are_one_value(one, other):
    assert parse(one) == parse(other)
    assert str(parse(one)) == str(parse(other))


def test_order_of_rules_counts():
    assert parse("ops:conv=store,relu=store") != parse("ops:relu=store,conv=store")


TAGS = st.from_regex(r"[a-z][a-z0-9_/*?]{0,6}", fullmatch=True)
WORDS = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True)
STORING = st.one_of(
    st.sampled_from([p.Dots(), p.DotsNoBatch(), p.Segments(None)]),
    st.integers(1, 99).map(p.Segments),
    st.lists(TAGS, min_size=1, max_size=3).map(lambda tags: p.Names(tuple(tags))),
    st.lists(TAGS, min_size=1, max_size=3).map(lambda tags: p.Paths(tuple(tags))),
    st.lists(st.integers(0, 999), min_size=1, max_size=3).map(lambda i: p.Values(tuple(i))),
    st.lists(st.integers(0, 9), min_size=1, max_size=3).map(lambda i: p.Values(tuple(i), host=tuple(i[:1]))),
    st.dictionaries(WORDS, st.sampled_from(p.ACTIONS), min_size=1, max_size=3).map(lambda d: p.Ops(tuple(d.items()))),
)
PARTS = st.one_of(STORING, STORING.map(p.Offload), st.just(p.Nothing()))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(PARTS, min_size=1, max_size=4))
def test_random_policies(parts):
    policy = p.union(*parts)
    assert parse(str(policy)) == policy
    assert p.union(*reversed(parts)) == policy
    assert policy + policy == policy


@pytest.mark.parametrize(
    ("long", "short"),
    [
        ("nothing_saveable", "nothing"),
        ("everything_saveable", "everything"),
        ("dots_saveable", "dots"),
        ("checkpoint_dots", "dots"),
        ("dots_with_no_batch_dims_saveable", "dots_no_batch"),
        ("checkpoint_dots_with_no_batch_dims", "dots_no_batch"),
    ],
)
def test_jax_names(long, short):
    assert parse(long) == parse(short)


@pytest.mark.parametrize("word", ["none", "full", "None", "Full"])
def test_ambiguous_words(word):
    with pytest.raises(PolicyError, match=r"everything.*nothing"):
        parse(word)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dots+", "a + stands between two policies, and here one of them is missing; write 'dots'"),
        ("+names:a++dots", "write 'names:a+dots'"),
        ("dotz", "Did you mean 'dots'"),
        ("dotz", "budget:SIZE"),  # the grammar
        ("", "empty"),
        ("names:", "needs an argument"),
        ("names:a,,b", "without blanks"),
        ("names:a b", "without blanks"),
        ("dots:3", "takes no argument"),
        ("ops:conv", "OP=ACTION"),
        ("ops:conv=keep", "store, recompute, offload"),
        ("ops:conv=stor", "Did you mean 'store'"),
        ("ops:conv=store,conv=recompute", "two actions"),
        ("segments:0", "at least 1"),
        ("segments:sqr", "Did you mean 'sqrt'"),
        ("segments:1.5", "a number or sqrt"),
        ("values:-1", "whole numbers"),
        ("values:^", "whole numbers"),
        ("values:1/2^", "whole numbers"),
        ("budget:2 elephants", "2GiB, 500MB, 60% or fits"),
        ("budget:0", "2GiB"),
        ("budget:140%", "at most 100%"),
        ("budget:1GiB+dots", "stands alone"),
        ("offload:nothing", "stores something"),
        ("offload:budget:1GiB", "stores something"),
    ],
)
def test_bad_text(text, says):
    with pytest.raises(PolicyError) as error:
        parse(text)
    assert says in str(error.value)


@pytest.mark.parametrize("other", [jax.checkpoint_policies.dots_saveable, None, 3, ["dots"]])
def test_not_text(other):
    with pytest.raises(TypeError, match="jaxremat policy"):
        parse(other)


def test_to_jax():
    policies = jax.checkpoint_policies
    assert parse("everything").to_jax() is policies.everything_saveable
    assert parse("nothing").to_jax() is policies.nothing_saveable
    assert parse("dots").to_jax() is policies.dots_saveable
    assert parse("dots_no_batch").to_jax() is policies.dots_with_no_batch_dims_saveable
    for text in ("names:h", "offload:names:h", "offload:dots_no_batch", "dots_no_batch+names:h"):
        assert parse(text).to_jax() is parse(text).to_jax()  # a fresh object each time would cost a second trace


@pytest.mark.parametrize(("text", "recomputed"), [("everything", 0), ("names:h", 1), ("nothing", 2), ("dots", 0)])
def test_to_jax_saves_what_it_says(text, recomputed):
    def loss(w, x):
        h = jax.ad_checkpoint.checkpoint_name(x @ w, "h")
        return jax.numpy.sin(jax.numpy.sin(h) @ w).sum()

    w, x = jax.numpy.eye(3), jax.numpy.ones((2, 3))
    saved = jax.checkpoint(loss, policy=parse(text).to_jax())
    products = str(jax.make_jaxpr(jax.grad(saved))(w, x)).count("dot_general")
    # Forward 2. Backward: each product with respect to both operands, less the one for x, which is not asked for: 3.
    # The derivative of the outer sine needs sin(h) @ w, that of the inner one h: what is not saved of the two is recomputed.
    assert products == 2 + 3 + recomputed


@pytest.mark.parametrize(
    "text", ["names:block*", "ops:conv=store", "paths:head", "segments:2", "budget:fits", "values:1"]
)
def test_to_jax_refuses(text):
    with pytest.raises(PolicyError, match=r"jaxremat\.remat"):
        parse(text).to_jax()


def test_sizes():
    assert parse_size("2GiB") == 2 * 2**30
    assert parse_size("500MB") == 500 * 10**6
    assert parse_size("7") == 7
    with pytest.raises(PolicyError, match="A size is"):
        parse_size("two")
