"""Compares what `jaxremat.cost` predicts for an attached accelerator with what the accelerator says it used.

    python -m experiments.device_peak
    python -m experiments.device_peak --policies everything ops:conv=store,*=recompute --batch-size 256

Each policy runs one gradient of the 16-block chain of `experiments.chain` in a process of its own, since a device's
`peak_bytes_in_use` never falls. The last line of standard output is one JSON document, with date and versions.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from functools import partial
from importlib import metadata
from typing import Any

import jax

import jaxremat
from experiments import chain


def measure(policy: str, batch_size: int) -> dict[str, Any]:
    """Returns predicted and used peak bytes of one gradient of the chain under a policy."""
    device = jax.local_devices()[0]
    remat_block = partial(jaxremat.remat, policy=policy)
    step = jax.jit(jax.value_and_grad(partial(chain.loss, remat_block=remat_block)))
    kernels = chain.init()
    x = jax.random.normal(jax.random.key(1), (batch_size, chain.SIZE, chain.SIZE, chain.CHANNELS))
    jax.block_until_ready((kernels, x))
    predicted = jaxremat.cost(step, kernels, x)
    jax.block_until_ready(step(kernels, x))
    used = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return {"policy": policy, "predicted_peak_bytes": predicted.peak_bytes, "used_peak_bytes": used}


def main(arguments: list[str] | None = None) -> int:
    """Runs the comparison; returns the exit status."""
    parser = argparse.ArgumentParser(prog="experiments.device_peak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--policies", nargs="+", default=["everything", "nothing", "dots"], metavar="POLICY")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.batch_size < 1:
        parser.error(f"--batch-size: a positive number is required; got {options.batch_size}")
    try:
        policies = [str(jaxremat.parse(policy)) for policy in options.policies]
    except jaxremat.PolicyError as e:
        parser.error(f"--policies: {e}")
    if options.only:
        print(json.dumps(measure(options.only, options.batch_size)))
        return 0
    # Asked in a process of its own: this one must not take the device's memory from those that measure.
    ask = "import jax; d = jax.local_devices()[0]; print((d.memory_stats() or {}).get('peak_bytes_in_use'), d.device_kind)"
    answer = subprocess.run([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True, check=True).stdout.split(
        maxsplit=1
    )
    if answer[0] == "None":
        print(
            "experiments.device_peak: an attached GPU or TPU is required, as a CPU does not tell its peak; JAX found "
            f"{answer[1].strip()}. Run it where there is one.",
            file=sys.stderr,
        )
        return 2
    command = [sys.executable, "-m", "experiments.device_peak", f"--batch-size={options.batch_size}", "--only"]
    rows = []
    print(f"{'policy':<24}{'predicted':>14}{'used':>14}{'difference':>12}")
    for policy in policies:
        output = subprocess.run([*command, policy], stdout=subprocess.PIPE, text=True, check=True).stdout
        row = json.loads(output.splitlines()[-1])
        predicted, used = row["predicted_peak_bytes"], row["used_peak_bytes"]
        print(f"{policy:<24}{predicted / 2**20:>10.1f} MiB{used / 2**20:>10.1f} MiB{(predicted / used - 1):>12.1%}")
        rows.append(row)
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib")}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    print(
        json.dumps(
            {"date": today, "device": answer[1].strip(), **versions, "batch_size": options.batch_size, "rows": rows}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
