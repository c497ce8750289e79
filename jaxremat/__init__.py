"""Rematerialization policies for JAX: what a training step stores, what it recomputes, and what that costs."""

from jaxremat.errors import PolicyError, RematWarning
from jaxremat.naming import name
from jaxremat.policy import Policy, parse
from jaxremat.remat import remat
from jaxremat.residuals import residuals

__all__ = ["Policy", "PolicyError", "RematWarning", "name", "parse", "remat", "residuals"]
