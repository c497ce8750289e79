"""The loop of a run: epochs of steps, each followed by evaluation, with checkpoints and progress on the way."""

import time
from collections import deque
from dataclasses import dataclass, field

import jax
import numpy as np

from experiments.augment import epoch_order
from experiments.checkpoints import Checkpoints
from experiments.config import Config
from experiments.devices import Devices
from experiments.errors import ExperimentError
from experiments.program import Program
from experiments.progress import Display
from experiments.training import TrainState

SAVE_EVERY_STEPS = 500  # and at the end of each epoch
STEPS_IN_FLIGHT = 2  # enough that the device never waits for the host, few enough that step times can be told
WARM_UP_STEPS = 3  # not timed


@dataclass
class History:
    """What a run went through. Losses are those of the steps that this process did, from `first_step` on."""

    first_step: int
    losses: list[float] = field(default_factory=list)
    test_accuracies: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)

    @property
    def median_step_seconds(self) -> float | None:
        """The median time between the ends of two steps in a row, or None where none was timed."""
        return float(np.median(self.step_seconds)) if self.step_seconds else None


def last_step(config: Config, program: Program) -> int:
    """Returns the number of steps after which the run ends."""
    steps = config.epochs * program.steps_per_epoch
    return steps if config.max_steps is None else min(steps, config.max_steps)


def run(
    config: Config, program: Program, devices: Devices, state: TrainState, checkpoints: Checkpoints, display: Display
) -> tuple[TrainState, History]:
    """Trains from `state` to the end and returns the final state and what happened.

    Args:
        config: the run.
        program: its compiled functions.
        devices: where they run.
        state: initial or restored; it is donated to the first step.
        checkpoints: where states are saved at each epoch's end and every `SAVE_EVERY_STEPS` steps.
        display: where progress is shown.

    Raises:
        ExperimentError: the loss became infinite or NaN. The last checkpoint saved before is kept.
    """
    first, end, per_epoch = int(state.step), last_step(config, program), program.steps_per_epoch
    history = History(first)
    if first >= end:
        if first > end:
            raise ExperimentError(
                f"--max-steps {end} lies before the checkpoint of step {first}: raise it, or choose another --checkpoint-dir."
            )
        return state, history
    with display:
        for epoch in range(first // per_epoch, -(-end // per_epoch)):
            begun = time.perf_counter()
            start, stop = max(first, epoch * per_epoch), min(end, (epoch + 1) * per_epoch)
            order = epoch_order(config.seed, epoch, program.training.labels.shape[0])[: per_epoch * config.batch_size]
            order = devices.replicate(np.asarray(order, np.int32).reshape(per_epoch, config.batch_size))
            state, losses = run_steps(config, program, state, order, range(start, stop), checkpoints, display, history)
            losses = [float(loss) for loss in jax.device_get(losses)]
            _require_sound(program, state, checkpoints)
            history.losses += losses
            history.test_accuracies.append(evaluate(program, state))
            checkpoints.save(stop, program.copy(state))
            display.epoch(epoch + 1, float(np.mean(losses)), history.test_accuracies[-1], time.perf_counter() - begun)
    return state, history


def run_steps(
    config: Config,
    program: Program,
    state: TrainState,
    order: jax.Array,
    steps: range,
    checkpoints: Checkpoints,
    display: Display,
    history: History,
) -> tuple[TrainState, list[jax.Array]]:
    """Does the steps with the numbers `steps`, from 0 and of one epoch, at most `STEPS_IN_FLIGHT` ahead of the device.

    Returns the new state and the steps' losses, which may still be on their way. Step times go to `history`.
    """
    losses, in_flight = list[jax.Array](), deque[jax.Array]()
    ended_at = time.perf_counter()
    for done in range(steps.start + 1, steps.stop + 1):
        state, loss = program.step(state, program.training, order)
        losses.append(loss)
        in_flight.append(loss)
        if len(in_flight) > STEPS_IN_FLIGHT:
            ended = in_flight.popleft().block_until_ready()
            now = time.perf_counter()
            if len(losses) > WARM_UP_STEPS + STEPS_IN_FLIGHT:
                history.step_seconds.append(now - ended_at)
            if display.wants_loss():
                epoch = (done - 1) // program.steps_per_epoch + 1
                display.step(done - STEPS_IN_FLIGHT, epoch, float(ended))
            ended_at = now
        if done % SAVE_EVERY_STEPS == 0 and done < steps.stop and checkpoints.active:
            _require_sound(program, state, checkpoints)
            checkpoints.save(done, program.copy(state))
            ended_at = time.perf_counter()
    return state, losses


def evaluate(program: Program, state: TrainState) -> float:
    """Returns the fraction of test images that the state classifies rightly."""
    images = program.test.labels.shape[0]
    starts = range(0, images, program.test_batch)
    counts = [program.count_correct(state.params, state.batch_stats, program.test, np.int32(start)) for start in starts]
    return sum(int(count) for count in counts) / images


def _require_sound(program: Program, state: TrainState, checkpoints: Checkpoints) -> None:
    if bool(program.sound(state)):
        return
    step = int(state.diverged_at)
    what = (
        f"the loss became infinite or NaN at step {step}"
        if step
        else f"a parameter is not finite at step {int(state.step)}"
    )
    checkpoints.wait()
    kept = checkpoints.latest_step()
    last = "No checkpoint was saved." if kept is None else f"The checkpoint of step {kept} is kept."
    raise ExperimentError(f"Training stopped: {what}. {last} Lower --learning-rate, or use --precision float32.")
