"""`targets`: the chips that programs can be compiled for here, attached or not.

XLA's compilers for NVIDIA GPUs and for TPUs run on any Linux machine. They come with JAX's plugins, which must have
exactly JAX's version; no driver is needed, and of the CUDA toolkit only the assembler, which has a wheel of its own.

The figures of the GPUs are those of OpenXLA's target specifications (`xla/backends/gpu/target_config/specs`); the
memory and the rates of the TPUs are those of Google Cloud's documentation.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import jax

from jaxremat.errors import TargetError, did_you_mean


@dataclass(frozen=True)
class Target:
    """A chip, or several, that programs can be compiled for.

    Attributes:
        name: as it was asked for, in lower case: `local`, `h100`, `h100:4`, `v5e:2x2`.
        kind: "local", "gpu" or "tpu".
        chips: how many; programs must be sharded over exactly as many. 0 for `local`: as many as the program says.
        memory_bytes: of one chip; for `local` what JAX may use, or the machine's memory; None where it is unknown.
        available: whether `jaxremat.cost` can compile for it here.
        remedy: what to do where it is not available (mostly an install command), else an empty string.
        specification: what the compiler is told: a GPU's target config, or a TPU's topology name.
        flops_per_second: of one chip at best; of GPUs in float32 without tensor cores, of TPUs in bfloat16. None for `local`.
        bytes_per_second: of one chip's memory. None for `local`.
        host_bytes_per_second: of its link to the host, in each direction. None for `local`.
    """

    name: str
    kind: str
    chips: int
    memory_bytes: int | None
    available: bool
    remedy: str
    specification: str
    flops_per_second: float | None = None
    bytes_per_second: float | None = None
    host_bytes_per_second: float | None = None


@dataclass(frozen=True)
class _Gpu:
    description: str
    memory_bytes: int
    bandwidth: int
    cores: int
    fpus_per_core: int
    clock_ghz: float
    l2_bytes: int
    capability: tuple[int, int]
    shared_per_core: int
    shared_optin: int
    pcie: int
    threads_per_core: int = 2048


# fmt: off
_GPUS = {
    "v100": _Gpu("Tesla V100-SXM2-16GB", 16935682048, 898048000000, 80, 64, 1.53, 6291456, (7, 0), 98304, 98304, 3),
    "a100": _Gpu("NVIDIA A100-SXM4-80GB", 85100068864, 2039040000000, 108, 64, 1.41, 41943040, (8, 0), 167936, 166912, 4),
    "a6000": _Gpu("NVIDIA RTX A6000", 51041271808, 768096000000, 84, 128, 1.80, 6291456, (8, 6), 102400, 101376, 4, 1536),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", 84942979072, 3352320000000, 132, 128, 1.98, 52428800, (9, 0), 233472, 232448, 5),
    "h200": _Gpu("NVIDIA H200", 151397597184, 4800000000000, 132, 128, 1.98, 52428800, (9, 0), 233472, 232448, 5),
    "b200": _Gpu("NVIDIA B200", 191514411008, 7672320000000, 148, 128, 1.965, 132644864, (10, 0), 233472, 232448, 5),
}
# By the generation of PCI Express, 16 lanes, B/s in each direction.
_PCIE = {3: 15.75e9, 4: 31.5e9, 5: 63.0e9}
# The chips of one host; GiB, FLOP/s and B/s of one chip; B/s to the host, by "How to Scale Your Model" (Austin et al. 2025).
_TPUS = {
    "v4": ("2x2x1", 32, 275e12, 1228e9, 16e9), "v5e": ("2x2", 16, 197e12, 819e9, 16e9),
    "v5p": ("2x2x1", 95, 459e12, 2765e9, 16e9), "v6e": ("2x2", 32, 918e12, 1640e9, 32e9),
}
# fmt: on
_NAMES = ("local", *_TPUS, *_GPUS)


class Targets(Mapping[str, Target]):
    """The targets by name; prints as a table. Several chips: `targets["h100:4"]`, `targets["v5e:2x2"]`."""

    def __getitem__(self, name: str) -> Target:
        return find_target(name)

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and bool(find_target(name))
        except TargetError:
            return False

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)

    def __str__(self) -> str:
        rows = [("target", "kind", "memory", "compiles here")]
        for target in self.values():
            memory = "?" if target.memory_bytes is None else f"{target.memory_bytes / 2**30:.1f} GiB"
            rows.append((target.name, target.kind, memory, "yes" if target.available else f"no: {target.remedy}"))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(row, widths)), row[3]]) for row in rows)

    __repr__ = __str__


def targets() -> Targets:
    """Returns the chips that `jaxremat.cost` knows, and what to install for those that it cannot compile for here.

    `local` is whatever JAX runs on: reading that row starts JAX's backend, as any computation does. The others are
    looked up in the metadata of the installed packages; nothing is loaded and no device is opened.

    Returns:
        A mapping of name to `Target`, which prints as a table.

    Raises:
        TargetError: from `targets()[name]`, for a name that does not exist or a suffix that names no topology.

    Example:
        >>> import jaxremat
        >>> h100 = jaxremat.targets()["h100:4"]
        >>> h100.kind, h100.chips, h100.memory_bytes
        ('gpu', 4, 84942979072)
        >>> "h1000" in jaxremat.targets()
        False
    """
    return Targets()


def find_target(name: str) -> Target:
    """Returns the target of a name such as `local`, `h100`, `h100:4` or `v5e:2x2` in any case, available here or not.

    Raises:
        TargetError: no such target, or no such topology.
    """
    if not isinstance(name, str):
        raise TargetError(f"target: a name such as 'local' or 'h100' is required; got {name!r}.")
    asked, name = name, name.lower()
    base, colon, suffix = name.partition(":")
    if base not in _NAMES:
        raise TargetError(
            f"target: {asked!r} does not exist.{did_you_mean(base, _NAMES)} There are {', '.join(_NAMES)}, and several "
            f"chips as h100:4 or v5e:2x2.{_how_to_get_more()}"
        )
    if base == "local":
        if colon:
            raise TargetError(
                f"target: local takes its devices from the shardings of the program, so it has no suffix; got {name!r}."
            )
        return _local()
    kind = "gpu" if base in _GPUS else "tpu"
    remedy = missing_package(kind)
    if not remedy and base == "v100" and cuda_version() == "13":
        remedy = (
            f'CUDA 13 knows no V100; in an environment of its own: pip install "jax-cuda12-plugin=={jax.__version__}"'
        )
    target = Target(name, kind, 1, None, not remedy, remedy, "")
    if kind == "gpu":
        gpu = _GPUS[base]
        chips = _gpu_chips(name, suffix) if colon else 1
        return replace(
            target,
            chips=chips,
            memory_bytes=gpu.memory_bytes,
            specification=_target_config(gpu),
            flops_per_second=2 * gpu.cores * gpu.fpus_per_core * gpu.clock_ghz * 1e9,
            bytes_per_second=gpu.bandwidth,
            host_bytes_per_second=_PCIE[gpu.pcie],
        )
    topology, gib, flops_per_second, bytes_per_second, host_bytes_per_second = _TPUS[base]
    shape = _tpu_shape(name, suffix, dims=topology.count("x") + 1) if colon else topology
    chips = _product(shape) if colon else 1
    return replace(
        target,
        chips=chips,
        memory_bytes=gib * 2**30,
        specification=f"{base}:{shape}",
        flops_per_second=flops_per_second,
        bytes_per_second=bytes_per_second,
        host_bytes_per_second=host_bytes_per_second,
    )


def missing_package(kind: str) -> str:
    """Returns what must be installed before programs can be compiled for a kind ("gpu", "tpu"), or an empty string."""
    if sys.platform != "linux":
        return f"JAX's {kind.upper()} compiler exists for Linux only"
    if kind == "tpu":
        wanted = libtpu_requirement()
        version = _installed("libtpu")
        command = f'pip install "libtpu{wanted}"'
        if version is None:
            return command
        return (
            "" if _satisfies(version, wanted) else f"libtpu {version} is not that of JAX {jax.__version__}: {command}"
        )
    cuda = cuda_version()
    plugin, assembler = f"jax-cuda{cuda}-plugin", {"12": "nvidia-cuda-nvcc-cu12", "13": "nvidia-cuda-nvcc"}[cuda]
    version, pjrt = _installed(plugin), _installed(f"jax-cuda{cuda}-pjrt")
    command = f'pip install "{plugin}=={jax.__version__}" {assembler}'
    if version is None:
        return command
    if version != jax.__version__ or pjrt != jax.__version__:
        return f"{plugin} {version} with jax-cuda{cuda}-pjrt {pjrt} is not that of JAX {jax.__version__}: {command}"
    return "" if _installed(assembler) or _has_cuda_toolkit() else f"pip install {assembler}"


def cuda_version() -> str:
    """Returns the CUDA generation ("12", "13") of the installed plugin of JAX, or of the one to install."""
    for cuda in ("13", "12"):
        if _installed(f"jax-cuda{cuda}-plugin"):
            return cuda
    # JAX's own choice of wheels goes on for the Pythons after 3.11 with CUDA 13.
    return "12" if sys.version_info < (3, 12) else "13"


def _has_cuda_toolkit() -> bool:
    """Whether the assembler (ptxas) and the device library beside it are where XLA looks, apart from NVIDIA's wheels."""
    roots = [Path(root) for root in (os.environ.get("CUDA_ROOT"), "/usr/local/cuda", "/opt/cuda") if root]
    return any((root / "bin" / "ptxas").exists() for root in roots)


