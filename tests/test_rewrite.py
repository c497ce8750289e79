"""The barriers of the backward program: what waits for what. Outcomes in compiled memory are in `test_counts` and `test_plan`."""

import jax
import jax.numpy as jnp
from plans import search_of
from programs import equations

import jaxremat
from jaxremat import compat
from jaxremat.plan.neighbours import but_for_the_last
from jaxremat.rewrite import backward_program

ROWS, SIDE, DEPTH = 1024, 64, 3


def dense(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return (x**2).sum()


def convolutions(kernels, x):
    for kernel in kernels:
        x = jnp.tanh(
            jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )
    return (x**2).sum()


def pooled(w, x):
    x = jnp.tanh(x @ w)
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 1), (2, 1), "VALID")
    return (x**2).sum()


def equations_of(loss, policy, *args):
    """The backward program's equations, and by what equation each value in it is made."""
    program, _, _ = jaxremat.remat(loss, policy).program(*args)
    leaves = len(jax.tree.leaves(args))
    cut = program.cut((True,) * leaves)
    closed = backward_program(cut.choice, (False,) * len(cut.choice.graph.outputs)).program
    made_by = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}
    return closed.jaxpr, made_by


def named(jaxpr, name):
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == name]


def gated_shapes(f, *args):
    """The shapes of all that passes a barrier in a function, the bodies of its loops included."""
    eqns = equations(jax.make_jaxpr(f)(*args).jaxpr)
    return [v.aval.shape for eqn in eqns if eqn.primitive.name == "optimization_barrier" for v in eqn.invars]


def source(made_by, var):
    """The equation behind what only shows a value in another order."""
    while var in made_by and made_by[var].primitive.name in ("transpose", "rev", "reshape", "stop_gradient"):
        var = made_by[var].invars[0]
    return made_by.get(var)


