"""What can be compiled for here, and what is said about the rest."""

import importlib

import jax
import pytest

import jaxremat
from jaxremat.errors import TargetError

module = importlib.import_module("jaxremat.targets")  # its function of the same name hides it
TPU_WANTED = module.libtpu_requirement()
TPU_FITTING = TPU_WANTED.removeprefix("==").replace("*", "1")


@pytest.fixture
def installed(monkeypatch):
    """Lets a test say which distributions are installed, on Linux with Python 3.11 and without a CUDA toolkit."""

    def say(**versions):
        known = {name.replace("_", "-"): version for name, version in versions.items()}
        monkeypatch.setattr(module, "_installed", lambda distribution: known.get(distribution))
        monkeypatch.setattr(module, "_has_cuda_toolkit", lambda: False)
        monkeypatch.setattr(module.sys, "platform", "linux")

    return say


CUDA12 = {"jax_cuda12_plugin": jax.__version__, "jax_cuda12_pjrt": jax.__version__, "nvidia_cuda_nvcc_cu12": "12.9.86"}
CUDA13 = {"jax_cuda13_plugin": jax.__version__, "jax_cuda13_pjrt": jax.__version__, "nvidia_cuda_nvcc": "13.0.88"}


def test_names():
    assert list(jaxremat.targets()) == ["local", "v4", "v5e", "v5p", "v6e", "v100", "a100", "a6000", "h100", "h200", "b200"]  # fmt: skip
    assert len(jaxremat.targets()) == 11


def test_local_is_what_jax_runs_on():
    local = jaxremat.targets()["local"]
    assert local.available
    assert local.specification == jax.default_backend()
    assert local.memory_bytes is not None
    assert local.memory_bytes > 2**28


def test_memory_is_of_one_chip():
    assert jaxremat.targets()["v5e:4x4"].memory_bytes == 16 * 2**30
    assert jaxremat.targets()["h100:8"].memory_bytes == 84942979072


@pytest.mark.parametrize(("name", "chips"), [("h100", 1), ("h100:8", 8), ("v5e", 1), ("v5e:2x4", 8), ("v4:2x2x2", 8)])
def test_suffixes(name, chips):
    assert jaxremat.targets()[name].chips == chips


@pytest.mark.parametrize(("asked", "name"), [("H100", "h100"), ("Local", "local"), ("V5E:2X4", "v5e:2x4")])
def test_names_in_any_case(asked, name):
    assert asked in jaxremat.targets()
    assert jaxremat.targets()[asked] == jaxremat.targets()[name]
    assert jaxremat.targets()[asked].name == name


def test_nothing_installed_names_the_exact_commands(installed, monkeypatch):
    installed()
    monkeypatch.setattr(module.sys, "version_info", (3, 11, 7))
    table = str(jaxremat.targets())
    assert f'no: pip install "jax-cuda12-plugin=={jax.__version__}" nvidia-cuda-nvcc-cu12' in table
    assert f'no: pip install "libtpu{TPU_WANTED}"' in table
    monkeypatch.setattr(module.sys, "version_info", (3, 13, 0))
    remedy = jaxremat.targets()["h100"].remedy
    assert remedy == f'pip install "jax-cuda13-plugin=={jax.__version__}" nvidia-cuda-nvcc'


def test_all_installed(installed):
    installed(**CUDA12, libtpu=TPU_FITTING)
    assert all(target.available for target in jaxremat.targets().values())


def test_cuda_13_has_no_v100(installed):
    installed(**CUDA13)
    assert jaxremat.targets()["h100"].available
    assert not jaxremat.targets()["v100"].available
    assert "jax-cuda12-plugin" in jaxremat.targets()["v100"].remedy


def test_the_assembler_is_missing(installed):
    installed(**{**CUDA12, "nvidia_cuda_nvcc_cu12": None})
    assert jaxremat.targets()["h100"].remedy == "pip install nvidia-cuda-nvcc-cu12"


def test_wrong_versions_are_named(installed):
    installed(**{**CUDA12, "jax_cuda12_plugin": "0.0.1"}, libtpu="0.0.1")
    assert not jaxremat.targets()["h100"].available
    assert "jax-cuda12-plugin 0.0.1" in jaxremat.targets()["h100"].remedy
    assert f'"jax-cuda12-plugin=={jax.__version__}"' in jaxremat.targets()["h100"].remedy
    assert "libtpu 0.0.1 is not that of JAX" in jaxremat.targets()["v4"].remedy
    assert f'"libtpu{TPU_WANTED}"' in jaxremat.targets()["v4"].remedy


def test_half_a_plugin_is_not_one(installed):
    installed(**{**CUDA12, "jax_cuda12_pjrt": None})
    assert not jaxremat.targets()["h100"].available


def test_other_systems_have_no_such_compilers(installed, monkeypatch):
    installed(**CUDA12)
    monkeypatch.setattr(module.sys, "platform", "darwin")
    assert jaxremat.targets()["h100"].remedy == "JAX's GPU compiler exists for Linux only"


@pytest.mark.parametrize(("version", "wanted", "fits"), [
    ("0.0.42.1", "==0.0.42.*", True),
    ("0.0.42", "==0.0.42.*", True),
    ("0.0.421", "==0.0.42.*", False),
    ("0.0.42.1", "==0.0.42.1", True),
    ("0.0.42.2", "==0.0.42.1", False),
])  # fmt: skip
def test_version_of_libtpu(version, wanted, fits):
    assert module._satisfies(version, wanted) is fits


BAD_NAMES = {
    "h1000": "Did you mean 'h100'.*There are local, v4",
    "": "does not exist",
    "h100:": "several GPUs are a number, as in h100:4",
    "h100:0": "several GPUs are a number",
    "h100:2x2": "several GPUs are a number",
    "v5e:4": "grid of 2 dimensions, as in v5e:2x2",
    "v4:2x2": "grid of 3 dimensions, as in v4:2x2x1",
    "v5e:0x2": "grid of 2 dimensions",
    "local:2": "takes its devices from the shardings",
}


@pytest.mark.parametrize(("name", "message"), BAD_NAMES.items(), ids=BAD_NAMES)
def test_bad_names(name, message):
    with pytest.raises(TargetError, match=message):
        jaxremat.targets()[name]
    assert name not in jaxremat.targets()


def test_unknown_target_says_how_to_get_more(installed):
    installed()
    with pytest.raises(TargetError, match="To compile for more of them: pip install"):
        jaxremat.targets()["gpu"]


def test_local_without_devices(monkeypatch):
    def no_devices():
        raise RuntimeError("Unable to initialize backend 'tpu': no such device\nand more")

    monkeypatch.setattr(jax, "local_devices", no_devices)
    local = jaxremat.targets()["local"]
    assert (local.available, local.remedy) == (False, "Unable to initialize backend 'tpu': no such device")
    with pytest.raises(TargetError, match=r"nothing here compiles for local.*no such device"):
        jaxremat.cost(lambda x: x, jax.ShapeDtypeStruct((1,), "float32"))


def test_target_configs_differ_by_chip():
    configs = {jaxremat.targets()[name].specification for name in ("v100", "a100", "a6000", "h100", "h200", "b200")}
    assert len(configs) == 6
    assert all("cuda_compute_capability" in config for config in configs)
