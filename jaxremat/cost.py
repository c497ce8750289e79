"""`cost`: what the compiler makes of a program: its memory and its work, on a chip that may not be here."""

from __future__ import annotations

import io
import os
import re
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, TypeVar

import jax
from jax.sharding import SingleDeviceSharding

from jaxremat import absent, cost_cache
from jaxremat.compat import compiler_options, private_cpu_device
from jaxremat.compiled import measure
from jaxremat.errors import CompileError, TargetError
from jaxremat.flops import FlopCount, count_flops
from jaxremat.targets import Target, find_target, package_versions

MEMORY = "compiler memory_analysis"
SUM = "temp + argument + output - aliased + closed-over bytes, as XLA:CPU reports no peak"
ANALYSIS = "compiler cost_analysis"
JAXPR = "counted from the jaxpr, scan bodies times their length"
HLO = "counted from the optimized program, loop bodies times their length"
UNKNOWN_LOOP = "unknown: the program holds a loop of unknown length"

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Cost:
    """What the compiler of a target makes of a program; sizes in bytes, for one chip. Prints as a table.

    A figure that nobody knows is None, and `sources` says of each figure whose word it is.

    Attributes:
        target: as it was asked for, such as `h100` or `v5e:2x2`.
        chips: how many chips the program runs on.
        peak_bytes: the most that is in use at any time: arguments, outputs and temporary values together.
        temp_bytes: allotted to values that are neither arguments nor outputs, in one block. It can exceed what of it is in
            use at any time, as arrays of unlike sizes leave gaps. On TPUs what stays in on-chip memory is not in it.
        argument_bytes: of the arguments that the program reads.
        output_bytes: of the results.
        aliased_bytes: of the results that are written over donated arguments.
        host_bytes: in host memory: offloaded values, and arguments and results that live there.
        flops: operations of one run; a multiply-add is two.
        bytes_accessed: read and written in one run.
        convolutions: how many are in the compiled program, each loop body once.
        dots: how many matrix products, likewise.
        compile_seconds: that the compiler took when it compiled this, which may have been another day.
        memory_bytes: of one chip of the target.
        sources: for each figure above whose word it is.
    """

    target: str
    chips: int
    peak_bytes: int
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    host_bytes: int
    flops: int | None
    bytes_accessed: int | None
    convolutions: int
    dots: int
    compile_seconds: float
    memory_bytes: int | None
    sources: Mapping[str, str] = field(repr=False)

    @property
    def needed_bytes(self) -> int:
        """What a run needs: the peak, or the sum of all that is allotted where that is more."""
        allotted = self.temp_bytes + self.argument_bytes + self.output_bytes - self.aliased_bytes
        return max(self.peak_bytes, allotted)

    @property
    def fits(self) -> bool | None:
        """Whether what a run needs is within the chip's memory; None where that is unknown.

        It is compared with all of the memory. JAX itself takes 75 % of a GPU's unless `XLA_PYTHON_CLIENT_MEM_FRACTION`
        says otherwise.
        """
        return None if self.memory_bytes is None else self.needed_bytes <= self.memory_bytes

    def to_json(self) -> dict[str, Any]:
        """Returns all figures, `needed_bytes`, `fits` and the sources as JSON values."""
        more = {"needed_bytes": self.needed_bytes, "fits": self.fits}
        return {**asdict(self), "sources": dict(self.sources), **more}

    def __str__(self) -> str:
        where = f"{self.target}, {self.chips} chips, each" if self.chips > 1 else self.target
        lines = [f"cost on {where}"]
        names = ("peak", "temp", "argument", "output", "aliased", "host")
        figures = [(n, _mebibytes(getattr(self, f"{n}_bytes")), self.sources[f"{n}_bytes"]) for n in names]
        figures += [
            ("flops", _giga(self.flops, "GFLOP"), self.sources["flops"]),
            ("moved", _giga(self.bytes_accessed, "GB"), self.sources["bytes_accessed"]),
            ("memory", _mebibytes(self.memory_bytes), {True: "fits", False: "does not fit", None: ""}[self.fits]),
            ("compile", f"{self.compile_seconds:.1f} s", ""),
        ]
        lines += [f"  {name:<9}{figure:>16}  {note}".rstrip() for name, figure, note in figures]
        return "\n".join(lines)


