"""The four networks, in Flax linen, with names for everything a policy may select.

Each is built by `build`. Modules carry explicit names, so that no policy renames a parameter or changes an initial
weight. Where a policy is applied block by block, `wrap_block` receives each block's class and returns the class to use.

    model      modules (for `paths:`)                     tags (for `names:`)
    net        block1, block2, head                       conv_out relu_out pool_out fc_out
    resnet18   stem, stage{1-4}_block{1,2}, fc            conv_out bn_out relu_out shortcut_out block_out pool_out
    wrn16_4    conv1, stage{1-3}_block{1,2}, bn, fc       conv_out bn_out relu_out shortcut_out block_out pool_out
    vit        patches, block{1-6}, ln, head              patch_out ln_out q k v scores probs heads_out attention_out
                                                          fc1_out gelu_out fc2_out block_out pool_out

With `ops="lean"` a batch norm and a ReLU that one convolution reads are one operation with it, without tags between: there
is no `relu_out` in resnet18.

Inside blocks: convolutions `conv*`, batch norms `bn*`, layer norms `ln*`, dropout `dropout*`, dense layers `fc*`, and in
`vit` a module `attention` with `q`, `k`, `v`, `out`. A block is a convolution with its activation and pooling, or the
dense head (`net`), a residual block (`resnet18`, `wrn16_4`), an encoder layer (`vit`).

Every model maps images of shape (batch, 32, 32, 3) to float32 logits of shape (batch, classes). `dtype` is the type of the
computation; parameters and the statistics of norms stay float32. Under float64 logits are float64.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.errors import ExperimentError
from experiments.operations import Operations, OpsName, operations
from jaxremat import name

ModelName = Literal["net", "resnet18", "wrn16_4", "vit"]
BlockClass = type[nn.Module]
WrapBlock = Callable[[BlockClass], BlockClass]
Dtype = Any

_HE_NORMAL = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


def as_it_is(block: BlockClass) -> BlockClass:
    """Returns the class of a block unchanged: the `wrap_block` of a model without policies of its own."""
    return block


def build(
    model: ModelName,
    *,
    classes: int = 10,
    dtype: Dtype = jnp.float32,
    ops: OpsName = "standard",
    wrap_block: WrapBlock = as_it_is,
) -> nn.Module:
    """Returns the named network, to be called as `network.apply(variables, images, train)`.

    Args:
        model: one of `net`, `resnet18`, `wrn16_4`, `vit`.
        classes: number of logits.
        dtype: type of the computation; parameters, statistics of norms and logits are float32 in any case.
        ops: `standard` for the operations of JAX and Flax, `lean` for those of jaxremat that keep less. Parameters and
            initial weights are the same.
        wrap_block: applied to the class of each block, for example a rematerializing transformation. It must keep
            names and parameters.

    Raises:
        ExperimentError: there is no such model, or no such operations.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from experiments.models import build
        >>> shapes = jax.eval_shape(lambda: build("net").init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)), False))
        >>> sum(leaf.size for leaf in jax.tree.leaves(shapes["params"]))
        62006
    """
    networks: dict[str, Callable[..., nn.Module]] = {
        "net": Net,
        "resnet18": ResNet18,
        "wrn16_4": WideResNet16x4,
        "vit": ViT,
    }
    if model not in networks:
        raise ExperimentError(f"A model is one of {', '.join(get_args(ModelName))}; got {model!r}.")
    return networks[model](classes=classes, dtype=dtype, ops=operations(ops), wrap_block=wrap_block)


class ConvBlock(nn.Module):
    """5x5 convolution without padding, ReLU, 2x2 max pooling: (batch, h, w, c) to (batch, (h-4)/2, (w-4)/2, features)."""

    features: int
    dtype: Dtype
    ops: Operations

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns the pooled activations."""
        x = name(nn.Conv(self.features, (5, 5), padding="VALID", dtype=self.dtype, name="conv")(x), "conv_out")
        x = name(self.ops.relu_before_pool(x), "relu_out")
        return name(self.ops.max_pool(x, (2, 2), strides=(2, 2)), "pool_out")


class DenseHead(nn.Module):
    """Three dense layers, 120 and 84 wide and then the logits, with ReLU between them."""

    classes: int
    dtype: Dtype
    ops: Operations

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns logits of shape (batch, classes)."""
        x = x.reshape(x.shape[0], -1)
        for i, width in enumerate((120, 84), start=1):
            x = name(nn.Dense(width, dtype=self.dtype, name=f"fc{i}")(x), "fc_out")
            x = name(self.ops.relu(x), "relu_out")
        return nn.Dense(self.classes, dtype=self.dtype, name="fc3")(x)


class Net(nn.Module):
    """LeNet for colour images: two convolutional blocks and three dense layers."""

    classes: int
    dtype: Dtype
    ops: Operations
    wrap_block: WrapBlock

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Returns logits of shape (batch, classes)."""
        conv_block, head = self.wrap_block(ConvBlock), self.wrap_block(DenseHead)
        x = images.astype(self.dtype)
        x = conv_block(6, self.dtype, self.ops, name="block1")(x, train)
        x = conv_block(16, self.dtype, self.ops, name="block2")(x, train)
        return head(self.classes, self.dtype, self.ops, name="head")(x, train).astype(_at_least_float32(self.dtype))


