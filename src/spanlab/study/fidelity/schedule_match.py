"""Schedule match: with the engine's step times, the simulator must schedule the same steps."""

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


class ScheduleMismatchError(Exception):
    """The simulator scheduled another step than the engine; later step times are not comparable."""


class Replay:
    """Backend that runs every step in the engine's time; a different step ends the run."""

    def __init__(self, log: Sequence[LoggedStep]) -> None:
        self._log = log
        self.equal = 0

    def resume(self) -> None:
        """Do nothing: the log has no idle time."""

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """Compare a step with the engine's; ScheduleMismatchError describes a difference."""
        index, key = self.equal, step.key()
        if index == len(self._log):
            raise ScheduleMismatchError(f"step {index}: the engine had finished, the simulator {_describe_key(key)}")
        if key != self._log[index].key:
            raise ScheduleMismatchError(f"step {index}: {_describe_difference(self._log[index].key, key)}")
        self.equal = index + 1
        return StepResult(self._log[index].took_ns, finished_after(step))

    def completed(self, step: ScheduledStep) -> None:
        """Do nothing: this backend stores no KV."""

    def close(self) -> None:
        """Do nothing: this backend has no resources."""


def schedule_match(
    requests: Sequence[Request],
    policy: TreePolicy,
    rules: BatchRules,
    log: Sequence[LoggedStep],
    clients: int | None = None,
) -> ScheduleMatch:
    """Replay a run's arrivals with the step times of its log. `policy` is a new policy of the same arm."""
    replay = Replay(log)

    def compare_times(step: ScheduledStep, now: int, result: StepResult) -> None:
        index = replay.equal - 1
        if late := log[index].started_ns - now:
            replay.equal = index
            raise ScheduleMismatchError(
                f"step {index}: the engine began it {abs(late)} ns {'later' if late > 0 else 'earlier'}"
            )

    try:
        serve(requests, policy, rules, replay, lambda record: None, clients=clients, on_step=compare_times)
    except ScheduleMismatchError as mismatch:
        return ScheduleMatch(replay.equal, len(log), str(mismatch))
    if replay.equal < len(log):
        difference = (
            f"step {replay.equal}: the engine {_describe_key(log[replay.equal].key)}, the simulator had finished"
        )
        return ScheduleMatch(replay.equal, len(log), difference)
    return ScheduleMatch(replay.equal, len(log), None)


def _describe_difference(engine: tuple[Any, ...], simulator: tuple[Any, ...]) -> str:
    """Describe the first chunk that differs, or else the decoding requests."""
    for engine_chunk, simulator_chunk in zip_longest(engine[0], simulator[0]):
        if engine_chunk != simulator_chunk:
            return f"the engine {_describe_chunk(engine_chunk)}, the simulator {_describe_chunk(simulator_chunk)}"
    return f"the engine decodes for {_join_ids(engine[1])}, the simulator for {_join_ids(simulator[1])}"


def _describe_key(key: tuple[Any, ...]) -> str:
    """Describe `ScheduledStep.key()`: its first chunk, or the decoding requests."""
    return _describe_chunk(key[0][0]) if key[0] else f"decodes for {_join_ids(key[1])}"


def _describe_chunk(chunk: tuple[Any, ...] | None) -> str:
    if chunk is None:
        return "computes no further prompt"
    request, start, stop, captures = chunk[:4]
    states = f", states kept at {_join_ids(captures)}" if captures else ""
    return f"computes [{start}, {stop}) of request {request}{states}"


def _join_ids(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values)) or "nobody"
