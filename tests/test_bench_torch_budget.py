"""The bench of `torch.compile`'s budget: what its partitioner runs again, and bad input."""

import pytest

pytest.importorskip("torch", reason='needs PyTorch: pip install "torch==2.13.0"')

from experiments.bench import torch_budget
from experiments.bench.torch_budget import Torch, planned


def test_what_the_partitioner_runs_again():
    """`net` has two convolutions and three products: at a budget of 0 the backward graph starts from the images again.

    Of its products the last is not needed, as the loss is not part of the graph; its own gradients need no logits.
    """
    network = Torch("net", batch_size=4)
    at_one, at_none = (network.backward_operations(budget) for budget in (1.0, 0.0))
    again = at_none - at_one
    assert at_one["convolution"] == 0
    assert again["convolution"] == 2
    assert again["mm"] + again["addmm"] == 2
    assert not at_one - at_none  # nothing of the gradient itself is left out


def test_the_planner_says_nothing_where_nothing_fits():
    assert planned("net", 4, 0.01) == {}


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["--batch-size=1"], "--batch-size must be at least 2"), (["--settings", "1.5"], "budgets from 0 to 1")],
)
def test_bad_input_is_one_message_and_status_2(argv, message, capsys):
    assert torch_budget.main(argv) == 2
    assert message in capsys.readouterr().err
