"""Training runs in processes of their own, with as many forced CPU devices as a check wants."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def command(arguments: Sequence[str]) -> list[str]:
    """Returns the command line of a training run with these arguments."""
    return [sys.executable, "-m", "experiments.cifar", *arguments]


def environment(devices: int) -> dict[str, str]:
    """Returns the environment in which JAX sees so many CPU devices and no accelerator."""
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}


def train_together(arguments: Sequence[str], *, processes: int, devices: int) -> dict[str, Any]:
    """Trains in several processes of several devices each and returns the record that the first one prints.

    Raises:
        RuntimeError: a process failed; the message holds its standard error.
    """
    together = ["--coordinator", f"localhost:{free_port()}", "--num-processes", str(processes)]
    children = []
    for index in range(processes):
        extra = [*together, "--process-id", str(index)] if processes > 1 else []
        children.append(
            subprocess.Popen(
                command([*arguments, *extra]),
                env=environment(devices),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [child.communicate() for child in children]
    finally:
        for child in children:
            child.kill()
    for child, (_, errors) in zip(children, outputs, strict=True):
        if child.returncode:
            raise RuntimeError(f"a process ended with status {child.returncode}:\n{errors}")
    return json.loads(outputs[0][0].splitlines()[-1])


def free_port() -> int:
    """Returns a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
