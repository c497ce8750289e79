"""`jaxremat.cost`: here, and for chips that are not."""

import json
import os
import re
import subprocess
import sys
from functools import partial

import chain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import wants
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import jaxremat
from jaxremat import absent, cost_cache
from jaxremat.errors import CompileError, TargetError

X = jax.ShapeDtypeStruct((256, 128), jnp.float32)
X_BYTES = 256 * 128 * 4
MIB = 2**20


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXREMAT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cost"


def gram(x):
    return jnp.tanh(x @ x.T)


def test_local_figures():
    c = jaxremat.cost(gram, X)
    assert (c.target, c.chips, c.argument_bytes, c.output_bytes) == ("local", 1, X_BYTES, 256 * 256 * 4)
    assert (c.aliased_bytes, c.host_bytes, c.convolutions, c.dots) == (0, 0, 0, 1)
    assert c.peak_bytes == c.temp_bytes + c.argument_bytes + c.output_bytes
    assert c.flops == 2 * 256 * 256 * 128
    assert c.fits is True
    assert c.sources["flops"] == "compiler cost_analysis"
    if jax.default_backend() == "cpu":
        assert c.sources["peak_bytes"].startswith("temp + argument")


def test_arrays_and_shapes_are_the_same():
    assert jaxremat.cost(gram, jnp.ones(X.shape)).to_json().keys() == jaxremat.cost(gram, X).to_json().keys()
    assert jaxremat.cost(gram, np.ones(X.shape, np.float32)).argument_bytes == X_BYTES


def test_donation_and_static_arguments_of_a_jit():
    update = jax.jit(lambda p, g, rate: p - rate * g, donate_argnums=0, static_argnums=2)
    c = jaxremat.cost(update, X, X, 0.5)
    assert (c.argument_bytes, c.aliased_bytes) == (2 * X_BYTES, X_BYTES)
    assert c.peak_bytes == c.temp_bytes + 2 * X_BYTES


def test_keys_pytrees_and_keyword_arguments():
    def f(tree, *, key):
        return tree["x"] * jax.random.bernoulli(key, 0.5, tree["x"].shape), None

    key = jax.eval_shape(lambda: jax.random.key(0))
    assert jaxremat.cost(f, {"x": X, "none": None}, key=key).argument_bytes == X_BYTES + 8


def test_scans_are_counted_as_often_as_they_run():
    def loop(a):
        return jax.lax.scan(lambda c, _: (c @ c, None), a, None, length=10)[0]

    c = jaxremat.cost(loop, jax.ShapeDtypeStruct((64, 64), jnp.float32))
    assert c.flops == 10 * 2 * 64**3
    assert c.sources["flops"] == "counted from the jaxpr, scan bodies times their length"
    assert c.bytes_accessed is not None
    assert c.bytes_accessed >= 10 * 2 * 64 * 64 * 4


def test_loops_of_unknown_length_have_no_count():
    c = jaxremat.cost(lambda a: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, a), X)
    assert c.flops is None
    assert c.bytes_accessed is None
    assert "unknown length" in c.sources["flops"]
    assert "?" in str(c)


def test_json_and_table():
    c = jaxremat.cost(gram, X)
    document = json.loads(json.dumps(c.to_json()))
    assert document["peak_bytes"] == c.peak_bytes
    assert document["fits"] is True
    missing = {name for name in document if name not in document["sources"]} - {
        "target",
        "chips",
        "needed_bytes",
        "fits",
        "sources",
    }
    assert not missing
    assert re.search(r"^cost on local$", str(c), re.MULTILINE)
    assert re.search(r"^  output +0\.2 MiB  compiler memory_analysis$", str(c), re.MULTILINE)


def test_same_program_is_not_compiled_twice():
    assert jaxremat.cost(gram, X) is jaxremat.cost(gram, X)
    assert jaxremat.cost(gram, jax.ShapeDtypeStruct((8, 8), jnp.float32)).argument_bytes == 256
    scale = [2.0]
    donating = jax.jit(lambda x: x * scale[0], donate_argnums=0)
    keeping = jax.jit(lambda x: x * scale[0])
    assert jaxremat.cost(donating, X).aliased_bytes == X_BYTES
    assert jaxremat.cost(keeping, X).aliased_bytes == 0
    assert jaxremat.cost(keeping, X) is jaxremat.cost(keeping, X)


def test_closed_over_arrays_are_not_lost():
    table = jax.random.normal(jax.random.key(0), X.shape)
    c = jaxremat.cost(lambda x: x * table, X)
    assert c.argument_bytes == X_BYTES  # the table is in the program
    assert c.peak_bytes == 3 * X_BYTES + c.temp_bytes