def _mebibytes(figure: int | None) -> str:
    return "?" if figure is None else f"{figure / 2**20:,.1f} MiB"


def _giga(figure: int | None, unit: str) -> str:
    return "?" if figure is None else f"{figure / 1e9:,.2f} {unit}"


@dataclass(frozen=True)
class Peak:
    """What a compiled program has in use at most, and what of that are its arguments: as in `Cost`, in bytes for one chip."""

    peak_bytes: int
    argument_bytes: int


def cost(f: Callable[..., Any], *args: Any, target: str = "local", **kwargs: Any) -> Cost:
    """Returns what the compiler of a chip makes of `f(*args, **kwargs)`; nothing runs, and the chip need not be there.

    For `local` the program is compiled here, as JAX would do it. For any other target it is lowered here without
    opening an attached device, and compiled in a child process that stays for the next one. Figures are kept in memory
    and on disk (`jaxremat.cost_cache`) by program, target and versions.

    Args:
        f: a function, or a `jax.jit` of one, whose shardings, donated and static arguments count. Its
            `compiler_options` are heeded by `local` alone.
        *args: arrays or `jax.ShapeDtypeStruct`s, and pytrees of them; no data is read. For several chips they, or the
            `jax.jit`, carry shardings over a mesh. A mesh of chips that are not here is a `jax.sharding.AbstractMesh`.
        target: a name of `jaxremat.targets()`, with a suffix for several chips: `h100:4`, `v5e:2x2`.
        **kwargs: of `f`, likewise.

    Returns:
        A `Cost`: sizes in bytes for one chip.

    Raises:
        TargetError: no such target, nothing installed compiles for it, or the program wants another number of chips.
        CompileError: the compiler refused the program, or ran out of the target's memory (`wanted_bytes`).

    Example:
        >>> import jax, jax.numpy as jnp, jaxremat
        >>> x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
        >>> c = jaxremat.cost(lambda x: jnp.tanh(x @ x), x)
        >>> c.argument_bytes, c.output_bytes, c.dots
        (262144, 262144, 1)
        >>> c.sources["temp_bytes"]
        'compiler memory_analysis'

    References:
        https://docs.jax.dev/en/latest/aot.html
    """
    return _asked(f, args, kwargs, target, _absent_cost)


def peak(f: Callable[..., Any], *args: Any, target: str = "local", **kwargs: Any) -> Peak:
    """Returns what `cost` would say of the peak, often many times as fast where the chip is not here.

    Compilers assign memory before they generate code, and this waits for no more than that. So what a program wants is known to
    the byte also where a compiler would refuse it for that; and one that it would refuse for its code passes.

    Args:
        f, *args, target, **kwargs: as for `cost`.

    Raises:
        TargetError, CompileError: likewise, but for programs that exceed the target's memory and keep nothing in host memory.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxremat.cost import peak
        >>> peak(lambda x: x + 1, jax.ShapeDtypeStruct((256,), jnp.float32))
        Peak(peak_bytes=2048, argument_bytes=1024)
    """
    found = _asked(f, args, kwargs, target, _absent_peak)
    return Peak(found.peak_bytes, found.argument_bytes)


