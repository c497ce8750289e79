"""`Net`: a network as a list of blocks, so that anything can be wrapped round one block, round several or round the whole.

A block is a function of its own parameters and of the state that the blocks before it left: an array or a tuple of arrays.
A network is what stands before the blocks, the blocks, and what stands after them down to a scalar loss. Its parameters are
a dictionary with one entry a block, beside what `before` and `after` read. Where equal blocks run in one `lax.scan`, the
body of the network is a `Loop`. BatchNorm uses the statistics of the batch, as training does; its running statistics are
no part of the loss and are dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.nets.sizes import positive
from experiments.errors import ExperimentError

Tree = Any
Function = Callable[..., Any]
Wrap = Callable[[Function], Function]


@dataclass(frozen=True, eq=False)
class Block:
    """One step of a network that is not looped.

    Attributes:
        name: its key among the parameters and the outermost part of its module path.
        function: from its parameters and a state to the next state.
        init: from a random key and a state to its parameters.
    """

    name: str
    function: Function
    init: Function


@dataclass(frozen=True, eq=False)
class Loop:
    """Equal steps that run in one `lax.scan`.

    Attributes:
        name: its key among the parameters and the outermost part of its module path.
        length: how many steps there are.
        enter: from its parameters and a state to (what all steps share, the first carry, what is sliced along axis 0).
        step: from (what is shared, carry, one slice) to (carry, output).
        leave: from the last carry and the stacked outputs to the next state.
    """

    name: str
    length: int
    enter: Function
    step: Function
    leave: Function


@dataclass(frozen=True, eq=False)
class Net:
    """A network in training mode with the shapes of its arguments.

    Attributes:
        name: what it is called in tables, its size included.
        args: shapes and types: parameters first, with respect to which the gradient is taken, then the batch.
        init: from a random key to parameters; under `jax.jit` or `jax.eval_shape` it computes no forward pass.
        before: from all parameters and the batch to the first state.
        body: the blocks, or the loop over them.
        after: from all parameters, the last state and the batch to the loss, a scalar.
        classes: the integers of a batch lie below this.
    """

    name: str
    args: tuple[Any, ...]
    init: Callable[[jax.Array], Tree]
    before: Function
    body: tuple[Block, ...] | Loop
    after: Function
    classes: int

    @property
    def depth(self) -> int:
        """How many blocks there are; for a loop, how many steps."""
        return self.body.length if isinstance(self.body, Loop) else len(self.body)

    @cached_property
    def loss(self) -> Function:
        """The loss of parameters and batch, without anything wrapped."""
        return self.build()

    def build(
        self,
        *,
        wrap_block: Wrap | None = None,
        group: int = 1,
        wrap_group: Wrap | None = None,
        wrap_last: bool = True,
    ) -> Function:
        """Returns the loss with wrappers such as `jax.checkpoint` round its blocks, round runs of blocks, or both.

        Args:
            wrap_block: gets the function of each block, `(params, state) -> state`, and of a loop its step,
                `(shared, carry, slice) -> (carry, output)`.
            group: how many consecutive blocks make a run; the last run may be shorter. A loop becomes a loop over runs,
                each a loop over its steps, so here its length must be a multiple of `group`.
            wrap_group: gets the function of each run, `(params by block name, state) -> state`; of a loop the inner
                loop, `(shared, carry, slices) -> (carry, outputs)`.
            wrap_last: whether the last run is wrapped too. Its backward pass follows at once, so that recomputing it
                saves nothing. In a loop it cannot be told from the others.

        Returns:
            A function of `args` with the values of `loss`.

        Raises:
            ExperimentError: `group` is no whole number of at least 1 or does not divide the length of a loop, or `wrap_last` is False
                for a loop.
        """
        positive(self.name, group=group)
        wrap_block, wrap_group = wrap_block or _unwrapped, wrap_group or _unwrapped
        if isinstance(self.body, Loop):
            if not wrap_last:
                raise ExperimentError(f"{self.name} runs in a loop, whose last run cannot be left unwrapped.")
            run = _looped(self.body, wrap_block, group, wrap_group)
        else:
            run = _unrolled(self.body, wrap_block, group, wrap_group, wrap_last)

        def loss(params: Tree, *batch: Any) -> jax.Array:
            return self.after(params, run(params, self.before(params, *batch)), *batch)

        return loss

    def arguments(self, seed: int = 0) -> tuple[Any, ...]:
        """Returns arrays for `args`: initial parameters, and a batch of normal or uniform integer numbers."""
        keys = jax.random.split(jax.random.key(seed), len(self.args))
        batch = [self._random(key, shape) for key, shape in zip(keys[1:], self.args[1:])]
        return jax.jit(self.init)(keys[0]), *batch

    def _random(self, key: jax.Array, shape: Any) -> jax.Array:
        if jnp.issubdtype(shape.dtype, jnp.integer):
            return jax.random.randint(key, shape.shape, 0, self.classes, shape.dtype)
        return jax.random.normal(key, shape.shape, shape.dtype)


def _unwrapped(function: Function) -> Function:
    return function


def _unrolled(
    blocks: tuple[Block, ...], wrap_block: Wrap, group: int, wrap_group: Wrap, wrap_last: bool
) -> Callable[[Tree, Tree], Tree]:
    def run_of(names: list[str], functions: list[Function]) -> Function:
        def run(params: Tree, state: Tree) -> Tree:
            for name, function in zip(names, functions):
                state = function(params[name], state)
            return state

        return run

    runs = list[tuple[list[str], Function]]()
    for start in range(0, len(blocks), group):
        part = blocks[start : start + group]
        names = [block.name for block in part]
        run = run_of(names, [wrap_block(block.function) for block in part])
        last = start + group >= len(blocks)
        runs.append((names, run if last and not wrap_last else wrap_group(run)))

    def whole(params: Tree, state: Tree) -> Tree:
        for names, run in runs:
            state = run({name: params[name] for name in names}, state)
        return state

    return whole


def _looped(loop: Loop, wrap_block: Wrap, group: int, wrap_group: Wrap) -> Callable[[Tree, Tree], Tree]:
    if loop.length % group:
        raise ExperimentError(f"{loop.name}: a loop of {loop.length} steps has no runs of {group}; use a divisor.")
    step = wrap_block(loop.step)

    def run(shared: Tree, carry: Tree, slices: Tree) -> tuple[Tree, Tree]:
        return jax.lax.scan(lambda carry, x: step(shared, carry, x), carry, slices)

    wrapped = wrap_group(run)

    def whole(params: Tree, state: Tree) -> Tree:
        shared, carry, slices = loop.enter(params[loop.name], state)
        if group == 1:
            return loop.leave(*run(shared, carry, slices))
        runs = jax.tree.map(lambda x: x.reshape(loop.length // group, group, *x.shape[1:]), slices)
        carry, outputs = jax.lax.scan(lambda carry, xs: wrapped(shared, carry, xs), carry, runs)
        return loop.leave(carry, jax.tree.map(lambda y: y.reshape(loop.length, *y.shape[2:]), outputs))

    return whole
