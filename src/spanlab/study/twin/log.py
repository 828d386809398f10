"""A log as input of a fit: requests without tokens, times of their tokens, and the split into training and test."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spanlab.core.request import Request, Span
from spanlab.workloads.logs import Log
from spanlab.workloads.logs.observed import Observed
from spanlab_sim.fitted_server import Memory

Floats = NDArray[np.float64]
LEAST_REQUESTS = 15  # on either side of the split


@dataclass(frozen=True, eq=False)
class TimedLog:
    """Requests in order of arrival.

    `requests`     with ids 0, 1, and so on
    `arrived_s`, `ttft_s`, `e2e_s`  float64 seconds, shape (requests,)
    `output_lens`  int64
    `trains`       whether a request is in the training set
    `notes`        notes about changes to the clocks
    """

    requests: tuple[Request, ...]
    arrived_s: Floats
    ttft_s: Floats
    e2e_s: Floats
    output_lens: NDArray[np.int64]
    trains: NDArray[np.bool_]
    notes: tuple[str, ...] = ()

    @property
    def tpot_s(self) -> Floats:
        """Seconds per output token after the first; NaN for outputs of one token."""
        return tpot(self.ttft_s, self.e2e_s, self.output_lens)


def tpot(ttft_s: Floats, e2e_s: Floats, output_lens: NDArray[np.int64]) -> Floats:
    """Return (E2E - TTFT) / (n - 1) for n output tokens; NaN for n = 1."""
    more = np.where(output_lens > 1, output_lens - 1, np.nan)
    return np.asarray((e2e_s - ttft_s) / more)


def read_timed_log(log: Log, path: str, train_share: float) -> TimedLog:
    """Return the log with its times; ValueError where it lacks the data that a fit needs."""
    prompts, outputs = log.prompt_tokens, log.output_lens.astype(np.int64)
    arrived_s = np.asarray(log.arrived_ns * 1e-9, np.float64)
    trains = np.arange(log.requests) < round(train_share * log.requests)
    observed = _checked(log, path, arrived_s, trains)
    if min(trains.sum(), (~trains).sum()) < LEAST_REQUESTS:
        raise ValueError(
            f"twin.train_share={train_share} of {log.requests} requests in log={path}: expected {LEAST_REQUESTS} "
            "requests or more on either side"
        )
    tokens = np.zeros(int(prompts.max()), dtype=np.int32)  # one array for all requests, since token ids are never read
    columns = zip(prompts.tolist(), outputs.tolist(), log.arrived_ns.tolist(), strict=True)
    requests = tuple(
        Request(number, number, (Span(tokens[:prompt]),), output, arrived, cache_salt=str(number))
        for number, (prompt, output, arrived) in enumerate(columns)
    )
    ttft_s, e2e_s = observed.first_token - arrived_s, observed.last_token - arrived_s
    return TimedLog(requests, arrived_s, ttft_s, e2e_s, outputs, trains, observed.notes)


def _checked(log: Log, path: str, arrived_s: Floats, trains: NDArray[np.bool_]) -> Observed:
    """Return the observed times, with clocks aligned by training requests; ValueError where one is missing or wrong."""
    if log.observed is None:
        raise ValueError(
            f"log={path}: expected times of arrival, first and last token of every request, as in requests.jsonl with "
            "arrival_time, first_token_ts and last_token_ts"
        )
    observed = log.observed.aligned_by(arrived_s, trains)
    for name, values in (("first_token_ts", observed.first_token), ("last_token_ts", observed.last_token)):
        _check_no_row(np.isnan(values), log, path, f"{name}: expected a time, and it is missing")
    _check_no_row(
        observed.first_token <= arrived_s, log, path, "first_token_ts: expected a time after the request's arrival"
    )
    _check_no_row(
        observed.last_token < observed.first_token,
        log,
        path,
        "last_token_ts: expected a time at first_token_ts or later",
    )
    _check_no_row(log.output_lens < 1, log, path, "output_toks: expected 1 or more")
    _check_no_row(log.prompt_tokens < 1, log, path, "input_toks: expected 1 or more")
    if log.output_lens[trains].max() < 2:
        raise ValueError(f"output_toks=1 of all fitted requests in log={path}: expected 2 or more for one of them")
    return observed


def _check_no_row(bad: NDArray[np.bool_], log: Log, path: str, problem: str) -> None:
    assert log.observed is not None, "called for logs with times"
    if bad.any():
        raise ValueError(f"{path}:{log.observed.lines[int(np.argmax(bad))]}: {problem}")


def check_memory(timed_log: TimedLog, memory: Memory, path: str) -> None:
    """Raise ValueError where the server has too few blocks for the longest request alone."""
    tokens = [request.num_tokens + request.output_len - 1 for request in timed_log.requests]
    longest = int(np.argmax(tokens))
    need = memory.blocks_for(timed_log.requests[longest])
    if need > memory.blocks:
        raise ValueError(
            f"twin.num_gpu_blocks={memory.blocks + 1}: expected at least {need + 1}, for request {longest} of "
            f"log={path} alone holds {tokens[longest]:,} tokens"
        )
