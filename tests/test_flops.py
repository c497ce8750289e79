"""FLOP counts of jaxprs against numbers derived by hand and against XLA's own cost analysis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chain import BATCH, CHANNELS, SIZE, arguments, loss
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxremat import compiler_options, hlo
from jaxremat.flops import OpCounts, _taps, conv_and_dot_counts, count_flops


def count(f, *args):
    return count_flops(jax.make_jaxpr(f)(*args))


def zeros(*shape):
    return jnp.zeros(shape)


DOTS = {  # name: (function, operand shapes, multiply-adds)
    "matrix": (jnp.dot, [(3, 5), (5, 7)], 3 * 5 * 7),
    "vector": (jnp.dot, [(5,), (5,)], 5),
    "batched": (jnp.matmul, [(2, 3, 5), (2, 5, 7)], 2 * 3 * 5 * 7),
    "two contracted": (lambda a, b: jnp.tensordot(a, b, 2), [(3, 4, 5), (4, 5, 7)], 3 * 4 * 5 * 7),
    "outer": (jnp.outer, [(3,), (4,)], 0),  # a broadcast product, not a contraction
}


@pytest.mark.parametrize(("f", "shapes", "multiply_adds"), DOTS.values(), ids=DOTS)
def test_dot(f, shapes, multiply_adds):
    assert count(f, *[zeros(*shape) for shape in shapes]).dot_flops == 2 * multiply_adds


def conv(x, k, strides=(1, 1), padding="VALID", numbers=("NHWC", "HWIO", "NHWC"), **options):
    return jax.lax.conv_general_dilated(x, k, strides, padding, dimension_numbers=numbers, **options)


CONVS = {  # name: (function, input shape, kernel shape, multiply-adds)
    # Every one of 4·4 outputs sees 3·3 inputs of 2 features, for 5 features of 7 images.
    "valid": (conv, (7, 6, 6, 2), (3, 3, 2, 5), 7 * 4 * 4 * 5 * 9 * 2),
    # With padding 1 an axis of 6 has 3·6 − 2 pairs (output, tap) with a real input.
    "same": (lambda x, k: conv(x, k, padding="SAME"), (7, 6, 6, 2), (3, 3, 2, 5), 7 * 16 * 16 * 5 * 2),
    # Outputs at 0, 2: each sees 3 inputs of 6.
    "strided": (lambda x, k: conv(x, k, (2, 2)), (1, 6, 6, 1), (3, 3, 1, 1), 6 * 6),
    # Taps 2 apart span 5: 2 outputs an axis.
    "dilated kernel": (lambda x, k: conv(x, k, rhs_dilation=(2, 2)), (1, 6, 6, 1), (3, 3, 1, 1), 6 * 6),
    # Input 2 apart spans 11: 9 outputs, of which the 5 even ones see 2 real inputs and the 4 odd ones 1.
    "dilated input": (
        lambda x, k: conv(x, k, padding=((0, 0), (0, 0)), lhs_dilation=(2, 2)),
        (1, 6, 6, 1),
        (3, 3, 1, 1),
        14 * 14,
    ),
    # Each of 4 groups turns 2 features into 3.
    "grouped": (lambda x, k: conv(x, k, feature_group_count=4), (1, 6, 6, 8), (3, 3, 2, 12), 16 * 12 * 9 * 2),
    "depthwise": (lambda x, k: conv(x, k, feature_group_count=8), (1, 6, 6, 8), (3, 3, 1, 8), 16 * 8 * 9),
    # 4 groups of images, each with 3 of the 12 kernels: 2 images of 12 features come out.
    "batch groups": (lambda x, k: conv(x, k, batch_group_count=4), (8, 6, 6, 2), (3, 3, 2, 12), 2 * 16 * 12 * 9 * 2),
}


@pytest.mark.parametrize(("f", "x", "k", "multiply_adds"), CONVS.values(), ids=CONVS)
def test_conv(f, x, k, multiply_adds):
    assert count(f, zeros(*x), zeros(*k)).conv_flops == 2 * multiply_adds


@pytest.mark.parametrize(("f", "x", "k", "multiply_adds"), CONVS.values(), ids=CONVS)
def test_conv_and_its_gradients_agree_with_xla(f, x, k, multiply_adds):
    for g in (f, jax.grad(lambda x, k: f(x, k).sum(), 0), jax.grad(lambda x, k: f(x, k).sum(), 1)):
        jaxpr = jax.make_jaxpr(g)(zeros(*x), zeros(*k))
        convs = [e for e in jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
        for eqn in convs:
            shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
            alone = jax.jit(lambda *a, eqn=eqn: eqn.primitive.bind(*a, **eqn.params))
            analysis = alone.lower(*shapes).cost_analysis()
            assert count_flops(alone.trace(*shapes).jaxpr).conv_flops == analysis["flops"]


def test_taps_equal_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        n, kernel, out, stride, lhs_dilation, rhs_dilation = map(int, rng.integers(1, 7, 6))
        low = int(rng.integers(-3, 6))
        positions = [o * stride + k * rhs_dilation - low for o in range(out) for k in range(kernel)]
        real = [p for p in positions if 0 <= p <= (n - 1) * lhs_dilation and p % lhs_dilation == 0]
        assert _taps(n, kernel, out, stride, low, lhs_dilation, rhs_dilation) == len(real)


def test_elementwise_and_reductions():
    x = zeros(4, 6)
    assert count(lambda x: jnp.tanh(x) * 2, x).elementwise_flops == 24 + 24
    assert count(lambda x: x.sum(), x).elementwise_flops == 23
    assert count(lambda x: x.max(0), x).elementwise_flops == 24 - 6
    assert count(lambda x: jnp.cumsum(x, 0), x).elementwise_flops == 24
    assert count(lambda x: x.T.reshape(3, 8).astype(jnp.bfloat16), x).flops == 0
    pool = lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 2), (2, 2), "VALID")  # noqa: E731
    assert count(pool, x).elementwise_flops == 2 * 3 * (4 - 1)


def square(a):
    return a @ a


def test_scan_counts_its_body_times_its_length():
    loop = lambda a: jax.lax.scan(lambda c, _: (square(c), None), a, None, length=10)[0]  # noqa: E731
    total = count(loop, zeros(4, 4))
    assert total.dot_flops == 10 * 2 * 4**3
    assert (total.loops, total.unknown_loops) == (1, 0)
    nested = lambda a: jax.lax.scan(lambda c, _: (loop(c), None), a, None, length=3)[0]  # noqa: E731
    assert count(nested, zeros(4, 4)).dot_flops == 30 * 2 * 4**3


def test_while_has_no_known_count():
    loop = lambda a: jax.lax.while_loop(lambda c: c.sum() > 0, square, a)  # noqa: E731
    total = count(loop, zeros(4, 4))
    assert total.flops is None
    assert total.unknown_loops == 1


def test_cond_counts_its_dearest_branch():
    f = lambda p, a: jax.lax.cond(p, lambda a: square(square(a)), square, a)  # noqa: E731
    assert count(f, True, zeros(4, 4)).dot_flops == 2 * 2 * 4**3


def test_calls_are_entered_and_dead_results_are_not_counted():
    @jax.jit
    def two(a):
        return square(a), square(a.T)

    assert count(lambda a: two(a), zeros(4, 4)).dot_flops == 2 * 2 * 4**3
    assert count(lambda a: two(a)[0], zeros(4, 4)).dot_flops == 2 * 4**3
    assert count(jax.grad(lambda a: jax.checkpoint(square)(a).sum()), zeros(4, 4)).dot_flops == 2 * 2 * 4**3


@jax.custom_vjp
def custom(a):
    return square(a)


custom.defvjp(lambda a: (custom(a), a), lambda a, g: (square(g) @ a,))


def test_custom_derivatives_are_entered():
    assert count(custom, zeros(4, 4)).dot_flops == 2 * 4**3
    assert count(jax.grad(lambda a: custom(a).sum()), zeros(4, 4)).dot_flops == 2 * 2 * 4**3  # the forward one is dead
    assert count(jax.value_and_grad(lambda a: custom(a).sum()), zeros(4, 4)).dot_flops == 3 * 2 * 4**3


def test_shard_map_counts_every_shard():
    mesh = AbstractMesh((4,), ("d",))
    row, whole = PartitionSpec("d"), PartitionSpec()
    f = jax.shard_map(jnp.dot, mesh=mesh, in_specs=(row, whole), out_specs=row)
    shapes = [((8, 5), row), ((5, 7), whole)]
    args = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, spec)) for s, spec in shapes]
    assert count_flops(jax.jit(f).trace(*args).jaxpr).dot_flops == 2 * 8 * 5 * 7


def test_chain_by_hand():
    # A 3×3 convolution with padding on an axis of 32 has 3·32 − 2 = 94 pairs. Each block has it forward, for its kernel
    # and for its input, except the first one, whose input needs no gradient: 47 in all, of equal cost.
    kernels, x = arguments()
    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(kernels, x)
    assert conv_and_dot_counts(jaxpr) == OpCounts(convolutions=47, dots=0)
    assert SIZE == 32
    assert count_flops(jaxpr).conv_flops == 47 * 2 * BATCH * 94**2 * CHANNELS**2


def test_chain_recomputation_by_hand():
    # `jax.checkpoint` repeats every block's convolution but those whose output no derivative needs: none here.
    kernels, x = arguments()
    f = jax.value_and_grad(lambda kernels, x: loss(kernels, x, jax.checkpoint))
    assert conv_and_dot_counts(jax.make_jaxpr(f)(kernels, x)).convolutions == 47 + 16


def test_compiled_counts_show_what_is_left():
    kernels, x = arguments(depth=2, batch=4)
    f = jax.jit(jax.value_and_grad(lambda kernels, x: loss(kernels, x, jax.checkpoint)))
    traced = f.trace(kernels, x)
    compiled = traced.lower().compile(compiler_options=compiler_options())
    assert conv_and_dot_counts(traced.jaxpr) == OpCounts(3 * 2 - 1 + 2, 0)
    assert hlo.conv_and_dot_counts(compiled.as_text()) == OpCounts(3 * 2 - 1 + 2, 0)


def test_bytes_moved_follow_loops_and_slices():
    def f(xs):  # reads 10 rows of 4 KiB, adds each to a carry of 4 KiB
        return jax.lax.scan(lambda c, x: (jnp.tanh(c + x), None), jnp.zeros(1024), xs)[0]

    text = jax.jit(f).lower(zeros(10, 1024)).compile().as_text()
    moved = hlo.bytes_moved(text)
    # At least row, carry in and carry out in every step; at most a copy of each more, and far from ten times all rows.
    assert moved is not None
    assert 10 * 3 * 4096 <= moved <= 10 * 6 * 4096 + 3 * 4096
    unknown = jax.jit(lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x))
    assert hlo.bytes_moved(unknown.lower(zeros(8)).compile().as_text()) is None


HLO_LINES = {
    '%c = (f32[8,8]{1,0}, u8[0]{0}) custom-call(%a, %b), custom_call_target="__cudnn$convForward"': OpCounts(1, 0),
    '%c = (f32[8,8]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul"': OpCounts(0, 1),
    "ROOT %d = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}": OpCounts(0, 1),
    "%e = f32[8,8]{1,0:T(8,128)} convolution(%a, %b), dim_labels=bf_io->bf": OpCounts(0, 1),
    "%e = f32[1,8,8,2]{3,2,1,0} convolution(%a, %b), window={size=3x3}, dim_labels=b01f_01io->b01f": OpCounts(1, 0),
    '%f = f32[8]{0} custom-call(%a), custom_call_target="SomeConvertElements"': OpCounts(0, 0),
    '%g = f32[8]{0} add(%a, %b), metadata={op_name="jit(f)/dot(general)"}': OpCounts(0, 0),
}


@pytest.mark.parametrize(("line", "counts"), HLO_LINES.items(), ids=range(len(HLO_LINES)))
def test_contractions_of_every_compiler_are_recognised(line, counts):
    text = f"HloModule m\n\nENTRY %main (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {{\n  {line}\n}}\n"
    assert hlo.conv_and_dot_counts(text) == counts


def test_bytes_moved_wants_a_program():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.bytes_moved("nothing of the kind")
