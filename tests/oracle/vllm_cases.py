"""Random workloads for a scheduler: bursts, documents, chats, long answers, tight memory, hybrids.

A case is what `entry schedule` reads. Token ids are a formula of a source and a position, so a
case is the same on every machine and in every version of NumPy.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

Case = dict[str, Any]
Layout = Callable[[random.Random, int], list[dict[str, Any]]]  # groups, from the tokens of a block
FIRST_ANSWER_TOKEN, ANSWER_TOKENS = 7, 13


def text(source: int, length: int) -> list[int]:
    """Token ids of a source's first `length` positions; different sources share no beginning."""
    return [
        20 + (source * 7919 + position * 104_729 + position * position % 9973) % 150_000 for position in range(length)
    ]


def answer(length: int) -> list[int]:
    """The output that every request gets."""
    return [FIRST_ANSWER_TOKEN + index % ANSWER_TOKENS for index in range(length)]


def listed(steps: list[dict[str, int]]) -> list[dict[str, int]]:
    """Steps one by one, as vLLM's driver lists them: `{"empty": n}` becomes n empty steps."""
    return [one for step in steps for one in ([{}] * step["empty"] if "empty" in step else [step])]


def make_case(seed: int) -> Case:
    """One random case; the seed decides kind, sizes and memory."""
    draw = random.Random(seed)
    kind = draw.choice(("burst", "documents", "chat", "decode", "mixed"))
    hybrid = draw.random() < 0.5
    block = draw.choice((16, 64, 528) if hybrid else (16, 64))
    case: Case = {
        "block_size": block,
        "max_num_seqs": draw.choice((2, 4, 16, 64)),
        "max_num_batched_tokens": draw.choice((128, 512, 2048, 8192)),
    }
    if hybrid:
        case["mamba_mode"] = "align"
        case["retention"] = draw.choice((None, 0, block * draw.choice((1, 2, 4, 8))))
    case["requests"] = KINDS[kind](draw, block)
    case["num_blocks"] = _memory(draw, case)
    return case


def make_drafted_case(seed: int) -> Case:
    """`make_case` of a model without recurrent layers that verifies drafts."""
    case = {key: value for key, value in make_case(seed).items() if key not in ("mamba_mode", "retention")}
    return case | {"draft_tokens": 1 + seed % 6}


def make_eagle_case(seed: int) -> Case:
    """`make_drafted_case` whose drafter has keys and values of its own."""
    return make_drafted_case(seed) | {"draft_method": "eagle"}


def make_uncached_eagle_case(seed: int) -> Case:
    """`make_eagle_case` on a server without prefix caching."""
    return make_eagle_case(seed) | {"prefix_caching": False}


def make_uncached_case(seed: int) -> Case:
    """`make_case` on a server without prefix caching; in half of the cases the model has 1 to 4 groups of states."""
    draw, case = random.Random(-seed), make_case(seed)
    case = {key: value for key, value in case.items() if key not in ("mamba_mode", "retention")}
    case |= {"prefix_caching": False}
    if draw.random() < 0.5:
        case |= {"mamba_mode": "none", "state_groups": draw.randint(1, 4)}
        case["num_blocks"] += case["state_groups"]
    return case


def make_grouped_case(seed: int) -> Case:
    """`make_case` of a hybrid whose recurrent layers make 2 to 4 groups, each with separate blocks."""
    tried = (make_case(one) for one in count(seed, 1_000_000))
    case = next(one for one in tried if one.get("mamba_mode"))
    draw = random.Random(f"groups {seed}")
    case["state_groups"] = draw.randint(2, 4)
    case["num_blocks"] = _memory(draw, case)
    return case


def make_async_case(seed: int) -> Case:
    """`make_case` on a server that plans a step while the one before runs, hybrids of 1 to 4 groups among them."""
    draw, case = random.Random(f"async {seed}"), make_case(seed)
    if case.get("mamba_mode"):
        case["state_groups"] = draw.randint(1, 4)
    case["num_blocks"] = _memory(draw, case)
    return case | {"async_scheduling": True}


def make_uncached_async_case(seed: int) -> Case:
    """`make_uncached_case`, planned ahead."""
    return make_uncached_case(seed) | {"async_scheduling": True}


