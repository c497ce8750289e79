"""`python -m experiments.bench ops`: what its networks keep, and bad input."""

import pytest

from experiments import chain
from experiments.bench import op_programs, ops

DEPTH, BATCH = 4, 2


def test_what_the_networks_keep():
    rows = {(row.program, row.ops, row.policy): row for row in op_programs.measure(DEPTH, BATCH, ())}
    activation = BATCH * chain.SIZE**2 * chain.CHANNELS * 4
    statistics = DEPTH * 2 * chain.CHANNELS * 4  # a mean and a variance for each channel
    everything, dots = (rows["chain", "lean", policy] for policy in ("everything", "dots"))
    # The outputs of the convolutions, and the derivative of the last square.
    assert everything.residual_bytes == (DEPTH + 1) * activation + statistics
    assert DEPTH * activation <= dots.residual_bytes <= DEPTH * activation + statistics
    assert everything.recomputed_convolutions == dots.recomputed_convolutions == 0
    lean, standard = (rows["transformer", form, "everything"].residual_bytes for form in ("lean", "standard"))
    assert lean <= 0.6 * standard


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "rellu"], "got 'rellu'. Did you mean 'relu'"),
        (["--turns", "0"], "--turns must be at least 1; got 0"),
        (["--targets", "h10"], "'h10' does not exist"),
        (["--out", "/nowhere/ops.jsonl"], "--out must name a file that can be written"),
    ],
)
def test_bad_input(arguments, message, capsys):
    assert ops.main(arguments) == 2
    assert message in capsys.readouterr().err
