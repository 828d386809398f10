"""Synthetic studies with the shape of real ones: documents with many questions each, under a byte budget."""

from dataclasses import asdict, fields
from typing import Any

import numpy as np

from spanlab.records import LOSS_CAUSES, Record, RunRow
from spanlab.report.data import ArmData, LoadPoint, StudyData
from spanlab.stats import STEADY, Stationarity

TOKENS = ("prompt", "seen", "matched", "resumable", "reused", "computed", "repaired", "copied")
KV_PER_TOKEN, STATE_BYTES = 32_768, 26_000_000
CALM = Stationarity(STEADY, 0.5, 0.0, 40)
FOOTER = (
    "QuALITY (hub text, measured lengths) · Qwen3.5-4B · H100 80 GB · roofline timing (modelled) · "
    "seeds 0–2, 95 % t-intervals · commit 1a2b3c4"
)

#: arm -> (family, states per document, share of the match that a state makes reusable)
ARMS: dict[str, tuple[str, float, float]] = {
    "none": ("none", 0, 0),
    "kv_only": ("kv_only", 0, 0),
    "block_hash_16": ("block_hash", 300, 0.97),
    "block_hash_528": ("block_hash", 10, 0.9),
    "radix": ("radix", 21, 0.985),
    **{f"block_{n}": ("block", 5300 / n, 1 - n / 2 / 5300) for n in (64, 128, 256, 512, 1024, 2048, 4096)},
    **{f"balanced_{m}": ("balanced", 1.6 * m, 1 - 0.55 / (m + 0.5)) for m in (1, 2, 3, 5, 8, 16, 30)},
    "sqrt": ("sqrt", 72, 0.95),
    "log": ("log", 12, 0.55),
    **{f"dp_{m}": ("dp", 1.05 * m, 0.97 - 0.4 / m) for m in (1, 2, 3, 5, 8, 16, 30)},
    "last_528": ("last", 1.0, 0.9),
    "last_1056": ("last", 1.0, 0.83),
    "boundary": ("boundary", 1.0, 0.975),
    "branch": ("branch", 1.0, 0.92),
    "mixed_branch_dp_3": ("mixed", 4.3, 0.97),
    "mixed_branch_dp_8": ("mixed", 9.0, 0.975),
    "tail_first": ("tail_first", 2.0, 0.88),
    "oracle_1": ("oracle", 1.0, 0.98),
}


def make_study(
    arms: dict[str, tuple[str, float, float]] = ARMS, seeds: int = 3, requests: int = 863, budget_gib: float = 16.0
) -> StudyData:
    """A study with plausible numbers; every count is consistent with every other."""
    arm_data = [_make_arm(name, *settings, seeds, requests, budget_gib) for name, settings in arms.items()]
    none = next((arm for arm in arm_data if arm.family == "none"), None)
    for arm in arm_data:
        arm.summary["speedup"] = _speedup(none, arm, seeds) if none else None
    store = f"{budget_gib:g} GiB, KV and states together, LRU" if np.isfinite(budget_gib) else "unlimited"
    return StudyData("quality_sim", FOOTER, arm_data, make_load() if seeds > 1 else [], store)


def make_load() -> list[LoadPoint]:
    """Delays that grow as in an M/G/1 queue; the first point of an arm has no queue."""
    load = []
    for arm, family, service_s in (
        ("none", "none", 0.6),
        ("radix", "radix", 0.3),
        ("dp_3", "dp", 0.22),
        ("dp_30", "dp", 0.2),
    ):
        for rate in np.linspace(0.25, min(0.95 / service_s, 4.5), 9):
            busy = rate * service_s
            wait = 0.7 * service_s * busy / (1 - busy) * (rate > 0.25)
            queue: dict[str, float | None] = {"mean": wait, "low": 0.8 * wait, "high": 1.2 * wait, "p99": 4.4 * wait}
            ttft: dict[str, float | None] = {key: (value or 0.0) + service_s for key, value in queue.items()}
            for delay in (queue, ttft):
                delay["unstable"] = None
            load.append(LoadPoint(arm, family, float(rate), 5, 4315, CALM, float(busy), 0.99, queue, ttft))
    return load


def _make_arm(
    name: str, family: str, states: float, share: float, seeds: int, requests: int, budget_gib: float
) -> ArmData:
    columns = [_columns(seed, family, states, share, requests, budget_gib) for seed in range(seeds)]
    joined = {key: np.concatenate([seed_columns[key] for seed_columns in columns]) for key in columns[0]}
    runs = [_run(seed, family, states, requests, budget_gib) for seed in range(seeds)]
    return ArmData(name, family, joined, runs, _summary(family, joined, runs))


