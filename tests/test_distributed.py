import subprocess

import pytest

from experiments.bench import distributed
from experiments.bench.processes import command, environment
from experiments.devices import check_batch
from experiments.errors import ExperimentError


def test_two_processes_of_two_devices_train_as_one_device():
    one, two, four = distributed.compare(distributed.Options())
    assert len(one["losses"]) == 20
    assert (two["devices"], four["processes"]) == (2, 2)
    assert two["difference"] <= 1e-5
    assert four["difference"] <= 1e-5
    # They are runs of their own: not the same bits by accident of running the same program.
    assert one["losses"] != four["losses"]


def test_a_batch_that_cannot_be_divided_over_devices():
    done = subprocess.run(
        command(["--data=sample", "--batch-size=127"]), env=environment(2), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "error: --batch-size must be a multiple of the 2 devices; got 127. Near it: 126 or 128." in done.stderr
    assert "Traceback" not in done.stderr


class Three:
    count = 3


@pytest.mark.parametrize(("batch_size", "near"), [(1, "3"), (4, "3 or 6"), (8, "6 or 9")])
def test_the_batches_near_one_that_cannot_be_divided(batch_size, near):
    with pytest.raises(ExperimentError, match=rf"multiple of the 3 devices; got {batch_size}\. Near it: {near}\."):
        check_batch(batch_size, Three(), 100)  # type: ignore[arg-type]
