"""The workload of vllm-project/vllm issue 45238, in the order in which vLLM's `prefix_repetition` sends it."""

from __future__ import annotations

import random
from typing import Any

BLOCK, PREFIXES, EACH, OUTPUT, STEPS = 528, 8, 8, 8, 16


def make_case(prefix: int, suffix: int, retention: int | None, num_blocks: int) -> dict[str, Any]:
    """64 prompts over 8 prefixes, one in flight, as a case of the entry `schedule`."""
    order = list(range(PREFIXES * EACH))
    random.Random(0).shuffle(order)
    requests = [
        {
            "tokens": _text(number // EACH, prefix) + _text(100 + number, suffix),
            "output_len": OUTPUT,
            "arrive_step": at * STEPS,
        }
        for at, number in enumerate(order)
    ]
    sizes = {"block_size": BLOCK, "num_blocks": num_blocks, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
    return {**sizes, "mamba_mode": "align", "retention": retention, "requests": requests}


def _text(source: int, length: int) -> list[int]:
    """Token ids that no other source has."""
    return list(range(20 + 2000 * source, 20 + 2000 * source + length))


#: Ample memory, and a pool in which prefixes of others leave.
CASES = {
    f"{prefix}/{suffix} retention={retention} blocks={blocks}": make_case(prefix, suffix, retention, blocks)
    for prefix, suffix in ((1500, 700), (1600, 600))
    for retention in (None, 0, BLOCK)
    for blocks in (1000, 72)
}
