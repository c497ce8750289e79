"""Exactly what is stored and exactly what is run again, policy by policy; integers derived by hand.

The network is n = 4 layers h_i = x_i @ w_i (tagged `h0` ... `h3`), x_{i+1} = relu(h_i), and sum(x_4 ** 2); rows and columns
are 64, so one value has 64 * 64 * 4 B = 16 KiB and a mask of it 4 KiB. Without rematerialization the gradient with respect
to the weights has n products forward, n for the weights and n - 1 for the layers' inputs: 3 n - 1 = 11. The backward pass
reads x_0 (an input), x_1 ... x_4 and the masks h_i > 0; whatever of it is missing is made again from h_i = x_i @ w_i.
"""

import chain
import jax
import jax.numpy as jnp
import pytest
from programs import counts, data, kept, same, weights

import jaxremat

SIZE = 64
VALUE = SIZE * SIZE * 4
MASK = SIZE * SIZE
PRODUCTS = 11


def layers(ws, x):
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer_{i}"):
            x = jax.nn.relu(jaxremat.name(x @ w, f"h{i}"))
    return (x**2).sum()


def arguments():
    return weights(4, SIZE), data(SIZE, SIZE)


# policy: (products run again, bytes kept of each value).
CASES = {
    "everything": (0, None),
    "nothing": (4, []),
    # All h_i: masks and relus are made from them.
    "dots": (0, [VALUE] * 4),
    "dots_no_batch": (0, [VALUE] * 4),
    "ops:dot=store,*=recompute": (0, [VALUE] * 4),
    "names:h*": (0, [VALUE] * 4),
    # h0 = x_0 @ w_0, h1 and h3 are made again.
    "names:h2": (3, [VALUE]),
    "names:h1,h2": (2, [VALUE] * 2),
    # x_2 and its mask; nothing else is made of h1, so that it is not read.
    "paths:layer_1": (3, [VALUE, MASK]),
    # The relu's output and its mask, both made in `relu`.
    "ops:relu=store": (0, [VALUE, MASK] * 4),
    # First rule that fits: the products are recomputed, whatever else is in the table.
    "ops:dot=recompute,relu=store": (0, [VALUE, MASK] * 4),
    "names:h0+names:h3": (2, [VALUE] * 2),
    # Nothing reads h3 but what is made of h3 itself, so that its offload is the only thing kept.
    "offload:names:h3": (3, [VALUE]),
    "offload:dots": (0, [VALUE] * 4),
    "offload:names:h3+names:h0": (2, [VALUE] * 2),
    # One segment: the last segment is not recomputed. `everything` keeps zeros of relu's rule beside.
    "segments:1": (0, [VALUE, MASK] * 4),
}


@pytest.mark.parametrize("policy", CASES)
def test_layers(policy):
    again, stored = CASES[policy]
    g = jaxremat.remat(layers, policy)
    assert counts(jax.grad(g), *arguments())["dot_general"] == PRODUCTS + again
    found = kept(g, *arguments())
    if stored is None:
        assert sum(v.nbytes for v in found) == sum(v.nbytes for v in kept(layers, *arguments()))
    else:
        assert sorted(v.nbytes for v in found) == sorted(stored)
        choice = cut_of(g, *arguments()).choice
        assert choice.stored_bytes == sum(stored)
        assert sorted(choice.graph.value_of[v].size_bytes for v in choice.kept) == sorted(stored)
    default = jax.devices()[0].default_memory().kind
    on_host = [v for v in found if v.sharding.memory_kind != default]
    assert len(on_host) == (policy.count("offload:names") or len(found)) * ("offload" in policy)


def cut_of(g, weights, *rest):
    """The cut for gradients with respect to the weights, as `jax.grad` asks for them."""
    program, _, leaves = g.program(weights, *rest)
    asked = len(jax.tree.leaves(weights))
    return program.cut((True,) * asked + (False,) * (len(leaves) - asked))