def libtpu_requirement() -> str:
    """Returns the version of libtpu that the installed JAX names for its extra `tpu`, such as `==0.0.42.*`."""
    for requirement in metadata.requires("jax") or ():
        match = re.match(r"libtpu\s*([^;\s]*)\s*;.*extra == [\"']tpu[\"']", requirement)
        if match:
            return match.group(1)
    return ""


def package_versions(kind: str) -> dict[str, str]:
    """Returns the versions of the packages that compile for a kind ("gpu", "tpu"): what a cached figure depends on."""
    names = ("jax-cuda12-pjrt", "jax-cuda13-pjrt") if kind == "gpu" else ("libtpu",)
    versions = {name: _installed(name) for name in ("jax", "jaxlib", *names)}
    return {name: version for name, version in versions.items() if version is not None}


def _satisfies(version: str, wanted: str) -> bool:
    if wanted.startswith("==") and wanted.endswith(".*"):
        return f"{version}.".startswith(wanted[2:-1])
    return version == wanted[2:] if wanted.startswith("==") else True


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _how_to_get_more() -> str:
    commands = [c for c in (missing_package("gpu"), missing_package("tpu")) if c]
    return f" To compile for more of them: {'; '.join(commands)}." if commands else ""


def _local() -> Target:
    try:
        device = jax.local_devices()[0]
    except (RuntimeError, IndexError) as e:
        reason = str(e).strip().splitlines() or ["JAX found no device"]
        return Target("local", "local", 0, None, False, reason[0], "")
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None and device.platform == "cpu" and hasattr(os, "sysconf"):  # not on Windows
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Target("local", "local", 0, limit, True, "", device.platform)


def _gpu_chips(name: str, suffix: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", suffix):
        raise TargetError(f"target: several GPUs are a number, as in {name.partition(':')[0]}:4; got {name!r}.")
    return int(suffix)


def _tpu_shape(name: str, suffix: str, dims: int) -> str:
    if not re.fullmatch(r"[1-9]\d*" + r"x[1-9]\d*" * (dims - 1), suffix):
        base = name.partition(":")[0]
        raise TargetError(
            f"target: {base} chips stand in a grid of {dims} dimensions, as in {base}:{_TPUS[base][0]}; got {name!r}."
        )
    return suffix


def _product(shape: str) -> int:
    n = 1
    for side in shape.split("x"):
        n *= int(side)
    return n


def _target_config(gpu: _Gpu) -> str:
    major, minor = gpu.capability
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {gpu.threads_per_core}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {gpu.shared_optin}
  shared_memory_per_core: {gpu.shared_per_core} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: {gpu.cores} fpus_per_core: {gpu.fpus_per_core} clock_rate_ghz: {gpu.clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth} l2_cache_size: {gpu.l2_bytes} device_memory_size: {gpu.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.description}"
"""
