"""Devices and processes: who takes part in a run, and how arrays are laid out over them."""

import os
import platform
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import jaxremat
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
    """Returns the devices of all processes. The axis is automatic: the compiler divides the work along it.

    It starts JAX's backends, where they are not yet, and before that forbids fused multiply-adds.
    """
    forbid_fused_multiply_add()
    return Devices(Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,)))


def forbid_fused_multiply_add() -> None:
    """Forbids XLA:CPU fused multiply-adds on x86, unless `XLA_FLAGS` says otherwise; before JAX's backends start, or in vain.

    XLA contracts a product and a sum in one fusion into one rounding, and what is fused with what depends on the policy;
    without it all policies train a network of ReLUs to the same bits. Only the environment has that say: as an option of
    `jax.jit` it is accepted and does nothing.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if platform.machine() in ("x86_64", "AMD64") and "--xla_cpu_max_isa" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_max_isa=AVX".strip()


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


def devices_of(target: jaxremat.Target) -> Devices:
    """Returns the devices that a program for a target is laid out over: those that are here, or so many absent ones."""
    return all_devices() if target.kind == "local" else absent_devices(target.chips)


def check_batch_on(target: jaxremat.Target, batch_size: int, training_images: int) -> None:
    """Refuses a batch that cannot be divided over a target's chips, or filled.

    Raises:
        ExperimentError: it names the target.
    """
    try:
        check_batch(batch_size, devices_of(target), training_images)
    except ExperimentError as error:
        raise ExperimentError(f"--target {target.name}: {error}") from None


def why_missing(target: jaxremat.Target) -> str:
    """Returns the message for a target that is not available, with what to install."""
    return f"nothing here compiles for {target.name}. Needed: {target.remedy}"


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