def make_continued_case(seed: int) -> Case:
    """Prompts that contain an answer, or part of it, which may not be delivered when they arrive.

    Attention and hybrids of 1 to 4 groups, planned ahead or not, and attention with drafts; small blocks and budgets.
    """
    draw = random.Random(f"continued {seed}")
    block = draw.choice((2, 4, 16))
    seqs = draw.choice((1, 2, 4, 16))
    budget = max(seqs, block * draw.choice((1, 2, 8, 64)) + draw.choice((0, 1, 3)))
    case: Case = {"block_size": block, "max_num_seqs": seqs, "max_num_batched_tokens": budget}
    kind = draw.choice(("attention", "hybrid", "drafts"))
    if kind == "drafts":
        case |= {"draft_tokens": draw.randint(1, 4), "draft_method": draw.choice(("ngram", "eagle"))}
    else:
        case["async_scheduling"] = draw.random() < 0.75
    if kind == "hybrid":
        case |= {"mamba_mode": "align", "state_groups": draw.randint(1, 4)}
        case["retention"] = draw.choice((None, None, 0, 2 * block))
    case["requests"] = _continued(draw, case)
    case["num_blocks"] = _memory(draw, case)
    if kind == "drafts":  # a server's pool has room for one request of any length, its drafts among it
        case["num_blocks"] += -(-2 * case["draft_tokens"] // block)
    return case


def make_salted_case(seed: int) -> Case:
    """`make_async_case` or `make_case` whose requests have one of two salts, or none."""
    draw = random.Random(f"salts {seed}")
    case = draw.choice((make_case, make_async_case))(seed)
    case["requests"] = [one | {"cache_salt": draw.choice((None, "a", "b"))} for one in case["requests"]]
    return case


def make_limited_case(seed: int) -> Case:
    """A case of the other makers, whose prompts share a step under a limit, fixed or adaptive."""
    draw = random.Random(f"limits {seed}")
    makers = (make_case, make_case, make_grouped_case, make_async_case, make_drafted_case, make_eagle_case)
    case = draw.choice((*makers, make_continued_case))(seed)
    block = case["block_size"]
    limit = draw.choice((1, 2, 3, block - 1, block, block + 1, 2 * block, draw.randint(1, 4 * block)))
    case["long_prefill_token_threshold"] = max(1, limit)
    case["long_prefill_token_threshold_adaptive"] = draw.random() < 0.4
    return case


def make_whole_case(seed: int) -> Case:
    """A case of attention layers, with drafts or planned ahead, whose prompts run in one step each."""
    draw = random.Random(f"whole prompts {seed}")
    maker = draw.choice((make_case, make_async_case, make_continued_case, make_drafted_case, make_eagle_case))
    case = next(one for one in map(maker, count(seed, 1_000_000)) if not one.get("mamba_mode"))
    packed = draw.choice((1, 3, 10))  # the more requests arrive together, the more prompts exceed the rest of a step
    case["requests"] = [one | {"arrive_step": one["arrive_step"] // packed} for one in case["requests"]]
    long = max(len(one["tokens"]) for one in case["requests"])
    for one in case["requests"]:
        if 4 * len(one["tokens"]) > 3 * long:  # fits into a step, but not beside many decodes
            one["output_len"] = draw.randint(1, 3)
    longest = max(len(one["tokens"]) + one["output_len"] for one in case["requests"]) + 2 * case.get("draft_tokens", 0)
    case["max_num_seqs"] = draw.choice((4, 16, 64))
    case["max_num_batched_tokens"] = max(case["max_num_seqs"], int(longest * draw.choice((1, 1, 1.1, 1.3, 2))))
    case["num_blocks"] = _memory(draw, case) + -(-2 * case.get("draft_tokens", 0) // case["block_size"])
    return case | {"enable_chunked_prefill": False}


def make_aborted_case(seed: int) -> Case:
    """A case of the other makers, a third of whose requests are aborted: waiting, running, preempted or ended."""
    draw = random.Random(f"aborts {seed}")
    makers = (make_case, make_grouped_case, make_async_case, make_async_case, make_drafted_case, make_eagle_case)
    case = draw.choice((*makers, make_continued_case, make_continued_case))(seed)
    for one in case["requests"]:
        if draw.random() < 0.35:
            end = one["output_len"] + draw.randint(-1, 2)  # near the last step of a request that never waits
            most = draw.choice((2, 8, end, 3 * end + 20))
            one["abort_step"] = one.get("arrive_step", 0) + draw.choice((end, draw.randint(0, most)))
    return case


def make_priority_case(seed: int) -> Case:
    """A case of the other makers whose requests have priorities, in little memory; some are aborted."""
    draw = random.Random(f"priorities {seed}")
    makers = (make_case, make_grouped_case, make_async_case, make_drafted_case, make_eagle_case, make_continued_case)
    case = draw.choice((*makers, make_limited_case, make_aborted_case))(seed)
    values = draw.choice(((0,), (0, 1), (-3, 0, 0, 7), tuple(range(-50, 50))))
    case["requests"] = [one | {"priority": draw.choice(values)} for one in case["requests"]]
    if draw.random() < 0.6:
        packed = draw.choice((2, 5))
        for one in case["requests"]:
            if one.get("abort_step") is None:
                one["arrive_step"] = one.get("arrive_step", 0) // packed
    return case | {"policy": "priority"}


def make_inner_case(seed: int) -> Case:
    """A hybrid of the other makers that also stores states inside the last chunk of a prompt."""
    draw = random.Random(f"inner states {seed}")
    maker = draw.choice(
        (make_case, make_case, make_grouped_case, make_async_case, make_continued_case, make_limited_case)
    )
    case = next(one for one in map(maker, count(seed, 1_000_000)) if one.get("mamba_mode")) | {"inner_states": True}
    case["num_blocks"] = _memory(draw, case)
    return case


def make_drafted_hybrid_case(seed: int) -> Case:
    """A hybrid of the other makers that verifies drafts, half of them of a drafter with keys and values of its own."""
    draw = random.Random(f"drafted hybrids {seed}")
    makers = (make_case, make_case, make_grouped_case, make_continued_case, make_limited_case)
    maker = draw.choice((*makers, make_aborted_case, make_priority_case))
    tried = map(maker, count(seed, 1_000_000))
    case = next(one for one in tried if one.get("mamba_mode") and not one.get("async_scheduling"))
    case |= {"draft_tokens": draw.choice((1, 1, 2, 3, 5)), "draft_method": draw.choice(("ngram", "eagle"))}
    case["num_blocks"] = _memory(draw, case) + -(-2 * case["draft_tokens"] // case["block_size"])
    return case


def make_local_case(seed: int, layouts: Sequence[Layout] | None = None) -> Case:
    """A case of the other makers on groups of windows, chunks, rings and states, beside full attention or without."""
    draw = random.Random(f"local attention {seed}")
    makers = (make_case, make_case, make_async_case, make_continued_case, make_salted_case, make_limited_case)
    makers += (make_aborted_case, make_priority_case, make_drafted_case, make_eagle_case, make_async_drafted_case)
    case = next(one for one in map(draw.choice(makers), count(seed, 1_000_000)) if not one.get("mamba_mode"))
    block = case["block_size"]
    case["groups"] = draw.choice(layouts or LAYOUTS)(draw, block)
    sizes = [group.get("block_size", block) for group in case["groups"]]
    aligned = math.lcm(*sizes)
    case["retention"] = draw.choice((0, 0, 0, None, aligned * draw.choice((1, 2, 4, 8))))
    kinds = {group["kind"] for group in case["groups"]}
    if not kinds & {"window", "state"} and case["retention"]:
        case["retention"] = 0
    if "state" in kinds:
        case["mamba_mode"] = "align"
        case["state_groups"] = sum(group.get("count", 1) for group in case["groups"] if group["kind"] == "state")
        case.pop("enable_chunked_prefill", None)  # vLLM cuts the prompts of hybrids
    case["num_blocks"] = _memory_of_groups(draw, case)
    return case


def _span(draw: random.Random, block: int) -> int:
    near = draw.choice((1, 2, block - 1, block, block + 1, 2 * block, 3 * block + 1))
    return max(1, draw.choice((near, draw.randint(1, 12 * block))))


def _window(draw: random.Random, block: int) -> dict[str, Any]:
    return {"kind": "window", "span": _span(draw, block)}


FULL: dict[str, Any] = {"kind": "full"}
#: Groups as vLLM makes them for models of these kinds, in its order; sizes are small and random.
LAYOUTS = (
    lambda draw, block: [_window(draw, block), FULL],  # gpt-oss
    lambda draw, block: [_window(draw, block) | {"count": draw.randint(2, 6)}, FULL],  # Gemma 3
    lambda draw, block: [FULL, _window(draw, block) | {"count": draw.randint(1, 3)}],
    lambda draw, block: [_window(draw, block) | {"block_size": block * draw.choice((2, 4))}, FULL],  # Gemma 4
    lambda draw, block: [_window(draw, block), FULL | {"block_size": block * draw.choice((2, 3))}],
    lambda draw, block: [{"kind": "chunk", "span": _span(draw, block), "count": 3}, FULL],  # Llama 4
    lambda draw, block: [_window(draw, block)],  # Mistral 7B, StarCoder2
    lambda draw, block: [_window(draw, block), _window(draw, block), FULL],
    lambda draw, block: [  # DeepSeek-V4: latents of 4 and of 128 tokens, windows, and the states of its compressors
        FULL | {"block_size": 16 * block},
        _window(draw, block) | {"block_size": 4 * block, "count": draw.randint(1, 2)},
        {"kind": "window", "span": 2 * block, "block_size": block},
        {"kind": "window", "span": 32 * block, "block_size": 2 * block},
    ],
    lambda draw, block: [{"kind": "state", "count": draw.randint(1, 4)}, FULL],  # Qwen3.5, whose first layers recur
    lambda draw, block: [{"kind": "state", "count": draw.randint(1, 3)}, FULL, _window(draw, block)],
    lambda draw, block: [FULL, {"kind": "ring", "block_size": block}, _window(draw, block)],
    lambda draw, block: [FULL | {"count": draw.randint(2, 3)}, _window(draw, block)],  # Qwen2 with a few windows
)


#: Groups of models whose attention is made before their states, or has more layers than these.
REORDERED = (
    lambda draw, block: [FULL, {"kind": "state", "count": draw.randint(1, 4)}],  # Falcon-H1, Zamba2
    lambda draw, block: [FULL | {"count": draw.randint(2, 3)}, {"kind": "state"}],
    lambda draw, block: [{"kind": "state", "count": draw.randint(1, 2)}, FULL | {"count": draw.randint(2, 3)}],
    lambda draw, block: [
        FULL | {"block_size": 2 * block},
        _window(draw, block) | {"count": draw.randint(1, 5)},
    ],  # MiMo
)


def make_reordered_case(seed: int) -> Case:
    """`make_local_case` with groups in other orders."""
    return make_local_case(seed, REORDERED)


def _memory_of_groups(draw: random.Random, case: Case) -> int:
    """Blocks of the pool: ample, or room for one to three of the largest requests."""
    ahead = case["max_num_batched_tokens"] * (1 + case.get("async_scheduling", False))
    drafts = 2 * case.get("draft_tokens", 0)

    def needed(tokens: int) -> int:
        total = 0
        for group in case["groups"]:
            size = group.get("block_size", case["block_size"])
            held = tokens if group["kind"] == "full" else min(tokens, group.get("span", 0) + ahead + size)
            blocks = {"state": 3 + drafts, "ring": 1}.get(group["kind"], -(-(held + drafts) // size) + 1)
            total += blocks * group.get("count", 1)
        return total

    sizes = [needed(len(one["tokens"]) + one["output_len"]) for one in case["requests"]]
    if draw.random() < 0.4:
        return sum(sizes) + 100
    return 2 + int(max(sizes) * draw.choice((1, 1.2, 1.7, 3)))


def make_async_drafted_case(seed: int) -> Case:
    """A case of attention layers of the other makers that verifies drafts in steps that are planned ahead.

    A step may reach over the end of an answer by the drafts of two steps, which vLLM cuts at its longest request.
    """
    draw = random.Random(f"async drafts {seed}")
    makers = (make_case, make_continued_case, make_limited_case, make_aborted_case, make_priority_case)
    case = draw.choice((*makers, make_salted_case, make_whole_case))(seed)
    case = {key: value for key, value in case.items() if key not in ("mamba_mode", "retention", "state_groups")}
    case |= {"draft_tokens": draw.choice((1, 1, 2, 3, 5)), "draft_method": draw.choice(("ngram", "eagle"))}
    reach = 3 * case["draft_tokens"] + 1
    if not case.get("enable_chunked_prefill", True):
        longest = max(len(one["tokens"]) + one["output_len"] for one in case["requests"]) + reach
        case["max_num_batched_tokens"] = max(case["max_num_batched_tokens"], longest)
    case["num_blocks"] = _memory(draw, case) + -(-reach // case["block_size"])
    return case | {"async_scheduling": True}


def make_uncached_async_drafted_case(seed: int) -> Case:
    """`make_async_drafted_case` without priorities, on a server without prefix caching."""
    tried = map(make_async_drafted_case, count(seed, 1_000_000))
    return next(one for one in tried if one.get("policy") != "priority") | {"prefix_caching": False}


def make_async_drafted_hybrid_case(seed: int) -> Case:
    """`make_drafted_hybrid_case` whose steps are planned ahead."""
    draw, case = random.Random(f"async drafted hybrids {seed}"), make_drafted_hybrid_case(seed)
    case["num_blocks"] = _memory(draw, case) + -(-(3 * case["draft_tokens"] + 1) // case["block_size"])
    return case | {"async_scheduling": True}


def make_modules_case(seed: int) -> Case:
    """A case of attention layers of the other makers, with drafts of several modules of multi-token prediction.

    Hybrids are left out: vLLM never ends a prompt of which a block's boundary stands among the tokens that they read
    ahead. So it does with smaller chunks than those tokens.
    """
    draw = random.Random(f"modules {seed}")
    makers = (make_eagle_case, make_async_drafted_case, make_async_drafted_case, make_continued_case)
    maker = draw.choice((*makers, make_limited_case, make_aborted_case, make_priority_case))
    tried = (one for one in map(maker, count(seed, 1_000_000)) if not one.get("mamba_mode"))
    case = next(one for one in tried if 1 < one.get("draft_tokens", 0) <= one["block_size"])
    least = {"max_num_batched_tokens": case["draft_tokens"]}
    if case.get("long_prefill_token_threshold"):
        least["long_prefill_token_threshold"] = case["draft_tokens"]
    case |= {key: max(case[key], tokens) for key, tokens in least.items()}
    modules = [count for count in (2, 3, 5) if case["draft_tokens"] <= count or case["draft_tokens"] % count == 0]
    return case | {"draft_method": "eagle", "draft_modules": draw.choice(modules)}


def make_local_modules_case(seed: int) -> Case:
    """A case of groups with drafts of several modules of multi-token prediction.

    Full attention is among them, for vLLM 0.33 fails without. Hybrids are left out as in `make_modules_case`.
    """
    draw = random.Random(f"modules beside windows {seed}")
    tried = (make_local_case(one) for one in count(seed, 1_000_000))
    plain = (one for one in tried if not one.get("mamba_mode") and one["block_size"] > 1)
    case = next(one for one in plain if any(group["kind"] == "full" for group in one["groups"]))
    case["draft_tokens"] = draw.randint(2, min(5, case["block_size"]))
    least = {"max_num_batched_tokens": case["draft_tokens"]}
    if case.get("long_prefill_token_threshold"):
        least["long_prefill_token_threshold"] = case["draft_tokens"]
    case |= {key: max(case[key], tokens) for key, tokens in least.items()}
    if not case.get("enable_chunked_prefill", True):
        case["max_num_batched_tokens"] += 4 * case["draft_tokens"] + 1
    modules = [many for many in (2, 3, 5) if case["draft_tokens"] <= many or case["draft_tokens"] % many == 0]
    case |= {"draft_method": "eagle", "draft_modules": draw.choice(modules)}
    case["num_blocks"] = _memory_of_groups(draw, case)
    return case


def _memory(draw: random.Random, case: Case) -> int:
    """Blocks of the pool: ample, or room for one to three of the largest requests."""
    block = case["block_size"]
    sizes = [len(r["tokens"]) + r["output_len"] for r in case["requests"]]
    per_group = 3 + case.get("inner_states", False) + case.get("draft_tokens", 0)
    states = per_group * case.get("state_groups", 1) if case.get("mamba_mode") else 0
    if draw.random() < 0.4:
        return sum(-(-size // block) + 2 * states for size in sizes) + 100
    largest = -(-max(sizes) // block) + states
    return 2 + int(largest * draw.choice((1, 1.2, 1.7, 3)))


def _burst(draw: random.Random, block: int) -> list[Case]:
    document = text(draw.randrange(10**6), draw.randint(block, 20 * block))
    return [
        {
            "tokens": document + text(1000 + n + draw.randrange(10**6), draw.randint(1, 3 * block)),
            "output_len": draw.randint(1, 40),
            "arrive_step": draw.choice((0, 0, 0, 1, 2)),
        }
        for n in range(draw.randint(3, 14))
    ]


def _documents(draw: random.Random, block: int) -> list[Case]:
    documents = [text(draw.randrange(10**6), draw.randint(block, 30 * block)) for _ in range(draw.randint(2, 6))]
    requests, step = [], 0
    for _ in range(draw.randint(6, 30)):
        step += draw.choice((0, 0, 1, 2, 5, 20))
        question = text(draw.randrange(10**6), draw.randint(1, 2 * block))
        document = draw.choice(documents)
        cut = draw.choice((len(document), len(document), draw.randint(1, len(document))))
        requests.append({"tokens": document[:cut] + question, "output_len": draw.randint(1, 30), "arrive_step": step})
    return requests


def _chat(draw: random.Random, block: int) -> list[Case]:
    system = text(draw.randrange(10**6), draw.randint(0, 6 * block))
    requests = []
    for _ in range(draw.randint(1, 6)):
        history, step = list(system), draw.randint(0, 30)
        for _ in range(draw.randint(1, 7)):
            history = history + text(draw.randrange(10**6), draw.randint(1, 3 * block))
            length = draw.randint(1, 5 * block)
            requests.append({"tokens": history, "output_len": length, "arrive_step": step})
            history = history + answer(length)
            step += length + draw.randint(0, 40)
    return requests


def _decode(draw: random.Random, block: int) -> list[Case]:
    return [
        {
            "tokens": text(draw.randrange(4), draw.randint(1, 3 * block)),
            "output_len": draw.randint(1, 12 * min(block, 64)),
            "arrive_step": draw.choice((0, 0, 3, 9)),
        }
        for _ in range(draw.randint(2, 12))
    ]


def _continued(draw: random.Random, case: Case) -> list[Case]:
    """Prompts, and near the end of their answers prompts that begin with them and their answers."""
    block, budget = case["block_size"], case["max_num_batched_tokens"]
    requests = []
    for source in range(draw.randint(1, 5)):
        prompt = text(source, draw.randint(1, 5 * block))
        length, step = draw.randint(1, 4 * block), draw.randint(0, 8)
        end = step + -(-len(prompt) // budget) + length
        requests.append({"tokens": prompt, "output_len": length, "arrive_step": step})
        for _ in range(draw.randint(1, 4)):
            contained = draw.choice(
                (length, length, length - 1, draw.randint(0, length), length + draw.randint(1, block))
            )
            asked = text(100 + draw.randrange(3), draw.choice((0, 1, draw.randint(1, 2 * block))))
            arrives = end + draw.randint(-3, 3) if draw.random() < 0.7 else draw.randint(step, end + 2 * block)
            requests.append(
                {
                    "tokens": prompt + answer(contained) + asked,
                    "output_len": draw.randint(1, 2 * block),
                    "arrive_step": max(0, arrives),
                }
            )
    return requests


def _mixed(draw: random.Random, block: int) -> list[Case]:
    requests = _documents(draw, block)[:8] + _chat(draw, block)[:8] + _decode(draw, block)[:4]
    draw.shuffle(requests)
    return requests


KINDS = {"burst": _burst, "documents": _documents, "chat": _chat, "decode": _decode, "mixed": _mixed}
