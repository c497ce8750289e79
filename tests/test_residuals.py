"""The ledger: exact bytes, decisions and reasons on programs small enough to count by hand.

| question | tests |
| --- | --- |
| which bytes are kept, and by whom? | test_two_layers, test_plain_function, test_groups |
| why is each value kept or not? | test_reasons, test_views_and_broadcasts_cost_nothing |
| do scans, regions, shapes and argnums count right? | test_scan_times_length, test_regions_inside, ... |
| is it readable? | test_table, test_json |
"""

import json

import jax
import jax.numpy as jnp
import pytest

import jaxremat

F32 = jnp.float32


def shape(*dims, dtype=F32):
    return jax.ShapeDtypeStruct(dims, dtype)


def two_layers(w, x):
    """32 x 16 activations: 2048 bytes each."""
    h = jaxremat.name(jnp.tanh(x @ w), "h")
    return jnp.sin(h @ w).sum()


ARGS = (shape(16, 16), shape(32, 16))


@pytest.mark.parametrize(
    ("policy", "kept", "by_op"),
    [
        # x @ w and h @ w.
        ("dots", 4096, {"dot": 4096}),
        # tanh(x @ w); its square for the derivative and h @ w are made again from it and from x.
        ("names:h", 2048, {"tanh": 2048}),
        ("nothing", 0, {}),
        # h, and so x @ w is not needed any more: nothing else reads it. And h @ w.
        ("dots+names:h", 4096, {"tanh": 2048, "dot": 2048}),
    ],
)
def test_two_layers(policy, kept, by_op):
    report = jaxremat.residuals(jaxremat.remat(two_layers, policy), *ARGS)
    assert report.total_bytes == kept
    assert report.by("op") == by_op
    assert report.host_bytes == 0


@pytest.mark.filterwarnings("ignore::jaxremat.RematWarning")
def test_offloaded_bytes_are_host_bytes():
    report = jaxremat.residuals(jaxremat.remat(two_layers, "offload:names:h"), *ARGS)
    assert (report.total_bytes, report.host_bytes) == (2048, 2048)
    assert [row.decision for row in report.rows if row.names == ("h",)] == ["offloaded"]


def test_plain_function():
    # Reverse mode keeps h (for w of the second product), 1 - h² in some form (for tanh) and cos(h @ w): three arrays.
    report = jaxremat.residuals(two_layers, *ARGS)
    assert report.policy == "everything"
    assert report.total_bytes == 3 * 2048
    residuals = jax.tree.leaves(jax.vjp(lambda w: two_layers(w, jnp.ones((32, 16))), jnp.ones((16, 16)))[1])
    large = {id(r) for r in residuals if r.shape == (32, 16)}
    assert len(large) == 4  # the three, and x, which is an input


def test_everything_is_what_jax_keeps():
    assert (
        jaxremat.residuals(jaxremat.remat(two_layers, "everything"), *ARGS).total_bytes
        == jaxremat.residuals(two_layers, *ARGS).total_bytes
    )


def test_groups():
    def f(w, x):
        with jax.named_scope("encoder"):
            x = jnp.tanh(x @ w)
        with jax.named_scope("decoder"):
            return jnp.tanh(x @ w).sum()

    report = jaxremat.residuals(jaxremat.remat(f, "dots"), *ARGS)
    assert report.by("path") == {"encoder": 2048, "decoder": 2048}
    assert report.by("name") == {"": 4096}
    with pytest.raises(ValueError, match="op, path, name"):
        report.by("color")


def test_reasons():
    def f(w, x):
        h = jaxremat.name(x @ w, "h")
        unused = jaxremat.name(jnp.cos(h), "unused")
        return (jnp.sin(h) + 0 * unused).sum(), unused

    report = jaxremat.residuals(jaxremat.remat(lambda w, x: f(w, x)[0], "names:h,unused"), *ARGS)
    decisions = {row.names[0]: (row.decision, row.why) for row in report.rows if row.names}
    assert decisions["h"] == ("stored", "names:h")
    assert decisions["unused"][0] == "free"
    assert "neither the backward pass nor recomputation reads it" in decisions["unused"][1]
    inputs = [row for row in report.rows if row.op == "input"]
    assert [row.shape for row in inputs] == [(32, 16)]  # the product's derivative for w reads x, and nothing reads w
    assert {row.decision for row in inputs} == {"free"}


def test_views_and_broadcasts_cost_nothing():
    def f(w, x):
        h = (x @ w).reshape(-1)
        h = jaxremat.name(h, "flat")
        return jnp.sin(h + jnp.broadcast_to(w[0, 0], h.shape)).sum()

    report = jaxremat.residuals(jaxremat.remat(f, "names:flat"), *ARGS)
    # The tag is on a view of the product: the product itself is stored, once.
    assert report.by("op") == {"dot": 2048}
    assert any(row.why.startswith("a view of value") for row in report.rows)
    assert any(row.why == "broadcast constant" and row.size_bytes == 0 for row in report.rows)


def test_scan_times_length():
    def f(w, x):
        def body(x, _):
            return jnp.sin(jaxremat.name(x @ w, "h")), None

        return jax.lax.scan(body, x, None, length=5)[0].sum()

    report = jaxremat.residuals(jaxremat.remat(f, "names:h"), *ARGS)
    # Five steps keep h (2048 bytes each), and x, from which the derivative for w is made: the carry, 2048 bytes each.
    assert report.total_bytes == 5 * 2048 + 5 * 2048
    assert report.by("name")["h"] == 5 * 2048
    assert report.matches["names:h"] == 1