def shapes(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_what_follows_the_gradient_of_a_weight_waits_for_it():
    """Each layer: the weight's gradient and the cotangent pass a barrier, and the product for the layer before reads that."""
    args = [shapes(SIDE, SIDE)] * DEPTH, shapes(ROWS, SIDE)
    jaxpr, made_by = equations_of(dense, "dots", *args)
    weights = [v for v in jaxpr.outvars if v.aval.shape == (SIDE, SIDE)]
    assert len(weights) == DEPTH
    cotangents = [eqn for eqn in named(jaxpr, "dot_general") if eqn.outvars[0].aval.shape == (ROWS, SIDE)]
    # One for every layer, the first included, as the input's gradient is wanted too.
    read = {id(made_by.get(v)) for eqn in cotangents for v in eqn.invars if isinstance(v, compat.Var)}
    for weight in weights:
        barrier = made_by[weight]
        assert barrier.primitive.name == "optimization_barrier"
        assert len(barrier.outvars) == 2
        assert id(barrier) in read
    assert len(cotangents) == DEPTH


def tied(table, ws, x):
    """A table that is read transposed, as by a language model whose embedding is its last layer, too."""
    for w in ws:
        x = jaxremat.name(jnp.sin(x @ w), "out")
    return jax.nn.logsumexp(x @ table.T, axis=1).sum()


def test_recomputation_waits_for_a_gradient_that_is_transposed_once_more():
    """The cotangent that the table's gradient is made of is read by nothing behind it: what waits is the last layer's product.

    It is the first that is computed again. But it waits only where it takes as much as that cotangent, of as many columns as
    there are words: what is smaller need not wait, and the table's gradient takes memory of its own.
    """

    def waits(words):
        args = shapes(words, SIDE), [shapes(SIDE, SIDE)] * DEPTH, shapes(ROWS, SIDE)
        jaxpr, made_by = equations_of(tied, "names:out", *args)
        (table,) = (v for v in jaxpr.outvars if v.aval.shape == (words, SIDE))
        again = [eqn for eqn in named(jaxpr, "dot_general") if eqn.outvars[0].aval.shape == (ROWS, SIDE)]
        # The cotangent of the last layer's output, and then that layer once more.
        return bool(set(again[1].invars) & set(made_by[table].outvars))

    assert waits(SIDE // 2)
    assert not waits(2 * SIDE)


def test_kernels_wait_for_the_cotangent():
    """The kernel that the gradient of a convolution's input reads, reversed, comes from behind a barrier."""
    side, channels = 32, 256  # 2.25 MiB a kernel: not small
    args = [shapes(3, 3, channels, channels)] * 2, shapes(2, side, side, channels)
    jaxpr, made_by = equations_of(convolutions, "dots", *args)
    reversed_kernels = [eqn.invars[0] for eqn in named(jaxpr, "rev")]
    assert len(reversed_kernels) == 2
    assert {made_by[v].primitive.name for v in reversed_kernels} == {"optimization_barrier"}


def test_what_a_maximum_was_taken_of_waits_for_the_cotangent():
    """Compilers make arrays of indices from it, four times the size of the result."""
    args = shapes(SIDE, SIDE), shapes(ROWS * 8, SIDE)
    jaxpr, made_by = equations_of(pooled, "ops:*=store", *args)
    (scatter,) = named(jaxpr, "select_and_scatter_add")
    operand = scatter.invars[1]
    assert operand.aval.shape == (ROWS * 8, SIDE)
    assert source(made_by, operand).primitive.name == "optimization_barrier"


def biased(ws, bs, x):
    for w, b in zip(ws, bs):
        x = jnp.tanh(x @ w + b)
    return (x**2).sum()


def test_what_follows_the_gradient_of_a_bias_waits_for_it():
    """It is the sum of a cotangent over rows, which compilers begin at once and end when all else is done."""
    rows = 4 * ROWS  # 1 MiB: not too small to wait for
    args = [shapes(SIDE, SIDE)] * DEPTH, [shapes(SIDE)] * DEPTH, shapes(rows, SIDE)
    jaxpr, made_by = equations_of(biased, "dots", *args)
    biases = [v for v in jaxpr.outvars if v.aval.shape == (SIDE,)]
    assert len(biases) == DEPTH
    waiting = set()
    for bias in biases:
        row = made_by[bias].invars[0]  # the sum over rows is one row, of which JAX takes the sum again
        barrier = made_by[row]
        assert barrier.primitive.name == "optimization_barrier"
        assert [v.aval.shape for v in barrier.outvars] == [(1, SIDE), (rows, SIDE)]
        waiting.add(barrier.outvars[1])
    weights = [eqn for eqn in named(jaxpr, "dot_general") if eqn.outvars[0].aval.shape == (SIDE, SIDE)]
    read = set()
    for eqn in weights:
        v = eqn.invars[0]
        while v not in waiting:  # it may have passed the gate of a recomputation since
            gate = made_by[v]
            assert gate.primitive.name == "optimization_barrier"
            v = gate.invars[gate.outvars.index(v)]
        read.add(v)
    assert read == waiting


def test_what_reads_a_gate_reads_its_cotangent_from_behind_it():
    """A compiler drops what nothing reads from a barrier: then the recomputation would not wait for the cotangent."""
    args = [shapes(SIDE, SIDE)] * DEPTH, shapes(ROWS, SIDE)
    jaxpr, _ = equations_of(dense, "segments:3", *args)
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, jax.extend.core.Literal)}
    gates = [eqn for eqn in named(jaxpr, "optimization_barrier") if len(eqn.outvars) > 1]
    assert gates
    moving = {jaxpr.invars[-1]}  # the cotangent, and what depends on it: the stored values and inputs come before
    for eqn in jaxpr.eqns:
        if moving.intersection(v for v in eqn.invars if isinstance(v, compat.Var)):
            moving.update(eqn.outvars)
    for gate in gates:
        assert read.union(jaxpr.outvars).issuperset(gate.outvars)
        assert moving.intersection(gate.invars)


def attention(ws, x):
    for w in ws:
        scores = x @ w @ x.T
        maxima = jax.lax.stop_gradient(scores.max(1))
        x = ((x @ w).T @ jnp.exp(scores - maxima[:, None]).T).T
    return (x**2).sum()


def test_small_values_pass_the_gate_behind_which_they_are_read():
    """The maxima of rows are stored, and read when what follows them was recomputed and the gate is open.

    Compilers may write what is broadcast from them, and would keep that if it were one with what the forward pass broadcast.
    """
    args = [shapes(SIDE, SIDE)] * DEPTH, shapes(ROWS, SIDE)
    jaxpr, made_by = equations_of(attention, "segments:3", *args)
    maxima = [eqn.invars[0] for eqn in named(jaxpr, "broadcast_in_dim") if eqn.outvars[0].aval.shape == (ROWS, 1)]
    assert len(maxima) == DEPTH - 1  # the last segment is not run again
    assert all(source(made_by, v).primitive.name == "optimization_barrier" for v in maxima)


