"""The planner: from a byte budget to what is stored.

The order of its modules is the order of its work: `compilers` (how they differ), `operations` (the graph in numbers),
`lifetimes` (bytes in use, when), `candidate` (a policy that is weighed), `subject` (the function, and a picture of its cuts),
`cut` (what is worth storing at a price), `segments` (waists and what lies between them), `knapsack` (the best mixture),
`nesting` (on several levels), `search` (all of it for one graph), `exhaustive` (of few values), `loops` (with scans), `judge`
(the compiler's word), `task` (search and judge of a function), `rounds` (the compiler in the loop), `planning` (a plan of it),
`result` (which is that), `frontier` (the whole curve), `curve` (which is that), `plot` (a drawing of it), `planner` (what users
call).
"""

from jaxremat.plan.curve import Frontier, Point
from jaxremat.plan.planner import Planner, frontier, plan
from jaxremat.plan.result import Plan, load_plan

__all__ = ["Frontier", "Plan", "Planner", "Point", "frontier", "load_plan", "plan"]
