"""Runs the matrix of the comparison: each cell in its own process, timed in turns with the others of its model and framework.

The processes of one model and framework are prepared one after another and stay; then all are timed in rounds, one after
another in each round, so that a slow minute of the machine falls on all of them; then each trains and ends.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from experiments import records
from experiments.compare_records import Cell, Result, from_json, hardware

WARM_UP_STEPS = 1


class CellFailed(Exception):
    """The process of a cell broke: the message is the last thing it said."""


class Worker:
    """The process of one cell."""

    def __init__(self, cell: Cell, data_dir: str | None):
        self.cell = cell
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        spec = json.dumps({"cell": vars(cell), "data_dir": data_dir})
        # Waiting threads that spin would take the cores from the process that is being timed.
        environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
        self._process = subprocess.Popen(
            [sys.executable, "-m", "experiments.compare_cell", spec],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            env=environment,
        )

    def answer(self, command: str | None = None) -> dict[str, Any]:
        """Sends a command, if one is given, and returns the answer.

        Raises:
            CellFailed: the process ended without one.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if command is not None:
                self._process.stdin.write(command + "\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        try:
            return json.loads(line)
        except ValueError:
            self._process.kill()
            raise CellFailed(self._last_words()) from None

    def _last_words(self) -> str:
        status = self._process.wait()
        self._complaints.seek(0)
        lines = [line.strip() for line in self._complaints.read().decode(errors="replace").splitlines() if line.strip()]
        ended = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        return f"{lines[-1][:400]} ({ended})" if lines else f"it said nothing ({ended})"

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._complaints):
            if pipe is not None:
                pipe.close()


@dataclass(frozen=True)
class Timing:
    """How cells are timed: `rounds` rounds of `steps` steps each."""

    rounds: int
    steps: int


def run_group(
    cells: Sequence[Cell],
    data_dir: str | None,
    timing: Timing,
    *,
    done: Callable[[Result], None],
    say: Callable[[str], None],
) -> None:
    """Runs cells of one model and framework and hands each result to `done` as soon as it is there.

    Args:
        cells: which share model and framework.
        data_dir: where the full data set lies, or None.
        timing: rounds and steps.
        done: is told of every cell's result, also of one that was refused or failed.
        say: is told what is going on.
    """
    workers = list[Worker]()

    def fail(worker: Worker, error: CellFailed) -> None:
        if worker in workers:
            workers.remove(worker)
        worker.close()
        done(Result(worker.cell, "failed", why=str(error), date=records.now(), hardware=hardware()))

    try:
        for cell in cells:
            say(f"{cell.framework} {cell.model} {cell.policy}: preparing")
            worker = Worker(cell, data_dir)
            workers.append(worker)
            try:
                answer = worker.answer()
                if "result" in answer:
                    workers.remove(worker)
                    worker.close()
                    done(from_json(answer["result"]))
                else:
                    worker.answer(f"warm {WARM_UP_STEPS}")
            except CellFailed as error:
                fail(worker, error)
        for number in range(timing.rounds):
            for worker in tuple(workers):
                say(f"{worker.cell.framework} {worker.cell.model}: timing, round {number + 1} of {timing.rounds}")
                try:
                    worker.answer(f"time {timing.steps}")
                except CellFailed as error:
                    fail(worker, error)
        for worker in tuple(workers):
            say(f"{worker.cell.framework} {worker.cell.model} {worker.cell.policy}: training")
            try:
                result = from_json(worker.answer("finish")["result"])
            except CellFailed as error:
                fail(worker, error)
            else:
                workers.remove(worker)
                worker.close()
                done(result)
    finally:
        for worker in workers:
            worker.close()
