"""The process that compiles for chips which are not here: `python -m jaxremat._compile_child`.

It reads requests from its standard input, one after the other: a line of JSON, then the program as serialized
StableHLO. It answers each with one line of JSON on what was its standard output when it began. All that the compilers
print goes to standard error. It ends when its standard input does, also in the middle of a compilation, so that it never
outlives the process that asked. A request for the peak alone is answered as soon as the compiler has assigned buffers; as no
compiler can be stopped then, the process ends with that answer, which says so.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from jaxremat import buffers


def _compile(request: dict[str, Any], program: bytes) -> dict[str, Any]:
    from jax.experimental import topologies

    from jaxremat.compat import compile_for_topology
    from jaxremat.compiled import measure

    chips, specification = request["chips"], request["specification"]
    start = time.perf_counter()
    if request["kind"] == "gpu":
        topology = topologies.get_topology_desc(
            "", "cuda", topology=f"1x1x{chips}", target_config=specification
        )  # processes, hosts, GPUs of a host
    else:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=specification)
    executable = compile_for_topology(program, list(topology.devices[:chips]), request["options"])
    seconds = time.perf_counter() - start
    text = "\n".join(module.to_string() for module in executable.hlo_modules())
    return {**measure(executable, executable.get_compiled_memory_stats(), text), "compile_seconds": seconds}


class _Reply:
    """The answer to one request: a line that is sent by whichever thread has it first."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._lock, self.is_sent = file, threading.Lock(), False

    def send(self, answer: dict[str, Any], then_end: bool = False) -> None:
        """Sends an answer, if none was; with `then_end` that ends the process."""
        with self._lock:
            if not self.is_sent:
                self.is_sent = True
                self._file.write(json.dumps({**answer, "has_ended": then_end}) + "\n")
                self._file.flush()
                if then_end:
                    os._exit(0)


_POLL_SECONDS = 0.02


def _answer_early(reply: _Reply, directory: Path) -> None:
    """Answers from the buffer assignment, once the compiler has written it into a directory."""
    program = None
    while not reply.is_sent and (program := buffers.written(directory)) is None:
        time.sleep(_POLL_SECONDS)
    if (found := _figures(program)) is not None:
        reply.send(found, then_end=True)


def _figures(program: bytes | None) -> dict[str, Any] | None:
    """Returns what a buffer assignment says; None where there is none that can be read."""
    try:
        return None if program is None else buffers.figures(program)
    except (ValueError, KeyError, IndexError):  # another compiler's may look otherwise: its last word counts then
        return None


def _read_requests(source: BinaryIO, requests: queue.SimpleQueue[tuple[dict[str, Any], bytes]]) -> None:
    directory = None
    while line := source.readline():
        request = json.loads(line)
        directory = request["directory"]
        requests.put((request, source.read(request["size"])))
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)  # whoever asked is gone: nobody waits for what may be compiling now


def main() -> None:
    """Serves requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: queue.SimpleQueue[tuple[dict[str, Any], bytes]] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(sys.stdin.buffer, requests), daemon=True).start()
    import jax.experimental.topologies  # noqa: F401 (while the asking process still traces)

    while True:
        request, program = requests.get()
        reply = _Reply(answers)
        directory = None if request["directory"] is None else Path(request["directory"])
        if directory is not None:
            request["options"] |= buffers.dump_options(directory)
            threading.Thread(target=_answer_early, args=(reply, directory), daemon=True).start()
        try:
            answer = _compile(request, program)
        except Exception as e:  # any refusal of any compiler: the asking process words it
            answer = {"error": f"{type(e).__name__}: {e}" if not str(e) else str(e)}
            if directory is not None:
                answer = _figures(buffers.written(directory)) or answer
        reply.send(answer)


if __name__ == "__main__":
    main()
