"""The stored sets of the two frameworks, layer by layer, to the last byte: equal, or a row that says why not.

Within a layer values of the same operation, type and size are paired first, then those of the same type and size. What is left
over stands in a row of its own. The rows' bytes add up to what each framework keeps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.compare_records import Kept, Result

UNEXPLAINED = "not explained"
# Layers outside of the blocks, by model. Under `nothing`, and in PyTorch under every policy but segments and budgets, no policy
# is applied there. A test holds that these are the PyTorch networks' parts that are no blocks.
OUTSIDE_BLOCKS: dict[str, tuple[str, ...]] = {
    "net": (),
    "resnet18": ("fc",),
    "wrn16_4": ("conv1", "bn", "fc"),
    "vit": ("patches", "dropout", "ln", "head"),
}
SMALL_FRACTION = 32  # under `nothing` a value inside of a block counts as small below this part of the largest one

# A value of JAX's without a partner, under any policy: what it is.
_JAX = {
    "cross_entropy": "a part of cross-entropy, which JAX differentiates as written; PyTorch's kernel keeps log softmax",
    "logsumexp": "a part of cross-entropy, which JAX differentiates as written; PyTorch's kernel keeps log softmax",
    "dropout": "dropout's mask as booleans or its scaled input; PyTorch keeps the mask as scaled float32, or draws it again",
}
# Where no policy chooses: JAX keeps what the parts of an operation need, PyTorch what its kernel needs.
_JAX_PLAIN = {
    "batch_norm": "JAX differentiates batch norm as written; PyTorch's kernel keeps its input, mean and 1/std",
    "layer_norm": "JAX differentiates layer norm as written; PyTorch's kernel keeps its input, mean and 1/std",
    "gelu": "JAX differentiates tanh-GELU as written, five arrays; PyTorch's kernel keeps its input",
    "attention": "JAX keeps the operands as they are; PyTorch's batched products want contiguous copies",
    "softmax": "JAX differentiates softmax as written; PyTorch's kernel keeps its output",
    "div": "the mean before the last product, under another operation's name",
    "mean": "the mean before the last product, under another operation's name",
    "add": "a sum that JAX keeps for the next operation; PyTorch's kernel keeps another value of the layer",
    "relu": "an input of the next operation; in PyTorch another operation's kernel keeps it",
}
# Operations that JAX writes out as several values, all of which a policy for the operation fits.
_WRITTEN_OUT = ("batch_norm", "layer_norm", "gelu", "attention", "softmax")
_TORCH_SAVED = {
    "conv": "the input of a norm or of an addition, which PyTorch's kernel keeps; JAX keeps what it makes of it",
    "dot": "the input of the next kernel",
    "relu": "ReLU's output, which PyTorch's kernel and the next operation keep",
    "batch_norm": "mean and 1/std, and the output where the next convolution keeps it as its input",
    "layer_norm": "mean and 1/std, and the output where the next product keeps it as its input",
    "softmax": "softmax's output, which PyTorch's kernel keeps; in JAX it is among attention's values",
    "gelu": "the input of the next product; in JAX it is among GELU's values",
    "add": "the input of a norm, which PyTorch's kernel keeps; JAX keeps it centred",
    "mean": "the input of the last product; JAX computes it again, or keeps it under another operation's name",
    "max_pool": "the input of the next operation; JAX computes it again, or keeps another value of the layer",
    "mul": "attention's scaled queries",
    "dropout": "dropout's output, the input of the next operation",
    "div_": "dropout's mask as scaled float32; JAX keeps booleans, one byte an element",
    "constant_pad_nd": "the input of a stride-2 convolution, padded at the far edge alone as Flax does: PyTorch needs a copy",
    "clone": "a contiguous copy for a batched product",
    "_unsafe_view": "contiguous copies for batched products",
    "_log_softmax": "log softmax, which PyTorch's cross-entropy keeps; JAX keeps the parts of log-sum-exp, or computes them again",
    "nll_loss_forward": "the weight of the batch, one number",
    "compiled": "a value inside of the compiled program, where layers have no names",
}
REGION_INPUT = "the input of a checkpointed block or segment, which PyTorch keeps beside what the policy chooses"
CACHED = "the policy fits it, so PyTorch caches it; jaxremat stores only what is read, and here reads another value"
BORDER = "what crosses a segment's border: jaxremat cuts at the narrowest places, PyTorch between parts of the network"
OUTSIDE = "outside of the blocks, where PyTorch does not apply the policy: autograd keeps what its kernels need"
SMALL = "small: statistics, keys and scalars are always stored by jaxremat; PyTorch computes them again, or keeps fewer"
WRITTEN_OUT = (
    "the policy fits all values of the operation, which JAX writes out; PyTorch's kernel has its results alone"
)
COMPILED = "PyTorch's program is compiled: its values have no layers, and stand together in the rows without one"


@dataclass(frozen=True)
class Row:
    """What one layer keeps in either framework: a pair of equal values, or one without a partner and the reason."""

    layer: str
    jax: Kept | None
    torch: Kept | None
    why: str

    @property
    def equal(self) -> bool:
        """Whether both frameworks keep it."""
        return self.jax is not None and self.torch is not None


def diff(jax: Result, torch: Result) -> list[Row]:
    """Returns the rows for the results of one policy in the two frameworks.

    Example:
        >>> from experiments.compare_diff import diff
        >>> from experiments.compare_records import Cell, Kept, Result
        >>> ours, theirs = (Cell(framework, "net", "dots", 1, "sample", 1, 0) for framework in ("jax", "torch"))
        >>> conv = Kept("block1/conv", "conv", "float32", "traced", 1, 64)
        >>> pool = Kept("block1", "max_pool", "float32", "region input", 1, 16)
        >>> rows = diff(Result(ours, "measured", kept=(conv,)), Result(theirs, "measured", kept=(conv, pool)))
        >>> [(row.layer, row.equal) for row in rows]
        [('block1/conv', True), ('block1', False)]
    """
    rows = list[Row]()
    for layer in dict.fromkeys(kept.path for kept in (*jax.kept, *torch.kept)):
        left, right = ([kept for kept in result.kept if kept.path == layer] for result in (jax, torch))
        for same_op in (True, False):
            pairs, left, right = _paired(left, right, same_op=same_op)
            rows += [Row(layer, one, other, "equal") for one, other in pairs]
        rows += [Row(layer, one, None, _why_jax(one, jax, torch)) for one in left]
        rows += [Row(layer, None, other, _why_torch(other)) for other in right]
    return rows


def _paired(
    left: Sequence[Kept], right: Sequence[Kept], *, same_op: bool
) -> tuple[list[tuple[Kept, Kept]], list[Kept], list[Kept]]:
    """Returns pairs of as many values of equal type and size, and what is left over on either side."""
    pairs, over, rest = list[tuple[Kept, Kept]](), list[Kept](), list(right)
    for one in left:
        for i, other in enumerate(rest):
            if (one.dtype, one.unit_bytes) == (other.dtype, other.unit_bytes) and (not same_op or one.op == other.op):
                both = min(one.count, other.count)
                pairs.append((one.times(both), other.times(both)))
                one, rest[i] = one.times(one.count - both), other.times(other.count - both)
        over.append(one)
    return [p for p in pairs if p[0].count], [k for k in over if k.count], [k for k in rest if k.count]


def _why_torch(kept: Kept) -> str:
    if kept.how == "region input":
        return REGION_INPUT
    if kept.dtype == "int64" and kept.op == "max_pool":
        return "the place of each maximum, 8 bytes; JAX finds it again in the input of pooling"
    if kept.how == "cached":
        return CACHED
    return _TORCH_SAVED.get(kept.op, UNEXPLAINED)


def _why_jax(kept: Kept, jax: Result, torch: Result) -> str:
    if kept.dtype == "bool" and kept.op == "relu":
        return "the mask of ReLU's derivative, one byte an element; PyTorch reads it off ReLU's output"
    if kept.op in _JAX:
        return _JAX[kept.op]
    if kept.how == "small":
        return SMALL
    if any(other.op == "compiled" for other in torch.kept):
        return COMPILED
    if kept.how == "border":
        return BORDER
    part = kept.path.partition("/")[0]
    outside = not part or part in OUTSIDE_BLOCKS[jax.cell.model]
    if kept.how == "chosen":
        return OUTSIDE if outside else WRITTEN_OUT if kept.op in _WRITTEN_OUT else UNEXPLAINED
    if jax.cell.policy == "nothing" and not outside:
        largest = max(other.unit_bytes for other in jax.kept)
        return SMALL if kept.unit_bytes * SMALL_FRACTION <= largest else UNEXPLAINED
    return _JAX_PLAIN.get(kept.op, UNEXPLAINED)
