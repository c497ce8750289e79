"""What a training run is asked to do: one frozen value, read from the command line."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import jaxremat
from experiments.errors import ExperimentError
from experiments.models import ModelName
from experiments.operations import OpsName
from experiments.policies import split_policies
from jaxremat.policy import Budget

# Fields that decide the run's parameters, or what its record says of them: a checkpoint belongs to one choice of them.
# The rest may change between a run and its resumption.
IDENTITY = (
    "model", "ops", "policy", "regions", "epochs", "batch_size", "learning_rate", "precision", "seed",
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Train a network on CIFAR-10 under a rematerialization policy and say what that keeps and costs."""

    policy: str = "everything"
    """What the backward pass finds stored, for example everything, nothing, dots, names:conv_out, ops:conv=store,*=recompute
    or segments:sqrt; or what a step may take, which is planned first: budget:4GiB, budget:60% of the peak without
    rematerialization, or budget:fits. An unknown spelling prints the grammar. Several, with commas, with --dry-run."""
    model: ModelName = "net"
    """The network; experiments/models.py lists its modules and tags."""
    ops: OpsName = "standard"
    """standard: the operations of JAX and Flax; lean: jaxremat's, with the same weights and values, that keep less."""
    epochs: int = 10
    """Passes over the training images."""
    batch_size: int = 128
    """Images per step, over all devices together. Images that do not fill a last batch wait for the next epoch."""
    learning_rate: float = 0.05
    """Peak of the schedule: linear warm-up over 5 % of the steps, then a cosine to zero."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type of the computation. Parameters, norms' statistics and the loss stay float32."""
    seed: int = 0
    """Decides initial weights, data order, augmentation and dropout."""
    data: Literal["auto", "cifar10", "sample"] = "auto"
    """auto: the full set where it is or can be downloaded, else the embedded sample; cifar10: the full set or an error."""
    data_dir: str | None = None
    """Where the full set is or shall be kept."""
    regions: Literal["auto", "net", "block"] = "auto"
    """Apply the policy to the whole loss function (net) or to each block (block). auto: block for `nothing`, else net."""
    checkpoint_dir: str | None = None
    """Save here, and resume from here when the same command is given again."""
    out: str | None = None
    """Append the record, one line of JSON, to this file."""
    max_steps: int | None = None
    """Stop after so many steps of the schedule that the epochs define."""
    coordinator: str | None = None
    """Train in several processes: HOST:PORT of process 0, or auto to let JAX detect the cluster (Slurm, MPI, TPU pods)."""
    num_processes: int | None = None
    """Number of processes, with --coordinator HOST:PORT."""
    process_id: int | None = None
    """This process's number from 0, with --coordinator HOST:PORT."""

    def identity(self) -> dict[str, Any]:
        """Returns the fields that a checkpoint must share with the run that resumes from it, policies in one spelling."""
        fields = {key: getattr(self, key) for key in IDENTITY}
        return fields | {"policy": str(jaxremat.parse(self.policy))}

    def as_json(self) -> dict[str, Any]:
        """Returns all fields, ready for `json.dumps`."""
        return dataclasses.asdict(self)


def check(config: Config) -> None:
    """Refuses values that no run can have; what depends on data and devices is checked where those are known.

    Raises:
        ExperimentError: a number out of range, or an incomplete description of several processes.
        PolicyError: the policy is not a spelling of one.
    """
    several = split_policies(config.policy)
    if len(several) > 1:
        raise ExperimentError(
            f"--policy takes one policy to train with, and several only with --dry-run; got {len(several)}: "
            f"{' and '.join(map(str, several))}."
        )
    policy = jaxremat.parse(config.policy)
    if isinstance(policy, Budget) and config.regions == "block":
        raise ExperimentError(
            f"A budget is planned for the whole loss: use --regions net or auto; got block for {policy}."
        )
    for field, least in (("epochs", 1), ("batch_size", 1), ("seed", 0)):
        if getattr(config, field) < least:
            raise ExperimentError(f"--{_flag(field)} must be at least {least}; got {getattr(config, field)}.")
    if config.seed >= 2**32:
        raise ExperimentError(f"--seed must be below 2**32; got {config.seed}.")
    if not (math.isfinite(config.learning_rate) and config.learning_rate > 0):
        raise ExperimentError(f"--learning-rate must be a positive number; got {config.learning_rate}.")
    if config.max_steps is not None and config.max_steps < 1:
        raise ExperimentError(f"--max-steps must be at least 1; got {config.max_steps}.")
    _check_processes(config)


def check_filled(batch_size: int, training_images: int) -> None:
    """Refuses a batch that so many images cannot fill.

    Raises:
        ExperimentError: the batch is larger.
    """
    if batch_size > training_images:
        raise ExperimentError(
            f"--batch-size must be at most the number of training images, {training_images}; got {batch_size}."
        )


def _check_processes(config: Config) -> None:
    count, index = config.num_processes, config.process_id
    if config.coordinator is not None and isinstance(jaxremat.parse(config.policy), Budget):
        raise ExperimentError(
            f"A budget is planned in one process; got --coordinator {config.coordinator}. Plan with --dry-run and the "
            "--target of all chips, and train with the policy that it found (`resolved` in its JSON) and --regions net."
        )
    if config.coordinator in (None, "auto"):
        if count is not None or index is not None:
            raise ExperimentError(
                "--num-processes and --process-id need --coordinator HOST:PORT, the address of process 0; got "
                f"--coordinator {config.coordinator}."
            )
        return
    host, colon, port = config.coordinator.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise ExperimentError(
            f"--coordinator must be HOST:PORT, such as 10.0.0.1:1234, or auto; got {config.coordinator!r}."
        )
    if count is None or index is None or not 0 <= index < count:
        raise ExperimentError(
            "--coordinator HOST:PORT needs --num-processes N and --process-id from 0 to N-1; got "
            f"--num-processes {count} --process-id {index}."
        )


def _flag(field: str) -> str:
    return field.replace("_", "-")