def _at_least_float32(dtype: Dtype) -> Dtype:
    """Returns the type of what must not be rounded to less than float32, such as logits: float64 where that is computed in."""
    return jnp.promote_types(dtype, jnp.float32)


def _conv(ops: Operations, dtype: Dtype, features: int, size: int, stride: int, **rest: Any) -> nn.Conv:
    rest = {"conv_general_dilated": ops.conv_general_dilated, **rest}
    window = (size, size), (stride, stride), "SAME"
    return nn.Conv(features, *window, use_bias=False, dtype=dtype, kernel_init=_HE_NORMAL, **rest)


def _stages(block: BlockClass, widths: Sequence[int], dtype: Dtype, ops: Operations) -> Iterator[nn.Module]:
    """Yields two residual blocks for each width; the first of each but the first width halves the image."""
    make: Any = block
    for stage, features in enumerate(widths, start=1):
        for i, stride in enumerate((1 if stage == 1 else 2, 1), start=1):
            yield make(features, stride, dtype, ops, name=f"stage{stage}_block{i}")


def global_pool(x: jax.Array) -> jax.Array:
    """Returns the mean over all positions, (batch, height, width, channels) -> (batch, channels).

    The barrier keeps the normalisation before it out of the sum: XLA:CPU hands sums to a library that rounds a fused
    normalisation otherwise, and whether it fuses depends on what else reads the values, so on the policy.
    """
    return jax.lax.optimization_barrier(x).mean(axis=(1, 2))


def _pooled_logits(x: jax.Array, classes: int, dtype: Dtype) -> jax.Array:
    """Returns logits of the mean over all positions, (batch, height, width, channels) -> (batch, classes)."""
    return nn.Dense(classes, dtype=dtype, name="fc")(name(global_pool(x), "pool_out")).astype(_at_least_float32(dtype))


def _batch_norm(ops: Operations, train: bool, dtype: Dtype, name: str) -> nn.BatchNorm:
    return ops.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5, dtype=dtype, name=name)


class BasicBlock(nn.Module):
    """Residual block of two 3x3 convolutions, each with batch norm; a 1x1 projection where the shape changes."""

    features: int
    stride: int
    dtype: Dtype
    ops: Operations

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns activations of shape (batch, h/stride, w/stride, features)."""
        conv = partial(_conv, self.ops, self.dtype, self.features)
        bn = partial(_batch_norm, self.ops, train, self.dtype)
        y = name(conv(3, self.stride, name="conv1")(x), "conv_out")
        y = name(self.ops.norm_relu_conv(bn("bn1"), partial(conv, 3, 1, name="conv2"), y), "conv_out")
        y = name(bn("bn2")(y), "bn_out")
        if x.shape != y.shape:
            x = name(conv(1, self.stride, name="conv_shortcut")(x), "conv_out")
            x = name(bn("bn_shortcut")(x), "shortcut_out")
        return name(self.ops.relu(x + y), "block_out")


class Stem(nn.Module):
    """3x3 convolution, batch norm, ReLU: (batch, h, w, c) to (batch, h, w, features)."""

    features: int
    dtype: Dtype
    ops: Operations

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns the first activations."""
        x = name(_conv(self.ops, self.dtype, self.features, 3, 1, name="conv1")(x), "conv_out")
        x = name(_batch_norm(self.ops, train, self.dtype, "bn1")(x), "bn_out")
        return name(self.ops.relu(x), "block_out")


class ResNet18(nn.Module):
    """ResNet-18 in its form for CIFAR (He et al. 2016, arXiv:1512.03385): 3x3 stem without pooling, 20 convolutions."""

    classes: int
    dtype: Dtype
    ops: Operations
    wrap_block: WrapBlock

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Returns logits of shape (batch, classes)."""
        stem, block = self.wrap_block(Stem), self.wrap_block(BasicBlock)
        x = stem(64, self.dtype, self.ops, name="stem")(images.astype(self.dtype), train)
        for residual in _stages(block, (64, 128, 256, 512), self.dtype, self.ops):
            x = residual(x, train)
        return _pooled_logits(x, self.classes, self.dtype)


class PreActivationBlock(nn.Module):
    """Batch norm and ReLU before each of two 3x3 convolutions; a 1x1 projection where the shape changes."""

    features: int
    stride: int
    dtype: Dtype
    ops: Operations

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns activations of shape (batch, h/stride, w/stride, features)."""
        conv = partial(_conv, self.ops, self.dtype, self.features)
        bn = partial(_batch_norm, self.ops, train, self.dtype)
        if x.shape[-1] != self.features or self.stride != 1:
            y = name(self.ops.relu(name(bn("bn1")(x), "bn_out")), "relu_out")
            x = name(conv(1, self.stride, name="conv_shortcut")(y), "shortcut_out")
            y = conv(3, self.stride, name="conv1")(y)
        else:
            y = self.ops.norm_relu_conv(bn("bn1"), partial(conv, 3, 1, name="conv1"), x)
        y = name(y, "conv_out")
        y = name(self.ops.norm_relu_conv(bn("bn2"), partial(conv, 3, 1, name="conv2"), y), "conv_out")
        return name(x + y, "block_out")


