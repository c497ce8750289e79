"""Reads what a compiler allots from the buffer assignment that it writes to a file before it generates code.

XLA decides on memory early: once operations are fused and scheduled it assigns buffers, and only then is code generated, which
takes most of the time (of a convolutional network for a TPU more than nine tenths). Whoever wants to know the peak alone need not wait.
The file is a serialized `HloProto` (xla/service/hlo.proto); the few fields that matter are read here without its schema.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# Fields of HloProto, BufferAssignmentProto, LogicalBufferProto, BufferAllocationProto, HeapSimulatorTrace and its Event.
_ASSIGNMENT = 3
_LOGICAL_BUFFERS, _ALLOCATIONS, _TRACES = 1, 3, 4
_BUFFER_ID, _BUFFER_SIZE, _BUFFER_COLOR = 1, 2, 4
_SIZE, _THREAD_LOCAL, _PARAMETER, _LIVE_OUT, _COLOR, _CONSTANT = 2, 3, 5, 7, 8, 12
_EVENTS = 1
_KIND, _EVENT_BUFFER, _SHARED_WITH = 1, 2, 5
_ALLOC, _FREE = 0, 1  # and 2, for a buffer that takes the memory of another
_HOST = 5  # the color of host memory

_Fields = dict[int, list[Any]]


def dump_options(directory: Path) -> dict[str, Any]:
    """Returns the compiler options under which the file is written into a directory, whatever `XLA_FLAGS` wants written."""
    return {
        "xla_dump_to": str(directory),
        "xla_dump_hlo_as_proto": True,
        "xla_dump_compress_protos": False,
        "xla_dump_hlo_module_re": ".*",
        "xla_dump_hlo_pass_re": "",
    }


def written(directory: Path) -> bytes | None:
    """Returns the file of the program that is being compiled into a directory; None while it is not there as a whole."""
    for path in directory.glob("*after_optimizations.hlo.pb"):
        try:
            program = path.read_bytes()
            if _fields(program)[_ASSIGNMENT]:
                return program
        except (OSError, ValueError):
            continue
    return None


def figures(program: bytes) -> dict[str, int] | None:
    """Returns the peak of a program's device memory and the bytes of its arguments, as `memory_analysis` has them.

    Args:
        program: a serialized `HloProto` with its buffer assignment.

    Returns:
        `peak_bytes`: arguments, results and constants, and the most that is in use at any time of the largest heap. That is the
        one of device memory, or in small programs for a TPU that of on-chip memory, which the compiler then reports.
        `argument_bytes`: of the arguments that the program reads.
        None where it keeps values in host memory: compilers then report another peak.

    Raises:
        ValueError: it is cut off.
    """
    assignment = _fields(_fields(program)[_ASSIGNMENT][0])
    buffers = [_fields(buffer) for buffer in assignment[_LOGICAL_BUFFERS]]
    if any(_number(buffer, _BUFFER_COLOR) == _HOST for buffer in buffers):
        return None
    sizes = {_number(buffer, _BUFFER_ID): _number(buffer, _BUFFER_SIZE) for buffer in buffers}
    arguments = fixed = 0
    for allocation in map(_fields, assignment[_ALLOCATIONS]):
        if _number(allocation, _COLOR) or _number(allocation, _THREAD_LOCAL):
            continue  # other memories: those on the chip, the host's; and what lives in no memory at all
        size = _number(allocation, _SIZE)
        is_argument = _number(allocation, _PARAMETER)
        arguments += size if is_argument else 0
        fixed += size if is_argument or _number(allocation, _LIVE_OUT) or _number(allocation, _CONSTANT) else 0
    heaps = (_most_in_use(map(_fields, _fields(trace)[_EVENTS]), sizes) for trace in assignment[_TRACES])
    return {"peak_bytes": fixed + max(heaps, default=0), "argument_bytes": arguments}


def _most_in_use(events: Iterable[_Fields], sizes: dict[int, int]) -> int:
    """The most that a heap holds at any time. Buffers that share memory are there as long as one of them is."""
    owner, users = dict[int, int](), defaultdict[int, int](int)
    now = most = 0
    for event in events:
        kind, number = _number(event, _KIND), _number(event, _EVENT_BUFFER)
        if kind == _FREE:
            users[owner[number]] -= 1
            if not users[owner[number]]:
                now -= sizes[owner[number]]
            continue
        owner[number] = number if kind == _ALLOC else owner[_number(event, _SHARED_WITH)]
        if not users[owner[number]]:
            now += sizes[owner[number]]
        users[owner[number]] += 1
        most = max(most, now)
    return most


def _number(message: _Fields, field: int) -> int:
    return message[field][0] if message[field] else 0


def _fields(message: bytes) -> _Fields:
    """Returns the values of every field of a message, in the encoding of protocol buffers.

    Source: https://protobuf.dev/programming-guides/encoding/
    """
    found: _Fields = defaultdict(list)
    for field, value in _wire(message):
        found[field].append(value)
    return found


def _wire(message: bytes) -> Iterator[tuple[int, Any]]:
    at, end = 0, len(message)

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while at < end:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
        raise ValueError("cut off within a number")

    while at < end:
        tag = varint()
        kind = tag & 7
        if kind == 0:
            yield tag >> 3, varint()
            continue
        length = {1: lambda: 8, 2: varint, 5: lambda: 4}.get(kind)
        if length is None:
            raise ValueError(f"no message: a field of kind {kind}")
        size = length()
        if at + size > end:
            raise ValueError("cut off within a field")
        yield tag >> 3, message[at : at + size]
        at += size