def test_rematerialization_is_kept():
    kernels, x = chain.arguments(depth=3, batch=8)
    plain = jaxremat.cost(jax.value_and_grad(chain.loss), kernels, x)
    remat = jaxremat.cost(jax.value_and_grad(partial(chain.loss, remat_block=jax.checkpoint)), kernels, x)
    assert (plain.convolutions, remat.convolutions) == (3 * 3 - 1, 3 * 3 - 1 + 3)


def test_refusals_are_one_line():
    def f(x):
        return jax.ffi.ffi_call("no_such_kernel", X)(x)

    with pytest.raises(CompileError, match=r"does not compile for local: .*no_such_kernel") as e:
        jaxremat.cost(f, X)
    assert "\n" not in str(e.value)
    assert e.value.wanted_bytes is None


def test_unknown_targets():
    with pytest.raises(TargetError, match="Did you mean 'h100'"):
        jaxremat.cost(gram, X, target="h10")
    with pytest.raises(TargetError, match="a name such as 'local' or 'h100' is required; got None"):
        jaxremat.cost(gram, X, target=None)


def test_local_wants_devices_that_are_there():
    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    with pytest.raises(TargetError, match=r"AbstractMesh, which has none\. Give a jax\.make_mesh"):
        jaxremat.cost(sharded(4), square, square)


def pretend(monkeypatch, kind):
    module = sys.modules["jaxremat.targets"]
    missing = module.missing_package
    monkeypatch.setattr(module, "missing_package", lambda k: "" if k == kind else missing(k))


def test_missing_compilers_name_the_remedy(monkeypatch):
    monkeypatch.setattr(sys.modules["jaxremat.targets"], "missing_package", lambda kind: f"pip install {kind}-compiler")
    with pytest.raises(TargetError, match=r"nothing here compiles for h100. Needed: pip install gpu-compiler\."):
        jaxremat.cost(gram, X, target="h100")


def sharded(chips, f=lambda p, x: (p - jnp.tanh(x @ p), (x @ p).sum())):
    mesh = AbstractMesh((chips,), ("data",))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    return jax.jit(f, in_shardings=(whole, rows), out_shardings=whole, donate_argnums=0)


@pytest.mark.parametrize(("chips", "target"), [(4, "h100"), (4, "h100:8"), (1, "h100:4")])
def test_the_mesh_must_have_as_many_chips_as_the_target(chips, target, monkeypatch):
    pretend(monkeypatch, "gpu")
    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    with pytest.raises(TargetError, match=rf"laid out for {chips} chips? and {target} is \d"):
        jaxremat.cost(sharded(chips), square, square, target=target)


def test_a_crash_of_the_compiler_is_reported_and_survived():
    crash = "import os, sys; sys.stdin.readline(); print('F1129 x.cc:1] Check failed: odd', file=sys.stderr, flush=True); os.abort()"
    worker = absent.Worker("gpu", (sys.executable, "-c", crash))
    for _ in range(2):
        with pytest.raises(CompileError, match=r"compiler process for GPU targets was ended by signal 6: F1129 .* odd"):
            worker.ask({"size": 0}, b"")
    worker.stop()


ECHO = """
import json, sys
for line in sys.stdin.buffer:
    request = json.loads(line)
    sys.stdin.buffer.read(request["size"])
    print(json.dumps({"number": request["number"]}), flush=True)
"""


def test_a_child_that_ended_while_nobody_asked_is_replaced():
    worker = absent.Worker("gpu", (sys.executable, "-c", ECHO))
    assert worker.ask({"size": 3, "number": 1}, b"abc") == {"number": 1}
    first = worker._process
    assert first is not None
    first.kill()
    # It may or may not have ended yet when the next one asks.
    assert worker.ask({"size": 3, "number": 2}, b"abc") == {"number": 2}
    assert worker._process is not first
    worker.kill()
    worker.stop()


def test_a_child_that_cannot_start_is_reported():
    worker = absent.Worker("tpu", (sys.executable, "-c", "import sys; sys.exit('no compiler')"))
    with pytest.raises(CompileError, match="for TPU targets ended with exit status 1: no compiler"):
        worker.ask({"size": 0}, b"x" * 10**6)  # more than a pipe holds
    worker.stop()


