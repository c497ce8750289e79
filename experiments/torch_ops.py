"""What PyTorch computes, by the names of the field: operations, the modules that run them, and one trial run that lists them.

An operation is recognised by its resolved overload (`aten.mm.default`): the packet `aten.mm` equals no overload, and a policy
that holds one silently matches nothing.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.torch_layers import BatchNorm
from experiments.torch_models import Network

aten = torch.ops.aten
# Overload -> the field's name. What is not here (views, copies, padding, random numbers) is never a choice of a policy.
LABELS: dict[Any, str] = {
    aten.convolution.default: "conv",
    aten.mm.default: "dot",
    aten.addmm.default: "dot",
    aten.bmm.default: "dot",
    aten.baddbmm.default: "dot",
    aten.relu.default: "relu",
    aten.clamp_min.default: "relu",
    aten.gelu.default: "gelu",
    aten._softmax.default: "softmax",
    aten.native_batch_norm.default: "batch_norm",
    aten.native_layer_norm.default: "layer_norm",
    aten.max_pool2d_with_indices.default: "max_pool",
    aten.add.Tensor: "add",
    aten.mul.Tensor: "mul",
    aten.mean.dim: "mean",
}
BATCHED_DOTS = (aten.bmm.default, aten.baddbmm.default)
OPS = (*dict.fromkeys(LABELS.values()), "dropout")


@dataclass(frozen=True)
class Operation:
    """One operation of a forward pass.

    Attributes:
        label: the field's name.
        path: the module that runs it, `stage1_block1/conv1`.
        name: the module's tag, or an empty string.
        batched: whether it is a product of stacks of matrices.
    """

    label: str
    path: str
    name: str
    batched: bool


class Modules:
    """The stack of modules that are running, kept by hooks on every module of a network; `remove` takes them off."""

    def __init__(self, network: nn.Module):
        self._running = list[tuple[str, nn.Module]]()
        self._hooks = list[Any]()
        for dotted, module in network.named_modules():
            if dotted:
                path = dotted.replace(".", "/")
                self._hooks.append(module.register_forward_pre_hook(self._entering(path)))
                # always_call: a recomputation stops with an exception as soon as it has what it needs.
                self._hooks.append(module.register_forward_hook(self._leaving, always_call=True))

    def _entering(self, path: str) -> Callable[..., None]:
        def enter(module: nn.Module, _: Any) -> None:
            self._running.append((path, module))

        return enter

    def _leaving(self, *_: Any) -> None:
        self._running.pop()

    @property
    def path(self) -> str:
        """The innermost running module's path, or an empty string."""
        return self._running[-1][0] if self._running else ""

    def operation(self, func: Any) -> Operation | None:
        """Returns what `func` is inside the running modules, or None for what no policy chooses."""
        label = LABELS.get(func)
        module = self._running[-1][1] if self._running else None
        if isinstance(module, nn.Dropout):
            label = "dropout" if label == "mul" else None
        if label is None:
            return None
        return Operation(label, self.path, getattr(module, "remat_name", ""), func in BATCHED_DOTS)

    def remove(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class Listing(TorchDispatchMode):
    """Gathers the operations that run inside modules, forward passes and recomputations alike."""

    def __init__(self, modules: Modules):
        super().__init__()
        self._modules = modules
        self.operations = list[Operation]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = self._modules.operation(func) if self._modules.path else None
        if operation is not None:
            self.operations.append(operation)
        return func(*args, **(kwargs or {}))

    def counts(self) -> dict[str, int]:
        """Returns how often each label ran."""
        return dict(Counter(operation.label for operation in self.operations))


def list_operations(network: Network) -> list[Operation]:
    """Returns the operations of one forward pass in training, from a trial with two black images.

    The trial leaves no trace: no random number is drawn from the caller's stream and no statistic is put aside.
    """
    modules, training = Modules(network), network.training
    try:
        network.train()
        first = next(network.parameters())
        with torch.random.fork_rng(), Listing(modules) as listing:
            network(torch.zeros(2, 3, 32, 32, device=first.device))
    finally:
        network.train(training)
        modules.remove()
        for module in network.modules():
            if isinstance(module, BatchNorm):
                module.batch_mean = module.batch_inverse_std = None
    return listing.operations
