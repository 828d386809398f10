"""Which calls of a log waited for which: by the times of sessions and of the agents that they
started, or by name."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
After = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class CallGraph:
    """Calls that wait for others.

    `after`     requests that had ended before each request was sent: of its session, and of agents
                that it started, without those of a session that ended before a later one of the
                same session was sent
    `waits_ns`  from the end of the last of them to the request, shape (requests,)
    `families`  numbers of the sessions that wait for each other, shape (requests,)
    """

    after: After
    waits_ns: Ints
    families: NDArray[np.int32]

    def notes(self, sessions: NDArray[np.int32]) -> tuple[str, ...]:
        """Return the note about calls that are not in a line."""
        started = len(np.unique(sessions)) - len(np.unique(self.families))
        several = sum(len(waited) > 1 for waited in self.after)
        parts = [f"{started:,} sessions are of agents that another session started"] * bool(started)
        parts += [f"{several:,} calls wait for several others"] * bool(several)
        return (
            (f"the calls form trees: {', and '.join(parts)}; arrivals=sessions keeps their order",)
            if parts
            else ()
        )


@dataclass
class _Session:
    """Calls of a session while its log is read: those that run, and those that ended and nobody
    waited for.

    `ends`      when its last call ends, and `children` the sessions that it has started, by that
                time
    """

    ends: float = -np.inf
    running: list[tuple[float, int]] = field(default_factory=list)
    front: list[int] = field(default_factory=list)
    latest: int = -1
    children: list[tuple[float, int]] = field(default_factory=list)


def graph_of_times(
    sessions: NDArray[np.int32], callers: Mapping[int, int], starts: Floats, ends: Floats
) -> CallGraph | None:
    """Return the graph of calls in the order of their start; None if the calls of each session are
    in a line.

    A call waits for the calls of its session that had ended. The first one of an agent waits for
    those of the session that started it, and a call of that session waits for the agents that had
    ended since.

    `callers`        session that started a session, by its number
    `starts`, `ends`  seconds; an unknown end is that of a call that takes no time
    """
    ends = np.fmax(np.where(np.isnan(ends), starts, ends), starts)
    if not callers and not _overlap(sessions, starts, ends):
        return None
    states: dict[int, _Session] = defaultdict(_Session)
    for session, end in zip(sessions.tolist(), ends.tolist(), strict=True):
        states[session].ends = max(states[session].ends, end)
    for child, caller in callers.items():
        states[caller].children.append((states[child].ends, child))
    for state in states.values():
        heapq.heapify(state.children)
    after: list[tuple[int, ...]] = [()] * len(sessions)
    order = np.argsort(starts, kind="stable")
    for call in order.tolist():
        session, now = int(sessions[call]), float(starts[call])
        state = states[session]
        waited = list(_front(state, now, starts, ends))
        if not waited and session in callers:
            waited = list(_front(states[callers[session]], now, starts, ends))
        while state.children and state.children[0][0] <= now:
            child = heapq.heappop(state.children)[1]
            waited += _front(states[child], now, starts, ends)
        after[call] = tuple(sorted(set(waited)))
        heapq.heappush(state.running, (float(ends[call]), call))
    waits = [
        max(0.0, float(starts[call]) - max(float(ends[other]) for other in waited))
        if waited
        else 0.0
        for call, waited in enumerate(after)
    ]
    waits_ns = np.rint(np.array(waits) * 1e9).astype(np.int64)
    return CallGraph(tuple(after), waits_ns, _families(after, sessions))


def _overlap(sessions: NDArray[np.int32], starts: Floats, ends: Floats) -> bool:
    """Return whether a call of a session was sent while another one ran."""
    latest: dict[int, float] = {}
    order = np.argsort(starts, kind="stable").tolist()
    for session, start, end in zip(
        sessions[order].tolist(), starts[order].tolist(), ends[order].tolist(), strict=True
    ):
        if start < latest.get(session, -np.inf):
            return True
        latest[session] = max(end, latest.get(session, end))
    return False


def _front(state: _Session, now: float, starts: Floats, ends: Floats) -> Sequence[int]:
    """Return the calls of a session that had ended, without those that ended before another of them
    was sent."""
    while state.running and state.running[0][0] <= now:
        call = heapq.heappop(state.running)[1]
        state.front.append(call)
        if state.latest < 0 or starts[call] >= starts[state.latest]:
            state.latest = call
    state.front = [
        call for call in state.front if call == state.latest or ends[call] > starts[state.latest]
    ]
    return state.front


def graph_of_names(
    names: Sequence[Hashable | None],
    waited: Sequence[Sequence[Hashable]],
    waits_s: Floats,
    sessions: NDArray[np.int32] | None,
) -> tuple[CallGraph, int]:
    """Return the graph of a log that names what each call waits for, and how many names are of no
    earlier call."""
    numbers = {name: number for number, name in enumerate(names) if name is not None}
    known = [
        [number for name in of_call if (number := numbers.get(name, call)) < call]
        for call, of_call in enumerate(waited)
    ]
    missing = sum(len(of_call) for of_call in waited) - sum(map(len, known))
    after = tuple(tuple(sorted(set(of_call))) for of_call in known)
    groups = np.arange(len(names), dtype=np.int32) if sessions is None else sessions
    waits = np.rint(waits_s * 1e9).astype(np.int64)
    return CallGraph(after, waits, _families(after, groups)), missing


def _families(after: Sequence[tuple[int, ...]], sessions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return numbers of the sessions that are connected, by first appearance."""
    above = list(range(int(sessions.max(initial=-1)) + 1))

    def root(session: int) -> int:
        while above[session] != session:
            above[session] = above[above[session]]
            session = above[session]
        return session

    of_call = sessions.tolist()
    for call, waited in enumerate(after):
        for other in waited:
            first, second = sorted((root(of_call[call]), root(of_call[other])))
            above[second] = first
    numbers: dict[int, int] = {}
    return np.array(
        [numbers.setdefault(root(session), len(numbers)) for session in of_call], dtype=np.int32
    )
