"""The networks on which planners are measured, each a function of its sizes that returns a `Net`.

    net.py           what a `Net` is: blocks, and how wrappers get round them
    modules.py       blocks from Flax modules
    sizes.py         what sizes must be
    chain.py         the engine's chain of convolutions
    residual.py      resnet18 and wrn16_4 for CIFAR-10, resnet50
    vgg.py           vgg16
    densenet.py      DenseNet-BC-100 for CIFAR-10
    unet.py          U-Net
    transformer.py   plain ViT-S/16, GPT-2 small unrolled and scanned over its layers
    recurrent.py     an LSTM by scan

`NETS` holds them at the sizes of the benchmark, and `RELU_NETS` names those whose only nonlinearities, beside norms, pooling
and the loss, are ReLUs: gradients are there the same bits whatever is recomputed. Making one computes nothing: its arguments
are shapes. Sizes that do not fit each other raise an `ExperimentError`.
"""

from collections.abc import Callable
from functools import partial

from experiments.bench.nets.chain import chain
from experiments.bench.nets.densenet import densenet_bc
from experiments.bench.nets.net import Block, Loop, Net
from experiments.bench.nets.recurrent import lstm
from experiments.bench.nets.residual import resnet18, resnet50, wrn16_4
from experiments.bench.nets.transformer import gpt2, vit
from experiments.bench.nets.unet import unet
from experiments.bench.nets.vgg import vgg16

NETS: dict[str, Callable[[], Net]] = {
    "chain16": partial(chain, 16),
    "chain64": partial(chain, 64),
    "resnet18": resnet18,
    "wrn16_4": wrn16_4,
    "resnet50": resnet50,
    "vgg16": vgg16,
    "unet": unet,
    "densenet100": densenet_bc,
    "vit_s16": vit,
    "gpt2": gpt2,
    "gpt2_scanned": partial(gpt2, scanned=True),
    "lstm": lstm,
}
RELU_NETS = frozenset(("chain16", "chain64", "resnet18", "wrn16_4", "resnet50", "vgg16", "unet", "densenet100"))

__all__ = [
    "NETS",
    "RELU_NETS",
    "Block",
    "Loop",
    "Net",
    "chain",
    "densenet_bc",
    "gpt2",
    "lstm",
    "resnet18",
    "resnet50",
    "unet",
    "vgg16",
    "vit",
    "wrn16_4",
]
