"""The two frameworks train the same network: to the last digits in float64, and within a tolerance in float32."""

import pytest

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install "torch==2.13.0"')

from experiments import agreement, torch_layers  # noqa: E402
from experiments.agreement_training import Losses, Training, largest_difference, train_jax, train_torch  # noqa: E402

TOLERANCE = 1e-9  # of a few steps in float64
SHORT = {
    "net": Training("net", steps=20, batch_size=16, learning_rate=0.05, bits=64),
    "resnet18": Training("resnet18", steps=3, batch_size=2, learning_rate=0.05, bits=64),
    "vit": Training("vit", steps=2, batch_size=4, learning_rate=0.05, bits=64),
}


@pytest.fixture(scope="module", params=SHORT)
def in_float64(request):
    return SHORT[request.param], train_jax(SHORT[request.param])


def test_float64_training_agrees_at_the_rate_of_real_training(in_float64):
    training, ours = in_float64
    theirs = train_torch(training)
    assert largest_difference(ours, theirs) <= TOLERANCE
    assert theirs.of_first_batch == pytest.approx(ours.of_first_batch, rel=TOLERANCE)
    assert abs(ours.of_first_batch - ours.of_steps[0]) > 1e-2  # it did train


def test_float64_finds_an_epsilon_that_is_a_hundredth_off(in_float64, monkeypatch):
    training, ours = in_float64
    if training.model != "resnet18":
        pytest.skip("one model with batch norm is enough")
    monkeypatch.setattr(torch_layers, "BATCH_NORM_EPSILON", torch_layers.BATCH_NORM_EPSILON * 1.01)
    assert largest_difference(ours, train_torch(training)) > 10 * TOLERANCE


@pytest.mark.parametrize(("model", "steps", "batch_size"), [("net", 50, 16), ("resnet18", 4, 4)])
def test_float32_training_stays_within_the_tolerance(model, steps, batch_size):
    training = Training(model, steps, batch_size, agreement.FLOAT32_RATES[model])
    assert largest_difference(train_jax(training), train_torch(training)) <= 1e-3


def test_the_command_ends_with_1_where_the_tolerance_is_not_met(monkeypatch, capsys):
    """At the rate of real training, where rounding alone parts the losses of ResNet-18: here pretended, as it takes minutes."""
    monkeypatch.setattr(agreement, "train_jax", lambda training: Losses([2.0, 2.002 + training.bits / 1e4], 1.9))
    monkeypatch.setattr(agreement, "train_torch", lambda _: Losses([2.0, 2.0], 1.9))
    assert agreement.main(["--models=net", "--policies", "everything", "--learning-rate=0.05"]) == 1
    out = capsys.readouterr().out
    assert out.count("NOT <= 1e-09") == 1
    assert out.count("NOT <= 0.001") == 1


BAD = {
    "model": (["--models=resnet81"], "got 'resnet81'"),
    "steps": (["--steps=-1"], "--steps must be at least 0"),
    "batch": (["--batch-size=1"], "--batch-size at least 2"),
    "rate": (["--learning-rate=0"], "--learning-rate must be a number above 0; got 0"),
    "no rate": (["--learning-rate=nan"], "--learning-rate must be a number above 0; got nan"),
    "no policy": (["--models=net", "--policies"], "--policies needs at least one policy"),
    "policy": (["--models=net", "--policies", "dotz"], "Did you mean 'dots'"),
}


@pytest.mark.parametrize(("argv", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_message_and_status_2(argv, message, capsys):
    assert agreement.main(argv) == 2
    assert message in capsys.readouterr().err
