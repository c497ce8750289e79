"""`jaxremat.buffers`: memory from a buffer assignment; and `jaxremat.peak`, which waits for no more than that."""

import jax
import jax.numpy as jnp
import pytest
from compilers import wants

import jaxremat
from jaxremat import absent, buffers

ALLOC, FREE, SHARE = 0, 1, 2
HOST = 5


def varint(number):
    seven = number & 0x7F
    return bytes([seven]) if number < 0x80 else bytes([seven | 0x80]) + varint(number >> 7)


def message(**fields):
    """A message in the encoding of protocol buffers: `f3=7` is field 3 with a number, `f3=[b""]` one with several messages."""
    written = b""
    for name, value in fields.items():
        number = int(name[1:])
        if isinstance(value, int):
            written += varint(number << 3) + varint(value)
        else:
            for part in value:
                written += varint(number << 3 | 2) + varint(len(part)) + part
    return written


def program(sizes, allocations, *traces, colors=()):
    """A serialized HloProto: buffers of these sizes from number 1 on, and heaps of (kind, buffer, shared with) each."""
    colors = dict(colors)
    logical = [message(f1=i, f2=size, f4=colors.get(i, 0)) for i, size in enumerate(sizes, 1)]
    heaps = [
        message(f1=[message(f1=kind, f2=buffer, f3=[b"main"], f5=shared) for kind, buffer, shared in trace], f2=1)
        for trace in traces
    ]
    return message(f1=[b"the module"], f3=[message(f1=logical, f3=allocations, f4=heaps)])


def test_what_is_fixed_and_the_heap_at_its_fullest():
    # An argument of 1,000 bytes, one of 200 whose memory a result takes over, a result of 30, a constant of 4; a heap. What
    # has no memory of the device (a color) or none at all (thread-local) does not count, nor does the heap's own size.
    allocations = [
        message(f2=1000, f5=1),
        message(f2=200, f5=1, f7=1),
        message(f2=30, f7=1),
        message(f2=4, f12=1),
        message(f2=10**6),
        message(f2=77, f8=1),
        message(f2=88, f3=1, f5=1),
    ]
    # 1 and 2 together are 300, then 1 is gone, and 3 makes it 250.
    heap = [(ALLOC, 1, 0), (ALLOC, 2, 0), (FREE, 1, 0), (ALLOC, 3, 0), (FREE, 2, 0), (FREE, 3, 0)]
    assert buffers.figures(program([100, 200, 50], allocations, heap)) == {
        "peak_bytes": 1000 + 200 + 30 + 4 + 300,
        "argument_bytes": 1200,
    }


def test_what_shares_memory_is_there_as_long_as_one_of_them_is():
    # 2 takes the memory of 1, which is then freed: still 100, and 3 beside it makes 150. Then none is there, until 4 takes it again
    # beside 5: 100 + 120.
    heap = [(ALLOC, 1, 0), (SHARE, 2, 1), (FREE, 1, 0), (ALLOC, 3, 0), (FREE, 2, 0), (FREE, 3, 0)]
    assert buffers.figures(program([100, 100, 50, 100, 120], [], heap))["peak_bytes"] == 150
    heap += [(SHARE, 4, 2), (ALLOC, 5, 0), (FREE, 4, 0), (FREE, 5, 0)]
    assert buffers.figures(program([100, 100, 50, 100, 120], [], heap))["peak_bytes"] == 220


def test_the_largest_heap_counts():
    small, large = [(ALLOC, 1, 0), (FREE, 1, 0)], [(ALLOC, 2, 0), (FREE, 2, 0)]
    assert buffers.figures(program([100, 300], [], small, large, colors={2: 1}))["peak_bytes"] == 300
    assert buffers.figures(program([100, 300], [])) == {"peak_bytes": 0, "argument_bytes": 0}


def test_files_that_do_not_say(tmp_path):
    whole = program([100], [message(f2=1000, f5=1)], [(ALLOC, 1, 0)])
    assert buffers.written(tmp_path) is None
    path = tmp_path / "module_0001.jit_f.sm_9.0_gpu_after_optimizations.hlo.pb"
    for part in (*(whole[:length] for length in range(len(whole))), b"\x0b"):
        path.write_bytes(part)
        assert buffers.written(tmp_path) is None
    path.write_bytes(whole)
    assert buffers.written(tmp_path) == whole
    assert buffers.figures(whole) == {"peak_bytes": 1100, "argument_bytes": 1000}
    assert buffers.figures(program([100], [], [(ALLOC, 1, 0)], colors={1: HOST})) is None


def layers(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def scanned(ws, x):
    return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2).mean()


def update(ws, x):
    return jax.tree.map(jnp.subtract, ws, jax.grad(layers)(ws, x))


WS, X = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 6, jax.ShapeDtypeStruct((16384, 512), jnp.float32)
STACKED = jax.ShapeDtypeStruct((6, 512, 512), jnp.float32)
PROGRAMS = {
    "layers": (jax.value_and_grad(layers), WS, X),
    "scan": (jax.value_and_grad(scanned), STACKED, X),
    "rematerialized scan": (jax.value_and_grad(jaxremat.remat(scanned, "nothing")), STACKED, X),
    "donated": (jax.jit(update, donate_argnums=0), WS, X),
    "host memory": (jax.value_and_grad(jaxremat.remat(layers, "offload:dots")), WS, X),
}


@pytest.fixture
def programs_compiled(monkeypatch):
    """For every program that is compiled whether its peak alone was asked for, and what came back."""
    found, compile_program = list[tuple[bool, dict]](), absent.compile_program

    def watched(program, target, peak_alone=False):
        found.append((peak_alone, compile_program(program, target, peak_alone)))
        return found[-1][1]

    monkeypatch.setattr(absent, "compile_program", watched)
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXREMAT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("target", [pytest.param("h100", marks=wants("h100")), pytest.param("v5e", marks=wants("v5e"))])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_peak_is_that_of_the_whole_compilation(name, target, programs_compiled):
    f, *args = PROGRAMS[name]
    alone = jaxremat.peak(f, *args, target=target)
    whole = jaxremat.cost(f, *args, target=target)
    assert (alone.peak_bytes, alone.argument_bytes) == (whole.peak_bytes, whole.argument_bytes)
    # What keeps values in host memory is compiled to its end, as compilers then report another peak; and serves both.
    early, *rest = programs_compiled
    assert early[0]
    assert ("compile_seconds" in early[1]) == (name == "host memory") == (not rest)


@wants("v5e")
def test_a_peak_is_kept_and_one_beyond_the_chip_is_known(programs_compiled):
    big = jax.ShapeDtypeStruct((65536, 32768), jnp.float32)
    for _ in range(2):
        found = jaxremat.peak(lambda x: (jnp.sin(x)[:, ::-1] @ x.T, jnp.cos(x)), big, target="v5e")
        # The argument, its cosine and the product, in 16 GiB of memory.
        assert found.argument_bytes == 65536 * 32768 * 4
        assert found.peak_bytes >= (2 * 65536 * 32768 + 65536 * 65536) * 4
    assert len(programs_compiled) == 1


def test_the_peak_of_a_local_program():
    f, *args = PROGRAMS["layers"]
    alone, whole = jaxremat.peak(f, *args), jaxremat.cost(f, *args)
    assert (alone.peak_bytes, alone.argument_bytes) == (whole.peak_bytes, whole.argument_bytes)