def _asked(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: str,
    of_absent: Callable[[Any, Target], _Found],
) -> _Found | Cost:
    """Returns what a function makes of the traced `f` and a chip that is not here; of one that is, the whole cost."""
    chip = find_target(target)
    if not chip.available:
        raise TargetError(f"target: nothing here compiles for {target}. Needed: {chip.remedy}.")
    jitted: Any = f if hasattr(f, "trace") and hasattr(f, "lower") else jax.jit(f)
    if chip.kind == "local":
        traced = jitted.trace(*args, **kwargs)
        return _remembered(f, traced, (args, kwargs), chip, _local_cost)
    absent.worker(chip.kind).start()
    args, kwargs = jax.tree.map(_described, (args, kwargs))
    # Without a device of its own to default to, lowering would open the attached ones.
    with jax.default_device(private_cpu_device()):
        traced = jitted.trace(*args, **kwargs)
        return _remembered(f, traced, (args, kwargs), chip, of_absent)


def _remembered(f: Any, traced: Any, arguments: Any, chip: Target, compute: Callable[[Any, Target], _Found]) -> _Found:
    """Returns `compute(traced, chip)`, or what it returned when the same function was traced to the same jaxpr."""
    try:
        known = _memory().setdefault(f, {})
    except TypeError:  # neither hashable nor weakly referable: nothing is remembered of it
        return compute(traced, chip)
    # JAX hands out the same jaxpr for the same function and arguments; their layouts are not in it.
    layouts = [repr(getattr(leaf, "sharding", None)) for leaf in jax.tree.leaves(arguments)]
    key = (compute, chip, *layouts, *_compiler_environment())
    jaxpr, result = known.get(key, (None, None))
    if result is None or jaxpr is None or jaxpr() is not traced.jaxpr:
        result = compute(traced, chip)
        known[key] = (weakref.ref(traced.jaxpr), result)
    return result


def _absent_cost(traced: Any, chip: Target) -> Cost:
    return _cost(_absent_figures(traced, chip), traced.jaxpr, chip, chip.chips)


def _absent_peak(traced: Any, chip: Target) -> Peak:
    figures = _absent_figures(traced, chip, peak_alone=True)
    return Peak(figures["peak_bytes"], figures["argument_bytes"])


def _absent_figures(traced: Any, chip: Target, peak_alone: bool = False) -> Mapping[str, Any]:
    """Returns what `absent.compile_program` does, from the cache where that has it."""
    try:
        lowered = traced.lower(lowering_platforms=({"gpu": "cuda", "tpu": "tpu"}[chip.kind],))
    except (ValueError, NotImplementedError, RuntimeError) as e:
        if "different from the lowering platform" in str(e):
            reason = "it calls back to this process (pure_callback, debug.print, ...), which wants an attached chip"
        else:
            reason = str(e)
        raise absent.compile_error(reason, chip.name) from e
    module = lowered.compiler_ir("stablehlo")
    wanted_chips = module.operation.attributes["mhlo.num_partitions"].value
    if wanted_chips != chip.chips:
        raise TargetError(
            f"target: the program is laid out for {wanted_chips} chip{'s' * (wanted_chips > 1)} and {chip.name} is "
            f"{chip.chips}. Choose a target of as many (h100:4, v5e:2x2), or shardings over a mesh of that size."
        )
    circumstances = {
        "target": [chip.kind, chip.chips, chip.specification],
        "versions": package_versions(chip.kind),
        "options": absent.OPTIONS[chip.kind],
        "environment": _compiler_environment(),
    }
    # The name of the function is in the program's, and changes nothing.
    text = re.sub(r"^module @\S+", "module", lowered.as_text(), count=1)
    key = cost_cache.cache_key(text, circumstances)
    peak_key = cost_cache.cache_key(text, {**circumstances, "peak alone": True})
    figures = cost_cache.load(key)
    if peak_alone and (figures is None or "error" in figures):
        figures = cost_cache.load(peak_key)
    if figures is None:
        try:
            figures = absent.compile_program(_serialized(module), chip, peak_alone)
        except CompileError as e:
            if e.wanted_bytes is not None:  # a property of the program, and a slow one to find out
                for refused in (key, peak_key) if peak_alone else (key,):
                    cost_cache.store(refused, {"error": str(e), "wanted_bytes": e.wanted_bytes})
            raise
        cost_cache.store(key if "compile_seconds" in figures else peak_key, figures)
    if "error" in figures:
        raise CompileError(figures["error"], figures["wanted_bytes"])
    return figures


