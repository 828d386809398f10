"""Recovery of a recurrent state where stored KV reaches deeper: the contract and the registered recoveries."""

from spanlab.core.recovery.contract import RECOVERIES, Plain, Recovery, Replay
from spanlab.core.recovery.recompute import recompute
from spanlab.core.recovery.resident_kv import resident_kv
from spanlab.core.recovery.state_backfill import state_backfill
from spanlab.core.recovery.tail_replay import tail_replay

__all__ = ["RECOVERIES", "Plain", "Recovery", "Replay", "recompute", "resident_kv", "state_backfill", "tail_replay"]
