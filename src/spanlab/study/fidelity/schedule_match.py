"""Schedule match: the simulator, told how long the engine's steps took, must compose the same steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from spanlab.analysis.compare import ScheduleMatch
from spanlab.core.backend import StepResult, finished_after
from spanlab.core.batch_rules import BatchRules
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request
from spanlab.core.scheduled import ScheduledStep
from spanlab.study.output.step_log import LoggedStep
from spanlab_sim.run import serve


class PartedError(Exception):
    """The simulator composed another step than the engine; from here on their times mean different things."""


class Replay:
    """The backend that runs every step in the engine's time; a step composed otherwise ends the run."""

    def __init__(self, log: Sequence[LoggedStep]) -> None:
        self._log = log
        self.equal = 0

    def resume(self) -> None:
        """The times of the log hold no idle time."""

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """Compare a step with the engine's; PartedError with the difference in words."""
        at, key = self.equal, step.key()
        if at == len(self._log):
            raise PartedError(f"step {at}: the engine had finished, the simulator {_words(key)}")
        if key != self._log[at].key:
            raise PartedError(f"step {at}: {_difference(self._log[at].key, key)}")
        self.equal = at + 1
        return StepResult(self._log[at].took_ns, finished_after(step))

    def completed(self, step: ScheduledStep) -> None:
        """Nothing is stored here."""

    def close(self) -> None:
        """Nothing is held here."""


def schedule_match(
    requests: Sequence[Request],
    policy: TreePolicy,
    rules: BatchRules,
    log: Sequence[LoggedStep],
    clients: int | None = None,
) -> ScheduleMatch:
    """Replay a run's arrivals with its own step times. `policy` is a new one of the same arm."""
    replay = Replay(log)

    def compare_times(step: ScheduledStep, now: int, result: StepResult) -> None:
        at = replay.equal - 1
        if late := log[at].started_ns - now:
            replay.equal = at
            raise PartedError(f"step {at}: the engine began it {abs(late)} ns {'later' if late > 0 else 'earlier'}")

    try:
        serve(requests, policy, rules, replay, lambda record: None, clients=clients, on_step=compare_times)
    except PartedError as parted:
        return ScheduleMatch(replay.equal, len(log), str(parted))
    if replay.equal < len(log):
        words = f"step {replay.equal}: the engine {_words(log[replay.equal].key)}, the simulator had finished"
        return ScheduleMatch(replay.equal, len(log), words)
    return ScheduleMatch(replay.equal, len(log), None)


def _difference(engine: tuple[Any, ...], simulator: tuple[Any, ...]) -> str:
    """The first chunk that is not alike, or else who decodes."""
    for ours, theirs in zip_longest(engine[0], simulator[0]):
        if ours != theirs:
            return f"the engine {_chunk(ours)}, the simulator {_chunk(theirs)}"
    return f"the engine decodes for {_ids(engine[1])}, the simulator for {_ids(simulator[1])}"


def _words(key: tuple[Any, ...]) -> str:
    """`ScheduledStep.key()` for a reader: the first of its chunks, or who decodes."""
    return _chunk(key[0][0]) if key[0] else f"decodes for {_ids(key[1])}"


def _chunk(chunk: tuple[Any, ...] | None) -> str:
    if chunk is None:
        return "computes no further prompt"
    request, start, stop, captures = chunk[:4]
    kept = f", states kept at {_ids(captures)}" if captures else ""
    return f"computes [{start}, {stop}) of request {request}{kept}"


def _ids(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values)) or "nobody"
