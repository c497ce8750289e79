"""The chain of 16 blocks under the budgets by which planners are compared; compiled for this machine.

One activation is 8 MiB and a convolution about 1.16 GFLOP, of which a step without rematerialization has 16 forward, 16
for the kernels and 15 for the inputs. `jax.checkpoint` over the best segments (of two blocks) needs 112 MiB of temporary
values and 74.2 GFLOP. Kernels and their gradients come on top of that, and so does the input.
"""

import chain
import jax
import pytest

import jaxremat
from jaxremat.flops import count_flops

MIB = 2**20


def step_flops(loss):
    return count_flops(jax.make_jaxpr(jax.value_and_grad(loss))(*chain.arguments(16))).conv_flops


@pytest.mark.parametrize(("temp_bytes", "most_flops"), [(112 * MIB, 66e9), (176 * MIB, None)])
def test_anchors(temp_bytes, most_flops):
    kernels, images = chain.arguments(16)
    inputs = sum(k.size * 4 for k in kernels) + images.size * 4
    gradients = sum(k.size * 4 for k in kernels)
    found = jaxremat.plan(chain.loss, kernels, images, budget=temp_bytes + inputs + gradients)
    assert found.peak_bytes <= found.budget_bytes
    plain, planned = step_flops(chain.loss), step_flops(jaxremat.remat(chain.loss, found))
    assert planned <= (most_flops or plain)  # else no convolution runs again
    assert planned - plain == found.recomputed_contraction_flops
