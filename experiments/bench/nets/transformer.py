"""Transformers: ViT-S/16 for images and GPT-2 small for text, both of blocks with the norms first."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.bench.nets.modules import cross_entropy, image_classifier, module_block
from experiments.bench.nets.net import Loop, Net, Tree
from experiments.bench.nets.sizes import multiple, positive
from jaxremat import name

_NORMAL = nn.initializers.normal(0.02)


def vit(
    batch_size: int = 128,
    size: int = 256,
    classes: int = 1000,
    depth: int = 12,
    width: int = 384,
    heads: int = 6,
    patch: int = 16,
) -> Net:
    """Returns the plain ViT-S/16 of Beyer et al. 2022 (arXiv:2205.01580), for images of shape (batch_size, size, size, 3).

    No class token: the head reads the mean of all patches. Without dropout. Positions are learnt, as in the original
    (Dosovitskiy et al. 2021, arXiv:2010.11929); those of Beyer et al. are fixed sines. At 256 x 256 pixels there are 256
    tokens. The 196 of 224 x 224 are no multiple of 16: without a GPU to tune on, XLA refuses the product behind the
    attention there, whatever the batch.
    """
    positive("vit", batch_size=batch_size, classes=classes, depth=depth, heads=heads, patch=patch)
    multiple("vit", heads, "heads share the width", width=width)
    multiple("vit", patch, "patches tile the image", size=size)
    layers = [TransformerBlock(heads, False, False, 1e-6, name=f"block{i:02}") for i in range(1, depth + 1)]
    blocks = [module_block(Patches(width, patch, name="patches")), *map(module_block, layers)]
    head = module_block(MeanHead(classes, name="head"))
    return image_classifier(f"vit_s16, batch {batch_size}", blocks, head, (batch_size, size, size, 3), classes)


def gpt2(
    batch_size: int = 8,
    length: int = 1024,
    depth: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 50257,
    scanned: bool = False,
) -> Net:
    """Returns GPT-2 small (Radford et al. 2019) on tokens and next tokens, both of shape (batch_size, length).

    Embedding and logits share one matrix; without dropout. `scanned` stacks the parameters of the blocks and runs these in
    one `lax.scan`.
    """
    positive("gpt2", batch_size=batch_size, length=length, depth=depth, heads=heads, vocabulary=vocabulary)
    multiple("gpt2", heads, "heads share the width", width=width)
    layers = [TransformerBlock(heads, True, True, 1e-5, name=f"block{i:02}") for i in range(1, depth + 1)]
    embedding = module_block(Embedding(vocabulary, length, width, name="embedding"))
    norm = module_block(nn.LayerNorm(epsilon=1e-5, name="ln_f"))
    blocks = tuple(module_block(layer) for layer in layers)
    tokens = jax.ShapeDtypeStruct((batch_size, length), jnp.int32)
    features = (batch_size, length, width)

    def init(key: jax.Array) -> Tree:
        *keys, key_embedding, key_norm = jax.random.split(key, depth + 2)
        state = jnp.zeros(features)
        params = {block.name: block.init(k, state) for block, k in zip(blocks, keys)}
        if scanned:
            params = {"blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params.values())}
        words = embedding.init(key_embedding, jnp.zeros(tokens.shape, tokens.dtype))
        return params | {"embedding": words, "ln_f": norm.init(key_norm, state)}

    def before(params: Tree, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        return embedding.function(params["embedding"], tokens)

    def after(params: Tree, x: jax.Array, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = norm.function(params["ln_f"], x)
        with jax.named_scope("logits"):
            logits = x @ params["embedding"]["wte"].T
        return cross_entropy(logits, targets)

    body = _loop_over_layers(depth, heads) if scanned else blocks
    title = f"gpt2{' scanned' if scanned else ''}, batch {batch_size}"
    shapes = jax.eval_shape(init, jax.random.key(0))
    return Net(title, (shapes, tokens, tokens), init, before, body, after, vocabulary)


def _loop_over_layers(depth: int, heads: int) -> Loop:
    block = module_block(TransformerBlock(heads, True, True, 1e-5, name="blocks"))

    def step(shared: tuple[()], x: jax.Array, params: Tree) -> tuple[jax.Array, None]:
        return block.function(params, x), None

    return Loop("blocks", depth, lambda params, x: ((), x, params), step, lambda x, outputs: x)


class TransformerBlock(nn.Module):
    """Multi-head self-attention and a two-layer perceptron four times as wide, each after a layer norm and added."""

    heads: int
    causal: bool
    tanh_gelu: bool
    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns tokens of the shape of `x`: (batch, tokens, width)."""
        width = x.shape[-1]
        y = nn.LayerNorm(epsilon=self.epsilon, name="ln1")(x)
        x = x + Attention(self.heads, self.causal, name="attention")(y)
        y = nn.LayerNorm(epsilon=self.epsilon, name="ln2")(x)
        y = nn.Dense(4 * width, kernel_init=_NORMAL, name="fc1")(y)
        y = nn.gelu(y, approximate=self.tanh_gelu)
        return name(x + nn.Dense(width, kernel_init=_NORMAL, name="fc2")(y), "block_out")


class Attention(nn.Module):
    """Scaled dot-product attention with the matrix of all scores, as the original networks have it."""

    heads: int
    causal: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the mixed tokens, of the shape of `x`."""
        batch, length, width = x.shape
        qkv = nn.Dense(3 * width, kernel_init=_NORMAL, name="qkv")(x)
        q, k, v = jnp.moveaxis(qkv.reshape(batch, length, 3, self.heads, width // self.heads), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // self.heads) ** -0.5
        if self.causal:
            scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, jnp.finfo(scores.dtype).min)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return nn.Dense(width, kernel_init=_NORMAL, name="out")(mixed.reshape(batch, length, width))


class Embedding(nn.Module):
    """The vectors of tokens and of positions."""

    vocabulary: int
    length: int
    width: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the sum of both, of shape (batch, length, width)."""
        wte = self.param("wte", _NORMAL, (self.vocabulary, self.width))
        wpe = self.param("wpe", _NORMAL, (self.length, self.width))
        return name(wte[tokens] + wpe, "block_out")


class Patches(nn.Module):
    """A vector for each patch of an image, its position added."""

    width: int
    patch: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns tokens of shape (batch, patches, width)."""
        patch = (self.patch, self.patch)
        x = nn.Conv(self.width, patch, patch, "VALID", name="conv")(images)
        x = x.reshape(x.shape[0], -1, self.width)
        return name(x + self.param("positions", _NORMAL, (1, *x.shape[1:])), "block_out")


class MeanHead(nn.Module):
    """Layer norm and a dense layer on the mean of all tokens."""

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits of shape (batch, classes)."""
        x = nn.LayerNorm(epsilon=1e-6, name="ln")(x)
        return nn.Dense(self.classes, name="fc")(x.mean(1))
