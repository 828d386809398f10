"""Print docs/releases.md: rule by rule and release by release, with the smallest stored case that
shows each.

.venvs/dev/bin/python docs/releases.py > docs/releases.md
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from spanlab.core.releases import RELEASES, WORDS, Release
from spanlab.schedule import Case, policy_of, schedule
from spanlab.study.conformance_cases import CASES, StoredCase, read_stored

HEAD = """# Releases of vLLM

A release is a set of named rules over one policy (`src/spanlab/core/releases.py`). A preset is made for each, and is
compared with that release's own scheduler [step by step](../benchmarks/conformance/README.md). What no rule names is
equal in all of them, as far as the cases reach.

What changes for your own traffic, with your drafter, memory and batch? The analysis `changes` lists the requests that
reuse less or more, the cause, and the TTFT of both releases:

```bash
bash runall.sh -cn upgrade log=FILE model=qwen3-8b \\
    batch.speculation.method=eagle batch.speculation.draft_tokens=3 batch.speculation.draft_layers=1
bash runall.sh -cn upgrade log=FILE model=qwen3.5-27b store=gib_64       # a hybrid
bash runall.sh -cn quality_sim arms.vllm_0_32.pool.release=vllm_0_33      # one arm of any study
```

"""
TAIL = """
The case of a rule is the smallest of these [stored cases](cases.md) in which our scheduler decides otherwise than the
later release, if it has all its rules but this one. *Cases* counts them.

**The card matters too.** On Hopper, 0.33 exports GatedDeltaNet states inside the last chunk of a prompt. The chunk is
then not cut, a request holds one block more, and blocks are multiples of 64 tokens. `hardware.compute_capability=90`
says that the card is one; `arms.NAME.pool.inner_states` overrides it. Layers of KDA do so on every card, in both
releases. The decisions are compared with both releases. That they are made on Hopper was read in vLLM's code, not seen
on a card.

## A new release

1. `.venvs/sim/bin/python benchmarks/conformance/new_release.py VERSION` installs its code and drives the stored cases
   through it. It prints the kinds that differ from the newest preset, and shrinks one case of each.
2. For each of them, read what the two releases do in `vllm/v1/core`, and name the rule in `core/releases.py`.
3. Let the policy ask for the rule where it decides, until the shrunk cases are equal:
   `bash runall.sh -cn schedule cases=outputs/conformance/releases/VERSION/KIND.json out=ours.json preset=NAME`.
4. Pin the release in `requirements`, as `vllm_0_33.txt`, and write its cases and this page:
   `benchmarks/conformance/make_cases.py`, `measure.py` and `docs/releases.py`.

Not modelled: `prefill_schedule_interval`; encoders. `spanlab.vllm_policy` serves both releases.
"""


def main() -> None:
    """Print the page."""
    print(HEAD, end="")
    names = list(RELEASES)
    for pair in pairwise(names):
        earlier, later = pair
        print(f"## {_title(earlier)} and {_title(later)}\n")
        before, after = (
            {case.name: case for case in read_stored(CASES / f"{name}.jsonl.zst")} for name in pair
        )
        other = [
            case
            for name, case in after.items()
            if name in before and before[name].expected != case.expected
        ]
        stored = sorted(other, key=lambda case: case.tokens)
        print(f"{len(stored)} of {len(after)} stored cases are decided otherwise.\n")
        print(
            f"| rule | {_title(earlier)} | {_title(later)} | cases | smallest case | without the rule |"
        )
        print("|---|---|---|---:|---|---|")
        for rule, row in _rows(RELEASES[earlier], RELEASES[later], stored):
            print(f"| {rule} | {' | '.join(row)} |")
    print(TAIL, end="")


def _title(release: str) -> str:
    return release.removeprefix("vllm_").replace("_", ".")


def _rows(
    earlier: Release, later: Release, stored: list[StoredCase]
) -> Iterator[tuple[str, list[str]]]:
    for rule, words in WORDS.items():
        before, after = (_words(getattr(release, rule)) for release in (earlier, later))
        if before == after:
            continue
        differing = [
            (case, text) for case in stored if (text := _difference(case, later, rule, earlier))
        ]
        smallest, text = differing[0] if differing else (None, "–")
        row = [before, after, f"{len(differing):,}", smallest.name if smallest else "none", text]
        yield f"`{rule}`: {words}", row


def _words(value: object) -> str:
    return (
        {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    )


def _difference(case: StoredCase, later: Release, rule: str, earlier: Release) -> str:
    """Return what differs if one rule of the later release is that of the earlier one; empty for
    nothing."""
    given = Case.model_validate(case.settings | {"requests": case.requests})
    mixed: Release = replace(later, **{rule: getattr(earlier, rule)})
    with_rule, without = case.expected, schedule(given, policy_of(mixed, given))
    reused = with_rule.reused or []
    if reused != without.reused_on_admission:
        pairs = enumerate(zip(reused, without.reused_on_admission, strict=True))
        number, (new, old) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
        return f"request {number} reuses {old} instead of {new} tokens"
    if with_rule.preemptions != without.preemptions:
        return f"{without.preemptions} instead of {with_rule.preemptions} preemptions"
    steps = [
        step for run in without.steps for step in ([{}] * run["empty"] if "empty" in run else [run])
    ]
    return "" if with_rule.steps == steps else "other steps"


if __name__ == "__main__":
    main()