def test_values_are_stored_as_they_are_named():
    graph = cut_of(jaxremat.remat(layers, "values:0"), *arguments()).choice.graph
    products = [v.position for v in graph.values if v.eqn.primitive.name == "dot_general"]
    for chosen in ([0], [1, 3], [0, 1, 2, 3]):
        g = jaxremat.remat(layers, f"values:{','.join(str(products[i]) for i in chosen)}")
        assert counts(jax.grad(g), *arguments())["dot_general"] == PRODUCTS + 4 - len(chosen)
        assert [v.nbytes for v in kept(g, *arguments())] == [VALUE] * len(chosen)


def test_segments_of_a_chain_of_products():
    """n segments of 8 equal layers: borders are stored, the last segment's values too; the rest runs again."""
    ws, x = weights(8, SIZE), data(SIZE, SIZE)
    plain = 3 * 8 - 1
    for n in range(2, 6):
        g = jaxremat.remat(layers, f"segments:{n}")
        choice = cut_of(g, ws, x).choice
        borders = [v for v, mark in choice.kept.items() if "border" in mark.selector]
        masks = [v for v, mark in choice.kept.items() if "last segment" in mark.selector and v.aval.dtype == bool]
        # Of the last border relu and mask are made at once, and those are kept: it is not read.
        assert [choice.graph.value_of[v].size_bytes for v in borders] == [VALUE] * (n - 2)
        assert 8 // n - 1 <= len(masks) <= 8 // n + 1
        again = counts(jax.grad(g), ws, x)["dot_general"] - plain
        assert again == 8 - len(borders) - len(masks)
    with pytest.raises(jaxremat.PolicyError, match="at most"):
        jax.grad(jaxremat.remat(layers, "segments:1000"))(ws, x)


def test_only_what_is_asked_for_is_recomputed():
    """With respect to the last weight alone nothing is read but x_3, x_4 and its mask; unread marks are not stored."""
    ws, x = arguments()
    g = jaxremat.remat(lambda w, ws, x: layers([*ws, w], x), "names:h0")
    # Forward 4, backward 1, and again h1, h2, h3 from the stored h0.
    assert counts(jax.grad(g), ws[3], ws[:3], x)["dot_general"] == 5 + 3
    g = jaxremat.remat(lambda w, ws, x: layers([*ws, w], x), "names:h0,h2")
    assert len(kept(lambda w: g(w, ws[:3], x), ws[3])) >= 1
    assert counts(jax.grad(g), ws[3], ws[:3], x)["dot_general"] == 5 + 1


def test_scan_stores_per_iteration():
    """Inside of a scan of 5 layers the tagged product is kept per iteration: 5 * 16 KiB, as one stacked value."""

    def scanned(w, x):
        def layer(x, w):
            with jax.named_scope("layer"):
                return jax.nn.relu(jaxremat.name(x @ w, "h")), None

        return (jax.lax.scan(layer, x, w)[0] ** 2).sum()

    w, x = jnp.stack(weights(5, SIZE)), data(SIZE, SIZE)
    bodies = {"names:h": 5 * VALUE, "dots": 5 * VALUE, "paths:layer": None, "offload:names:h": 5 * VALUE, "nothing": 0}
    for policy, stored in bodies.items():
        g = jaxremat.remat(scanned, policy)
        found = sorted(v.nbytes for v in kept(g, w, x))
        # Forward 1; backward 2 (of w and of x); again none: the relu is made from the product. `nothing` runs it again.
        assert counts(jax.grad(g), w, x)["dot_general"] == 3 + (policy == "nothing")
        # Beside it the carry is kept, which the product for w reads, 5 * 16 KiB, and the last x for its square.
        if stored is not None:
            assert sum(found) == stored + 5 * VALUE + VALUE
    with pytest.raises(jaxremat.PolicyError, match=r"names:g.*Did you mean 'h'|'names:g' matches no value"):
        jax.grad(jaxremat.remat(scanned, "names:g"))(w, x)


