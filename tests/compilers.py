"""Which compilers of absent chips are installed."""

import pytest

import jaxremat


def wants(target):
    """Returns the mark of a test that is skipped where nothing compiles for a target."""
    remedy = jaxremat.targets()[target].remedy
    return pytest.mark.skipif(bool(remedy), reason=f"no compiler for {target}: {remedy}")
