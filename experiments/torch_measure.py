"""What a PyTorch step keeps, recomputes and allocates: exact, from the tensors themselves.

Three counts, each of one step:

- *kept*: the storages that autograd's saved tensors, checkpointing's saved inputs and selective checkpointing's own cache
  hold between the forward and the backward pass. Two tensors of one storage count once; parameters, statistics and the
  batch itself are there anyway and do not count.
- *recomputed*: the operations that modules run during the backward pass.
- *peak*: on CPU the largest running sum of the allocator's events that the profiler records, on CUDA
  `max_memory_allocated`; both above what was allocated before the step.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from experiments.torch_models import Network
from experiments.torch_ops import LABELS, Listing, Modules
from experiments.torch_policies import Applied

How = Literal["saved", "cached", "region input"]
Loss = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Kept:
    """One storage that lives from the forward to the backward pass.

    Attributes:
        path: the module whose operation made it.
        op: that operation, by the field's name where there is one; `compiled` inside compiled programs.
        shape: of the tensor that was saved first.
        dtype: its type.
        size_bytes: of the storage.
        how: `saved` by autograd, `cached` by selective checkpointing, or the `region input` of a checkpoint.
    """

    path: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    how: How


class _Makers(TorchDispatchMode):
    """Remembers which module and operation last filled each storage."""

    def __init__(self, modules: Modules):
        super().__init__()
        self._modules = modules
        self.of = dict[int, tuple[str, str]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            operation = self._modules.operation(func)
            label: str = operation.label if operation else LABELS.get(func, str(func.overloadpacket.__name__))
            for tensor in _tensors(result):
                self.of[_address(tensor)] = (self._modules.path, label)
        return result


def kept(
    network: Network, applied: Applied, loss: Loss, images: torch.Tensor, given: Iterable[torch.Tensor] = ()
) -> list[Kept]:
    """Returns what one forward pass keeps for its backward pass, in the order in which it was saved.

    Args:
        network: the network, in training mode.
        applied: its forward pass under a policy.
        loss: logits to the loss.
        images: a batch of shape (batch, 3, 32, 32).
        given: other tensors that are there anyway, such as the labels.
    """
    there = {_address(t) for t in (*network.parameters(), *network.buffers(), images, *given)}
    found = dict[int, Kept]()
    held = list[torch.Tensor]()  # so that no address is used twice
    modules = Modules(network)
    makers = _Makers(modules)

    def note(tensor: torch.Tensor, how: How) -> None:
        address, size_bytes = _address(tensor), tensor.untyped_storage().nbytes()
        if address in there or not size_bytes:
            return
        held.append(tensor.detach())
        path, op = makers.of.get(address, ("", "compiled" if applied.compiled else "input"))
        if address not in found:
            found[address] = Kept(path, op, tuple(tensor.shape), _dtype(tensor), size_bytes, how)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        note(tensor, "saved")
        return tensor

    def cache(result: Any) -> None:
        for tensor in _tensors(result):
            note(tensor, "cached")

    applied.witness.cached = cache
    applied.witness.region_input = lambda tensor: note(tensor, "region input")
    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            if applied.compiled:
                value = loss(applied.forward(images))
            else:
                with makers:
                    value = loss(applied.forward(images))
        del value
    finally:
        applied.witness.cached = applied.witness.region_input = None
        modules.remove()
    return list(found.values())


def recomputed(network: Network, applied: Applied, loss: Loss, images: torch.Tensor) -> dict[str, int] | None:
    """Returns how often each operation runs again in the backward pass, or None for a compiled program.

    Gradients are left on the parameters, to be cleared by the caller.
    """
    if applied.compiled:
        return None
    modules = Modules(network)
    try:
        value = loss(applied.forward(images))
        with Listing(modules) as listing:
            value.backward()
    finally:
        modules.remove()
    return listing.counts()


def peak_bytes(step: Callable[[], Any], device: torch.device) -> int:
    """Returns the most that `step` has allocated at any time, above what was allocated before it."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _without_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    # The trace alone lists every event of the allocator; `profiler.events()` folds most of them into operations.
    with TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    return max(0, *accumulate(event["args"]["Bytes"] for event in events)) if events else 0


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Silences the profiler's own chatter, which it writes past Python to the file descriptor."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
