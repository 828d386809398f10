"""Time to first token of our engine beside what a user would pick instead, in turns on the same cores.

    .venvs/answers/bin/python benchmarks/peers/measure.py [--texts FILE.jsonl] [--publish]

Four documents and a question, cold, in the same order again with another question, and shuffled; every trial has new
words. Systems take turns trial by trial, in an order that turns round, and only one computes at a time. What is
measured is kept in `outputs/peers`: the same command goes on where it ended, at the same commit and on the same
machine. It tells how long the rest will take, by what is measured and published. At the end it prints the tables; with
`--publish` it writes `results.json`, the figure and the tables of the page beside this file instead.

    .venvs/answers/bin/python benchmarks/peers/measure.py --tokens 873 3073 8100 --systems transformers none pic radix

This form prints the ratios to plain transformers for drawn prompts of so many tokens, and writes nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import torch
from measurements import facts, write_results
from names import ARMS, ITEMSIZE, ONLY_FLOAT32, SERVERS, SYSTEMS, kinds_of
from pages import ROOT, fill_page
from prompts import Prompts, Trial
from systems import SERVER_WORDS, Arm, System, Transformers, check_cores, cores, kvboost, opened, server, study_of_arms
from tables import Results, figure, lines_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from spanlab.build import build_model
from spanlab.model_files import packaged, packaged_folder
from spanlab.study.servers import base

OUT = ROOT / "outputs" / "peers"
MODEL = "smollm2-135m"
WORDS = (200, 500, 1000, 2000, 4000)
REPEATS = 3
LIMIT_S = 15.0
START_S = 25.0  # of a server, its warm-up included
GROWTH = 1.25  # of the time of a prompt with its words: attention grows faster than the other layers
ENGINES = {"vllm": "vllm_cpu", "mistralrs": "mistralrs", "llama_cpp": "llama_cpp"}

Rows = dict[str, dict[str, Any]]
"""Rows by `DTYPE/WORDS/SYSTEM`: commit, machine, trials. A trial has seconds and reused tokens by kind, and tokens."""


def weights(dtype: str) -> Path:
    """Return a folder with the packaged model in a precision, which is written if it is missing."""
    folder = OUT / "weights" / dtype / MODEL
    if not (folder / "tokenizer.json").is_file():
        source = packaged_folder(packaged(MODEL, "model"))
        AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)).save_pretrained(folder)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)  # last: it marks a complete folder
    return folder


def package_of_kvboost() -> Path:
    """Return the folder of kvboost, which is installed if it is missing, without what it depends on."""
    folder = OUT / "kvboost"
    if not (folder / "kvboost").is_dir():
        pins = HERE / "kvboost.txt"
        install = f'"$uv" --quiet pip install --no-deps --require-hashes --target "{folder}" --requirements "{pins}"'
        script = f'source "{ROOT}/requirements/setup.sh"; find_python; find_uv; {install} --python "{sys.executable}"'
        subprocess.run(["bash", "-c", script], check=True)
    return folder


@contextmanager
def systems(names: list[str], dtype: str) -> Iterator[dict[str, System]]:
    """Start the systems that have a precision."""
    model, found = weights(dtype), dict[str, System]()
    study = study_of_arms(model, dtype)
    ours = build_model(study) if set(names) & set(ARMS) else None
    torch.set_num_threads(len(cores()))
    with ExitStack() as stack:
        for name in names:
            if name in SERVER_WORDS and not (name in ONLY_FLOAT32 and dtype != "float32"):
                found[name] = opened(stack, name, server(name, model, dtype, OUT / "servers" / dtype))
            elif name == "kvboost":
                log = OUT / "kvboost.log"
                context = kvboost(Path(sys.executable), package_of_kvboost(), model, dtype, log)
                found[name] = opened(stack, name, context)
            elif name == "transformers":
                found[name] = Transformers(model, dtype)
            elif name in ARMS:
                assert ours is not None, "an arm is among the names"
                found[name] = Arm(study, name, ours)
        yield found


def served(system: System, name: str, trial: Trial) -> dict[str, Any]:
    """Serve a trial, and return its row."""
    found = system.serve(trial, kinds_of(name))
    check_cores()
    return {kind: asdict(one) for kind, one in found.items()} | {"tokens": trial.requests["cold"].num_tokens}


def in_turns(ready: dict[str, System], repeats: int, draw: Callable[[], Trial]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Serve trials, all systems in turn on the same trial, and yield the name and the row of each."""
    for repeat in range(repeats):
        trial = draw()
        for name in list(ready)[:: -1 if repeat % 2 else 1]:
            yield name, served(ready[name], name, trial)


