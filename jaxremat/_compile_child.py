"""The process that compiles for chips which are not here: `python -m jaxremat._compile_child`.

It reads requests from its standard input, one after the other: a line of JSON, then the program as serialized
StableHLO. It answers each with one line of JSON on what was its standard output when it began. All that the compilers
print goes to standard error. It ends when its standard input does, also in the middle of a compilation, so that it never
outlives the process that asked.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from typing import Any, BinaryIO

MEMORY_FIGURES = {
    "peak_bytes": "peak_memory_in_bytes",
    "temp_bytes": "temp_size_in_bytes",
    "argument_bytes": "argument_size_in_bytes",
    "output_bytes": "output_size_in_bytes",
    "aliased_bytes": "alias_size_in_bytes",
}
HOST_FIGURES = ("host_temp_size_in_bytes", "host_argument_size_in_bytes", "host_output_size_in_bytes")


def measure(executable: Any, memory: Any, hlo_text: str) -> dict[str, Any]:
    """Returns what an executable says of itself, as JSON values.

    Args:
        executable: has `cost_analysis()`, which may be missing for some platforms.
        memory: its memory analysis, with sizes in bytes.
        hlo_text: its optimized HLO module, as text.
    """
    from jaxremat import hlo

    figures: dict[str, Any] = {ours: getattr(memory, theirs) for ours, theirs in MEMORY_FIGURES.items()}
    figures["host_bytes"] = sum(getattr(memory, name) for name in HOST_FIGURES) - memory.host_alias_size_in_bytes
    try:
        analysis = executable.cost_analysis() or {}
    except Exception:  # a JaxRuntimeError "UNIMPLEMENTED" for GPUs that are not attached
        analysis = {}
    figures["compiler_flops"] = _integer(analysis.get("flops"))
    figures["compiler_bytes_accessed"] = _integer(analysis.get("bytes accessed"))
    figures["hlo_bytes_moved"] = hlo.bytes_moved(hlo_text)
    counts = hlo.conv_and_dot_counts(hlo_text)
    figures["convolutions"], figures["dots"] = counts.convolutions, counts.dots
    return figures


def _integer(figure: float | None) -> int | None:
    return None if figure is None or figure < 0 else int(figure)


def _compile(request: dict[str, Any], program: bytes) -> dict[str, Any]:
    from jax.experimental import topologies

    from jaxremat.compat import compile_for_topology

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


def _read_requests(source: BinaryIO, requests: queue.SimpleQueue[tuple[dict[str, Any], bytes]]) -> None:
    while line := source.readline():
        request = json.loads(line)
        requests.put((request, source.read(request["size"])))
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
        try:
            answer = _compile(request, program)
        except Exception as e:  # any refusal of any compiler: the asking process words it
            answer = {"error": f"{type(e).__name__}: {e}" if not str(e) else str(e)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
