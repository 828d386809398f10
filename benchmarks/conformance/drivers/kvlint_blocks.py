"""kvlint's model of vLLM's prefix cache (PyPI `kvlint`) as a driver of `conformance_cases`: reuse alone.

    PYTHON -m pip install kvlint==0.1.1
    bash runall.sh -cn conformance_cases driver='PYTHON benchmarks/conformance/drivers/kvlint_blocks.py'

It takes one prompt after another, without answers, so cases with several requests at once are not modelled.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from kvlint.sim.vllm_blocks import VLLMBlockSimulator  # type: ignore[import-not-found, unused-ignore]


def unsupported(case: dict[str, Any]) -> str | None:
    """Return what of a case this simulator does not model."""
    if not case["kind"].startswith("one at a time"):
        return "several requests at once: no scheduler"
    return "recurrent layers" if case["settings"].get("mamba_mode") else None


def reused(case: dict[str, Any]) -> list[int]:
    """Return the reused tokens of each request; one block of the pool is vLLM's null block."""
    simulator = VLLMBlockSimulator(case["settings"]["block_size"], case["settings"]["num_blocks"] - 1)
    return [
        simulator.feed_tokens(str(number), request["tokens"]).cached_tokens
        for number, request in enumerate(case["requests"])
    ]


for line in sys.stdin:
    case = json.loads(line)
    why = unsupported(case)
    claims = {"reused": reused(case)} if why is None else {"unsupported": why}
    print(json.dumps({"name": case["name"], **claims}), flush=True)
