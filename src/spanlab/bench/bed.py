"""What all sessions over one model share: the model, its pages and the machine's rates."""

from __future__ import annotations

from dataclasses import dataclass, field

from spanlab.bench.rates import Rates
from spanlab.engine.model import SpanModel
from spanlab.engine.pool import PagePool, PoolShape
from spanlab.model_spec import ModelSpec


@dataclass(eq=False)
class Bed:
    """One loaded model; `pool` hands out pages of a size, made anew only where more are asked for than there are."""

    name: str
    model: SpanModel
    spec: ModelSpec
    rates: Rates
    _pools: dict[int, PagePool] = field(default_factory=dict, kw_only=True)

    def pool(self, page: int, pages: int) -> PagePool:
        """A pool of at least so many pages, all free."""
        held = self._pools.get(page)
        if held is None or held.shape.pages < pages:
            self._pools.pop(page, None)  # its memory goes before more is asked for
            self._pools[page] = held = self._made(page, pages)
        assert held.free_pages == held.shape.pages, "an arm left pages behind"
        return held

    def _made(self, page: int, pages: int) -> PagePool:
        model = self.model
        shape = PoolShape(model.layers, pages, page, model.kv_heads, model.head_dim)
        try:
            return PagePool(shape, model.dtype, model.device)
        except RuntimeError as error:  # torch has no kind of its own for it on the CPU
            gib = pages * page * self.spec.kv_bytes_per_token / 2**30
            raise ValueError(
                f"models={self.name}: the keys and values of one trial need {gib:.3g} GiB of {model.device}; expected "
                "fewer or shorter prompts, or a smaller model"
            ) from error