class WideResNet16x4(nn.Module):
    """Wide residual network of 16 layers, 4 times as wide (Zagoruyko and Komodakis 2016, arXiv:1605.07146)."""

    classes: int
    dtype: Dtype
    ops: Operations
    wrap_block: WrapBlock

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Returns logits of shape (batch, classes)."""
        block = self.wrap_block(PreActivationBlock)
        x = name(_conv(self.ops, self.dtype, 16, 3, 1, name="conv1")(images.astype(self.dtype)), "conv_out")
        for residual in _stages(block, (64, 128, 256), self.dtype, self.ops):
            x = residual(x, train)
        x = name(self.ops.relu(name(_batch_norm(self.ops, train, self.dtype, "bn")(x), "bn_out")), "relu_out")
        return _pooled_logits(x, self.classes, self.dtype)


class Attention(nn.Module):
    """Multi-head self-attention with dropout on the probabilities: (batch, tokens, width) to the same shape."""

    heads: int
    dropout: float
    dtype: Dtype
    ops: Operations

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns the mixed tokens."""
        width = x.shape[-1] // self.heads
        project = partial(nn.DenseGeneral, (self.heads, width), dtype=self.dtype)
        q, k, v = (name(project(name=part)(x), part) for part in "qkv")
        # Softmax in float32 at least: its sums lose too much in bfloat16.
        scores = jnp.einsum("bqhd,bkhd->bhqk", q * width**-0.5, k, preferred_element_type=_at_least_float32(self.dtype))
        probs = name(self.ops.softmax(name(scores, "scores")).astype(self.dtype), "probs")
        probs = self.ops.Dropout(self.dropout, deterministic=not train, name="dropout")(probs)
        mixed = name(jnp.einsum("bhqk,bkhd->bqhd", probs, v), "heads_out")
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), dtype=self.dtype, name="out")(mixed)


class EncoderBlock(nn.Module):
    """Transformer encoder layer, norms first: attention and a two-layer perceptron, each added to its input."""

    heads: int
    dropout: float
    dtype: Dtype
    ops: Operations

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns tokens of the shape of `x`."""
        drop = partial(self.ops.Dropout, self.dropout, deterministic=not train)
        dense, norm = partial(nn.Dense, dtype=self.dtype), partial(self.ops.LayerNorm, dtype=self.dtype)
        y = name(norm(name="ln1")(x), "ln_out")
        y = name(Attention(self.heads, self.dropout, self.dtype, self.ops, name="attention")(y, train), "attention_out")
        x = x + drop(name="dropout1")(y)
        y = name(norm(name="ln2")(x), "ln_out")
        y = name(dense(4 * x.shape[-1], name="fc1")(y), "fc1_out")
        y = name(self.ops.gelu(y), "gelu_out")
        y = name(dense(x.shape[-1], name="fc2")(y), "fc2_out")
        return name(x + drop(name="dropout2")(y), "block_out")


class ViT(nn.Module):
    """Small vision transformer (Dosovitskiy et al. 2021, arXiv:2010.11929): 64 patches of 4x4, mean-pooled tokens."""

    classes: int
    dtype: Dtype
    ops: Operations
    wrap_block: WrapBlock
    patch: int = 4
    width: int = 192
    depth: int = 6
    heads: int = 3
    dropout: float = 0.1

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Returns logits of shape (batch, classes)."""
        block, patch = self.wrap_block(EncoderBlock), (self.patch, self.patch)
        x = images.astype(self.dtype)
        x = nn.Conv(self.width, patch, patch, "VALID", dtype=self.dtype, name="patches")(x)
        x = x.reshape(x.shape[0], -1, self.width)
        positions = self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = name(x + positions.astype(self.dtype), "patch_out")
        x = self.ops.Dropout(self.dropout, deterministic=not train, name="dropout")(x)
        for i in range(1, self.depth + 1):
            x = block(self.heads, self.dropout, self.dtype, self.ops, name=f"block{i}")(x, train)
        x = name(self.ops.LayerNorm(dtype=self.dtype, name="ln")(x), "ln_out")
        x = name(x.mean(axis=1), "pool_out")
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x).astype(_at_least_float32(self.dtype))
