"""Devices and processes: who takes part in a run, and how arrays are laid out over them."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.config import Config, check_filled
from experiments.errors import ExperimentError


@dataclass(frozen=True)
class Devices:
    """All devices of all processes, in one mesh with the axis `data`; an abstract mesh stands for devices that are not here.

    `whole` lays an array out as a copy on every device, `split` divides its first axis over them.
    """

    mesh: Mesh | AbstractMesh

    @property
    def count(self) -> int:
        """Number of devices, of all processes together."""
        return self.mesh.size

    @property
    def whole(self) -> NamedSharding:
        """The layout of parameters and of the data set."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def split(self) -> NamedSharding:
        """The layout of a batch."""
        return NamedSharding(self.mesh, PartitionSpec("data"))

    def replicate(self, array: np.ndarray) -> jax.Array:
        """Returns a host array, the same in every process, as a copy on each device."""
        return jax.make_array_from_callback(array.shape, self.whole, lambda index: array[index])


def join_processes(config: Config) -> None:
    """Joins the other processes of the run, if it has any. Must come before JAX touches a device.

    Detection is asked for with `--coordinator auto` and never guessed: a shell inside a Slurm job looks like a cluster, and
    a run there would wait for processes that nobody started.

    Raises:
        ExperimentError: no cluster was found, or the processes did not meet.
    """
    if config.coordinator is None:
        return
    try:
        if config.coordinator == "auto":
            jax.distributed.initialize()
        else:
            jax.distributed.initialize(config.coordinator, config.num_processes, config.process_id)
    except (ValueError, RuntimeError) as error:
        raise ExperimentError(
            f"--coordinator {config.coordinator}: the processes could not be joined ({_first_line(error)}). Start every process "
            "with the same --coordinator HOST:PORT and --num-processes and its own --process-id, or use auto inside a "
            "cluster that JAX knows."
        ) from error


def all_devices() -> Devices:
    """Returns the devices of all processes. The axis is automatic: the compiler divides the work along it."""
    return Devices(Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,)))


def absent_devices(count: int) -> Devices:
    """Returns so many devices that are not here, laid out as `all_devices` does, for programs that are only compiled."""
    return Devices(AbstractMesh((count,), ("data",), axis_types=(AxisType.Auto,)))


def check_batch(batch_size: int, devices: Devices, training_images: int) -> None:
    """Refuses a batch that cannot be divided or filled.

    Raises:
        ExperimentError: the batch is no multiple of the devices, or larger than the training set.
    """
    if batch_size % devices.count:
        lower = batch_size // devices.count * devices.count
        nearest = [n for n in (lower, lower + devices.count) if n]
        raise ExperimentError(
            f"--batch-size must be a multiple of the {devices.count} devices; got {batch_size}. "
            f"Near it: {' or '.join(map(str, nearest))}."
        )
    check_filled(batch_size, training_images)


def describe_devices(devices: Devices) -> dict[str, Any]:
    """Returns platform, kind and numbers of devices and processes, ready for `json.dumps`."""
    first = jax.devices()[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "devices": devices.count,
        "processes": jax.process_count(),
    }


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
