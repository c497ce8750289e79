"""The planner: from a byte budget to what is stored.

The order of its modules is the order of its work: `operations` (the graph in numbers), `lifetimes` (bytes in use, when),
`cut` (what is worth storing at a price), `segments` (waists and what lies between them), `knapsack` (the best mixture),
`search` (all of it for one graph), `judge` (the compiler's word), `planning` (`plan` itself), `result` (what it returns).
"""

from jaxremat.plan.planning import plan
from jaxremat.plan.result import Plan, load_plan

__all__ = ["Plan", "load_plan", "plan"]
