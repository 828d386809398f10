"""Which points of the grid of position-independent methods are refused, and that the others can be built."""

from itertools import product

import pytest

from spanlab.build import build_policy
from spanlab.cli import compose
from spanlab.core.repair import KEYS_OF_KERNEL, PROVENANCES, REPAIRS, Repair, SpanSettings
from spanlab.settings import Strategy

USER_ERRORS = [
    (SpanSettings(provenance="alone"), "provenance=alone: expected one of isolated, conditioned, as_seen"),
    (SpanSettings(positions="same"), "positions=same: expected one of sequential, overlapping, original"),
    (SpanSettings(sharing="shared"), "sharing=shared: expected one of canonical, private"),
    (SpanSettings(kernel="RK"), "kernel=RK: expected one of rotate_keys, rotate_queries, pre_rotated"),
    (SpanSettings(kernel="rotate_keys"), "keys=local with kernel=rotate_keys: expected raw"),
    (SpanSettings(keys="raw"), "keys=raw with kernel=rotate_queries: expected local"),
    (SpanSettings(keys="absolute"), "keys=absolute with kernel=rotate_queries: expected local"),
    (
        SpanSettings(keys="absolute", kernel="pre_rotated", sharing="private"),
        "keys=absolute with positions=sequential: expected keys=local",
    ),
    (SpanSettings(provenance="conditioned"), "provenance=conditioned with positions=sequential: expected overlapping"),
    (SpanSettings(keys="raw", kernel="pre_rotated"), "keys=raw with kernel=pre_rotated: expected local or absolute"),
    (
        SpanSettings(kernel="pre_rotated"),
        "sharing=canonical with kernel=pre_rotated, which writes to spans: expected private",
    ),
    (
        SpanSettings(repair=Repair("deviation", ratio=0.1)),
        "sharing=canonical with repair.kind=deviation, which writes to spans: expected private",
    ),
    (
        SpanSettings(repair=Repair("neighbours", 4)),
        "sharing=canonical with repair.kind=neighbours, which writes to spans: expected private",
    ),
    (
        SpanSettings(repair=Repair("attention", 4), temperature=0.9),
        "repair.kind=attention with temperature=0.9, scale=1.0: expected 1 and 1",
    ),
    (
        SpanSettings(positions="original"),
        "positions=original with kernel=rotate_queries, keys=local: expected kernel=pre_rotated, keys=absolute",
    ),
    (
        SpanSettings(positions="original", kernel="pre_rotated", sharing="private"),
        "positions=original with kernel=pre_rotated, keys=local: expected kernel=pre_rotated, keys=absolute",
    ),
    (SpanSettings(temperature=0), "temperature=0: expected a number above zero"),
    (SpanSettings(scale=float("inf")), "scale=inf: expected a number above zero"),
]
REPAIR_MISTAKES = [
    (Repair("none", k=4), "kind=none with k=4, ratio=None: expected neither k nor ratio"),
    (Repair("first"), "kind=first with k=None, ratio=None: expected k"),
    (Repair("first", ratio=0.1), "kind=first with k=None, ratio=0.1: expected k"),
    (Repair("last", 4, 0.1), "kind=last with k=4, ratio=0.1: expected k"),
    (Repair("random"), "kind=random with k=None, ratio=None: expected k or ratio"),
    (Repair("strided", 4, 0.1), "kind=strided with k=4, ratio=0.1: expected k or ratio"),
    (Repair("deviation", k=4), "kind=deviation with k=4, ratio=None: expected ratio"),
    (Repair("first", k=0), "k=0: expected a number above zero"),
    (Repair("random", ratio=1.5), "ratio=1.5: expected a share from 0 to 1"),
    (Repair("random", k=4, seed=-1), "seed=-1: expected zero or more"),
    (Repair("deviation", ratio=0.1, check_layer=0), "check_layer=0: expected 1 or more"),
    (Repair("deviation", ratio=0.1, score="queries"), "score=queries: expected one of values, keys, both"),
    (Repair("deviation_gradual", ratio=0.1), "filter=queries with kind=deviation_gradual: expected layers"),
    (
        Repair("deviation", ratio=0.1, filter="layers", writes="chosen"),
        "writes=chosen with filter=layers: expected all",
    ),
    (Repair("attention"), "kind=attention with k=None, ratio=None: expected k or ratio"),
    (Repair("attention", 4, score="keys"), "score=keys with kind=attention: expected values"),
    (Repair("attention", 4, check_layer=2), "check_layer=2 with kind=attention: expected 1"),
    (Repair("neighbours", 4, writes="chosen"), "writes=chosen with kind=neighbours: expected all"),
    (Repair("neighbours", 4, layers=[1]), "layers=[1] with kind=neighbours: expected null, or kind=attention"),
    (Repair("attention", 4, layers=[]), "layers=[]: expected layers from 0 on, each once and in order"),
    (Repair("attention", 4, layers=[2, 1]), "layers=[2, 1]: expected layers from 0 on, each once and in order"),
    (
        Repair("attention", 4, chunked=True),
        "chunked=true with kind=attention, which compares all tokens: expected false or null",
    ),
    (Repair("first", 4, base="prompt"), "base=prompt with k=4: expected ratio"),
    (
        Repair("deviation", ratio=0.1, chunked=True),
        "chunked=true with kind=deviation, which compares all tokens: expected false or null",
    ),
]
USER_ERRORS += [(SpanSettings(repair=repair), f"repair.{sentence}") for repair, sentence in REPAIR_MISTAKES]


