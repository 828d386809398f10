"""Random request sequences over prompts that share beginnings."""

import numpy as np

PAGES = (1, 16, 64)


def random_case(seed, hybrid):
    """One case; equal seeds give equal cases."""
    rng = np.random.default_rng([seed, int(hybrid)])
    page = int(rng.choice(PAGES))
    ops, running, serial = [], {}, 0
    for _ in range(int(rng.integers(12, 30))):
        kind = rng.choice(["start", "step", "step", "finish", "evict"])
        if kind == "start" or not running:
            runs = random_prompt(rng, serial)
            running[serial] = sum(count for _, count in runs)
            ops.append(["start", serial, runs])
            serial += 1
        elif kind == "evict":
            states = int(rng.integers(0, 3)) if hybrid else 0
            ops.append(["evict", int(rng.integers(0, 300)), states])
        else:
            name = int(rng.choice(list(running)))
            ops += step(rng, running, name, hybrid, kind == "finish")
    return {"page": page, "hybrid": hybrid, "ops": ops}


def random_prompt(rng, serial):
    """A beginning that others have, cut anywhere, and a tail that few have."""
    document = int(rng.integers(0, 3))
    runs = [[10_000 * document, int(rng.integers(1, 500))]]
    if rng.random() < 0.7:
        runs.append([100_000 + 1_000 * int(rng.integers(0, 4)), int(rng.integers(1, 200))])
    if rng.random() < 0.3:
        runs.append([2_000_000 + 1_000 * int(rng.integers(0, 3)), int(rng.integers(1, 100))])
    if rng.random() < 0.3:
        runs.append([1_000_000 + 1_000 * serial, int(rng.integers(1, 80))])
    return runs


def step(rng, running, name, hybrid, finish):
    """Some more of a prompt (all of it where the model is a hybrid), or its end; a few give up."""
    length = running[name]
    if finish:
        del running[name]
        return [_end(rng, name, hybrid)]
    return [["chunk", name, length if hybrid else int(rng.integers(1, length + 1))]]


def _end(rng, name, hybrid):
    if rng.random() < 0.2:
        return ["abandon", name]
    output = [] if hybrid else [[2_000_000 + 1_000 * int(rng.integers(0, 3)), int(rng.integers(1, 100))]]
    return ["finish", name, output]
