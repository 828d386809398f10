"""The published study's arms against a second program, written from its description and sharing no code with ours."""

import heapq
import json
import math
import runpy
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spanlab.cli import compose
from spanlab.study.run import run_study

from ..support.shared import DATA, needs

SHARED_CASE = DATA / "replica_case"
GRID, LONGEST, FOLD = 64, 16_384, 512
DP_COUNT = {"dp_25": 20}  # theirs is named 25 and runs 20


# -- the second program: one request after another, linear scans, no tree, no store -----------------------------------


def study_order(groups: list[int]) -> list[int]:
    """Row numbers in the order in which the study asks them."""
    rng = np.random.RandomState(42)
    names = list(dict.fromkeys(groups))
    rng.shuffle(names)
    rows = {name: [row for row, group in enumerate(groups) if group == name] for name in names}
    arrival = {name: rng.exponential(1.0) for name in names}
    order: list[int] = []
    while arrival:
        name = min(arrival, key=lambda name: arrival[name])  # the first of equal ones: the earlier shuffled
        order.append(rows[name].pop(0))
        if rows[name]:
            arrival[name] += rng.exponential(1.0)
        else:
            del arrival[name]
    return order


def shared(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def fixed_positions(arm: str, L: int) -> list[int]:
    kind, _, number = arm.partition("_")
    match kind:
        case "block":
            return list(range(int(number), L + 1, int(number)))
        case "balanced" | "dp":
            M = DP_COUNT.get(arm, int(number))
            step = max(1, L // (M + 1))
            return list(range(step, L + 1, step))[:M]
        case "sqrt":
            return list(range(int(math.sqrt(L)), L + 1, int(math.sqrt(L))))
        case "log":
            return [2**k for k in range(10, 40) if 768 <= 2**k <= L]
    raise AssertionError(arm)


def solve(histogram: np.ndarray, M: int) -> list[int]:
    """Checkpoint positions: a table over (checkpoints, last bin), sums in the published order, first minima.

    Where every cost is zero rounding decides, so the order of the operations is part of the description.
    """
    p = histogram / histogram.sum()
    t = np.arange(len(p), dtype=float)
    mass, moment = np.cumsum(p), np.cumsum(p * t)
    N = len(p) - 1
    s = np.arange(1, N + 1)[:, None]
    lost = s * (mass[None, 1:] - mass[:-1, None])  # depths s..j resume at s
    best = moment.copy()  # nothing placed: depth t costs t
    splits = []
    for _ in range(min(M, N)):
        options = ((best[:-1, None] + moment[None, 1:]) - moment[:-1, None]) - lost
        options[np.tril_indices(N, -1)] = np.inf
        first = options.argmin(axis=0)
        best = np.concatenate([[0.0], options[first, np.arange(N)]])
        splits.append([0, *(first + 1).tolist()])
    positions, j = set(), N
    for split in reversed(splits):
        positions.add(split[j] * GRID)
        j = split[j] - 1 if split[j] else N
    return sorted(positions - {0})


def play(rows: list[np.ndarray], groups: list[int], arm: str, entries: int) -> tuple[int, int]:
    """Hits and reused tokens of the counted requests under one arm."""
    order = study_order(groups)
    warmup = int(0.6 * len(order))
    stored: list[tuple[int, np.ndarray, list[int]]] = []  # oldest first
    histogram, observed, solved_at, solution = np.zeros(LONGEST // GRID + 1), 0, -1, []
    learns = arm.startswith("dp_")
    M = DP_COUNT.get(arm, int(arm.partition("_")[2])) if learns else 0
    hits = reused = 0
    for number, row in enumerate(order):
        prompt, group = rows[row] % FOLD, groups[row]
        L = len(prompt)
        matched, resume = 0, 0
        for owner, tokens, positions in stored:
            m = shared(prompt, tokens) if owner == group else 0
            if m > matched:
                matched = m
                resume = max((p for p in positions if p <= min(m, len(tokens), L)), default=0)
        if number >= warmup:
            hits += matched > 0
            reused += resume
        if arm == "no_cache":
            continue
        positions = fixed_positions(arm, L)
        if learns:
            histogram *= 0.99
            histogram[min(matched // GRID, len(histogram) - 1)] += 1
            observed += 1
            if number >= warmup:
                if observed % 10 == 0 and observed != solved_at:
                    solution, solved_at = solve(histogram, M), observed
                positions = [p for p in solution if 0 < p <= L]
        if len(stored) == entries:
            stored.pop(0)
        stored.append((group, prompt, sorted({p // GRID * GRID for p in positions})))
        if learns and number == warmup - 1:
            solution, solved_at = solve(histogram, M), observed
    return hits, reused


# -- workloads --------------------------------------------------------------------------------------------------------


def draw_group(rng: np.random.Generator, requests: int, most: int) -> list[np.ndarray]:
    """Prompts that grow from one another: continuations, cuts, copies, and lengths that end on the grid."""

    def fresh(n: int) -> np.ndarray:
        return rng.integers(0, FOLD, n, dtype=np.int32)

    document = fresh(int(rng.integers(most // 4, most)))
    prompts: list[np.ndarray] = []
    for _ in range(requests):
        match int(rng.integers(0, 6)) if prompts else 0:
            case 0 | 1:  # the document and a question
                prompt = np.concatenate([document, fresh(int(rng.integers(1, 200)))])
            case 2:  # a part of an earlier prompt, and something else
                earlier = prompts[int(rng.integers(len(prompts)))]
                prompt = np.concatenate([earlier[: int(rng.integers(1, len(earlier) + 1))], fresh(150)])
            case 3:  # the same again
                prompt = prompts[int(rng.integers(len(prompts)))]
            case 4:  # an earlier one cut on the grid
                earlier = prompts[int(rng.integers(len(prompts)))]
                prompt = earlier[: max(GRID, len(earlier) // int(rng.integers(1, 4)) // GRID * GRID)]
            case _:  # nothing in common
                prompt = fresh(GRID * int(rng.integers(4, 30)))
        if len(prompt) < 200:
            prompt = np.concatenate([prompt, fresh(200)])
        prompts.append(prompt[:6_000])
    return prompts


def draw_workload(seed: int, groups: int, fewest: int, most: int, longest: int) -> tuple[list[np.ndarray], list[int]]:
    """Rows in file order, groups mixed; ids differ by multiples of 512 wherever they are meant to be equal."""
    rng = np.random.default_rng(seed)
    queues = {
        100 - g: draw_group(rng, int(rng.integers(fewest, most + 1)), int(rng.integers(400, longest)))
        for g in range(groups)
    }
    owners = [group for group, prompts in queues.items() for _ in prompts]
    rng.shuffle(owners)
    rows = []
    for group in owners:
        prompt = queues[group].pop(0)
        rows.append(prompt + FOLD * rng.integers(0, 290, len(prompt), dtype=np.int32))
    return rows, owners


def make_shared_case(path: Path) -> None:
    """Run the shared rule that makes the case, with this environment's Parquet writer in place of polars."""

    class DataFrame(dict):
        def write_parquet(self, out: Path) -> None:
            write_parquet(out, self["tokens"], self["group_id"])

        def __getitem__(self, name: str) -> np.ndarray:
            column = super().__getitem__(name)
            return column if name == "tokens" else np.array(column)

    polars = types.ModuleType("polars")
    polars.DataFrame = DataFrame
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "polars", polars)
        patch.setattr(sys, "argv", ["make_tokens.py", str(path)])
        runpy.run_path(str(SHARED_CASE / "make_tokens.py"))


def write_parquet(path: Path, rows: list[np.ndarray], groups: list[int]) -> None:
    counts: dict[int, int] = {}
    idx = []
    for group in groups:
        idx.append(counts.get(group, 0))
        counts[group] = idx[-1] + 1
    columns = {
        "group_id": pa.array(groups, pa.int64()),
        "idx": pa.array(idx, pa.int64()),
        "tokens": pa.array(rows, pa.list_(pa.int32())),
        "n_tokens": pa.array([len(row) for row in rows], pa.int64()),
    }
    pq.write_table(pa.table(columns), path)


def ours(tmp_path: Path, rows: list[np.ndarray], groups: list[int], entries: int) -> dict[str, tuple[int, int]]:
    write_parquet(tmp_path / "rows.parquet", rows, groups)
    return run_replica(tmp_path, tmp_path / "rows.parquet", entries)


def run_replica(tmp_path: Path, path: Path, entries: int) -> dict[str, tuple[int, int]]:
    """Hits and reused tokens of every arm of the entry on a Parquet file."""
    settings = compose(
        "sparse_prefix_replica",
        [f"workload.path={path}", f"output.root={tmp_path}/out", "output.figures=false", f"store.entries={entries}"],
    )
    folder = run_study(settings, "sparse_prefix_replica", tmp_path / "out")
    arms = json.loads((folder / "summary.json").read_text())["arms"]
    return {name: (arm["hits"], arm["tokens"]["reused"]) for name, arm in arms.items()}


def check_all_arms(tmp_path: Path, rows: list[np.ndarray], groups: list[int], entries: int) -> None:
    measured = ours(tmp_path, rows, groups, entries)
    assert len(measured) == 27
    assert measured == {arm: play(rows, groups, arm, entries) for arm in measured}


# -- tests ------------------------------------------------------------------------------------------------------------


def test_the_second_program_interleaves_as_the_description_says():
    groups = [3, 1, 3, 3, 1, 2]
    heap, rng = [], np.random.RandomState(42)
    names = [3, 1, 2]
    rng.shuffle(names)
    for rank, name in enumerate(names):
        heapq.heappush(heap, (rng.exponential(1.0), rank, name))
    remaining, order = {3: [0, 2, 3], 1: [1, 4], 2: [5]}, []
    while heap:
        time, rank, name = heapq.heappop(heap)
        order.append(remaining[name].pop(0))
        if remaining[name]:
            heapq.heappush(heap, (time + rng.exponential(1.0), rank, name))
    assert study_order(groups) == order


def test_the_second_program_places_by_hand():
    assert fixed_positions("block_192", 600) == [192, 384, 576]
    assert fixed_positions("balanced_2", 600) == [200, 400]
    assert fixed_positions("balanced_300", 3) == [1, 2, 3]
    assert fixed_positions("sqrt", 10) == [3, 6, 9]
    assert fixed_positions("log", 4096) == [1024, 2048, 4096]
    histogram = np.zeros(9)
    histogram[[0, 3, 5, 8]] = 1, 4, 3, 1
    assert solve(histogram, 1) == [3 * GRID]  # loses 2 · 3 + 5 against 12 + 3 at five
    assert solve(histogram, 2) == [3 * GRID, 5 * GRID]


@pytest.mark.parametrize(("seed", "entries"), [pytest.param(1, 20, marks=pytest.mark.slow), (2, 7)])
def test_every_published_arm_is_reproduced_to_the_token(tmp_path, seed, entries):
    rows, groups = draw_workload(seed, groups=12, fewest=8, most=15, longest=5_800)
    check_all_arms(tmp_path, rows, groups, entries)


@pytest.mark.slow
@pytest.mark.parametrize("entries", [20, 50])
@pytest.mark.parametrize("seed", [3, 4])
def test_every_published_arm_is_reproduced_on_a_thousand_requests(tmp_path, seed, entries):
    rows, groups = draw_workload(seed, groups=90, fewest=8, most=15, longest=5_800)
    check_all_arms(tmp_path, rows, groups, entries)


@pytest.mark.slow
@needs(SHARED_CASE)
def test_shared_case_has_the_published_programs_own_numbers(tmp_path):
    make_shared_case(tmp_path / "case.parquet")
    expected = json.loads((SHARED_CASE / "expected.json").read_text())["strategies"]
    measured = run_replica(tmp_path, tmp_path / "case.parquet", 20)
    assert measured == {arm: (row["hits"], row["tokens_saved"]) for arm, row in expected.items()}
