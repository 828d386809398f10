"""Costs of computing a prompt's tokens: each is one registered file."""

from spanlab.core.cost.contract import COST, COSTS, Cost, CostOf, in_tokens
from spanlab.core.cost.flops import flops
from spanlab.core.cost.seconds import seconds
from spanlab.core.cost.tokens import tokens

__all__ = ["COST", "COSTS", "Cost", "CostOf", "flops", "in_tokens", "seconds", "tokens"]
