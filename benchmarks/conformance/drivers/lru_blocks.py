"""The smallest useful driver of `conformance_cases`: a prefix cache of blocks, and no scheduler.

    bash runall.sh -cn conformance_cases driver='python3 benchmarks/conformance/drivers/lru_blocks.py'

It needs nothing but Python, and is meant to be copied. It claims what each request reuses where requests come one
after another and the model has attention alone. All else it calls not modelled. A pool has `num_blocks`, one of which
is never used. A block is known by all tokens up to its end. A request reuses its longest known prefix of whole blocks,
but not its last token. The least recently freed block goes first, and of one request the last one.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from typing import Any


def unsupported(case: dict[str, Any]) -> str | None:
    """Return what of a case this cache does not model."""
    if not case["kind"].startswith("one at a time"):
        return "several requests at once: no scheduler"
    return "recurrent layers" if case["settings"].get("mamba_mode") else None


def reused(case: dict[str, Any]) -> list[int]:
    """Return the reused tokens of each request."""
    size, room = case["settings"]["block_size"], case["settings"]["num_blocks"] - 1
    blocks: OrderedDict[tuple[int, ...], None] = OrderedDict()  # the first is evicted first
    counts = []
    for request in case["requests"]:
        prompt, output = request["tokens"], request["output"]
        known = 0
        while (known + 1) * size < len(prompt) and tuple(prompt[: (known + 1) * size]) in blocks:
            known += 1
        counts.append(known * size)
        computed = (prompt + output)[:-1]  # the last token of an answer is never computed
        used = [tuple(computed[: end * size]) for end in range(1, len(computed) // size + 1)]
        for block in used:
            blocks.pop(block, None)  # it is in use, or is stored anew
        partial = len(computed) % size > 0
        while len(blocks) + len(used) + partial > room:
            blocks.popitem(last=False)
        blocks.update(dict.fromkeys(reversed(used)))
    return counts


for line in sys.stdin:
    case = json.loads(line)
    why = unsupported(case)
    claims = {"reused": reused(case)} if why is None else {"unsupported": why}
    print(json.dumps({"name": case["name"], **claims}), flush=True)
