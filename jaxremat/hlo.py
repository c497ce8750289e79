"""Reads the text of a compiled program (optimized HLO): what the compiler left of it, and what it moves.

All functions are pure and take the text that `compiled.as_text()` gives.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxremat.flops import OpCounts

_DTYPE_BITS = {"pred": 8, "token": 0, "opaque": 0}  # the others end in their width, as f32, bf16, f8e4m3fn, s4
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<=]*)\]")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_LABELS = re.compile(r"dim_labels=(\S+?)[,\s]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TRIPS = re.compile(r'"?known_trip_count"?:\s*\{\s*"?n"?:\s*"?(\d+)"?')
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
# They name a buffer, or a part of one, and move nothing.
_FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
    | {"opt-barrier", "domain", "add-dependency", "iota"}
)


@dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    text: str
    is_root: bool


def conv_and_dot_counts(hlo_text: str) -> OpCounts:
    """Returns how many convolutions and matrix products a compiled program holds, each loop body once.

    Fused ones count, and so do calls of cuDNN, cuBLAS and oneDNN. XLA:TPU writes matrix products as convolutions
    without a window: those are counted as matrix products, except batched ones whose origin it does not tell.

    Args:
        hlo_text: the text of an optimized HLO module.

    Returns:
        The counts. Beside those of the jaxpr (`jaxremat.flops.conv_and_dot_counts`) their sum shows whether a
        recomputation survived; one by one they may differ, as compilers turn convolutions of 1×1 into products.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.zeros((64, 64))
        >>> conv_and_dot_counts(jax.jit(lambda x: jnp.tanh(x @ x) @ x).lower(x).compile().as_text())
        OpCounts(convolutions=0, dots=2)
    """
    convolutions = dots = 0
    for instruction in (i for body in _computations(hlo_text).values() for i in body):
        kind = _contraction(instruction)
        convolutions += kind == "convolution"
        dots += kind == "dot"
    return OpCounts(convolutions, dots)


def bytes_moved(hlo_text: str) -> int | None:
    """Returns how many bytes one run of a compiled program reads and writes, or None where a loop's length is unknown.

    Every instruction outside of fusions reads its operands and writes its result, once per run of the loop that it
    stands in. A slice reads only what it takes and an update in place writes only what it changes, also inside fusions.
    What stays in a cache is counted like the rest: the figure is for comparing programs, not for a roofline.

    Args:
        hlo_text: the text of an optimized HLO module.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.zeros(1024)  # 4096 bytes in, 4096 bytes out, in one fusion
        >>> bytes_moved(jax.jit(lambda x: jnp.tanh(x) * 2).lower(x).compile().as_text())
        8192
    """
    computations = _computations(hlo_text)
    entry = re.search(r"^ENTRY %?([\w.\-]+)", hlo_text, re.MULTILINE)
    if entry is None:
        raise ValueError("bytes_moved: an optimized HLO module has an ENTRY computation; this text has none.")
    return _moved(entry.group(1), computations)


def _computations(text: str) -> dict[str, list[_Instruction]]:
    found: dict[str, list[_Instruction]] = {}
    body: list[_Instruction] = []
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            head = re.match(r"(?:ENTRY )?%?([\w.\-]+) ", line)
            if head:
                body = found.setdefault(head.group(1), [])
        elif line.startswith(" ") and " = " in line:
            instruction = _parse(line.strip())
            if instruction is not None:
                body.append(instruction)
    return found


def _parse(line: str) -> _Instruction | None:
    is_root = line.startswith("ROOT ")
    name, _, rest = line.removeprefix("ROOT ").partition(" = ")
    shape_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:shape_end], rest[shape_end:].lstrip()
    opcode, parenthesis, _ = rest.partition("(")
    if not parenthesis or " " in opcode:
        return None
    end = _closing(rest, len(opcode))
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[len(opcode) : end]))
    return _Instruction(name.lstrip("%"), shape, opcode, operands, rest[end + 1 :], is_root)


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text)


def _contraction(instruction: _Instruction) -> str | None:
    if instruction.opcode in ("dot", "ragged-dot"):
        return "dot"
    if instruction.opcode == "convolution":
        labels, origin = _LABELS.search(instruction.text + " "), _OP_NAME.search(instruction.text)
        windowless = labels is not None and not re.search(r"\d", labels.group(1))
        return (
            "dot" if windowless or (origin is not None and origin.group(1).endswith("dot_general")) else "convolution"
        )
    if instruction.opcode == "custom-call":
        target = _TARGET.search(instruction.text)
        name = target.group(1).lower() if target else ""
        if "conv" in name and "convert" not in name:
            return "convolution"
        if re.search(r"gemm|matmul|dot", name):
            return "dot"
    return None


def _bytes(shape: str) -> int:
    total_bits = 0
    for dtype, dims in _SHAPE.findall(shape):
        sizes = [int(d) for d in dims.replace("<=", "").split(",") if d]
        total_bits += math.prod(sizes) * _bits(dtype)
    return -(-total_bits // 8)


def _bits(dtype: str) -> int:
    if dtype in _DTYPE_BITS:
        return _DTYPE_BITS[dtype]
    width = re.match(r"[a-z]+(\d+)", dtype)
    return int(width.group(1)) if width else 0


def _moved(name: str, computations: dict[str, list[_Instruction]]) -> int | None:
    body = computations[name]
    shapes = {i.name: i.shape for i in body}
    total = 0
    for instruction in body:
        moved = _moved_by(instruction, shapes, computations)
        if moved is None:
            return None
        total += moved
    return total


def _moved_by(i: _Instruction, shapes: dict[str, str], computations: dict[str, list[_Instruction]]) -> int | None:
    called = dict(_CALLED.findall(i.text))
    if i.opcode in _FREE or i.opcode.endswith(("-done", "-update")):
        return 0
    if i.opcode == "while":
        trips, parts = _TRIPS.search(i.text), [_moved(called[k], computations) for k in ("body", "condition")]
        return None if trips is None else _times(int(trips.group(1)), parts)
    if i.opcode == "conditional":
        names = [n.strip().lstrip("%") for n in (_BRANCHES.findall(i.text) or [""])[0].split(",") if n.strip()]
        names += [called[k] for k in ("true_computation", "false_computation") if k in called]
        parts = [_moved(n, computations) for n in names]
        return None if None in parts else max((p for p in parts if p is not None), default=0)
    if i.opcode in ("call", "async-start") and (called.get("to_apply") or called.get("calls")):
        return _moved(called.get("to_apply") or called["calls"], computations)
    if i.opcode.endswith("-start"):
        return 2 * sum(_bytes(shapes.get(o, "")) for o in i.operands)
    if i.opcode == "fusion":
        return _moved_by_fusion(computations[called["calls"]])
    if i.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * _bytes(i.shape)
    if i.opcode in ("dynamic-update-slice", "scatter"):
        return 2 * _bytes(shapes.get(i.operands[1 if i.opcode == "dynamic-update-slice" else -1], ""))
    return _bytes(i.shape) + sum(_bytes(shapes.get(o, "")) for o in i.operands)


def _times(n: int, parts: list[int | None]) -> int | None:
    known = [p for p in parts if p is not None]
    return n * sum(known) if len(known) == len(parts) else None


def _moved_by_fusion(body: list[_Instruction]) -> int:
    inner = {i.name: i for i in body}
    users: dict[str, list[_Instruction]] = {}
    for i in body:
        for operand in i.operands:
            users.setdefault(operand, []).append(i)
    total = 0
    for parameter in (i for i in body if i.opcode == "parameter"):
        total += _read_of(parameter, users, inner)
    root = next(i for i in body if i.is_root)
    for written in _written(root, inner):
        update = inner[written.operands[1]] if written.opcode == "dynamic-update-slice" else written
        total += _bytes(update.shape)
    return total


def _read_of(parameter: _Instruction, users: dict[str, list[_Instruction]], inner: dict[str, _Instruction]) -> int:
    total = 0
    for user in users.get(parameter.name, []):
        if user.opcode == "dynamic-slice" and user.operands[0] == parameter.name:
            total += _bytes(user.shape)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name:
            continue  # updated in place
        elif user.opcode == "bitcast":
            total += _read_of(user, users, inner)
        else:
            return _bytes(parameter.shape)
    return min(total, _bytes(parameter.shape))


def _written(root: _Instruction, inner: dict[str, _Instruction]) -> Iterator[_Instruction]:
    if root.opcode == "tuple":
        for operand in root.operands:
            yield from _written(inner[operand], inner)
    elif root.opcode == "bitcast" and inner[root.operands[0]].opcode == "dynamic-update-slice":
        yield inner[root.operands[0]]
    else:
        yield root
