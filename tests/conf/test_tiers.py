"""Settings of tiers that make no sense, one sentence each."""

import re

import pytest

from spanlab.cli import compose

HOST = "store.tiers.host"
ONE = "sweep=[]"


def refused(*overrides: str, entry: str = "tiers_sim") -> str:
    """The error for these settings."""
    with pytest.raises(ValueError, match="expected") as found:
        compose(entry, [ONE, *overrides])
    return str(found.value)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([f"{HOST}.gib=0"], f"{HOST}.gib=0.0: expected a number above zero"),
        ([f"{HOST}.bandwidth_gb_s=0"], f"{HOST}.bandwidth_gb_s=0.0: expected a number above zero"),
        ([f"{HOST}.latency_s=-1"], f"{HOST}.latency_s=-1.0: expected zero or more"),
        ([f"{HOST}.action=compress"], f"{HOST}.action=compress: expected one of evict, demote, quantise"),
        ([f"{HOST}.write=never"], f"{HOST}.write=never: expected one of through, back, second_hit"),
        ([f"{HOST}.load=lazy"], f"{HOST}.load=lazy: expected one of blocking, layerwise"),
        ([f"{HOST}.high=0"], f"{HOST}.high=0.0: expected a share above 0 and up to 1"),
        ([f"{HOST}.high=0.5"], f"{HOST}.low=1.0: expected a share from 0 to {HOST}.high=0.5"),
        ([f"{HOST}.action=demote"], f"{HOST}.action=demote: expected evict or quantise, for no tier is below it"),
        ([f"{HOST}.quantise_to=fp8"], f"{HOST}.quantise_to=fp8 with {HOST}.action=evict: expected null"),
        ([f"{HOST}.action=quantise"], f"{HOST}.quantise_to=null: expected one of fp8, int4"),
        (
            [f"{HOST}.action=quantise", f"{HOST}.quantise_to=fp8", "model=qwen3.5-27b"],
            f"{HOST}.action=quantise with model.name=qwen3.5-27b: expected evict or demote, for recurrent states are "
            "not quantised",
        ),
        (
            ["replicas.count=2", "replicas.routing=round_robin"],
            "store.tiers=[host] with replicas.count=2: expected 1, for tiers belong to one engine",
        ),
        (["backend=engine"], "store.tiers=[host] with backend=engine: expected backend=sim"),
        (
            ["arms.break_even.pool.load_when=sometimes"],
            "arms.break_even.pool.load_when=sometimes: expected one of break_even, always, never",
        ),
        (
            ["+strategy@arms.radix=radix"],
            "arms.radix with store.tiers=[host]: expected arms.radix.pool, for tiers hold hashed blocks",
        ),
        (
            ["+tier@store.tiers.disk=nvme", "store.tiers.disk.write=back"],
            f"store.tiers.disk.write=back with {HOST}.action=evict: expected {HOST}.action=demote",
        ),
    ],
)
def test_a_tier_without_sense_is_refused(overrides, sentence):
    said = refused(*overrides)
    assert re.sub(r"\s+", " ", said).startswith(sentence)


def test_keys_of_tiers_need_a_tier():
    said = refused("+strategy@arms.mine=vllm_0_32", "arms.mine.pool.load_when=always", entry="smoke")
    assert said.startswith("arms.mine.pool.load_when=always without store.tiers: expected null")
    assert refused("analyses=[summary,tiers]", entry="smoke").startswith("analyses=tiers without store.tiers: expected")


def test_a_tier_needs_size_and_bandwidth(spanlab, one_sentence):
    own, path = "+tier@store.tiers.disk=own", "store.tiers.disk"
    for given, missing in (("gib=1", "bandwidth_gb_s"), ("bandwidth_gb_s=1", "gib")):
        one_sentence(spanlab("-cn", "tiers_sim", ONE, own, f"{path}.{given}"), f"{path}.{missing}", "is not set")


def test_tiers_keep_their_order():
    study = compose("tiers_sim", [ONE, "+tier@store.tiers.disk=nvme", "+tier@store.tiers.far=remote"])
    assert list(study.store.tiers) == ["host", "disk", "far"]
