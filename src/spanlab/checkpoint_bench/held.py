"""What a cache holds, counted three times: by its policy, in its pools, and from the model's sizes."""

from __future__ import annotations

from spanlab.bench.session import Served, Session
from spanlab.engine.state_pool import StatePool
from spanlab.model_spec import ModelSpec


class Held:
    """Counts along with one session, from an empty cache on; whatever is stored stays."""

    def __init__(self, session: Session, model: ModelSpec) -> None:
        self._session, self._model = session, model
        self._tokens = self._states = 0

    def after(self, served: Served) -> dict[str, int]:
        """The bytes of KV and of states once a request has been served, as `Row` names them."""
        policy, pool, model = self._session.policy, self._session.engine.pool, self._model
        content, record = policy.store, served.record
        if policy.rules.keeps:
            page = content.tree.page
            self._tokens += record.prompt_tokens // page * page - record.matched_tokens
            self._states += record.captured_states
        kept = self._session.engine.states
        return {
            "kv_bytes": content.kv_cached,
            "kv_allocated_bytes": (pool.shape.pages - pool.free_pages) * pool.page_bytes,
            "kv_formula_bytes": self._tokens * model.kv_bytes_per_token,
            "state_bytes": content.state_cached,
            "state_allocated_bytes": 0 if kept is None else _in_use(kept.pool),
            "state_formula_bytes": self._states * model.state_bytes,
        }


def _in_use(pool: StatePool) -> int:
    """Bytes of the tensors of all slots in use."""
    each = sum(pool.recurrent(layer, 0).nbytes + pool.conv(layer, 0).nbytes for layer in range(pool.shape.layers))
    return pool.used * each
