"""Rates in texts that name no request: consoles of servers, and scrapes of their metrics.

Such a text is refused as a log. The refusal names the rates that stand in it, and what they cannot
tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_REQUEST = b"Received request "
_VLLM = re.compile(rb"Avg prompt throughput: ([\d.]+)")
_VLLM_HITS = re.compile(rb"Prefix cache hit rate: (?:GPU: )?([\d.]+)%")
_SGLANG = re.compile(rb"#new-token: (\d+), #cached-token: (\d+)")
_LMCACHE = re.compile(rb"[Tt]otal tokens:? (\d+).{0,80}?hit tokens:? (\d+)")
_METRIC = re.compile(rb"^(([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?)\s+([-+\d.eE]+)")
#: Counters of prompt tokens and of cached ones, by the names of vLLM and SGLang.
_COUNTERS = {
    b"vllm:prefix_cache_queries": b"vllm:prefix_cache_hits",
    b"vllm:gpu_prefix_cache_queries": b"vllm:gpu_prefix_cache_hits",
    b"sglang:prompt_tokens": b"sglang:cached_tokens",
}
UNKNOWN = (
    "these are rates alone, so which prompts shared what, and what else was possible, is unknown"
)
NOT_READ = "its lines about single requests are not read"


def rates_of(lines: Iterable[bytes]) -> str | None:
    """Return clauses with the rates in a text and what they cannot tell; None if it has none."""
    has_requests = False

    def watched() -> Iterator[bytes]:
        nonlocal has_requests
        for line in lines:
            has_requests = has_requests or _REQUEST in line
            yield line

    rates = _rates(watched())
    return None if rates is None else f"{rates}; {NOT_READ if has_requests else UNKNOWN}"


def _rates(lines: Iterable[bytes]) -> str | None:
    throughputs: list[float] = []
    hits: list[float] = []
    tokens, batches, lookups = [0, 0], 0, [0, 0, 0]
    readings: dict[tuple[bytes, bytes], list[float]] = {}
    for line in lines:
        if match := _VLLM_HITS.search(line):
            hits.append(_number(match[1]))
        if match := _VLLM.search(line):
            throughputs.append(_number(match[1]))
        elif match := _SGLANG.search(line):
            batches += 1
            tokens = [tokens[0] + int(match[1]), tokens[1] + int(match[2])]
        elif match := _LMCACHE.search(line):
            lookups = [lookups[0] + 1, lookups[1] + int(match[1]), lookups[2] + int(match[2])]
        elif match := _METRIC.match(line):
            readings.setdefault((match[2].removesuffix(b"_total"), match[1]), []).append(
                _number(match[3])
            )
    # counters by name: over the time of several scrapes, or since the start of the server with one
    counters: dict[bytes, float] = {}
    for (name, _), values in readings.items():
        counters[name] = counters.get(name, 0.0) + (
            values[-1] - values[0] if len(values) > 1 else values[0]
        )
    for prompts, cached in _COUNTERS.items():
        if counters.get(prompts):
            return _share("counters", counters.get(cached, 0.0), counters[prompts])
    if throughputs:
        mean = sum(throughputs) / len(throughputs)
        rate = f", and a hit rate of {hits[-1]:g} % in the last of {len(hits):,}" if hits else ""
        return f"{len(throughputs):,} lines with {mean:,.1f} prompt tokens/s on average{rate}"
    if batches:
        return _share(f"{batches:,} prefill batches", tokens[1], sum(tokens))
    if lookups[0]:
        return _share(f"{lookups[0]:,} lookups", lookups[2], lookups[1])
    return None


def _share(source: str, cached: float, prompt: float) -> str:
    share = f" ({100 * cached / prompt:.1f} %)" if prompt else ""
    return f"{source} with {cached:,.0f} cached of {prompt:,.0f} tokens{share}"


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
