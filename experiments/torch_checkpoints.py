"""Checkpoints of the PyTorch mirror: one file, replaced whole after each epoch, that belongs to one run."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from experiments.errors import ExperimentError
from experiments.torch_models import Network

FILE = "torch.pt"


class TorchCheckpoint:
    """A run's checkpoint, or none where no directory was asked for."""

    def __init__(self, directory: str | None, identity: dict[str, Any]):
        self._path = None if directory is None else Path(directory).expanduser() / FILE
        self._identity = identity
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ExperimentError(
                    f"--checkpoint-dir must be a directory that can be written; {directory}: {error.strerror or error}."
                ) from None

    def restore(self, network: Network, optimizer: torch.optim.SGD) -> int:
        """Restores what was saved and returns the number of steps done: 0 where nothing was.

        Raises:
            ExperimentError: the file is damaged, or of another run.
        """
        if self._path is None or not self._path.exists():
            return 0
        try:
            saved = torch.load(self._path, weights_only=True)
            identity = json.loads(saved["identity"])
            differing = [key for key, value in self._identity.items() if identity.get(key) != value]
            if not differing:
                network.load_state_dict(saved["network"])
                optimizer.load_state_dict(saved["optimizer"])
            step = int(saved["step"])
        except Exception as error:  # unpickling a damaged file raises anything
            raise ExperimentError(
                f"{self._path} must be a checkpoint of this command, and cannot be read ({type(error).__name__}): delete it, or "
                "choose another --checkpoint-dir."
            ) from None
        if differing:
            told = ", ".join(
                f"{key} {identity.get(key)!r} there, {self._identity[key]!r} asked for" for key in differing
            )
            raise ExperimentError(
                f"--checkpoint-dir holds another run: {told}. Choose another directory, or the same flags."
            )
        return step

    def save(self, step: int, network: Network, optimizer: torch.optim.SGD) -> None:
        """Saves the state after `step` steps; a crash leaves the earlier file whole."""
        if self._path is None:
            return
        state = {
            "identity": json.dumps(self._identity),
            "step": step,
            "network": network.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        partial = self._path.with_suffix(".part")
        torch.save(state, partial)
        os.replace(partial, self._path)
