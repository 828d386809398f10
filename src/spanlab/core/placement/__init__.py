"""Placements of recurrent states: the protocol and the registered placements."""

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
from spanlab.core.placement.departures import Departures
from spanlab.core.placement.dynamic_program import Dp, DynamicProgram
from spanlab.core.placement.following import PROGRESS, Following, chunk_end, decode_interval, response_end
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
    retention,
    second_hit,
    square_root,
    tail,
)
from spanlab.core.placement.shared_budget import SharedBudget

__all__ = [
    "PLACEMENTS",
    "PROGRESS",
    "ArmFacts",
    "Checked",
    "Clairvoyant",
    "Departures",
    "Dp",
    "DynamicProgram",
    "Following",
    "PlacementError",
    "Placer",
    "Planner",
    "PrefillInfo",
    "Rule",
    "SharedBudget",
    "Union",
    "balanced",
    "boundary",
    "branch",
    "branch_else_last",
    "chunk_end",
    "decode_interval",
    "every_n",
    "last",
    "learned",
    "no_states",
    "planned",
    "powers_of_two",
    "response_end",
    "retention",
    "second_hit",
    "solve_as_published",
    "square_root",
    "tail",
]
