"""The analysis `explain`: known bounds, fields of the summary, order of fixes, and messages of rejected settings."""

import random
from pathlib import Path
from typing import Any

import pytest

from spanlab.analyses.fixes import Facts
from spanlab.cli import compose
from spanlab.study.bounds import BoundCrossedError
from spanlab.study.prepare import check_memory

from ..support.files import write_lines
from ..support.products import in_turn
from ..support.shared import TRACES, needs
from .explained import chat, explained, explained_bodies, fixes_of, invented


def write_log(folder: Path, prompts: list[list[int]], **more: Any) -> Path:
    rows = ({"timestamp": index, "input_ids": tokens, **more} for index, tokens in enumerate(prompts))
    return write_lines(folder / "log.jsonl", *rows)


@pytest.fixture(scope="module")
def usual(tmp_path_factory) -> dict[str, Any]:
    """The analysis of the first requests of the packaged log."""
    return explained(tmp_path_factory.mktemp("usual"), "workload.log.requests=400")


@needs(TRACES)
def test_mooncake_ceilings_come_out_exactly(tmp_path: Path):
    path = TRACES / "mooncake-fast25" / "conversation_trace.jsonl"
    summary = explained(tmp_path, f"log={path}")
    curve = {point["blocks"]: round(100 * point["token_hit_rate"], 3) for point in summary["capacity_curve"]}
    expected = {1_000: 4.541, 3_000: 6.661, 10_000: 21.575, 30_000: 33.215, 50_000: 36.153, 100_000: 37.084}
    assert {blocks: curve[blocks] for blocks in expected} == expected
    assert round(100 * summary["bounds"]["prefix"], 3) == 37.362
    assert summary["capacity_curve"][-1]["token_hit_rate"] == summary["bounds"]["prefix"]
    assert (summary["requests"], summary["tokens"]["prompt"]) == (12_031, 144_793_823)
    assert summary["bounds"]["any_position"] is None


@pytest.mark.parametrize("source", ["shape", pytest.param("local", marks=needs(TRACES))])
def test_ragpulse_bounds_come_out_exactly(tmp_path: Path, source: str):
    settings = [f"log={TRACES / 'ragpulse'}"] if source == "local" else []
    summary = explained(tmp_path, *settings)
    assert summary["tokens"]["prompt"] == 20_851_449
    bounds = {name: round(share * 20_851_449) for name, share in summary["bounds"].items()}
    assert (bounds["prefix"], bounds["any_position"]) == (6_574_248, 15_018_605)  # 31.5 and 72.0 %


def test_summary_counts_the_log(usual):
    assert usual["requests"] == 400
    assert set(usual["presets"]) == {"vllm_0_32", "sglang_0_5_23", "blocks_256"}
    preset, total = usual["presets"]["vllm_0_32"], usual["tokens"]["prompt"]
    assert usual["lost_by_cause"] == preset["lost_by_cause"]
    assert preset["reused_tokens"] + sum(usual["lost_by_cause"].values()) == total
    assert preset["token_hit_rate"] == preset["reused_tokens"] / total
    assert preset["token_hit_rate"] <= usual["bounds"]["offline_optimum"] <= usual["bounds"]["prefix"]
    assert {"blocks", "gib", "token_hit_rate"} == set(usual["capacity_curve"][0])
    assert set(usual["losses"]) == {"requests", "sessions"}


def test_fixes_are_ranked_by_gain_per_byte(usual):
    fixes = usual["fixes"]
    assert [fix["rank"] for fix in fixes] == list(range(1, len(fixes) + 1))
    helpful = [fix for fix in fixes if fix["helps"]]
    assert fixes[: len(helpful)] == helpful
    free = [fix["gain"] for fix in helpful if not fix["extra_gib"] and not fix["is_bound"]]
    paid = [fix["gain_per_gib"] for fix in helpful if fix["extra_gib"]]
    assert free == sorted(free, reverse=True)
    assert paid == sorted(paid, reverse=True)
    assert {"pic", "lego_link", "cache_blend", "cached_order", "eviction_optimum"} <= {fix["name"] for fix in fixes}


