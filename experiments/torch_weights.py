"""Weights, statistics and gradients of the four networks between Flax's trees and PyTorch's modules, in both directions."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from experiments.errors import ExperimentError
from experiments.torch_layers import BatchNorm
from experiments.torch_models import Network

Tree = dict[str, Any]
Kind = Literal["as it is", "conv", "dense", "dense on images"]


def load_flax(network: Network, params: Tree, batch_stats: Tree) -> None:
    """Gives a network the parameters and BatchNorm statistics of the Flax one.

    Args:
        network: of `torch_models.build`.
        params: Flax's tree `params`, of arrays.
        batch_stats: Flax's tree `batch_stats`, empty for models without.

    Raises:
        ExperimentError: the trees hold more, less or other shapes than the network.
    """
    theirs: dict[tuple[str, ...], Any] = {("params", *path): leaf for path, leaf in _leaves(params)}
    theirs |= {("batch_stats", *path): leaf for path, leaf in _leaves(batch_stats)}
    ours: dict[tuple[str, ...], tuple[torch.Tensor, Kind, tuple[int, int, int]]] = {
        path: (tensor, kind, shape) for path, tensor, kind, shape in _entries(network)
    }
    if differing := sorted("/".join(path) for path in theirs.keys() ^ ours.keys()):
        raise ExperimentError(
            f"The Flax variables must be those of the same model: they differ in {', '.join(differing[:5])}."
        )
    with torch.no_grad():
        for path, (tensor, kind, image) in ours.items():
            array = np.asarray(theirs[path], np.float32)
            if array.size != tensor.numel():
                raise ExperimentError(
                    f"{'/'.join(path)} must have {tensor.numel()} elements, as in PyTorch {tuple(tensor.shape)}; got {array.shape}."
                )
            tensor.copy_(torch.from_numpy(_to_torch(array, tensor, kind, image).copy()))


def to_flax(network: Network, like: Tree | None = None) -> tuple[Tree, Tree]:
    """Returns the network's parameters and BatchNorm statistics as Flax's trees `params` and `batch_stats` of numpy arrays.

    Args:
        network: of `torch_models.build`.
        like: Flax's `params`, for the shapes of the attention's weights; None gives them two axes.
    """
    return _export(network, lambda tensor: tensor.detach(), like)


def gradients_to_flax(network: Network, like: Tree | None = None) -> Tree:
    """Returns the gradients as a tree like Flax's `params`. Parameters without a gradient get zeros."""
    return _export(network, lambda t: torch.zeros_like(t) if t.grad is None else t.grad, like)[0]


def _export(network: Network, read: Any, like: Tree | None) -> tuple[Tree, Tree]:
    trees: dict[str, Tree] = {"params": {}, "batch_stats": {}}
    shapes = {} if like is None else {path: np.shape(leaf) for path, leaf in _leaves(like)}
    for (collection, *path), tensor, kind, image in _entries(network):
        array = _to_flax(read(tensor).float().cpu().numpy(), kind, image)
        if collection == "params" and tuple(path) in shapes:
            array = array.reshape(shapes[tuple(path)])
        node = trees[collection]
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = array.copy()
    return trees["params"], trees["batch_stats"]


def _entries(network: Network) -> Iterator[tuple[tuple[str, ...], torch.Tensor, Kind, tuple[int, int, int]]]:
    """Every tensor with its place in Flax's trees and the layout that it changes into."""
    for name, module in network.named_modules():
        path = tuple(name.split(".")) if name else ()
        image = network.flattened.get("/".join(path), (0, 0, 0))
        for kind_of, tensor in module.named_parameters(recurse=False):
            leaf, kind = _place(module, kind_of, bool(image[0]))
            yield ("params", *path, leaf), tensor, kind, image
        if isinstance(module, BatchNorm):
            yield ("batch_stats", *path, "mean"), module.mean, "as it is", image
            yield ("batch_stats", *path, "var"), module.var, "as it is", image


def _place(module: nn.Module, parameter: str, on_images: bool) -> tuple[str, Kind]:
    if parameter == "weight" and isinstance(module, nn.Conv2d):
        return "kernel", "conv"
    if parameter == "weight" and isinstance(module, nn.Linear):
        return "kernel", "dense on images" if on_images else "dense"
    if parameter == "weight":
        return "scale", "as it is"
    return parameter, "as it is"


def _to_torch(array: np.ndarray, tensor: torch.Tensor, kind: Kind, image: tuple[int, int, int]) -> np.ndarray:
    if kind == "conv":
        return array.transpose(3, 2, 0, 1)  # height, width, in, out -> out, in, height, width
    if kind == "dense":
        return array.reshape(tensor.shape[1], tensor.shape[0]).T
    if kind == "dense on images":
        channels, height, width = image
        return array.reshape(height, width, channels, -1).transpose(3, 2, 0, 1).reshape(tensor.shape)
    return array.reshape(tensor.shape)


def _to_flax(array: np.ndarray, kind: Kind, image: tuple[int, int, int]) -> np.ndarray:
    if kind == "conv":
        return array.transpose(2, 3, 1, 0)
    if kind == "dense":
        return array.T
    if kind == "dense on images":
        return array.reshape(-1, *image).transpose(2, 3, 1, 0).reshape(-1, array.shape[0])
    return array


def _leaves(tree: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value
