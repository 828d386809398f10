"""State backfill: a deeper state, evicted from the device while its KV stayed, is loaded from a lower tier.

Sources: vllm-project/vllm#52774, which fetches the state alone from the store, and sgl-project/sglang#40680, which
demotes states of inner nodes to the host. `core.policies.backfilled` does it.
"""

from __future__ import annotations

from spanlab.core.recovery.contract import RECOVERIES, Plain, Recovery


@RECOVERIES.register("state_backfill")
def state_backfill(always: bool = False) -> Recovery:
    """`state_backfill`: the deepest state that the tiers of the study have within the KV that is there.

    `always`  load it even where computing the gap is faster
    """
    return Plain(backfill="always" if always else "break_even")