def test_nothing_helps_where_nothing_is_shared(tmp_path: Path):
    log = write_log(tmp_path, [list(range(start, start + 64)) for start in range(0, 6400, 64)])
    summary = explained(tmp_path, f"log={log}")
    assert summary["verdict"].startswith("nothing will help, because prompts share 0.0 % of their tokens")
    assert not any(fix["helps"] for fix in summary["fixes"])


def test_more_memory_helps_where_prompts_take_turns(tmp_path: Path):
    prompts = [list(range(1000 * number, 1000 * number + 320)) for number in range(8)] * 5
    tokens = 4 * 320
    log = write_log(tmp_path, prompts)
    summary = explained(tmp_path, f"log={log}", f"store.total_gib={tokens * 131_072 / 2**30}")
    assert summary["presets"]["vllm_0_32"]["reused_tokens"] == 0
    best = next(fix for fix in summary["fixes"] if fix["helps"] and fix["extra_gib"])
    assert best["name"] == "memory_times_2"
    assert best["token_hit_rate"] == pytest.approx(4 / 5 * 304 / 320)


def on_small_device(room_gib: float, *settings: str) -> tuple[str, ...]:
    """Settings of a device on which the weights leave this room."""
    weights = compose("explain", list(settings)).model.weight_bytes / 2**30
    return *settings, f"hardware.memory_gib={room_gib + weights}"


@pytest.mark.parametrize("kind", [(), ("model=qwen3.5-0.8b", "arms=engines_hybrid")])
def test_settings_of_fixes_are_accepted_and_reach_their_rate(tmp_path: Path, kind: tuple[str, ...]):
    rng, own, room = random.Random(3), 0.2, 0.7
    numbers = rng.choices(range(30), [1 / rank for rank in range(1, 31)], k=120)
    log = write_log(tmp_path, [list(range(2000 * number, 2000 * number + 1200)) for number in numbers])
    settings = f"log={log}", *on_small_device(room, *kind), f"store.total_gib={own}"
    summary = explained(tmp_path, *settings)
    settable = [fix for fix in summary["fixes"] if fix["settings"]]
    assert {"memory_times_2", "memory_of_device"} < {fix["name"] for fix in settable}
    for number, fix in enumerate(settable):
        overrides = [*settings, *fix["settings"]]
        check_memory(compose("explain", [*overrides, "analyses=[summary]"]))
        again = explained(tmp_path / str(number), *overrides)
        assert again["presets"][again["explained"]]["token_hit_rate"] == fix["token_hit_rate"], fix["name"]
    assert all(fix["fits"] == (own + fix["extra_gib"] <= room + 1e-9) for fix in summary["fixes"])
    assert not any(fix["settings"] for fix in summary["fixes"] if not fix["fits"])
    helpful = [fix["fits"] for fix in summary["fixes"] if fix["helps"] and not fix["is_bound"]]
    assert helpful == sorted(helpful, reverse=True)
    assert set(helpful) == {True, False}
    assert summary["verdict"].startswith(f"first {summary['fixes'][0]['says']}: ")
    assert "points with tiers or replicas" in summary["verdict"]


def test_memory_of_several_devices_is_last_resort(tmp_path: Path):
    prompts = [list(range(2000 * number, 2000 * number + 1600)) for number in range(30)] * 3
    settings = f"log={write_log(tmp_path, prompts)}", *on_small_device(1), "store.total_gib=0.4"
    summary = explained(tmp_path, *settings)
    helpful = [fix["name"] for fix in summary["fixes"] if fix["helps"] and not fix["is_bound"]]
    assert helpful == ["memory_for_all"]
    assert summary["verdict"].startswith("first every reusable block is held, ")
    assert summary["verdict"].endswith("; one h200 holds 1 GiB beside the weights, so it needs tiers or replicas")
    size = summary["fixes"][0]["extra_gib"] + 0.4
    study = compose("explain", [*settings, f"store.total_gib={size}", "analyses=[summary]"])
    with pytest.raises(ValueError, match=r"^store of .* GiB on hardware.name=h200: expected at most 1 GiB"):
        check_memory(study)


