"""How long a prefill must take: by this machine's own rates, and by the simulator for the hardware named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spanlab.bench.bound import Roofline
from spanlab.bench.rates import Rates
from spanlab.core.scheduler import ScheduledStep
from spanlab.core.step_features import StepFeatures, features
from spanlab.model_spec import ModelSpec, causal_pairs
from spanlab_sim.hardware import HardwareSpec
from spanlab_sim.timing import RooflineTiming


class Expected(NamedTuple):
    """Seconds: the bound of what is computed and moved, and the simulator's roofline."""

    bound_s: float
    modelled_s: float


class Theory:
    """What prefills of one model should take."""

    def __init__(self, model: ModelSpec, rates: Rates, hardware: HardwareSpec) -> None:
        self._model, self._rates = model, rates
        self._roofline, self._timing = Roofline(model, rates), RooflineTiming(model, hardware)

    def of(self, steps: Sequence[ScheduledStep]) -> Expected:
        """What steps that were planned should take."""
        return self._expected([features(step, self._model.state_bytes) for step in steps])

    def resumed(self, start: int, stop: int, token_budget: int) -> Expected:
        """What prompt tokens [start, stop) should take on top of a stored state, without captures."""
        return self._expected([self._step(start, at, stop, token_budget) for at in range(start, stop, token_budget)])

    def curve(self, length: int, token_budget: int) -> dict[str, list[float]]:
        """What a prompt of a length should take from every `resume` that a state may stand at, 0 included."""
        starts = list(range(0, length, self._model.grid))
        expected = [self.resumed(start, length, token_budget) for start in starts]
        sides = {key: [getattr(one, key) for one in expected] for key in Expected._fields}
        return {"resume": [float(start) for start in starts], **sides}

    def copied(self, states: int) -> float:
        """Seconds in which the machine copies so many states: each is read and written."""
        return 2 * states * self._model.state_bytes / self._rates.bytes_per_s

    def _step(self, resume: int, at: int, stop: int, token_budget: int) -> StepFeatures:
        end = min(at + token_budget, stop)
        return StepFeatures(
            prefill_tokens=end - at,
            prefill_pairs=causal_pairs(at, end),
            num_prefills=1,
            num_first_tokens=int(end == stop),
            loaded_state_bytes=self._model.state_bytes if at == resume > 0 else 0,
            prefill_context=at,
            num_forwards=1,
        )

    def _expected(self, work: list[StepFeatures]) -> Expected:
        return Expected(self._roofline.of_work(work).seconds, sum(map(self._timing.step, work)) * 1e-9)