def _columns(
    seed: int, family: str, states: float, share: float, requests: int, budget_gib: float
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    group = rng.integers(0, max(requests // 20, 1), requests)
    document = np.clip(np.random.default_rng(99).normal(5300, 1100, max(requests // 20, 1)), 1500, 9000).astype(int)
    prompt = document[group] + rng.integers(30, 250, requests)
    first = np.zeros(requests, dtype=bool)
    first[np.unique(group, return_index=True)[1]] = True
    seen_tokens = np.where(first, 40, document[group] + rng.integers(0, 6, requests)).clip(max=prompt)
    evicted_prefix = rng.random(requests) < min(
        0.6, max(0.0, 0.02 + 0.004 * states if np.isfinite(budget_gib) else 0.0)
    )
    kv_lost = np.where(evicted_prefix & ~first, seen_tokens, 0) if family != "none" else seen_tokens
    matched = seen_tokens - kv_lost
    noise = rng.beta(60 * share + 0.05, 60 * (1 - share) + 0.05, requests) if share else np.zeros(requests)
    reused = (matched * noise).astype(int) if family != "kv_only" else np.zeros(requests, dtype=int)
    missing = matched - reused
    aligned = np.minimum(missing, 8)
    evicted = ((missing - aligned) * 0.3).astype(int)
    computed = prompt - reused
    arrived = np.cumsum(rng.exponential(1.2, requests))
    queue = rng.exponential(0.02 + 2.0 * float(computed.mean() / prompt.mean()) ** 3, requests)
    prefill = 0.012 + 9e-5 * computed * rng.lognormal(0, 0.05, requests)
    output = rng.integers(1, 60, requests)
    columns = {
        "arrived_s": arrived,
        "admitted_s": arrived + queue,
        "first_token_s": arrived + queue + prefill,
        "finished_s": arrived + queue + prefill + 0.011 * output,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "seen_tokens": seen_tokens,
        "matched_tokens": matched,
        "resumable_tokens": reused,
        "reused_tokens": reused,
        "computed_tokens": computed,
        "lost_never_seen": prompt - seen_tokens,
        "lost_out_of_reach": np.zeros_like(seen_tokens),
        "lost_never_stored": kv_lost if family == "none" else np.zeros_like(kv_lost),
        "lost_kv_evicted": kv_lost if family != "none" else np.zeros_like(kv_lost),
        "lost_state_evicted": evicted,
        "lost_state_never_placed": missing - aligned - evicted,
        "lost_alignment": aligned,
        "group_id": group,
        "request_id": np.arange(requests),
        "counted": np.ones(requests, dtype=bool),
        "seed": np.full(requests, seed),
    }
    zero = np.zeros(requests, dtype=int)
    return {**{field.name: zero for field in fields(Record)}, **columns}


def _run(seed: int, family: str, states: float, requests: int, budget_gib: float) -> dict[str, Any]:
    documents, budget = max(requests // 20, 1), budget_gib * 1024**3
    kv, state = (0.0, 0.0) if family == "none" else (documents * 5400 * KV_PER_TOKEN, documents * states * STATE_BYTES)
    scale = min(1.0, budget / (kv + state)) if kv + state else 0.0
    kv, state = kv * scale * (1 + 0.01 * seed) / (1 + 0.02), state * scale * (1 + 0.01 * seed) / (1 + 0.02)
    times = np.linspace(0, 1.2 * requests, 240)
    fill = 1 - np.exp(-times / (0.15 * times[-1] + 1e-9))
    wobble = 1 + 0.04 * np.sin(times / 37.0 + seed)
    row = RunRow(
        seed=seed,
        rate_rps=0.8,
        requests=requests,
        makespan_s=float(times[-1]),
        busy_s=0.6 * float(times[-1]),
        steps=20 * requests,
        preemptions=0,
        kv_resident_mean_bytes=kv,
        state_resident_mean_bytes=state,
        kv_resident_peak_bytes=int(1.05 * kv),
        state_resident_peak_bytes=int(1.05 * state),
        inserted_bytes=int(5 * kv),
        evicted_bytes=int(4 * kv) if scale < 1 else 0,
        timeline_s=times.tolist(),
        timeline_kv_bytes=(kv * fill * wobble).astype(int).tolist(),
        timeline_state_bytes=(state * fill * wobble).astype(int).tolist(),
        group_rounds=_rounds(family, states),
    )
    return asdict(row)


def _rounds(family: str, states: float) -> list[dict[str, Any]]:
    rng = np.random.default_rng(7)
    rounds = []
    for number in range(1, 19):
        prompt = 5100 + int(rng.integers(60, 400))
        match = 40 if number == 1 else 5100 + int(rng.integers(0, 40))
        count = round(states * (0.5 + 0.5 * min(number / 6, 1.0)))
        positions = sorted({int(p) for p in np.linspace(0, match, count + 1)[1:]}) if number > 1 else []
        resumable = [p for p in positions if p <= match]
        rounds.append(
            {
                "round": number,
                "prompt": prompt,
                "match": match,
                "resume": resumable[-1] if resumable else 0,
                "positions": positions,
            }
        )
    return rounds


def _summary(family: str, columns: dict[str, np.ndarray], runs: list[dict[str, Any]]) -> dict[str, Any]:
    total = {key: int(values.sum()) for key, values in columns.items()}
    prompt, reused, seen_tokens = total["prompt_tokens"], total["reused_tokens"], total["seen_tokens"]
    ttft = columns["first_token_s"] - columns["arrived_s"]
    queue = columns["admitted_s"] - columns["arrived_s"]
    e2e = columns["finished_s"] - columns["arrived_s"]
    quantities = {"ttft_s": ttft, "queue_s": queue, "e2e_s": e2e, "tpot_s": np.full(len(ttft), 0.011)}
    by_name = {key: _spread(values) for key, values in quantities.items()}
    intervals = {f"{key}_interval": _intervals(values, columns["seed"]) for key, values in quantities.items()}
    hits = int((columns["reused_tokens"] > 0).sum())
    return {
        "family": family,
        "requests": len(ttft),
        "hits": hits,
        "tokens": {
            **{key: total[f"{key}_tokens"] for key in TOKENS},
            "lost_by_cause": {cause: total[f"lost_{cause}"] for cause in LOSS_CAUSES},
        },
        "token_hit_rate": reused / prompt,
        "token_hit_rate_interval": hit_rate_interval(columns),
        "finds": "prefixes",
        "bounds": {
            "infinite_prefix_tokens": seen_tokens,
            "infinite_any_position_tokens": seen_tokens,
            "offline_tokens": (seen_tokens + reused) // 2,
            "regret_points": 50.0 * (seen_tokens - reused) / prompt,
            "least_ttft_s": None,
            "ttft_regret_s": None,
        },
        "own_bound_tokens": seen_tokens,
        "request_hit_rate": hits / len(ttft),
        "share_of_bound": reused / seen_tokens if seen_tokens else None,
        "bytes": {
            f"{kind}_resident_{statistic}": float(np.mean([run[f"{kind}_resident_{statistic}_bytes"] for run in runs]))
            for kind in ("kv", "state")
            for statistic in ("mean", "peak")
        }
        | {"copied_mean": 0.0},
        **by_name,
        **intervals,
        "evicted_bytes": sum(run["evicted_bytes"] for run in runs),
        "utilisation": 0.6,
        "busy_fraction": 0.9,
        "stationarity": asdict(CALM),
        "seeds": sorted({int(seed) for seed in columns["seed"]}),
        "groups": len(np.unique(columns["group_id"])),
    }


def hit_rate_interval(columns: dict[str, np.ndarray]) -> list[float] | None:
    """An interval of the token hit rate."""
    seeds = np.unique(columns["seed"])
    reused, prompt = columns["reused_tokens"], columns["prompt_tokens"]
    rates = np.array([reused[columns["seed"] == seed].sum() / prompt[columns["seed"] == seed].sum() for seed in seeds])
    if len(rates) < 2:
        return None
    half = 4.303 * rates.std(ddof=1) / np.sqrt(len(rates))
    return [float(rates.mean() - half), float(rates.mean() + half)]


def _spread(values: np.ndarray) -> dict[str, float]:
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    return {"mean": float(values.mean()), "p50": float(p50), "p95": float(p95), "p99": float(p99)}


def _intervals(values: np.ndarray, seeds: np.ndarray) -> dict[str, list[float | None]]:
    spreads = [_spread(values[seeds == seed]) for seed in np.unique(seeds)]
    if len(spreads) < 2:
        return {key: [None, None] for key in spreads[0]}
    intervals: dict[str, list[float | None]] = {}
    for key in spreads[0]:
        by_seed = np.array([spread[key] for spread in spreads])
        half = 4.303 * by_seed.std(ddof=1) / np.sqrt(len(by_seed))
        intervals[key] = [float(by_seed.mean() - half), float(by_seed.mean() + half)]
    return intervals


def _speedup(none: ArmData, arm: ArmData, seeds: int) -> dict[str, float | None]:
    ratio = none.summary["ttft_s"]["mean"] / arm.summary["ttft_s"]["mean"]
    wide = 0.03 * ratio if seeds > 1 else None
    return {
        "mean": ratio,
        "low": None if wide is None else ratio - wide,
        "high": None if wide is None else ratio + wide,
    }


def make_degenerate() -> dict[str, StudyData]:
    """Edge cases of studies: one arm, one seed, one request, no states, no bytes, no hits, no arms."""
    none, kv_only = ARMS["none"], ARMS["kv_only"]
    return {
        "one arm, one seed": make_study({"dp_3": ARMS["dp_3"]}, seeds=1, requests=30),
        "one request": make_study({"none": none, "dp_3": ARMS["dp_3"]}, seeds=1, requests=1),
        "zero states": make_study({"none": none, "kv_only": kv_only}, seeds=2, requests=40),
        "zero bytes, no hits": make_study({"none": none}, seeds=2, requests=40),
        "only kv_only": make_study({"kv_only": kv_only}, seeds=1, requests=40),
        "unlimited store": make_study(dict(list(ARMS.items())[::4]), seeds=1, requests=60, budget_gib=np.inf),
        "long names": make_study({f"a_family_with_a_rather_long_name_{k}": ("long", k, 0.5) for k in range(9)}, 2, 40),
        "no arms": StudyData("empty", FOOTER, [], [], "unlimited"),
    }