def test_small_block_helps_short_prompts_of_hybrids(tmp_path: Path):
    shared = list(range(240))
    log = write_log(tmp_path, [[*shared, *range(1000 * number, 1000 * number + 60)] for number in range(1, 60)])
    summary = explained(tmp_path, f"log={log}", "model=qwen3.5-0.8b", "arms=engines_hybrid")
    assert summary["presets"]["vllm_0_32"]["token_hit_rate"] == 0
    assert summary["lost_by_cause"]["alignment"] > 0.7 * summary["tokens"]["prompt"]
    assert summary["fixes"][0]["gain"] > 0.5
    assert summary["checkpoint_positions"][0]["position"] == 240


def test_tenants_are_told_apart(tmp_path: Path):
    rows = [{"timestamp": index, "input_ids": list(range(64)), "tenant": "ab"[index % 2]} for index in range(6)]
    log = write_lines(tmp_path / "log.jsonl", *rows)
    tenants = explained(tmp_path, f"log={log}")["losses"]["tenants"]
    assert {tenant["name"]: tenant["requests"] for tenant in tenants} == {"a": 3, "b": 3}


def test_lengths_alone_give_no_hit_rate(tmp_path: Path):
    log = tmp_path / "azure.csv"
    log.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n2023-11-16 18:15:50,396,109\n")
    summary = explained(tmp_path, f"log={log}")
    assert summary["bounds"] == {"prefix": None, "any_position": None, "offline_optimum": None}
    assert (summary["tokens"]["prompt"], summary["presets"], summary["fixes"]) == (770, {}, [])
    assert any("lengths only" in caveat for caveat in summary["caveats"])


