"""Compiles programs for chips that are not attached, in a child process.

The compilers come as plugins that take lock files, write to standard error, and end the process on an internal error.
So they are loaded into a process of their own, one for each kind of chip, which sees no accelerator and serves the
compilations of this process one after another.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from functools import cache
from typing import Any

from jaxremat.errors import CompileError
from jaxremat.targets import Target

# XLA_FLAGS and LIBTPU_INIT_ARGS are left as they are: they change the programs of a real run, too.
_CHILD_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # so that no accelerator's backend starts
    "CUDA_VISIBLE_DEVICES": "",
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server is asked what this machine is
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no lock file: another process may hold the real chip
}
OPTIONS = {"gpu": {"xla_gpu_autotune_level": "0"}, "tpu": {}}  # autotuning wants the GPU itself
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
_MEMORY_WANTED = (  # used, available
    re.compile(rf"Used {_SIZE} of {_SIZE} \w+"),
    re.compile(rf"\({_SIZE}\) exceeds available \w+ \({_SIZE}\)"),
)


def compile_program(program: bytes, target: Target, peak_alone: bool = False) -> dict[str, Any]:
    """Returns the figures of a program compiled for a target that is not here (see `compiled.measure`).

    With `peak_alone` it returns those of `buffers.figures`, as soon as they are known; or all, where the compiler does not write
    them before it is done.

    Args:
        program: serialized StableHLO, lowered for the target's platform and partitioned over its chips.
        target: an available one, of kind "gpu" or "tpu".

    Raises:
        CompileError: the compiler refused the program, ran out of the target's memory, or crashed.
    """
    with tempfile.TemporaryDirectory(prefix="jaxremat-") if peak_alone else contextlib.nullcontext() as directory:
        request = {
            "kind": target.kind,
            "chips": target.chips,
            "specification": target.specification,
            "options": OPTIONS[target.kind],
            "size": len(program),
            "directory": directory,
        }
        answer = worker(target.kind).ask(request, program)
    if "error" in answer:
        raise compile_error(answer["error"], target.name)
    return answer


def compile_error(message: str, target_name: str) -> CompileError:
    """Returns a compiler's refusal as a `CompileError` of one line, with the memory that it wanted where it says so."""
    for pattern in _MEMORY_WANTED:
        if found := pattern.search(message):
            used, limit = (round(float(n) * _UNITS[unit]) for n, unit in (found.group(1, 2), found.group(3, 4)))
            return CompileError(
                f"cost: out of memory when compiling for {target_name}: the program wants {used / 2**30:.2f} GiB, and "
                f"{limit / 2**30:.2f} GiB can be used. Store less, or make the batch smaller.",
                wanted_bytes=used,
            )
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason given"]
    # Some begin with the name of the error alone.
    reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return CompileError(f"cost: the program does not compile for {target_name}: {_shortened(reason)}")


def _shortened(line: str, limit: int = 300) -> str:
    return line if len(line) <= limit else line[: limit - 1] + "…"


class Worker:
    """A child process that compiles for one kind of chip. It starts when it is first asked, and again after a crash."""

    def __init__(self, kind: str, command: tuple[str, ...] = (sys.executable, "-m", "jaxremat._compile_child")):
        self._kind = kind
        self._command = command
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._killed: subprocess.Popen[bytes] | None = None
        self._log = None

    def start(self) -> None:
        """Starts the process, if none runs, without waiting for it: it loads JAX while this one traces."""
        with self._lock:
            self._start()

    def ask(self, request: dict[str, Any], program: bytes) -> dict[str, Any]:
        """Sends one request and returns its answer.

        A process that was there before and ends without one may have been ending already: then a fresh one is asked.

        Raises:
            CompileError: the process ended without one.
        """
        with self._lock:
            before = self._process
            try:
                return self._answer(request, program)
            except CompileError:
                if before is None or before.poll() is None or self._killed is before:
                    raise
            return self._answer(request, program)

    def _answer(self, request: dict[str, Any], program: bytes) -> dict[str, Any]:
        process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request).encode() + b"\n" + program)
                process.stdin.flush()
                line = process.stdout.readline()
        except BaseException:
            self._stop()  # an answer that nobody waits for would be taken for the next one's
            raise
        if line.endswith(b"\n"):
            answer = json.loads(line)
            if answer.pop("has_ended", False):
                self._stop()
                self._start()  # for the next one: it loads JAX while this one searches
            return answer
        process.wait()
        code, last_words = process.returncode, self._last_words()
        self._stop()
        end = f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"
        raise CompileError(f"cost: the compiler process for {self._kind.upper()} targets {end}: {last_words}")

    def stop(self) -> None:
        """Ends the process, if one runs."""
        with self._lock:
            self._stop()

    def kill(self) -> None:
        """Ends the process at once, also while another thread waits for its answer, which then gets a `CompileError`."""
        process = self._killed = self._process
        if process is not None:
            process.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 (as long-lived as the process)
            path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**os.environ, **_CHILD_ENVIRONMENT, "PYTHONPATH": path},
            )
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if stream is not None:
                        stream.close()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _last_words(self) -> str:
        if self._log is None:
            return "no message"
        self._log.seek(0)
        lines = [s.strip() for s in self._log.read().decode(errors="replace").splitlines() if s.strip()]
        # A fatal line of the compilers' logs begins with F and the date; what follows it is a stack trace.
        fatal = [s for s in lines if re.match(r"F\d{4} |Fatal|.*Check failed", s)]
        return _shortened((fatal or lines or ["no message"])[-1])


def worker(kind: str) -> Worker:
    """Returns this process's worker for a kind of chip ("gpu", "tpu")."""
    return _worker(kind, os.getpid())  # a forked process must not share its parent's pipes


@cache
def _worker(kind: str, pid: int) -> Worker:
    made = Worker(kind)

    def stop() -> None:
        if os.getpid() == pid:  # a forked process that exits runs this, too
            made.kill()

    atexit.register(stop)
    return made