def test_regions_inside_a_plain_function():
    block = jaxremat.remat(lambda w, x: jnp.sin(jnp.sin(x @ w) @ w), "nothing")

    def f(w, x):
        return block(w, block(w, block(w, x))).sum()

    # The inputs of the second and third block; that of the first is an input of f.
    assert jaxremat.residuals(f, *ARGS).total_bytes == 2 * 2048


def test_argnums():
    def f(w, v, x):
        return jnp.sin(jnp.sin(x @ w) @ v).sum()

    args = (shape(16, 16), shape(16, 16), shape(32, 16))
    g = jaxremat.remat(f, "dots")
    # With respect to v alone nothing needs the first product but the second one's operand, sin(x @ w).
    assert jaxremat.residuals(g, *args, argnums=1).total_bytes == 4096
    assert jaxremat.residuals(g, *args, argnums=(0, 1)).total_bytes == 4096
    assert jaxremat.residuals(g, *args, argnums=-1).total_bytes == 4096
    with pytest.raises(TypeError, match="no floating-point array"):
        jaxremat.residuals(lambda i: i, jnp.arange(3))


def test_arrays_keys_and_keywords():
    def f(w, key, *, x):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x @ w, 0).sum()

    report = jaxremat.residuals(
        jaxremat.remat(f, "nothing"), jnp.ones((16, 16)), jax.random.key(0), x=jnp.ones((32, 16))
    )
    assert report.total_bytes == 0
    assert "input" in {row.op for row in report.rows}


def test_table():
    text = str(jaxremat.residuals(jaxremat.remat(two_layers, "names:h"), *ARGS))
    assert text.splitlines()[0] == "Residuals under names:h (from the trace): 2.0 KiB kept"
    assert "stored" in text
    assert "test_residuals.py:" in text
    assert "Matches: names:h 1" in text


def blocks(w, x):
    """Four blocks of a product, tagged, and a sine; the last product is not tagged."""
    for i in range(4):
        with jax.named_scope(f"net/block_{i}"):
            h = x @ w
            x = jnp.sin(jaxremat.name(h, f"h{i}") if i < 3 else h)
    return x.sum()


def lines_of(text, word):
    return [line for line in text.splitlines() if word in line.split()]


def test_repeated_blocks_share_a_line():
    report = jaxremat.residuals(jaxremat.remat(blocks, "dots"), *ARGS)
    products = [row for row in report.rows if row.op == "dot"]
    first, last = lines_of(str(report), "stored")
    assert first.split()[:9] == [
        f"{products[0].position}…{products[2].position}", "3", "stored", "dot", "net/block_*", "h*", "float32[32,16]", "6.0", "KiB"
    ]  # fmt: skip
    # What has no tag stands by itself.
    assert last.split()[:4] == [str(products[3].position), "stored", "dot", "net/block_3"]
    assert "A line of n values stands for all of them" in str(report)


def test_every_row():
    report = jaxremat.residuals(jaxremat.remat(blocks, "dots"), *ARGS)
    text = report.to_text(every_row=True)
    assert [line.split()[3] for line in lines_of(text, "stored")] == [f"net/block_{i}" for i in range(4)]
    assert [line.split()[4] for line in lines_of(text, "stored")][:3] == ["h0", "h1", "h2"]
    # Title, header, rule, a line for each row, matches.
    assert len(text.splitlines()) == 3 + len(report.rows) + 1
    assert len(json.loads(report.to_json())["rows"]) == len(report.rows)


def test_lines_of_several_sources_are_not_merged():
    def f(w, x):
        x = jnp.sin(x @ w)
        x = jnp.sin(x @ w)
        return x.sum()

    assert len(lines_of(str(jaxremat.residuals(jaxremat.remat(f, "dots"), *ARGS)), "stored")) == 2


def test_json():
    report = jaxremat.residuals(jaxremat.remat(two_layers, "names:h"), *ARGS)
    document = json.loads(report.to_json())
    assert document["total_bytes"] == 2048
    assert sum(row["size_bytes"] for row in document["rows"] if row["decision"] == "stored") == 2048
    assert len(document["rows"]) == len(report.rows)


def language_model(ws, x, words):
    for w in ws:
        x = x + jnp.tanh(x @ w)
    return jax.nn.logsumexp(x @ words, axis=-1).mean()


def test_activations_are_not_small_beside_logits():
    """A vocabulary makes the logits 512 times as large as an activation: `nothing` keeps no activation for all that."""
    width, rows, layers = 8, 256, 12
    ws = [jnp.ones((width, width))] * layers
    args = ws, jnp.ones((rows, width)), jnp.ones((width, 512 * width))
    with pytest.warns(jaxremat.RematWarning, match="whole loss"):
        report = jaxremat.residuals(jaxremat.remat(language_model, "nothing"), *args)
    activation = rows * width * 4
    assert max(row.kept_bytes for row in report.rows) < activation
    dots = jaxremat.residuals(jaxremat.remat(language_model, "dots"), *args)
    # The products of twelve layers, and the logits.
    assert sum(row.kept_bytes == activation for row in dots.rows) == layers
    assert sum(row.kept_bytes == 512 * activation for row in dots.rows) == 1


def test_the_formula_of_an_einsum_is_no_module():
    """jnp.einsum opens a scope of that name."""

    def loss(a, b):
        with jax.named_scope("attention"):
            return (jnp.tanh(jnp.einsum("ij,jk->ik", a, b)) ** 2).sum()

    table = jaxremat.residuals(jaxremat.remat(loss, "dots"), jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert {row.path for row in table.rows} - {""} == {"attention"}