# ------------------------------------------------------------------------------
# The whole comparison: rows that are kept between runs.
# ------------------------------------------------------------------------------


class Kept:
    """Rows of this commit and machine, kept in a file after every trial."""

    def __init__(self, source: str) -> None:
        self._file, self._now = OUT / "rows.json", {key: facts()[key] for key in ("commit", "machine")}
        self._now["words"] = source
        stored: Rows = json.loads(self._file.read_text()) if self._file.is_file() else {}
        same = {key: row for key, row in stored.items() if self._now.items() <= row.items()}
        if len(same) < len(stored):
            print(f"{len(stored) - len(same)} rows of another commit, machine or text are measured again")
        self.rows = same

    def trials(self, key: str) -> list[dict[str, Any]]:
        """Return the trials of a row."""
        trials: list[dict[str, Any]] = self.rows.setdefault(key, {**self._now, "trials": []})["trials"]
        return trials

    def add(self, key: str, trial: dict[str, Any]) -> None:
        """Keep one more trial."""
        self.trials(key).append(trial)
        OUT.mkdir(parents=True, exist_ok=True)
        write_results(self._file, self.rows)


def slow_at(kept: Kept, dtype: str, name: str, words: list[int], limit_s: float) -> tuple[int, float] | None:
    """Return the first length whose cold request took longer than the limit, and its seconds; None without one."""
    for count in words:
        trials = kept.trials(f"{dtype}/{count}/{name}")
        if trials and (seconds := median(trial["cold"]["seconds"] for trial in trials)) > limit_s:
            return count, seconds
    return None


class Clock:
    """Expects how long trials take, by the same system's trials of this run and of the published one."""

    def __init__(self, kept: Kept) -> None:
        published = json.loads((HERE / "results.json").read_text())["rows"]
        self._kept, self._published = kept, published

    def trial_s(self, dtype: str, words: int, name: str) -> float:
        """Return the seconds of a trial; a system without any is expected to take as long as the slowest one."""
        known = self._known(dtype, name)
        if not known:
            others = (self._known(dtype, other) for other in SYSTEMS)
            known = max(filter(None, others), key=lambda row: row[max(row)] / max(row), default={words: 0.0})
        nearest = min(known, key=lambda each: abs(each - words))
        return known[nearest] * (words / nearest) ** GROWTH

    def _known(self, dtype: str, name: str) -> dict[int, float]:
        """Return the median seconds of a system's trials by words."""
        found = {}
        for rows in (self._published, {key: row["trials"] for key, row in self._kept.rows.items()}):
            for key, trials in rows.items():
                if trials and key.startswith(f"{dtype}/") and key.endswith(f"/{name}"):
                    each = [sum(trial[kind]["seconds"] for kind in kinds_of(name)) for trial in trials]
                    found[int(key.split("/")[1])] = median(each)
        return found

    def left(self, given: argparse.Namespace) -> str:
        """Return how long the missing trials of all precisions take, and the starts of their systems."""
        seconds = 0.0
        for dtype in given.dtypes:
            todo = [
                (words, name, given.repeats - len(self._kept.trials(f"{dtype}/{words}/{name}")))
                for name in names_of(dtype, given)
                for at, words in enumerate(given.words)
                if lacks(self._kept, dtype, name, given.words, at, given)
            ]
            seconds += sum(count * self.trial_s(dtype, words, name) for words, name, count in todo)
            seconds += START_S * len({name for _, name, _ in todo} & set(SERVERS))
        return f"about {seconds / 60:.0f} minutes are left"


def names_of(dtype: str, given: argparse.Namespace) -> list[str]:
    """Return the systems that have a precision."""
    return [name for name in given.systems if not (name in ONLY_FLOAT32 and dtype != "float32")]


def compare(dtype: str, given: argparse.Namespace, prompts: Prompts, kept: Kept, clock: Clock) -> None:
    """Measure what is missing of one precision."""
    words: list[int] = given.words
    names = names_of(dtype, given)
    missing = [name for name in names if any(lacks(kept, dtype, name, words, at, given) for at in range(len(words)))]
    if not missing:
        return
    with systems(missing, dtype) as ready:
        warm_up = prompts.trial(words[0])
        for name, system in ready.items():
            served(system, name, warm_up)
        for at, count in enumerate(words):
            for repeat in range(given.repeats):
                trial = prompts.trial(count)
                for name in list(ready)[:: -1 if repeat % 2 else 1]:
                    if lacks(kept, dtype, name, words, at, given):
                        row = served(ready[name], name, trial)
                        kept.add(f"{dtype}/{count}/{name}", row)
                        seconds = ", ".join(f"{kind} {row[kind]['seconds']:.3f} s" for kind in kinds_of(name))
                        print(f"{dtype} {count} words, {row['tokens']} tokens, {name}: {seconds}", flush=True)
            print(f"{dtype}, {count} words: {clock.left(given)}", flush=True)


