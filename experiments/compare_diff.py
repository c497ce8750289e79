"""The stored sets of the two frameworks, layer by layer, to the last byte: equal, or a row that says why not.

Within a layer values of the same operation, type and size are paired first, then those of the same type and size. What is left
over stands in a row of its own. The rows' bytes add up to what each framework keeps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.compare_records import Framework, Kept, Result, gather

UNEXPLAINED = "not explained"
SMALL_BYTES = 16 * 1024  # of one value: statistics, scalars and the loss's own values

_WRITTEN = "JAX differentiates {} as it is written and keeps what its parts need"
# (framework, operation) of what has no partner -> why.
_EVERYTHING: dict[tuple[Framework, str], str] = {
    ("jax", "batch_norm"): _WRITTEN.format("batch norm") + "; PyTorch's kernel keeps its input (the convolution's row), mean and 1/std",
    ("jax", "layer_norm"): _WRITTEN.format("layer norm") + "; PyTorch's kernel keeps its input, mean and 1/std",
    ("jax", "gelu"): _WRITTEN.format("tanh-GELU") + ", five arrays; PyTorch's kernel keeps its input",
    ("jax", "attention"): _WRITTEN.format("attention") + "; PyTorch keeps contiguous copies and softmax's output",
    ("jax", "softmax"): _WRITTEN.format("softmax") + "; PyTorch's kernel keeps its output",
    ("torch", "conv"): "the input of batch norm or of an addition of positions, which PyTorch's next kernel keeps",
    ("torch", "batch_norm"): "mean and 1/std, or the input of the next convolution",
    ("torch", "layer_norm"): "its output is the input of the next products; and mean and 1/std",
    ("torch", "softmax"): "softmax's kernel keeps its output; in JAX it is among attention's values",
    ("torch", "gelu"): "its output is the input of the next product; in JAX it is among GELU's five",
    ("torch", "add"): "the input of the next norm, which PyTorch's kernel keeps; JAX keeps it centred",
    ("torch", "constant_pad_nd"): "a stride-2 convolution's input, padded at the far edge alone as Flax's SAME does: PyTorch has to copy it",
    ("torch", "clone"): "a contiguous copy for a batched product",
    ("torch", "_unsafe_view"): "contiguous copies for batched products",
}
_REGION = "the input of a checkpointed block or segment, which PyTorch keeps beside what the policy chose"
_OUTSIDE = "outside of the blocks, where PyTorch is not under the policy: autograd keeps what it needs"
_POLICY: dict[tuple[Framework, str], str] = {
    ("torch", "batch_norm"): "cached by selective checkpointing, or the region's input; jaxremat stores only what is read again",
    ("torch", "layer_norm"): "cached by selective checkpointing with mean and 1/std, or outside of the blocks",
    ("torch", "conv"): "cached by selective checkpointing, whether it is read again or not; or the input of a block",
    ("torch", "dot"): "cached by selective checkpointing, whether it is read again or not; or used at once in the last segment",
    ("torch", "gelu"): "cached by selective checkpointing, whether it is read again or not; or used at once in the last segment",
    ("torch", "softmax"): "cached by selective checkpointing, whether it is read again or not",
    ("torch", "relu"): _REGION + "; or its output, cached",
    ("torch", "add"): _REGION + "; or its sum, cached",
    ("torch", "dropout"): _REGION,
    ("torch", "max_pool"): _REGION + "; or its output, cached",
    ("torch", "mul"): _REGION,
    ("torch", "constant_pad_nd"): "a padded input in the last segment, which is not recomputed",
    ("torch", "_unsafe_view"): "contiguous copies in the last segment, which is not recomputed",
    ("torch", "clone"): "contiguous copies in the last segment, which is not recomputed",
}
_STORED = "stored as the policy says; PyTorch's stored set has no such value: its regions or kernels are cut elsewhere"
_ALWAYS: dict[tuple[Framework, str], str] = {
    ("torch", "mean"): "the input of the last product; JAX keeps it under another operation's name, or computes it again",
    ("torch", "_log_softmax"): "PyTorch's cross-entropy keeps log softmax and a weight; " + "JAX keeps the parts of log-sum-exp or computes them again",
    ("torch", "nll_loss_forward"): "the weight of the batch, one number",
    ("torch", "div_"): "PyTorch keeps dropout's mask as scaled float32; JAX as booleans, one byte an element",
    ("torch", "dropout"): "dropout's output is the input of what follows",
    ("torch", "compiled"): "values inside of the compiled program, which have no names any more",
    ("jax", "cross_entropy"): "the parts of cross-entropy; PyTorch's kernel keeps log softmax",
    ("jax", "logsumexp"): "the parts of cross-entropy; PyTorch's kernel keeps log softmax",
    ("jax", "dropout"): "dropout's mask as booleans, and its scaled output; PyTorch keeps the mask as float32",
}


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
    """Returns the rows for the results of one policy in the two frameworks."""
    ours = gather_layers(jax.kept)
    theirs = gather_layers(torch.kept)
    rows = list[Row]()
    for layer in dict.fromkeys(kept.path for kept in (*ours, *theirs)):
        left = [kept for kept in ours if kept.path == layer]
        right = [kept for kept in theirs if kept.path == layer]
        for same_op in (True, False):
            for one in tuple(left):
                other = next((k for k in right if _alike(one, k, same_op=same_op)), None)
                if other is not None:
                    rows.append(Row(layer, one, other, "equal"))
                    left.remove(one)
                    right.remove(other)
        rows += [Row(layer, one, None, why(jax, "jax", one)) for one in left]
        rows += [Row(layer, None, other, why(torch, "torch", other)) for other in right]
    return rows


def gather_layers(kept: Sequence[Kept]) -> list[Kept]:
    """Returns rows by layer. An einsum's own scope, such as `bqhd,bkhd->bhqk`, is no layer."""
    moved = [replace(k, path="/".join(part for part in k.path.split("/") if "->" not in part)) for k in kept]
    counted = gather((k.path, k.op, k.dtype, k.size_bytes) for k in moved)
    numbers = {(k.path, k.op, k.dtype): 0 for k in counted}
    for k in moved:
        numbers[k.path, k.op, k.dtype] += k.count
    return [replace(k, count=numbers[k.path, k.op, k.dtype]) for k in counted]