def test_limit_ends_with_a_sentence_and_a_report(tmp_path: Path):
    with pytest.raises(ValueError, match=r"^fail_on=token_hit_rate<0.6: token_hit_rate of vllm_0_32 is 0\.\d+$"):
        explained(tmp_path, "workload.log.requests=50", "fail_on='token_hit_rate<0.6'")
    assert (tmp_path / "explain" / "x" / "summary.json").is_file()
    explained(tmp_path, "workload.log.requests=50", "fail_on='token_hit_rate<0.01'")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["store.total_gib=0.01"],
            r"^store.total_gib=0.01 with arms\.vllm_0_32: expected at least 0\.\d+ GiB, for request \d+ of the log",
        ),
        (["fail_on=hits"], r"^fail_on=hits: expected METRIC<SHARE"),
        (["fail_on='token_hit_rate<60'"], r"^fail_on=token_hit_rate<60: expected METRIC<SHARE"),
        (["arrivals=poisson"], r"^arrivals.kind=poisson with analyses=explain: expected as_given"),
        (["baseline=none"], r"^baseline=none with analyses=explain: expected one of the arms"),
        (["workload.documents=3"], r"^workload.documents=3 with workload.kind=log"),
        (["arms.sglang_0_5_23.eviction=lfu"], r"^arms.sglang_0_5_23.eviction=lfu with analyses=explain: expected lru"),
        (["+strategy@arms.mine=cache_blend"], r"^arms.mine.spans with analyses=explain .*: expected strategy pic or"),
        (["store.kv_gib=3"], r"^store.kv_gib=3.0 with analyses=explain: expected store.total_gib"),
        (["workload.log.piece=0"], r"^workload.log.piece=0: expected a number above zero"),
        (["log=no_such_file"], r"^log=no_such_file: no such file; expected a log"),
    ],
)
def test_what_cannot_be_explained_is_refused(tmp_path: Path, overrides: list[str], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        explained(tmp_path, *overrides)


def test_log_is_refused_where_nothing_reads_it():
    with pytest.raises(ValueError, match=r"^log=x with workload.kind=quality: expected -cn explain log=FILE"):
        compose("smoke", ["log=x"])
    with pytest.raises(ValueError, match=r"^fail_on=token_hit_rate<0.5 with analyses=.*: expected explain among them"):
        compose("smoke", ["fail_on='token_hit_rate<0.5'"])


@pytest.mark.parametrize(("bad", "stands"), [(1, True), (40, False)])
def test_no_verdict_over_an_unread_share(tmp_path: Path, bad: int, stands: bool):
    rows = [{"timestamp": index, "input_ids": list(range(start, start + 64))} for index, start in enumerate([0] * 200)]
    log = write_lines(tmp_path / "log.jsonl", *rows[:-1], *[{"timestamp": 199, "input_ids": ["a"] * 64}] * bad)
    summary = explained(tmp_path, f"log={log}", "workload.log.bad_lines=skip")
    assert summary["unread"]["bytes_left_out"].keys() == {"bad lines (input_ids, first in line 200)"}
    assert (summary["unread"]["share"] <= 0.01) == stands
    assert summary["verdict"].startswith("no verdict stands, ") != stands
    assert any(note.startswith("left out of ") and "bad lines" in note for note in summary["caveats"])


def test_page_without_a_true_bound_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(Facts, "offline_optimum", lambda facts, rules: 0)
    with pytest.raises(BoundCrossedError, match=r"^arms\.vllm_0_32 reuses .* expected at most 0\.0000%, the bound off"):
        explained(tmp_path, "workload.log.requests=400")


@pytest.mark.parametrize("length", [1055, 1056, 1057])
def test_best_eviction_holds_where_prompts_are_whole_blocks(tmp_path: Path, length: int):
    prompts = [[*range(first, first + length)] for first in (0, 0, 5000, 5000)]
    settings = (f"log={write_log(tmp_path, prompts)}", "model=qwen3.5-4b", "arms=engines_hybrid", "store=gib_64")
    summary = explained(tmp_path, *settings)
    blocks = (length - 1) // 528  # the last token of a prompt is computed
    assert summary["presets"]["vllm_0_32"]["reused_tokens"] == 2 * blocks * 528
    assert summary["bounds"]["offline_optimum"] == 2 * blocks * 528 / (4 * length)


SHARED = invented(1500)
VOLATILE = {
    "clock": lambda n: f"Time: 2026-05-04 10:{n // 3:02}.",
    "identifier": lambda n: f"request {random.Random(n).getrandbits(128):032x}",
}


@pytest.mark.parametrize(("kind", "where"), in_turn(VOLATILE, ["start", "middle"]))
def test_volatile_line_is_moved_behind_the_rest(tmp_path: Path, kind: str, where: str):
    rest = [SHARED[:6000], SHARED[6000:]] if where == "middle" else [SHARED]

    def system(number: int) -> str:
        return "\n".join([*rest[:-1], VOLATILE[kind](number), rest[-1]])

    summary = explained_bodies(tmp_path, *(chat(system(n), f"{n} {invented(30, n)}") for n in range(1, 41)))
    moved = fixes_of(summary)["volatile_last"]
    length = summary["tokens"]["prompt"] / 40
    assert moved == pytest.approx(39 / 40 * len(SHARED) / 4 / length, abs=0.02)
    assert moved > summary["presets"]["vllm_0_32"]["token_hit_rate"] + 0.1
    assert not summary["verdict"].startswith("nothing will help")


def test_identifier_that_opens_a_user_turn_is_moved(tmp_path: Path):
    bodies = [chat("S", f"{VOLATILE['identifier'](n)}\n{SHARED}\n{invented(20, n)}") for n in range(30)]
    assert fixes_of(explained_bodies(tmp_path, *bodies))["volatile_last"] > 0.9


def test_changing_system_prompt_spares_the_conversation_at_the_end(tmp_path: Path):
    turns = [{"role": "user", "content": invented(400, 7)}, {"role": "assistant", "content": invented(400, 8)}]
    bodies = [
        {"system": f"x {n:08}\n{SHARED}", "messages": [*turns, {"role": "user", "content": invented(9, n)}]}
        for n in range(30)
    ]
    fixes = fixes_of(explained_bodies(tmp_path, *bodies))
    assert fixes["volatile_at_end"] > 0.93 > fixes["volatile_last"] > 0.5


def test_tools_in_one_order_are_shared(tmp_path: Path):
    tools = [{"type": "function", "function": {"name": f"t{k}", "description": invented(60, k)}} for k in range(30)]
    bodies = [chat(invented(200), invented(20, n), tools=random.Random(n).sample(tools, 30 - n % 2)) for n in range(40)]
    summary = explained_bodies(tmp_path, *bodies)
    assert summary["presets"]["vllm_0_32"]["token_hit_rate"] < 0.1
    assert fixes_of(summary)["tools_sorted"] > 0.7


def test_text_in_front_of_images_is_shared(tmp_path: Path):
    def body(number: int) -> dict[str, Any]:
        url = f"https://example.org/{number}.png"
        image = {"type": "image_url", "image_url": {"url": url}}
        return chat("", [image, {"type": "text", "text": SHARED[:2400]}])

    bodies = [body(number) for number in range(8)]
    summary = explained_bodies(tmp_path, *bodies, settings=("workload.log.image_tokens=1000",))
    assert fixes_of(summary)["volatile_last"] == pytest.approx(7 / 8 * 600 / 1600, abs=0.01)
    unknown = explained_bodies(tmp_path / "unknown", *bodies)
    assert unknown["verdict"].startswith("no verdict stands, because too much of the log is unknown: ")


def test_prompts_in_good_order_get_no_other_one(tmp_path: Path):
    bodies = [chat(f"{SHARED}\nTime: {n}", f"{n} {invented(30, n)}") for n in range(1, 31)]
    assert not {"volatile_last", "tools_sorted", "all_orders"} & set(fixes_of(explained_bodies(tmp_path, *bodies)))


@pytest.mark.parametrize(
    ("usage", "rate", "requests", "prompt"),
    [
        ({"prompt_tokens": 1600, "prompt_tokens_details": {"cached_tokens": 0}}, 0.0, 20, 1600),
        ({"prompt_tokens": 1600, "prompt_tokens_details": {"cached_tokens": 400}}, 0.25, 20, 1600),
        ({"prompt_tokens": 1600, "prompt_tokens_details": None}, None, 0, 1600),
        ({"prompt_tokens": 1600, "prompt_tokens_details": {"cached_tokens": None}}, None, 0, 1600),
        ({"input_tokens": 100, "cache_read_input_tokens": 1200, "cache_creation_input_tokens": 300}, 0.75, 20, 1600),
        ({"input_tokens": 100, "cache_read_input_tokens": None, "cache_creation_input_tokens": 300}, None, 0, None),
        ({"prompt_tokens": 1600, "prompt_cache_hit_tokens": 800, "prompt_cache_miss_tokens": 800}, 0.5, 20, 1600),
        ({"input_tokens": 1600, "input_tokens_details": {"cached_tokens": 1200}}, 0.75, 20, 1600),
        ({"prompt_tokens": 1600, "prompt_tokens_details": {"cached_tokens": 1700}}, None, 0, None),
        ({"prompt_tokens": 1600, "cache_read_input_tokens": 400}, 0.25, 20, 1600),
    ],
)
def test_measured_reuse_stands_beside_the_possible(
    tmp_path: Path, usage: Any, rate: float | None, requests: int, prompt: int | None
):
    bodies = [{"request": chat(SHARED, invented(30, n)), "response": {"usage": usage}} for n in range(20)]
    summary = explained_bodies(tmp_path, *bodies)
    reported = summary["reported"] or {"token_hit_rate": None, "requests": 0, "prompt_tokens": None}
    assert (reported["token_hit_rate"], reported["requests"], reported["prompt_tokens"]) == (rate, requests, prompt)
    if rate is not None:
        assert reported["possible"] == summary["presets"]["vllm_0_32"]["token_hit_rate"]
        page = (tmp_path / "explain" / "x" / "report.html").read_text()
        line = f"the server reports {100 * rate:.1f} % of the prompt tokens as cached"
        assert line in page
        assert summary["measured"][0].startswith(line)
        assert summary["verdict"].startswith("first find out why the server reuses less than it can")


def test_partly_reported_counts_say_for_how_many(tmp_path: Path):
    usage = {"prompt_tokens": 1600, "prompt_tokens_details": {"cached_tokens": 1200}}
    bodies = [chat(SHARED, invented(30, n), **({"usage": usage} if n % 4 else {})) for n in range(20)]
    summary = explained_bodies(tmp_path, *bodies)
    assert summary["reported"]["requests"] == 15
    assert "(15 of 20 requests report it)" in summary["measured"][0]


def test_sums_of_the_server_are_in_page_and_summary(tmp_path: Path):
    usage = {
        "input_tokens": 100,
        "cache_read_input_tokens": 1200,
        "cache_creation_input_tokens": 300,
        "output_tokens": 9,
    }
    summary = explained_bodies(tmp_path, *(chat(SHARED, invented(30, n), usage=usage) for n in range(20)))
    line = (
        "the server counts 32,000 prompt tokens: 24,000 cached, 6,000 created in a cache, 2,000 fresh, and 180 output"
    )
    assert summary["reported"]["sums"] == {
        "requests": 20,
        "without_cached": 0,
        "prompt_tokens": 32_000,
        "cached_tokens": 24_000,
        "created_tokens": 6_000,
        "fresh_tokens": 2_000,
        "output_tokens": 180,
    }
    assert any(sentence.startswith(line) for sentence in summary["measured"])
    assert line in (tmp_path / "explain" / "x" / "report.html").read_text()


def test_sums_of_a_log_without_prompts_stand_alone(tmp_path: Path):
    rows = [
        {
            "startTime": 1000.0 + n,
            "call_type": "acompletion",
            "prompt_tokens": 60,
            "completion_tokens": 7,
            "messages": {},
        }
        for n in range(3)
    ]
    summary = explained(tmp_path, f"log={write_lines(tmp_path / 'log.jsonl', *rows)}")
    assert summary["log"]["format"] == "litellm"
    assert summary["reported"]["sums"]["fresh_tokens"] == 180
    assert summary["measured"] == [
        "the server counts 180 prompt tokens: 0 cached, 180 fresh, and 21 output tokens; 3 of 3 requests report no "
        "cached ones, which count as fresh"
    ]
    assert summary["presets"] == {}


def test_break_is_shown_with_the_text_of_both_sides(tmp_path: Path):
    def body(number: int) -> dict[str, Any]:
        return chat(f"{SHARED[:320]}<b>\x1b[1m time {1000 + number} {SHARED}", invented(9, number))

    summary = explained_bodies(tmp_path, *map(body, range(10)))
    first = summary["breaks"][0]
    start = len("system\n") + 320 + len("<b>\x1b[1m time 100")
    assert (first["path"], first["character"], first["requests"]) == ("messages[0]", start, 9)
    assert first["position"] == start // 64 * 16
    lengths = [
        -(-len(f"{message['role']}\n{message['content']}") // 4) for n in range(10) for message in body(n)["messages"]
    ]
    assert first["tokens"] == sum(lengths[2:]) - 9 * first["position"]
    assert first["earlier"].split("|")[0] == first["later"].split("|")[0]
    assert "<b>\\x1b[1m time 100" in first["later"]
    assert {side.split("|")[1][0] for side in (first["earlier"], first["later"])} <= set("0123456789")
    page = (tmp_path / "explain" / "x" / "report.html").read_text()
    assert "&lt;b&gt;\\x1b[1m time" in page
    assert "\x1b" not in page
    hidden = explained_bodies(tmp_path / "hidden", *map(body, range(10)), settings=("redact=true",))
    assert hidden["breaks"][0] == first | {"earlier": None, "later": None}
    assert "time 100" not in (tmp_path / "hidden" / "explain" / "x" / "report.html").read_text()


def test_conversation_that_goes_on_is_no_break(tmp_path: Path):
    turns = [{"role": ("user", "assistant")[n % 2], "content": invented(50, n)} for n in range(12)]
    bodies = [{"messages": turns[: 2 * count + 1]} for count in range(6)]
    assert explained_bodies(tmp_path, *bodies)["breaks"] == []


def seen_contents(bodies: list[dict[str, Any]]) -> float:
    """Share of prompt tokens in beginnings of messages that were seen before, in steps of 64 bytes of 4 per token."""
    seen, known, total = set[str](), 0, 0
    for body in bodies:
        for message in body["messages"]:
            text = f"{message['role']}\n{message['content']}"
            for start in range(0, len(text), 64):
                tokens = -(-len(text[start : start + 64]) // 4)
                known, total = known + tokens * (text[: start + 64] in seen), total + tokens
                seen.add(text[: start + 64])
    return known / total


@pytest.mark.parametrize("seed", range(4))
def test_contents_seen_at_any_position_bound_every_arm(tmp_path: Path, seed: int):
    rng = random.Random(seed)
    texts = [invented(rng.randint(1, 60), number)[: rng.choice([57, 64, 121, 400])] for number in range(8)]
    bodies = [
        {"messages": [{"role": "user", "content": text} for text in rng.choices(texts, k=rng.randint(2, 6))]}
        for _ in range(25)
    ]
    arms = "+strategy@arms.pic=pic", "+strategy@arms.lego=lego_link"
    summary = explained_bodies(tmp_path, *bodies, settings=arms)
    bound = summary["bounds"]["any_position"]
    assert bound == pytest.approx(seen_contents(bodies), abs=1e-12)
    fixes = fixes_of(summary)
    reused = [*(preset["token_hit_rate"] for preset in summary["presets"].values())]
    reused += [fixes[name] for name in ("pic", "lego_link", "cache_blend", "as_pic", "as_lego", "block_1")]
    assert 0.3 < max(reused) <= bound


def test_reuse_at_other_positions_is_unknown_for_text_prompts(tmp_path: Path):
    texts = [invented(60, number) for number in range(4)]
    orders = [random.Random(number).sample(texts, 4) for number in range(12)]
    prompts = [{"prompt": "\n".join(order)} for order in orders]
    messages = [{"messages": [{"role": "user", "content": text} for text in order]} for order in orders]
    whole = explained_bodies(tmp_path / "text", *prompts, settings=("+strategy@arms.pic=pic",))
    divided = explained_bodies(tmp_path / "messages", *messages)
    assert divided["bounds"]["any_position"] > 0.9
    assert whole["bounds"]["any_position"] is None
    assert not {"pic", "lego_link", "cache_blend", "as_pic"} & set(fixes_of(whole))
    assert "pic" not in whole["presets"]
    assert any(note.startswith("no prompt is divided into messages or passages: ") for note in whole["caveats"])
    page = (tmp_path / "text" / "explain" / "x" / "report.html").read_text()
    assert "unknown: only beginnings are compared" in page
