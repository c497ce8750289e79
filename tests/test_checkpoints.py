import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import cifar, data, devices, loop
from experiments.bench import kill
from experiments.checkpoints import NoCheckpoints, OrbaxCheckpoints, digest
from experiments.config import Config
from experiments.errors import ExperimentError
from experiments.loop import run
from experiments.program import apply_policy, build_program
from experiments.progress import Silent
from experiments.training import TrainState

ARGUMENTS = ["--data=sample", "--batch-size=200", "--epochs=3"]  # 5 steps an epoch


def outcome(argv: list[str], capsys) -> dict:
    assert cifar.main(argv) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def refused(argv: list[str], capsys) -> str:
    assert cifar.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A directory in which a run stopped at step 7 of 15, after the end of the first epoch."""
    directory = tmp_path_factory.mktemp("interrupted") / "checkpoints"
    assert cifar.main([*ARGUMENTS, "--max-steps=7", f"--checkpoint-dir={directory}"]) == 0
    return directory


@pytest.fixture
def checkpoints(interrupted, tmp_path):
    return Path(shutil.copytree(interrupted, tmp_path / "copy"))


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


def test_a_resumed_run_ends_as_an_undisturbed_one(checkpoints, capsys):
    assert steps(checkpoints) == [5, 7]
    resumed = outcome([*ARGUMENTS, f"--checkpoint-dir={checkpoints}"], capsys)
    whole = outcome(ARGUMENTS, capsys)
    assert (resumed["first_step"], resumed["last_step"]) == (7, 15)
    assert resumed["params_sha256"] == whole["params_sha256"]
    assert resumed["losses"] == whole["losses"][7:]
    assert resumed["test_accuracy"] == whole["test_accuracy"]
    assert steps(checkpoints) == [10, 15]
    again = outcome([*ARGUMENTS, f"--checkpoint-dir={checkpoints}"], capsys)
    assert (again["first_step"], again["params_sha256"]) == (15, whole["params_sha256"])
    assert again["test_accuracy"] == whole["test_accuracy"]
    assert again["step_seconds"] is None


def test_another_configuration_is_refused_field_by_field(checkpoints, capsys):
    error = refused([*ARGUMENTS, "--seed=3", "--policy=dots", f"--checkpoint-dir={checkpoints}"], capsys)
    assert "policy: everything in the checkpoint, dots asked" in error
    assert "seed: 0 in the checkpoint, 3 asked" in error
    assert "batch_size" not in error
    assert "another --checkpoint-dir" in error
    assert steps(checkpoints) == [5, 7]


def test_a_policy_in_another_spelling_is_the_same_configuration(checkpoints, capsys):
    argv = [*ARGUMENTS, "--policy=everything_saveable", "--max-steps=7", f"--checkpoint-dir={checkpoints}"]
    assert outcome(argv, capsys)["first_step"] == 7


def test_fewer_steps_than_the_checkpoint_has(checkpoints, capsys):
    error = refused([*ARGUMENTS, "--max-steps=6", f"--checkpoint-dir={checkpoints}"], capsys)
    assert "--max-steps 6 lies before the checkpoint of step 7" in error


def largest_file(directory: Path) -> Path:
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("part", "damage"),
    [("state", truncate), ("state", flip), ("about", truncate), ("about", flip), ("about", Path.unlink)],
)
def test_damage_is_found_and_the_remedy_works(part, damage, checkpoints, capsys):
    damage(largest_file(checkpoints / "7" / part))
    argv = [*ARGUMENTS, "--max-steps=7", f"--checkpoint-dir={checkpoints}"]
    error = refused(argv, capsys)
    assert f"{checkpoints / '7'} is damaged" in error
    assert "Delete that directory to resume from step 5" in error
    assert steps(checkpoints) == [5, 7]
    if damage is truncate and part == "state":
        shutil.rmtree(checkpoints / "7")
        assert outcome(argv, capsys)["first_step"] == 5


def test_a_directory_that_is_a_file(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    error = refused([*ARGUMENTS, f"--checkpoint-dir={tmp_path / 'file'}"], capsys)
    assert "--checkpoint-dir must be a directory that can be written" in error


def small_state(step: int) -> TrainState:
    whole = devices.all_devices().whole
    tree = TrainState(
        jnp.int32(step), {"w": jnp.arange(4.0), "b": jnp.zeros((), jnp.bfloat16)}, {}, (jnp.ones(3),), jnp.int32(0)
    )
    return jax.tree.map(lambda leaf: jax.device_put(leaf, whole), tree)


def test_saved_and_restored_bit_for_bit(tmp_path):
    state = small_state(3)
    saved = OrbaxCheckpoints(str(tmp_path), {"model": "net"})
    assert saved.restore(state) is None
    saved.save(3, state)
    saved.close()
    restored = OrbaxCheckpoints(str(tmp_path), {"model": "net"})
    again = restored.restore(jax.tree.map(jnp.zeros_like, state))
    restored.close()
    assert again is not None
    assert digest(again) == digest(state)
    assert jax.tree.structure(again) == jax.tree.structure(state)


def test_a_field_that_the_checkpoint_does_not_know(tmp_path):
    saved = OrbaxCheckpoints(str(tmp_path), {"model": "net"})
    saved.save(3, small_state(3))
    saved.close()
    later = OrbaxCheckpoints(str(tmp_path), {"model": "net", "ops": "lean"})
    with pytest.raises(ExperimentError, match="ops: None in the checkpoint, lean asked"):
        later.require_same_run()
    later.close()


def test_digest_is_that_of_the_bits():
    tree = {"b": jnp.zeros(2), "a": jnp.ones(3, jnp.bfloat16)}
    assert digest(tree) == digest(dict(reversed(tree.items())))
    assert digest(tree) != digest(tree | {"b": -jnp.zeros(2)})


@pytest.fixture(scope="module")
def program():
    """Five steps an epoch, three epochs."""
    config = Config(data="sample", batch_size=200, epochs=3)
    over = devices.all_devices()
    return config, over, build_program(config, apply_policy(config, 10), data.load("sample"), over)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(program, tmp_path):
    config, over, program = program

    def step(state, training, order):
        if int(state.step) == 8:  # the ninth step, of the second epoch
            state = replace(state, params=jax.tree.map(lambda leaf: leaf * jnp.nan, state.params))
        return program.step(state, training, order)

    saved = OrbaxCheckpoints(str(tmp_path), config.identity())
    with pytest.raises(ExperimentError, match=r"NaN at step 9\. The checkpoint of step 5 is kept"):
        run(config, replace(program, step=step), over, program.init(), saved, Silent())
    saved.close()
    assert steps(tmp_path) == [5]

    with pytest.raises(ExperimentError, match=r"NaN at step 9\. No checkpoint was saved"):
        run(config, replace(program, step=step), over, program.init(), NoCheckpoints(), Silent())


def test_a_diverging_run_says_so_on_the_command_line(tmp_path, capsys):
    error = refused([*ARGUMENTS, "--learning-rate=1e30", f"--checkpoint-dir={tmp_path}"], capsys)
    assert "Training stopped: the loss became infinite or NaN at step " in error
    assert steps(tmp_path) == []


def test_checkpoints_within_an_epoch(program, monkeypatch):
    monkeypatch.setattr(loop, "SAVE_EVERY_STEPS", 2)
    saves = list[int]()

    class Watched(NoCheckpoints):
        active = True

        def save(self, step, state):
            assert int(state.step) == step
            saves.append(step)

    config, over, program = program
    config = replace(config, epochs=1)
    run(config, program, over, program.init(), Watched(), Silent())
    assert saves == [2, 4, 5]


def test_killed_and_restarted():
    result = kill.compare(kill.Options(kills=2, epochs=8, batch_size=200))
    assert [one["during"] for one in result["kills"]] == ["start", "training"]
    assert result["kills"][-1]["newest_checkpoint"] is not None
    assert result["resumed_from"] > 0
    assert result["killed_sha256"] == result["undisturbed_sha256"]


def test_losses_of_a_run_that_has_nothing_to_do(program):
    config, over, program = program
    config = replace(config, epochs=1)
    state = replace(program.init(), step=jnp.int32(5))
    _, history = run(config, program, over, state, NoCheckpoints(), Silent())
    assert (history.losses, history.median_step_seconds) == ([], None)
    np.testing.assert_equal(history.first_step, 5)
