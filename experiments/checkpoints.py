"""Checkpoints of a run: saved atomically and in the background by Orbax, restored exactly or refused with the reason.

A checkpoint holds the training state, the configuration that it belongs to and the state's SHA-256. The data order and all
random numbers follow from seed and step, so the state is enough to resume exactly. Orbax writes into a temporary directory
and renames it when it is complete: a kill at any moment leaves the checkpoints before it as they were.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from experiments.errors import ExperimentError
from experiments.training import TrainState

KEPT = 2


class Checkpoints(Protocol):
    """Where a run saves its state."""

    active: bool

    def latest_step(self) -> int | None:
        """Returns the step of the newest complete checkpoint, or None."""
        ...

    def require_same_run(self) -> None:
        """Refuses checkpoints of another run."""
        ...

    def save(self, step: int, state: TrainState) -> None:
        """Saves in the background. The state must stay as it is: hand over a copy that no step will donate."""
        ...

    def restore(self, like: TrainState) -> TrainState | None:
        """Returns the newest checkpoint with the shapes and layouts of `like`, or None where there is none."""
        ...

    def wait(self) -> None:
        """Returns when all saves are complete."""
        ...

    def close(self) -> None:
        """Waits and lets go of the directory."""
        ...


class NoCheckpoints:
    """For runs without a checkpoint directory: there is nothing to restore and nowhere to save."""

    active = False

    def latest_step(self) -> int | None:
        """There is none."""
        return None

    def require_same_run(self) -> None:
        """There are no others."""

    def save(self, step: int, state: TrainState) -> None:
        """Saves nothing."""

    def restore(self, like: TrainState) -> TrainState | None:
        """There is none."""
        return None

    def wait(self) -> None:
        """There is nothing to wait for."""

    def close(self) -> None:
        """There is nothing to close."""


class OrbaxCheckpoints:
    """Checkpoints in a directory, the newest two of which are kept.

    Args:
        directory: created where missing.
        identity: the fields of the configuration that a run must share with its checkpoints.

    Raises:
        ExperimentError: the directory cannot be used, or what it holds cannot be restored into this run.
    """

    active = True

    def __init__(self, directory: str, identity: dict[str, Any]):
        # Orbax takes a second to import: only runs with checkpoints wait for it.
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self._directory = Path(directory).expanduser().absolute()
        self._identity = identity
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, create=True, cleanup_tmp_directories=True)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            _require_writable(self._directory)
            self._manager = ocp.CheckpointManager(self._directory, options=options)
        except OSError as error:
            raise ExperimentError(
                f"--checkpoint-dir must be a directory that can be written; {self._directory}: {error.strerror or error}."
            ) from error

    def latest_step(self) -> int | None:
        """Returns the step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState) -> None:
        """Saves in the background. The state must stay as it is: hand over a copy that no step will donate."""
        ocp = self._ocp
        about = {"identity": self._identity, "state_sha256": digest(state)}
        about["sha256"] = _digest_of_json(about)
        try:
            self._manager.save(
                step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(about))
            )
        except OSError as error:
            raise ExperimentError(
                f"The checkpoint of step {step} could not be written to {self._directory}: {error.strerror or error}. Free "
                "space or choose another --checkpoint-dir; earlier checkpoints are kept and the same command resumes."
            ) from error

    def restore(self, like: TrainState) -> TrainState | None:
        """Returns the newest checkpoint with the shapes and layouts of `like`, or None where there is none.

        Raises:
            ExperimentError: it is damaged.
        """
        ocp, step = self._ocp, self.latest_step()
        if step is None:
            return None
        expected = self._about(step)["state_sha256"]
        try:
            state = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))["state"]
        except Exception as error:  # Orbax and its storage raise many kinds for a damaged file
            raise self._damaged(step, error) from error
        if (arrived := digest(state)) != expected:
            raise self._damaged(
                step, ValueError(f"SHA-256 {arrived[:12]}… of the state where {expected[:12]}… was saved")
            )
        return state

    def wait(self) -> None:
        """Returns when all saves are complete."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and lets go of the directory."""
        self._manager.wait_until_finished()
        self._manager.close()

    def _about(self, step: int) -> dict[str, Any]:
        ocp = self._ocp
        try:
            about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
            if about.pop("sha256") != _digest_of_json(about):
                raise ValueError("its description was changed")
        except Exception as error:
            raise self._damaged(step, error) from error
        return about

    def require_same_run(self) -> None:
        """Refuses the newest checkpoint if it belongs to another configuration; cheap, and possible before compiling.

        Raises:
            ExperimentError: it does, or it is damaged.
        """
        step = self.latest_step()
        if step is None:
            return
        identity = self._about(step)["identity"]
        keys = sorted(identity.keys() | self._identity.keys())
        differ = [key for key in keys if identity.get(key) != self._identity.get(key)]
        if differ:
            table = "\n".join(
                f"  {key}: {identity.get(key)} in the checkpoint, {self._identity.get(key)} asked" for key in differ
            )
            raise ExperimentError(
                f"{self._directory} holds a checkpoint (step {step}) of another configuration:\n{table}\n"
                "Run with the checkpoint's values, or choose another --checkpoint-dir."
            )

    def _damaged(self, step: int, error: Exception) -> ExperimentError:
        earlier = [other for other in self._manager.all_steps() if other != step]
        then = f"resume from step {max(earlier)}" if earlier else "start again"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        return ExperimentError(
            f"The checkpoint {self._directory / str(step)} is damaged and cannot be restored ({reason}). "
            f"Delete that directory to {then}, or choose another --checkpoint-dir."
        )


def open_checkpoints(directory: str | None, identity: dict[str, Any]) -> Checkpoints:
    """Returns the checkpoints in `directory`, or none at all where it is None."""
    return NoCheckpoints() if directory is None else OrbaxCheckpoints(directory, identity)


def digest(tree: Any) -> str:
    """Returns the SHA-256 over the leaves of a tree of arrays, in tree order: equal digests mean equal bits.

    Example:
        >>> import jax.numpy as jnp
        >>> from experiments.checkpoints import digest
        >>> digest({"a": jnp.zeros(2)}) == digest({"a": jnp.zeros(2)})
        True
    """
    sha = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        # On several processes every one holds a whole copy in its own first device.
        sha.update(np.asarray(leaf.addressable_data(0)).tobytes())
    return sha.hexdigest()


def _digest_of_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _require_writable(directory: Path) -> None:
    probe = directory / ".writable"
    probe.touch()
    probe.unlink(missing_ok=True)