def _local_cost(traced: Any, chip: Target) -> Cost:
    try:
        lowered = traced.lower()
    except ValueError as e:
        if "AbstractMesh" not in str(e):
            raise
        raise TargetError(
            "target: local compiles for devices that are there, and the shardings of the program are over an "
            "AbstractMesh, which has none. Give a jax.make_mesh of as many devices, or name the chips (h100:4, v5e:2x2)."
        ) from e
    start = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=compiler_options(chip.specification))
    except jax.errors.JaxRuntimeError as e:
        raise absent.compile_error(str(e), chip.name) from None
    seconds = time.perf_counter() - start
    figures = {**measure(compiled, compiled.memory_analysis(), compiled.as_text()), "compile_seconds": seconds}
    chips = lowered.compiler_ir("stablehlo").operation.attributes["mhlo.num_partitions"].value
    return _cost(figures, traced.jaxpr, chip, chips)


def _cost(figures: Mapping[str, Any], jaxpr: Any, chip: Target, chips: int) -> Cost:
    """Chooses for each figure whose word counts."""
    count = count_flops(jaxpr)
    memory = {f"{n}_bytes": figures[f"{n}_bytes"] for n in ("peak", "temp", "argument", "output", "aliased", "host")}
    sources = dict.fromkeys(memory, MEMORY)
    if chip.specification == "cpu":
        held = sum(memory[f"{n}_bytes"] for n in ("temp", "argument", "output")) - memory["aliased_bytes"]
        memory["peak_bytes"] = held + sum(getattr(array, "nbytes", 0) for array in jaxpr.consts)
        sources["peak_bytes"] = SUM
    flops, moved = figures["compiler_flops"], figures["compiler_bytes_accessed"]
    sources["flops"] = sources["bytes_accessed"] = ANALYSIS
    if count.loops or flops is None:
        flops = None if count.flops is None else -(-count.flops // chips)
        sources["flops"] = _label(JAXPR, count, chips) if flops is not None else UNKNOWN_LOOP
    if count.loops or moved is None:
        moved = figures["hlo_bytes_moved"]
        sources["bytes_accessed"] = HLO if moved is not None else UNKNOWN_LOOP
    sources["convolutions"] = sources["dots"] = "counted from the optimized program"
    sources["compile_seconds"], sources["memory_bytes"] = "measured", "target"
    return Cost(
        target=chip.name,
        chips=chips,
        **memory,
        flops=flops,
        bytes_accessed=moved,
        convolutions=figures["convolutions"],
        dots=figures["dots"],
        compile_seconds=figures["compile_seconds"],
        memory_bytes=chip.memory_bytes,
        sources=sources,
    )


def _label(label: str, count: FlopCount, chips: int) -> str:
    without = f", without {', '.join(count.uncounted)}" if count.uncounted else ""
    return f"{label}{without}" + (f", divided by {chips} chips" if chips > 1 else "")


def _described(leaf: Any) -> Any:
    """Returns an array's shape, dtype and layout over a mesh, without the device that it happens to live on."""
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return leaf
    sharding = leaf.sharding
    if isinstance(sharding, SingleDeviceSharding):
        sharding = None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=getattr(leaf, "weak_type", False))


def _serialized(module: Any) -> bytes:
    buffer = io.BytesIO()
    module.operation.write_bytecode(file=buffer)
    return buffer.getvalue()


def _compiler_environment() -> tuple[str, str]:
    return os.environ.get("XLA_FLAGS", ""), os.environ.get("LIBTPU_INIT_ARGS", "")


@cache
def _memory() -> weakref.WeakKeyDictionary[Any, dict[Any, tuple[weakref.ref[Any], Any]]]:
    return weakref.WeakKeyDictionary()
