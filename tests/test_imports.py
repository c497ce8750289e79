"""The import graph is a straight line, private modules of JAX stay in one file, and experiments use public names."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jaxremat

ROOT = Path(jaxremat.__file__).parent
# A module may import what stands before it. Packages count as one.
ORDER = [
    "errors",
    "text",
    "frames",
    "policy",
    "spelling",
    "naming",
    "compat",
    "labels",
    "fingerprint",
    "inline",
    "fusion",
    "graph",
    "segments",
    "choice",
    "masks",
    "forward",
    "pooled",
    "rewrite",
    "lint",
    "program",
    "arguments",
    "remat",
    "rows",
    "residuals",
    "flops",
    "hlo",
    "erasure",
    "targets",
    "buffers",
    "absent",
    "compiled",
    "cost_cache",
    "cost",
    "plan",
    "_compile_child",
    "ops",
    "flax",
]
ALLOWED_IN_EXPERIMENTS = {
    "policy",
    "spelling",
    "errors",
    "residuals",
    "cost",
    "cost_cache",
    "targets",
    "hlo",
    "flops",
    "text",
    "ops",
    "flax",
    "remat",
}


def imports(path):
    """The dotted names that a file imports anywhere, names from modules included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


LIBRARY = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")
EXPERIMENTS = sorted((ROOT.parent / "experiments").rglob("*.py"))


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: str(p.relative_to(ROOT)))
def test_straight_line(path):
    own = module_of(path)
    assert own in ORDER, f"give {own} its place in the line"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "jaxremat" and len(parts) > 1 and parts[1] in ORDER and parts[1] != own:
            assert ORDER.index(parts[1]) < ORDER.index(own), f"{own} imports {parts[1]}, which stands behind it"


@pytest.mark.parametrize("path", [*LIBRARY, *EXPERIMENTS], ids=lambda p: str(p.relative_to(ROOT.parent)))
def test_private_modules_of_jax(path):
    private = [name for name in imports(path) if name.startswith("jax._src")]
    assert not private or path == ROOT / "compat.py"


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_core_stands_on_jax_and_what_it_brings(path):
    others = {"flax", "optax", "rich", "tyro", "matplotlib", "orbax", "tensorflow_datasets", "torch"}
    if path == ROOT / "plan" / "plot.py":  # draws, if asked to and if it can
        others.remove("matplotlib")
    if module_of(path) != "flax":
        assert not [name for name in imports(path) if name.split(".")[0] in others]


def test_matplotlib_is_imported_only_to_draw():
    probe = "import sys, jaxremat.plan; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT.parent, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: str(p.relative_to(ROOT.parent)))
def test_experiments_use_public_names(path):
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "jaxremat" and len(parts) > 1:
            assert parts[1] in ALLOWED_IN_EXPERIMENTS or parts[1] in jaxremat.__all__, name
            assert not any(part.startswith("_") for part in parts[1:]), name
