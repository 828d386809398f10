"""Where recurrent states are put: what a placement is, and the placements that come along."""

from spanlab.core.placement.clairvoyant import Clairvoyant
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
from spanlab.core.placement.departures import CacheForm, Departures
from spanlab.core.placement.dynamic_program import SOLVERS, Dp, DynamicProgram, Solution
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

__all__ = [
    "PLACEMENTS",
    "SOLVERS",
    "ArmFacts",
    "CacheForm",
    "Checked",
    "Clairvoyant",
    "Departures",
    "Dp",
    "DynamicProgram",
    "PlacementError",
    "Placer",
    "PrefillInfo",
    "Rule",
    "Solution",
    "Union",
    "balanced",
    "boundary",
    "branch",
    "branch_else_last",
    "every_n",
    "last",
    "no_states",
    "powers_of_two",
    "solve_as_published",
    "square_root",
    "tail",
]