def test_the_child_ends_with_its_parent():
    script = """if True:
        import os, signal
        from jaxremat import absent
        worker = absent.worker("gpu")
        worker.start()
        print(worker._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    # The child has this process's standard output too, until it puts its own there: closed when both have ended.
    parent = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment())
    child = int(parent.stdout)
    for _ in range(600):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        with open(f"/proc/{child}/stat") as stat:
            if stat.read().split()[2] == "Z":
                return
        subprocess.run(["sleep", "0.1"], check=True)
    pytest.fail("the child outlived its parent by a minute")


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "JAX_PLATFORMS": "cpu"}


def test_garbage_is_refused_by_the_child_which_lives_on():
    worker = absent.Worker("gpu")
    request = {"kind": "gpu", "chips": 1, "specification": "nonsense {", "options": {}, "size": 3, "directory": None}
    assert "error" in worker.ask(request, b"abc")
    process = worker._process
    assert "error" in worker.ask(request, b"abc")
    assert worker._process is process
    worker.stop()


OUT_OF_MEMORY = {
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 18.50G of 15.75G "
    "hbm. Exceeded hbm capacity by 2.75G.\n\nTotal hbm usage >= 18.7G": 18.5 * 2**30,
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (36.00G) exceeds "
    "available HBM (15.75G).": 36 * 2**30,
}


@pytest.mark.parametrize(("message", "wanted"), OUT_OF_MEMORY.items(), ids=["used", "exceeds"])
def test_out_of_memory_says_what_was_wanted(message, wanted):
    e = absent.compile_error(message, "v5e")
    assert e.wanted_bytes == wanted
    assert f"wants {wanted / 2**30:.2f} GiB, and 15.75 GiB can be used" in str(e)


def test_a_heading_alone_is_no_reason():
    e = absent.compile_error("INVALID_ARGUMENT: E1200: HostOffload:\nwhat is wrong\nand a third line", "v4")
    assert str(e) == "cost: the program does not compile for v4: INVALID_ARGUMENT: E1200: HostOffload: what is wrong"


def test_long_refusals_are_cut():
    e = absent.compile_error("\n\nINTERNAL: " + "x" * 1000 + "\nsecond line", "h100")
    assert str(e).startswith("cost: the program does not compile for h100: INTERNAL: xxx")
    assert len(str(e)) < 400


def test_cache_keeps_and_misses(cache):
    key = cost_cache.cache_key("module {}", {"target": "h100"})
    assert cost_cache.load(key) is None
    cost_cache.store(key, {"peak_bytes": 3})
    assert cost_cache.load(key) == {"peak_bytes": 3, "key": key}
    assert [p.name for p in cache.iterdir()] == [f"{key}.json"]
    others = [("module { }", {"target": "h100"}), ("module {}", {"target": "h200"})]
    assert all(cost_cache.cache_key(*other) != key for other in others)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"key": "other"}', b"\xff\xfe"])
def test_a_spoiled_entry_counts_as_absent(cache, content):
    key = cost_cache.cache_key("module {}", {})
    cost_cache.store(key, {"peak_bytes": 3})
    (cache / f"{key}.json").write_bytes(content)
    assert cost_cache.load(key) is None


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXREMAT_CACHE_DIR", str(tmp_path / "file"))
    cost_cache.store("key", {})
    assert cost_cache.load("key") is None


@wants("h100")
def test_chain_on_h100():
    # Each block keeps its convolution's output and its own: 2 · 16 activations of 8 MiB. A checkpoint of each block
    # keeps the 16 inputs, and two more activations are in flight.
    kernels, x = chain.arguments()
    plain = jaxremat.cost(jax.value_and_grad(chain.loss), kernels, x, target="h100")
    remat = jaxremat.cost(
        jax.value_and_grad(partial(chain.loss, remat_block=jax.checkpoint)), kernels, x, target="h100"
    )
    assert plain.temp_bytes == pytest.approx(2 * 16 * chain.ACTIVATION_BYTES, rel=0.02)
    assert remat.temp_bytes == pytest.approx((16 + 2) * chain.ACTIVATION_BYTES, rel=0.02)
    assert (plain.convolutions, remat.convolutions) == (47, 63)
    assert plain.sources["peak_bytes"] == "compiler memory_analysis"
    assert plain.sources["flops"] == "counted from the jaxpr, scan bodies times their length"


@wants("v5e")
def test_chain_on_v5e():
    # Batch 512: an activation of 64 MiB, too large for the on-chip memory. XLA:TPU keeps the convolutions' outputs alone
    # and makes what follows them again itself: two, and a gradient in flight. With a checkpoint of each block only the
    # input of the second one is kept (that of the first is an argument), beside one activation in flight.
    kernels, x = chain.arguments(depth=2, batch=512)
    plain = jaxremat.cost(jax.value_and_grad(chain.loss), kernels, x, target="v5e")
    remat = jaxremat.cost(jax.value_and_grad(partial(chain.loss, remat_block=jax.checkpoint)), kernels, x, target="v5e")
    assert plain.argument_bytes >= 64 * MIB
    assert plain.temp_bytes == pytest.approx(3 * 64 * MIB, rel=0.02)
    # The compiler that comes with JAX 0.12 gains nothing from it at this depth.
    kept = 2 if jax.__version_info__ < (0, 11) else 3
    assert remat.temp_bytes == pytest.approx(kept * 64 * MIB, rel=0.02)
    assert (plain.convolutions, remat.convolutions) == (5, 7)
    assert plain.sources["flops"] == "compiler cost_analysis"


@wants("v5e")
def test_out_of_memory_on_v5e():
    big = jax.ShapeDtypeStruct((65536, 32768), jnp.float32)
    with pytest.raises(CompileError, match=r"wants \d+\.\d\d GiB, and 15\.75 GiB can be used") as e:
        jaxremat.cost(lambda x: (jnp.sin(x)[:, ::-1] @ x.T, jnp.cos(x)), big, target="v5e")
    assert e.value.wanted_bytes is not None
    assert e.value.wanted_bytes > 16 * 2**30
    with pytest.raises(CompileError, match="wants"):  # from the cache
        jaxremat.cost(lambda x: (jnp.sin(x)[:, ::-1] @ x.T, jnp.cos(x)), big, target="v5e")


@pytest.mark.parametrize(
    "target", [pytest.param("h100:4", marks=wants("h100")), pytest.param("v5e:2x2", marks=wants("v5e"))]
)
def test_shardings_and_donation_over_several_chips(target):
    square = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    c = jaxremat.cost(sharded(4, lambda p, x: p - x.T @ (x @ p)), square, square, target=target)
    assert c.chips == 4
    assert c.argument_bytes == 4 * MIB + 1 * MIB  # the whole of p and a quarter of x
    assert c.aliased_bytes == 4 * MIB
    assert c.dots == 2
    assert f"{target}, 4 chips, each" in str(c)


@wants("h100")
def test_offloaded_values_are_host_bytes():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device", offload_dst="pinned_host"
    )

    def f(w, x):
        for _ in range(3):
            x = jaxremat.name(jnp.tanh(x @ w), "h")
        return x.sum()

    square = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    c = jaxremat.cost(jax.grad(jax.checkpoint(f, policy=policy)), square, square, target="h100")
    assert c.host_bytes >= 4 * MIB
    assert c.host_bytes % (4 * MIB) == 0


@wants("h100")
def test_keys_are_lowered_for_the_target_and_figures_are_cached(cache, monkeypatch):
    def f(key, x):
        return x * jax.random.normal(key, x.shape)

    key = jax.eval_shape(lambda: jax.random.key(0))
    first = jaxremat.cost(f, key, X, target="h100")
    assert first.argument_bytes == X_BYTES + 8
    assert len(list(cache.iterdir())) == 1

    def no_compiler(program, target, peak_alone):
        raise AssertionError("compiled again")

    monkeypatch.setattr(absent, "compile_program", no_compiler)
    assert jaxremat.cost(jax.jit(f), key, X, target="h100") == first
    with pytest.raises(AssertionError, match="compiled again"):
        jaxremat.cost(f, key, X, target="h200")


@wants("h100")
def test_no_backend_starts_for_a_chip_that_is_not_here():
    script = """if True:
        import jax, jaxremat
        from jax._src import xla_bridge
        jaxremat.cost(lambda x: x @ x, jax.ShapeDtypeStruct((64, 64), "float32"), target="h100")
        print(xla_bridge.backends_are_initialized())
    """
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment(), check=True)
    assert run.stdout == "False\n"


@wants("h100")
def test_callbacks_have_no_process_to_call():
    def f(x):
        jax.debug.print("{}", x.sum())
        return x

    with pytest.raises(CompileError, match="does not compile for h100: it calls back to this process"):
        jaxremat.cost(f, X, target="h100")


@wants("h100")
def test_arguments_in_host_memory():
    mesh = AbstractMesh((1,), ("d",))
    host, device = (NamedSharding(mesh, PartitionSpec(), memory_kind=kind) for kind in ("pinned_host", "device"))
    f = jax.jit(lambda x: jax.device_put(x, device) * 2, in_shardings=host, out_shardings=device)
    c = jaxremat.cost(f, X, target="h100")
    assert (c.host_bytes, c.argument_bytes, c.output_bytes) == (X_BYTES, 0, X_BYTES)


@wants("h100")
def test_what_a_gpu_cannot_compile_is_one_line():
    def f(x):
        return jax.ffi.ffi_call("no_such_kernel", X)(x)

    with pytest.raises(CompileError, match="does not compile for h100: ") as e:
        jaxremat.cost(f, X, target="h100")
    assert "\n" not in str(e.value)
