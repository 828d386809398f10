"""Where recurrent states are put: what a placement is, and the placements that come along."""

from spanlab.core.placement.contract import (
    PLACEMENTS,
    ArmFacts,
    Checked,
    PlacementError,
    Placer,
    PrefillInfo,
    Rule,
    Union,
)
from spanlab.core.placement.dynamic_program import SOLVERS, Dp, DynamicProgram, Solution
from spanlab.core.placement.planner import Planner, learned, planned
from spanlab.core.placement.published_solver import solve_as_published
from spanlab.core.placement.rules import (
    balanced,
    boundary,
    branch,
    branch_else_last,
    every_n,
    last,
    no_states,
    powers_of_two,
    square_root,
    tail,
)
from spanlab.core.placement.shared_budget import SharedBudget

__all__ = [
    "PLACEMENTS",
    "SOLVERS",
    "ArmFacts",
    "Checked",
    "Dp",
    "DynamicProgram",
    "PlacementError",
    "Placer",
    "Planner",
    "PrefillInfo",
    "Rule",
    "SharedBudget",
    "Solution",
    "Union",
    "balanced",
    "boundary",
    "branch",
    "branch_else_last",
    "every_n",
    "last",
    "learned",
    "no_states",
    "planned",
    "powers_of_two",
    "solve_as_published",
    "square_root",
    "tail",
]
