"""What a run shows while it trains: a bar on a terminal, plain lines elsewhere, on standard error."""

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

BAR_SECONDS = 0.25
LINE_SECONDS = 30.0


class Display(Protocol):
    """Where a run's progress goes. It is told often and shows when it sees fit."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def wants_loss(self) -> bool:
        """Says whether it is time to show a step; reading a loss from the device for nothing costs time."""
        ...

    def step(self, done: int, epoch: int, loss: float) -> None:
        """Shows that `done` steps of the run are done, and the loss of the last of them."""
        ...

    def epoch(self, epoch: int, train_loss: float, test_accuracy: float, epoch_seconds: float) -> None:
        """Shows the result of an epoch, counted from 1."""
        ...


class Silent:
    """Shows nothing: for all processes but the first, and for tests."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def wants_loss(self) -> bool:
        """Never."""
        return False

    def step(self, done: int, epoch: int, loss: float) -> None:
        """Shows nothing."""

    def epoch(self, epoch: int, train_loss: float, test_accuracy: float, epoch_seconds: float) -> None:
        """Shows nothing."""


@dataclass(frozen=True)
class Extent:
    """How far a run goes: `first_step` steps are done already out of `steps`."""

    epochs: int
    steps: int
    first_step: int
    batch_size: int


class Lines(Silent):
    """Plain lines, for log files and pipes: one for each epoch and, in long epochs, one every half a minute."""

    def __init__(self, console: Console, extent: Extent):
        self._console, self._extent = console, extent
        self._done, self._shown_at = extent.first_step, time.perf_counter()

    def wants_loss(self) -> bool:
        """Every half a minute."""
        return time.perf_counter() - self._shown_at >= LINE_SECONDS

    def step(self, done: int, epoch: int, loss: float) -> None:
        """Prints a line with the loss, images per second and time left."""
        speed = self._measure(done)
        extent = self._extent
        left = (extent.steps - done) * extent.batch_size / speed
        self._print(
            f"epoch {epoch}/{extent.epochs}  step {done}/{extent.steps}  loss {loss:.4f}  {speed:,.0f} images/s  {left:.0f} s left"
        )

    def epoch(self, epoch: int, train_loss: float, test_accuracy: float, epoch_seconds: float) -> None:
        """Prints the epoch's line."""
        self._print(
            f"epoch {epoch}/{self._extent.epochs}  loss {train_loss:.4f}  test accuracy {test_accuracy:.2%}  {epoch_seconds:.1f} s"
        )

    def _measure(self, done: int) -> float:
        """Returns the images per second since the last time that a step was shown."""
        now = time.perf_counter()
        speed = (done - self._done) * self._extent.batch_size / (now - self._shown_at)
        self._done, self._shown_at = done, now
        return max(speed, 1e-9)

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


class Bar(Lines):
    """A bar with the epoch, loss, images per second and time left, and above it a line for each epoch."""

    def __init__(self, console: Console, extent: Extent):
        super().__init__(console, extent)
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}/" + str(extent.epochs)),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} images/s"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            auto_refresh=False,
        )
        self._task = self._progress.add_task(
            "train", total=extent.steps, completed=extent.first_step, epoch="-", loss="-", speed="-"
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def wants_loss(self) -> bool:
        """Four times a second."""
        return time.perf_counter() - self._shown_at >= BAR_SECONDS

    def step(self, done: int, epoch: int, loss: float) -> None:
        """Moves the bar."""
        speed = self._measure(done)
        self._progress.update(
            self._task, completed=done, refresh=True, epoch=epoch, loss=f"{loss:.4f}", speed=f"{speed:,.0f}"
        )


def choose_display(console: Console, extent: Extent) -> Display:
    """Returns a bar if `console` is a terminal, else plain lines."""
    return Bar(console, extent) if console.is_terminal else Lines(console, extent)