def gates_of_weights(rows, is_body):
    """How many gradients of weights the rest waits for."""
    args = [shapes(SIDE, SIDE)] * DEPTH, shapes(rows, SIDE)
    program, _, _ = jaxremat.remat(dense, "dots").program(*args)
    choice = program.cut((True,) * (DEPTH + 1)).choice
    closed = backward_program(choice, (False,) * len(choice.graph.outputs), is_body).program.jaxpr
    made_by = {v: eqn for eqn in closed.eqns for v in eqn.outvars}
    weights = [v for v in closed.outvars if v.aval.shape == (SIDE, SIDE)]
    assert len(weights) == DEPTH
    return sum(made_by[v].primitive.name == "optimization_barrier" for v in weights)


def test_in_a_loop_only_what_frees_more_than_it_takes():
    """A weight has SIDE · SIDE numbers, and what its gradient reads rows · SIDE."""
    assert gates_of_weights(2 * SIDE, is_body=False) == gates_of_weights(2 * SIDE, is_body=True) == DEPTH
    assert gates_of_weights(SIDE // 2, is_body=False) == DEPTH
    assert gates_of_weights(SIDE // 2, is_body=True) == 0


def test_a_cotangent_that_only_products_read_passes_no_gate():
    """Of a language model with tied embeddings above a scan: a compiler computes the logits' cotangent inside of both products.

    What the scan reads is no gradient of a weight: the product that makes it does not count as an end.
    """
    steps, batch, width, words = 3, 64, 32, 512

    def loss(table, weights, tokens):
        def step(x, w):
            return x + jnp.tanh(x @ w), None

        x, _ = jax.lax.scan(step, table[tokens], weights)
        logits = x @ table.T
        return (jax.nn.logsumexp(logits, axis=1) - logits[:, 0]).sum()

    shape = jax.ShapeDtypeStruct
    args = shape((words, width), jnp.float32), shape((steps, width, width), jnp.float32), shape((batch,), jnp.int32)
    wrapped = jaxremat.remat(loss, "loops:everything|nothing")
    gated = gated_shapes(jax.grad(wrapped, (0, 1)), *args)
    assert gated
    assert (batch, words) not in gated


def test_a_transposed_input_passes_no_gate():
    """Tied embeddings below unrolled blocks: all behind the last block is stored, and the table is transposed once more.

    The logits' cotangent would pass a gate beside the table, and be written for it.
    """
    rows, width, words = 64, 32, 512

    def loss(table, weights, tokens):
        x = table[tokens]
        for w in weights:
            x = jaxremat.name(x + jnp.tanh(x @ w), "block")
        logits = jnp.sin(x) @ table.T
        return (jax.nn.logsumexp(logits, axis=1) - logits[:, 0]).sum()

    keys = jax.random.split(jax.random.key(0), 3)
    table, weights = (jax.random.normal(k, shape) for k, shape in zip(keys, ((words, width), (3, width, width))))
    args = table, list(weights), jax.random.randint(keys[2], (rows,), 0, words)
    search = search_of(loss, *args, argnums=(0, 1), platform="tpu")
    head = but_for_the_last(search, jaxremat.parse("names:*"), parts=0)
    assert head.contraction_flops == 3 * 2 * rows * width * width  # the blocks' products and not the logits
    wrapped = jaxremat.remat(loss, head.policy)
    gated = gated_shapes(jax.grad(wrapped, (0, 1)), *args)
    assert (rows, width) in gated
    assert (rows, words) not in gated
    for ours, plain in zip(*(jax.tree.leaves(jax.grad(f, (0, 1))(*args)) for f in (wrapped, loss)), strict=True):
        assert jnp.allclose(ours, plain, rtol=2e-5, atol=2e-5)


def test_sums_of_one_cotangent_are_waited_for_together():
    """A bias and a table of positions, added one after the other: XLA:TPU computes both gradients in one fusion."""
    steps, width, rows = 64, 64, 128  # the cotangent has 2 MiB: smaller ones are not waited for

    def loss(w, bias, table, x):
        x = (jnp.sin(x) @ w + bias).reshape(rows, steps, width)
        return (jnp.tanh(x + table) ** 2).sum()

    args = shapes(width, width), shapes(width), shapes(steps, width), shapes(rows * steps, width)
    jaxpr, made_by = equations_of(loss, "dots", *args)
    _, of_bias, of_table, _ = jaxpr.outvars
    (row,) = made_by[of_bias].invars  # one row, which is what the sum over the batch leaves
    gate = made_by[row]
    assert gate.primitive.name == "optimization_barrier"
    assert made_by[of_table] is gate
    cotangents = [v for v in gate.outvars if v not in (row, of_table)]
    assert [v.aval.size for v in cotangents] == [rows * steps * width]