def why(result: Result, framework: Framework, kept: Kept) -> str:
    """Returns why the other framework keeps no such value."""
    if kept.dtype == "bool" and kept.op == "relu":
        return "the mask of ReLU's derivative, one byte an element; PyTorch reads it off ReLU's output"
    if kept.dtype == "int64" and kept.op == "max_pool":
        return "the place of each maximum, 8 bytes; JAX finds it again in the input of pooling"
    key = (framework, kept.op)
    if key in _ALWAYS:
        return _ALWAYS[key]
    if kept.size_bytes / kept.count <= SMALL_BYTES and framework == "jax":
        return "small: statistics, keys and scalars are always stored"
    table = _EVERYTHING if result.cell.policy == "everything" else _POLICY
    if key in table:
        return table[key]
    if framework == "jax" and result.cell.policy != "everything":
        return _STORED if kept.path.count("/") or kept.op in ("conv", "dot", "relu", "max_pool", "add", "gelu") else _OUTSIDE_JAX
    if framework == "jax" and kept.op in ("div", "mean", "reduce_sum"):
        return "the input of the last product, under another operation's name"
    return UNEXPLAINED


_OUTSIDE_JAX = "stored as the policy says, or outside of the blocks"


def _alike(one: Kept, other: Kept, *, same_op: bool) -> bool:
    return (one.dtype, one.size_bytes) == (other.dtype, other.size_bytes) and (not same_op or one.op == other.op)