def lacks(kept: Kept, dtype: str, name: str, words: list[int], at: int, given: argparse.Namespace) -> bool:
    """Return whether a system has fewer trials than asked for at a length, and was not too slow at a shorter one."""
    if slow_at(kept, dtype, name, words[:at], given.limit_s) is not None:
        return False
    return len(kept.trials(f"{dtype}/{words[at]}/{name}")) < given.repeats


def results_of(given: argparse.Namespace, prompts: Prompts, kept: Kept) -> Results:
    """Return what is measured, with its origin."""
    words = given.words
    left_out = {
        f"{dtype}/{name}": {"words": slow[0], "seconds": slow[1]}
        for dtype in given.dtypes
        for name in given.systems
        if (slow := slow_at(kept, dtype, name, words[:-1], given.limit_s)) is not None
    }
    torch_versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    known = facts()
    return {
        "commit": known["commit"],
        "machine": known["machine"],
        "versions": known["versions"] | torch_versions,
        "peers": {name: base.SERVERS.make(engine, {}, {}).version for name, engine in ENGINES.items()}
        | {"kvboost": "0.9.0"},
        "threads": len(cores()),
        "words": words,
        "source": prompts.source,
        "limit_s": given.limit_s,
        "left_out": left_out,
        "rows": {key: row["trials"] for key, row in kept.rows.items() if row["trials"]},
    }


def publish(results: Results) -> None:
    """Write results, figure and tables."""
    write_results(HERE / "results.json", results)
    figure(results, HERE / "ttft.png")
    fill_page(HERE / "README.md", "peers", lines_of(results))


# ------------------------------------------------------------------------------
# Ratios to plain transformers for prompts of given lengths in tokens.
# ------------------------------------------------------------------------------


def ratios(dtype: str, given: argparse.Namespace, prompts: Prompts) -> None:
    """Print seconds, and ratios to the same prompt in plain transformers, of drawn prompts."""
    with systems(given.systems, dtype) as ready:
        for name, system in ready.items():
            served(system, name, prompts.trial_of_tokens(min(given.tokens)))
        for tokens in given.tokens:
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in ready}
            for name, row in in_turns(ready, given.repeats, lambda tokens=tokens: prompts.trial_of_tokens(tokens)):
                found[name].append(row)
            plain = [row["cold"]["seconds"] for row in found.get("transformers", [])]
            for name, rows in found.items():
                for kind in kinds_of(name):
                    seconds = [row[kind]["seconds"] for row in rows]
                    each = [own / other for own, other in zip(seconds, plain, strict=False)]
                    ratio = f" = {median(each):.2f} x [{min(each):.2f}, {max(each):.2f}]" if each else ""
                    print(f"{dtype} {tokens} tokens {name} {kind}: {median(seconds):.3f} s{ratio}", flush=True)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, help="JSON lines with texts; drawn words without it")
    parser.add_argument("--words", type=int, nargs="+", default=WORDS, help="words of the four documents together")
    parser.add_argument("--tokens", type=int, nargs="+", help="print ratios for prompts of so many drawn tokens")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--dtypes", nargs="+", choices=tuple(ITEMSIZE), default=tuple(ITEMSIZE))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="a slower system is not measured at more words")
    parser.add_argument("--publish", action="store_true", help="write the page and its results, not only print them")
    given = parser.parse_args()
    cores()  # a later change of them is an error
    if given.texts is not None and not given.texts.is_file():
        sys.exit(f"--texts {given.texts}: expected a file of JSON lines")
    given.systems, given.words = list(given.systems), sorted(given.words)
    prompts = Prompts(weights("float32"), given.texts)
    if given.tokens:
        for dtype in given.dtypes:
            ratios(dtype, given, prompts)
        return
    kept = Kept(prompts.source)
    clock = Clock(kept)
    print(clock.left(given), flush=True)
    for dtype in given.dtypes:
        compare(dtype, given, prompts, kept, clock)
    shutil.rmtree(OUT / "servers", ignore_errors=True)
    results = results_of(given, prompts, kept)
    if given.publish:
        publish(results)
    else:
        print(lines_of(results))


if __name__ == "__main__":
    main()
