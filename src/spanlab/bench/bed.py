"""What all sessions over one model share: the model, its memory and the machine's rates."""

from __future__ import annotations

from dataclasses import dataclass, field

from spanlab.bench.rates import Rates
from spanlab.engine.model import SpanModel
from spanlab.engine.pool import PagePool, PoolShape
from spanlab.engine.state_pool import StatePool
from spanlab.model_spec import ModelSpec

GIB = 1 << 30


@dataclass(eq=False)
class Bed:
    """One loaded model; memory is made anew only where more is asked for than there is, so that it is warm."""

    name: str
    model: SpanModel
    spec: ModelSpec
    rates: Rates
    _pools: dict[int, PagePool] = field(default_factory=dict, kw_only=True)
    _states: StatePool | None = field(default=None, kw_only=True)

    def pool(self, page: int, pages: int) -> PagePool:
        """A pool of at least so many pages, all free."""
        held = self._pools.get(page)
        if held is None or held.shape.pages < pages:
            self._pools.pop(page, None)  # its memory goes before more is asked for
            self._pools[page] = held = self._made(page, pages)
        assert held.free_pages == held.shape.pages, "an arm left pages behind"
        return held

    def states(self, count: int) -> StatePool | None:
        """Slots for at least so many states, all free; None where all layers are attention."""
        model = self.model
        if model.state_shape is None:
            return None
        self._states = self._states or StatePool(model.state_shape, model.dtype, model.device)
        assert self._states.used == 0, "an arm left states behind"
        try:
            self._states.give([self._states.take() for _ in range(count)])
        except RuntimeError as error:
            raise self._too_large("states", count * self._states.slot_bytes) from error
        return self._states

    def _made(self, page: int, pages: int) -> PagePool:
        model = self.model
        shape = PoolShape(model.layers, pages, page, model.kv_heads, model.head_dim)
        try:
            return PagePool(shape, model.dtype, model.device)
        except RuntimeError as error:  # torch has no kind of its own for it on the CPU
            size = pages * page * self.spec.kv_bytes_per_token
            raise self._too_large("keys and values", size) from error

    def _too_large(self, what: str, size: int) -> ValueError:
        return ValueError(
            f"models={self.name}: the {what} of one trial need {size / GIB:.3g} GiB of {self.model.device}; expected "
            "fewer or shorter prompts, or a smaller model"
        )