def test_scan_runs_again_inside_of_its_body():
    """A body of two products: `nothing` keeps the carry alone and runs both again, a tag on the first one product."""

    def scanned(w, x):
        def layer(x, w):
            return jnp.sin(jaxremat.name(jnp.sin(x @ w), "h") @ w), None

        return jax.lax.scan(layer, x, w)[0].sum()

    w, x = jnp.stack(weights(3, SIZE)), data(SIZE, SIZE)
    # Forward 2, backward 2 for x and 2 for w.
    for policy, again in {"everything": 0, "nothing": 2, "names:h": 2, "dots": 0}.items():
        # names:h: sin(x @ w) is kept, its derivative cos(x @ w) is not, and so both products run again.
        assert counts(jax.grad(jaxremat.remat(scanned, policy)), w, x)["dot_general"] == 6 + again, policy


def test_branches():
    """`nothing` recomputes a branch whole; a tag inside of a branch is stored."""

    def branching(w, x, flag):
        h = jax.lax.cond(flag, lambda x: jnp.sin(jaxremat.name(x @ w, "h")), lambda x: x, x)
        return (h**2).sum()

    w, x = weights(1, SIZE)[0], data(SIZE, SIZE)
    plain = counts(jax.grad(branching), w, x, True)["dot_general"]
    assert plain == 2  # forward, and for w
    assert counts(jax.grad(jaxremat.remat(branching, "nothing")), w, x, True)["dot_general"] == plain + 1
    assert kept(jaxremat.remat(branching, "nothing"), w, x, True) == []
    assert counts(jax.grad(jaxremat.remat(branching, "names:h")), w, x, True)["dot_general"] == plain


def test_dots_without_batch_dimensions():
    def batched(ws, x):
        a, b = x @ ws[0], jnp.einsum("nij,njk->nik", x, x)
        return (jnp.sin(a) @ ws[1]).sum() + jnp.sin(b).sum()

    ws, x = weights(2, 8), jax.random.normal(jax.random.key(0), (4, 8, 8))
    # Kept: a (4 * 8 * 8 * 4 B); the batched product b is run again. sin(a) @ w1 is never read.
    g = jaxremat.remat(lambda ws, x: batched(ws, x), "dots_no_batch")
    plain = counts(jax.grad(batched, (0, 1)), ws, x)["dot_general"]
    assert counts(jax.grad(g, (0, 1)), ws, x)["dot_general"] == plain + 1
    assert [v.nbytes for v in kept(g, ws, x)] == [4 * 8 * 8 * 4]


class TestChain:
    """Convolution, batch norm, ReLU; 16 blocks. Without remat 3 * 16 - 1 = 47 convolutions: the input has no gradient."""

    @pytest.mark.parametrize(
        ("policy", "again"),
        [
            ("everything", 0),
            ("ops:conv=store,*=recompute", 0),
            ("ops:conv=store,batch_norm=recompute,relu=recompute", 0),
            ("dots", 0),
            ("nothing", 16),
            ("dots_no_batch", 16),
        ],
    )
    def test_convolutions_in_the_trace(self, policy, again):
        if "batch_norm" in policy:
            pytest.skip("the chain's normalisation is plain arithmetic; tests/test_composition.py has flax's")
        g = jaxremat.remat(chain.loss, policy)
        assert counts(jax.value_and_grad(g), *chain.arguments())["conv_general_dilated"] == 47 + again

    def test_conv_outputs_are_all_that_is_kept(self):
        """16 activations of 8 MiB, and per block the small statistics of 32 channels."""
        choice = cut_of(jaxremat.remat(chain.loss, "dots"), *chain.arguments()).choice
        sizes = [choice.graph.value_of[v].size_bytes for v in choice.kept]
        assert sizes.count(chain.ACTIVATION_BYTES) == 16
        assert {s for s in sizes if s != chain.ACTIVATION_BYTES} <= {32 * 4}

    @pytest.mark.parametrize(
        "policy",
        [
            "everything",
            "nothing",
            "dots",
            "dots_no_batch",
            "segments:sqrt",
            "segments:3",
            "ops:relu=store",
            "ops:conv=store",
            "offload:dots",
        ],
    )
    def test_gradients_are_bit_identical(self, policy):
        kernels, x = chain.init(4), jax.random.normal(jax.random.key(1), (4, 32, 32, 32))
        options = jaxremat.compiler_options()
        run = lambda f: jax.jit(jax.value_and_grad(f), compiler_options=options)(kernels, x)  # noqa: E731
        same(run(jaxremat.remat(chain.loss, policy)), run(chain.loss))


