"""What a compiled program says of itself: memory, work, and what is left of it."""

from __future__ import annotations

from typing import Any

from jaxremat import hlo

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
    figures: dict[str, Any] = {ours: getattr(memory, theirs) for ours, theirs in MEMORY_FIGURES.items()}
    figures["host_bytes"] = sum(getattr(memory, name) for name in HOST_FIGURES) - memory.host_alias_size_in_bytes
    if memory.host_temp_size_in_bytes:
        # The compiler's peak is that of its largest heap, be it the host's; the device has no more than what is allotted there.
        allotted = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
        figures["peak_bytes"] = min(figures["peak_bytes"], allotted - memory.alias_size_in_bytes)
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
