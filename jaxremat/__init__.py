"""Rematerialization policies for JAX: what a training step stores, what it recomputes, and what that costs."""

from jaxremat.compat import compiler_options
from jaxremat.cost import Cost, Peak, cost, peak
from jaxremat.erasure import erased
from jaxremat.errors import CompileError, PolicyError, RematWarning, TargetError
from jaxremat.naming import name
from jaxremat.plan import Frontier, Plan, Planner, frontier, load_plan, plan
from jaxremat.policy import Policy
from jaxremat.remat import remat
from jaxremat.residuals import Residuals, residuals
from jaxremat.spelling import parse
from jaxremat.targets import Target, targets

__all__ = [
    "CompileError",
    "Cost",
    "Frontier",
    "Peak",
    "Plan",
    "Planner",
    "Policy",
    "PolicyError",
    "RematWarning",
    "Residuals",
    "Target",
    "TargetError",
    "compiler_options",
    "cost",
    "erased",
    "frontier",
    "load_plan",
    "name",
    "parse",
    "peak",
    "plan",
    "remat",
    "residuals",
    "targets",
]