# One convolution, forward or either gradient: 2 x 64 images x 32 x 32 channels, and along each axis 3 taps at 32 places, less
# the two that fall on the padding: 94.
CONV_GFLOP = 2 * 64 * 32 * 32 * 94 * 94 / 1e9


@pytest.fixture(scope="module")
def compiled():
    """Compiles the gradient of a loss over the chain: temp MiB, convolutions and conv GFLOP of the optimized program."""
    if jax.default_backend() != "cpu":
        pytest.skip("the numbers are those of XLA:CPU")

    def measure(loss):
        step = jax.jit(jax.value_and_grad(loss), compiler_options=jaxremat.compiler_options())
        program = step.lower(*chain.arguments()).compile()
        temp_bytes = program.memory_analysis().temp_size_in_bytes
        convolutions = program.as_text().count(" convolution(")
        return temp_bytes / 2**20, convolutions, convolutions * CONV_GFLOP

    return measure


def conv_positions():
    graph = cut_of(jaxremat.remat(chain.loss, "values:0"), *chain.arguments()).choice.graph
    return [v.position for v in graph.values if v.eqn.primitive.name == "conv_general_dilated"]


class TestCompiledChain:
    """The program that XLA:CPU makes of the chain of 16 blocks at its full size: 8 MiB an activation."""

    def test_convolutions_stored(self, compiled):
        temp_mebibytes, convolutions, _ = compiled(jaxremat.remat(chain.loss, "ops:conv=store,*=recompute"))
        # 15 convolutions' outputs of 8 MiB, the last one's cotangent, and three arrays while a block is in its backward pass.
        assert temp_mebibytes <= 8 * 19 + 1
        assert convolutions == 47

    @pytest.mark.parametrize(("every", "again", "gflop_limit"), [(2, 8, 65), (3, 11, 69)])
    def test_every_nth_convolution_stored(self, compiled, every, again, gflop_limit):
        policy = "values:" + ",".join(map(str, conv_positions()[1::every]))
        temp_mebibytes, convolutions, gflop = compiled(jaxremat.remat(chain.loss, policy))
        assert temp_mebibytes <= 128
        assert convolutions == 47 + again
        assert gflop <= gflop_limit

    def test_everything_is_no_remat(self, compiled):
        plain, _, _ = compiled(chain.loss)
        temp_mebibytes, convolutions, _ = compiled(jaxremat.remat(chain.loss, "everything"))
        assert temp_mebibytes <= 1.02 * plain
        assert convolutions == 47

    def test_nothing_per_block_is_no_worse_than_jax_checkpoint(self, compiled):
        def per_block(wrap):
            return lambda kernels, x: chain.loss(kernels, x, remat_block=wrap)

        ours, _, our_gflop = compiled(per_block(lambda f: jaxremat.remat(f, "nothing")))
        theirs, _, their_gflop = compiled(per_block(jax.checkpoint))
        assert ours <= 1.001 * theirs  # 160 MiB both, but for some small buffers
        assert our_gflop <= 1.001 * their_gflop

    def test_segments_are_no_worse_than_jax_checkpoint_with_the_same_regions(self, compiled):
        """sqrt(16) = 4 segments of 4 blocks."""

        def in_segments(kernels, x):
            for start in range(0, 16, 4):
                x = jax.checkpoint(segment)(kernels[start : start + 4], x)
            return jnp.mean(x**2)

        def segment(kernels, x):
            for kernel in kernels:
                x = chain.block(kernel, x)
            return x

        ours, _, our_gflop = compiled(jaxremat.remat(chain.loss, "segments:sqrt"))
        theirs, _, their_gflop = compiled(in_segments)
        assert ours <= theirs
        assert our_gflop <= their_gflop
