"""Synthetic conversations: the prompt of each turn is the history, with answers, plus a new message."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanlab.checks import not_negative, positive
from spanlab.core.request import Request, Span
from spanlab.workloads.fresh_ids import FreshIds
from spanlab.workloads.source import workload
from spanlab.workloads.workload import Provenance, Workload


@dataclass
class ChatSessions:
    """Conversations of several tenants; lengths and think times are drawn from exponential distributions.

    `sessions`        conversations
    `turns`           mean number of turns, geometric, at least one
    `tenants`         tenants; each has its own system prompt
    `tenant_zipf`     exponent of the tenants' popularity; 0: uniform
    `system_tokens`   length of every system prompt
    `message_tokens`  mean length of a message
    `answer_tokens`   mean length of an answer
    `think_s`         mean seconds between an answer and the next message
    `seed`            seed of the draws
    """

    sessions: int = 100
    turns: float = 6.0
    tenants: int = 4
    tenant_zipf: float = 0.0
    system_tokens: int = 1024
    message_tokens: float = 256.0
    answer_tokens: float = 128.0
    think_s: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("sessions", "tenants", "system_tokens", "message_tokens", "answer_tokens"):
            positive(f"workload.chat_sessions.{key}", getattr(self, key))
        for key in ("tenant_zipf", "think_s"):
            not_negative(f"workload.chat_sessions.{key}", getattr(self, key))
        if self.turns < 1:
            raise ValueError(f"workload.chat_sessions.turns={self.turns}: expected 1 or more")


@workload("chat_sessions")
def modelled(chat_sessions: ChatSessions) -> Workload:
    """Return the turns of each conversation, one group per conversation; `wait_ns` holds the think times."""
    options, ids = chat_sessions, FreshIds()
    systems = [Span(ids.take(options.system_tokens), reusable=True) for _ in range(options.tenants)]
    requests: list[Request] = []
    seeds = np.random.SeedSequence(options.seed).spawn(options.sessions + 1)
    for group, tenant in enumerate(_tenants(options, np.random.default_rng(seeds[-1]))):
        draw = np.random.default_rng(seeds[group])
        requests += _conversation(options, len(requests), group, systems[tenant], ids, draw)
    detail = (
        f"{options.sessions:,} conversations of {options.tenants} tenants, {len(requests):,} turns, "
        f"mean think time {options.think_s:g} s"
    )
    return Workload("chat sessions", tuple(requests), Provenance("modelled", detail))


def _tenants(options: ChatSessions, rng: np.random.Generator) -> list[int]:
    weights = np.arange(1, options.tenants + 1, dtype=np.float64) ** -options.tenant_zipf
    drawn: list[int] = rng.choice(options.tenants, options.sessions, p=weights / weights.sum()).tolist()
    return drawn


def _conversation(
    options: ChatSessions, first_id: int, group: int, system: Span, ids: FreshIds, draw: np.random.Generator
) -> list[Request]:
    """Return the requests of one session; every message but the last is marked reusable, so its end is a boundary."""
    turns = int(draw.geometric(1 / options.turns))
    messages = _lengths(draw, options.message_tokens, turns)
    answers = _lengths(draw, options.answer_tokens, turns)
    waits = np.rint(draw.standard_exponential(turns) * options.think_s * 1e9).astype(np.int64).tolist()
    history: tuple[Span, ...] = (system,)
    requests = []
    for turn in range(turns):
        history += (Span(ids.take(messages[turn]), reusable=turn + 1 < turns),)
        answer = ids.take(answers[turn])
        wait = waits[turn] if turn else 0
        requests.append(Request(first_id + turn, group, history, len(answer), output=answer, wait_ns=wait))
        history += (Span(answer),)
    return requests


def _lengths(draw: np.random.Generator, mean: float, count: int) -> list[int]:
    """Return `count` exponential lengths in tokens, at least 1 each."""
    drawn: list[int] = np.maximum(1, np.rint(draw.standard_exponential(count) * mean)).astype(np.int64).tolist()
    return drawn