@pytest.mark.parametrize(("spans", "sentence"), USER_ERRORS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_point_that_makes_no_sense_is_refused_in_one_sentence(spans: SpanSettings, sentence: str):
    with pytest.raises(ValueError, match="expected") as refused:
        Strategy(spans=spans).check("arms.mine")
    assert str(refused.value) == f"arms.mine.spans.{sentence}"


@pytest.mark.parametrize(("key", "value"), [("sharing", "private"), ("last_token", "reuse")])
def test_spans_are_not_kept_as_the_published_study_keeps_prefixes(key: str, value: str):
    with pytest.raises(ValueError, match="expected shared and recompute") as refused:
        Strategy(spans=SpanSettings(), **{key: value}).check("arms.mine")
    assert f"{key}={value}" in str(refused.value)


def test_whatever_is_not_refused_is_built_as_it_was_set():
    study = compose("smoke", ["model=llama-3.2-1b", "arms=attention", "load.rates_rps=[]", "load.arms=[]"])
    built = 0
    for provenance, positions, sharing, kernel, kind, size in product(
        PROVENANCES,
        ("sequential", "overlapping", "original"),
        ("canonical", "private"),
        KEYS_OF_KERNEL,
        REPAIRS,
        ({}, {"k": 4}, {"ratio": 0.2}),
    ):
        for keys in ("raw", "local", "absolute"):
            repair = Repair(kind, **size, filter="layers" if kind == "deviation_gradual" else "queries")
            spans = SpanSettings(provenance, keys, positions, repair, sharing, kernel)
            arm = Strategy(spans=spans)
            try:
                arm.check("arms.mine")
            except ValueError:
                continue
            rules = build_policy(study, arm, 0, 100).rules
            assert rules.layout.__name__ == provenance
            assert (rules.copies, rules.repair.kind) == (sharing == "private", kind)
            assert (rules.repair.k, rules.repair.ratio) == (size.get("k"), size.get("ratio"))
            built += 1
    # Ways to repair: 9, of which 7 choose by place and 2 ask the query; 4 more rewrite spans, in private copies only:
    # two kinds of deviation, and neighbours with k or a share. Positions sequential or
    # overlapping: rotate_keys and rotate_queries read one kind of keys each, in either way of sharing; pre_rotated
    # reads one, in private copies.
    # Original positions: pre_rotated, in either way of sharing. Conditioned spans overlap.
    assert built == 2 * (2 * 2 * (9 + 13) + 2 * 13 + (9 + 13)) + 2 * (9 + 13) + 13
