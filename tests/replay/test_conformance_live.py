"""The entry `conformance` on a running server: a right one passes, and each fault is found by its property."""

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from urllib.request import urlopen

import hydra
import orjson
import pytest

from spanlab.cli import compose
from spanlab.compiled import CONF
from spanlab.registry import file_of
from spanlab.study import conformance_live
from spanlab.study.conformance import Conformance, run_conformance
from spanlab.study.conformance_live import LIVE, NOISE
from spanlab.study.live_server import ServerGoneError
from spanlab.study.servers.base import SERVERS, EmbeddedServer, Launch
from spanlab.study.verdicts import ABSENT, FAILED, PASSED, UNTESTED, Choice, difference, logit_step

from ..conf.conftest import spanlab as _spanlab
from .conftest import FOLDER, serving

spanlab = _spanlab  # a fixture
SMALL = ["prompts=2", "output_tokens=6", "live.concurrency=4", "live.largest_prompt=150", "live.fill_tokens=1000"]
SCRIPT = "caching_server.py"
BLOCK = 8
#: Only preemption asks for long answers. The first four are computed together, so that they always overlap.
OVERLAP = {"gate": [0, 4, 50]}


def settings(url: str, *overrides: str) -> Conformance:
    return compose("conformance", [*SMALL, f"base_url={url}", *overrides])


def run(server, root: Path, *overrides: str) -> tuple[bool, dict]:
    """Whether nothing failed, and the summary."""
    passed = run_conformance(settings(server.url, *overrides), "run", root)
    return passed, summary_of(root)


def summary_of(root: Path) -> dict:
    return orjson.loads((root / "conformance/run/summary.json").read_bytes())


def verdicts(summary: dict) -> dict[str, str]:
    return {name: row["verdict"] for name, row in summary["properties"].items()}


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_right_server_passes_every_property(serve, tmp_path: Path, noise: float):
    server = serve(SCRIPT, noise=noise, drafts=True, blocks=60, chunk=64, **OVERLAP)
    passed, summary = run(server, tmp_path, "live.chunk_tokens=64")
    assert verdicts(summary) == dict.fromkeys((NOISE, *LIVE), PASSED)
    assert passed
    assert (summary["block_size"], summary["reference"]) == (BLOCK, "salt")
    assert summary["calls"] == len(server.received())
    properties = summary["properties"]
    assert (properties[NOISE]["measured"] > 0) == (noise > 0)
    limits = {row["limit"] for name, row in properties.items() if name not in (NOISE, "salt_isolation")}
    assert limits == {max(conformance_live.LEAST_LIMIT, conformance_live.MARGIN * properties[NOISE]["measured"])}


def test_a_server_that_stores_no_answers_has_no_turns(serve, tmp_path: Path):
    server = serve(SCRIPT, decoded=False)
    passed, summary = run(server, tmp_path, "properties=[full_hit,turns]", "live.largest_prompt=17")
    assert passed
    assert verdicts(summary) == {NOISE: PASSED, "full_hit": PASSED, "turns": ABSENT}
    assert "no turn reused tokens" in summary["properties"]["turns"]["what"]


class Caching(EmbeddedServer):
    """The server of these tests, as one that a study starts; its arguments are faults."""

    environment, version, health_path = "none", "1", "/v1/models"

    def python(self) -> Path:
        return Path(sys.executable)

    def command(self, launch: Launch) -> list[str]:
        faults = dict(word.split("=") for word in launch.study.server.arguments)
        return ["python", "-I", str(FOLDER / SCRIPT), json.dumps(faults | {"port": launch.port})]


@pytest.fixture
def caching() -> Iterator[None]:
    """The server among those that a study can start; other tests of this process list those that we ship."""
    SERVERS.register("caching")(Caching)
    yield
    SERVERS.forget(file_of(Caching))


@pytest.mark.usefixtures("caching")
@pytest.mark.parametrize("fault", [None, "shifted"])
def test_a_server_is_started_and_tested(fault: str | None, tmp_path: Path):
    given = ["server.engine=caching", "properties=[salt_isolation,prefix_boundaries]"]
    given += [f"server.arguments=['fault={fault}']"] if fault else []
    settings = compose("conformance", [*SMALL, *given])
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)) if fault else nullcontext():
        assert run_conformance(settings, "run", tmp_path) == (
            fault is None
        )  # the command line leaves Hydra initialized
    summary = summary_of(tmp_path)
    found = {NOISE: PASSED, "salt_isolation": PASSED, "prefix_boundaries": FAILED if fault else PASSED}
    assert verdicts(summary) == found
    assert summary["started"] == {"engine": "caching", "version": "1"}
    assert (tmp_path / "conformance/run/server/server.log").is_file()
    with pytest.raises(OSError, match="refused"):
        urlopen(summary["server"]["base_url"], timeout=30)


FAULTS = {
    "stale_block": ("after_eviction", {"blocks": 60}),
    "early_state": ("prefix_boundaries", {}),
    "shifted": ("prefix_boundaries", {}),
    "whole_prompt": ("full_hit", {}),
    "decoded": ("turns", {}),
    "chunk_position": ("chunked", {"chunk": 64}),
    "resumed": ("preemption", {"blocks": 40, **OVERLAP}),
    "unverified": ("drafts", {"drafts": True}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_with_a_small_prompt(serve, tmp_path: Path, fault: str):
    name, options = FAULTS[fault]
    server = serve(SCRIPT, fault=fault, **options)
    passed, summary = run(server, tmp_path, f"properties=[{name}]", "live.chunk_tokens=64")
    assert not passed
    assert summary["properties"][name]["verdict"] == FAILED
    example = summary["properties"][name]["example"]
    stored = orjson.loads((tmp_path / "conformance/run" / example["file"]).read_bytes())
    assert len(stored["prompt"]) == example["prompt_tokens"]
    assert any(body["prompt"] == stored["prompt"] for bodies in stored["calls"] for body in bodies)
    assert example["difference"] > stored["limit"]
    if name in ("prefix_boundaries", "full_hit"):  # whose smallest prompts have one block and at most two tokens
        assert example["prompt_tokens"] <= BLOCK + 2
        assert example["cached_tokens"] >= BLOCK - 1


@pytest.mark.parametrize(
    ("fault", "name", "options"),
    [
        ("whole_prompt", "prefix_boundaries", {}),
        ("decoded", "prefix_boundaries", {}),
        ("shifted", "drafts", {"drafts": True}),
        ("resumed", "after_eviction", {"blocks": 60}),
    ],
)
def test_a_property_without_the_fault_passes(serve, tmp_path: Path, fault: str, name: str, options: dict):
    _, summary = run(serve(SCRIPT, fault=fault, **options), tmp_path, f"properties=[{name}]")
    assert summary["properties"][name]["verdict"] == PASSED


def test_blocks_that_are_shared_too_early_fail_siblings(serve, tmp_path: Path):
    """The server computes siblings only when all have arrived, so that they always overlap."""
    _, before = run(serve(SCRIPT, chunk=BLOCK), tmp_path, "properties=[chunked]")  # not applicable: no calls of its own
    server = serve(SCRIPT, chunk=BLOCK, fault="published_early", gate=[before["calls"], 4, 0])
    _, summary = run(server, tmp_path, "properties=[siblings]", "live.shrink=0")
    assert verdicts(summary) == {NOISE: PASSED, "siblings": FAILED}


def test_salts_that_the_server_ignores_fail(serve, tmp_path: Path):
    passed, summary = run(serve(SCRIPT, salts=False), tmp_path)
    by_property = verdicts(summary)
    assert not passed
    assert by_property.pop("salt_isolation") == FAILED
    assert set(by_property.values()) == {ABSENT}
    assert "expected server.reset_path" in summary["properties"][NOISE]["what"]


@pytest.mark.parametrize("reference", ["auto", "reset"])
def test_a_reset_makes_answers_uncached(serve, tmp_path: Path, reference: str):
    server = serve(SCRIPT, salts=False, fault="early_state")
    overrides = ["server.reset_path=/reset", f"live.reference={reference}"]
    _, summary = run(server, tmp_path, *overrides, "properties=[prefix_boundaries,full_hit,salt_isolation]")
    assert summary["reference"] == "reset"
    assert verdicts(summary)["prefix_boundaries"] == FAILED
    assert verdicts(summary)[NOISE] == PASSED
    assert verdicts(summary)["salt_isolation"] == (ABSENT if reference == "reset" else FAILED)


def test_without_cached_tokens_nothing_passes(serve, tmp_path: Path):
    passed, summary = run(serve(SCRIPT, cached=False), tmp_path)
    assert set(verdicts(summary).values()) == {ABSENT}
    assert passed


def test_effects_that_cannot_be_observed_are_not_applicable(serve, tmp_path: Path):
    names = ["after_eviction", "preemption", "drafts", "turns", "chunked"]
    server = serve(SCRIPT, metrics=False, ids=False)
    _, summary = run(server, tmp_path, f"properties=[{','.join(names)}]", "live.drafts=true")
    assert verdicts(summary) == {NOISE: PASSED} | dict.fromkeys(names, ABSENT)


def test_more_noise_than_rounding_fails(serve, tmp_path: Path):
    _, summary = run(serve(SCRIPT, noise=0.5), tmp_path, "properties=[full_hit]", "live.rounding=0.05")
    assert summary["properties"][NOISE]["verdict"] == FAILED
    assert summary["properties"]["full_hit"]["limit"] == 0.05


def test_finished_properties_of_a_server_that_ends_are_written(serve, tmp_path: Path):
    with pytest.raises(ServerGoneError, match="expected answers until the end of the test: no connection"):
        run(serve(SCRIPT, dies_after=50), tmp_path, "live.block_size=8")
    summary = summary_of(tmp_path)
    by_property = verdicts(summary)
    assert (by_property[NOISE], by_property["salt_isolation"]) == (PASSED, PASSED)
    assert list(by_property) == [NOISE, *LIVE]
    assert by_property["drafts"] == UNTESTED
    assert "until the end" in summary["interrupted"]


def test_an_interrupt_names_the_command_that_tests_the_rest(spanlab, serve, tmp_path: Path, monkeypatch):
    async def interrupted(subject):
        raise KeyboardInterrupt

    monkeypatch.setitem(LIVE._factories, "prefix_boundaries", interrupted)
    server = serve(SCRIPT)
    given = [*SMALL, f"base_url={server.url}", f"output.root={tmp_path}", "output.run=run"]
    done = spanlab("-cn", "conformance", *given, "properties=[full_hit,salt_isolation,prefix_boundaries]")
    rest = "properties=[prefix_boundaries,full_hit]"
    folder = tmp_path / "conformance/run"
    assert (done.code, done.err.splitlines()[-1]) == (
        130,
        f"spanlab: interrupted; what was finished is kept; {folder} has the finished properties: the same command with "
        f"{rest} tests the others",
    )
    untested = dict.fromkeys(("prefix_boundaries", "full_hit"), UNTESTED)
    assert verdicts(summary_of(tmp_path)) == {NOISE: PASSED, "salt_isolation": PASSED} | untested
    monkeypatch.undo()
    assert spanlab("-cn", "conformance", *given, rest).code == 0
    assert verdicts(summary_of(tmp_path)) == {NOISE: PASSED, "prefix_boundaries": PASSED, "full_hit": PASSED}


def test_an_interrupt_before_the_first_property_says_that_nothing_is_kept(spanlab, serve, tmp_path: Path, monkeypatch):
    async def interrupted(subject):
        raise KeyboardInterrupt

    monkeypatch.setattr(conformance_live, "noise", interrupted)
    done = spanlab("-cn", "conformance", *SMALL, f"base_url={serve(SCRIPT).url}", f"output.root={tmp_path}")
    assert (done.code, done.err.splitlines()[-1]) == (130, "spanlab: interrupted: the same command starts again")


def test_refused_requests_name_the_reason(serve, tmp_path: Path):
    _, summary = run(serve(SCRIPT, blocks=30), tmp_path, "live.largest_prompt=150", "properties=[turns]", "prompts=2")
    assert verdicts(summary)["turns"] == PASSED
    with (
        serving(SCRIPT, blocks=10) as server,
        pytest.raises(ValueError, match="HTTP 400: too long or too large for me"),
    ):
        run(server, tmp_path)


def test_answers_are_compared_up_to_the_first_other_token():
    same = Choice("a", {"a": -0.1, "b": -3.0})
    near = Choice("b", {"a": -0.7, "b": -0.6})
    tied = Choice("a", {"a": -0.6, "b": -0.7})
    assert difference([same, near, same], [same, near, near]).fork == 2
    tie = difference([same, near, near], [same, tied, same])
    assert (tie.fork, tie.tokens, tie.value) == (1, ("b", "a"), pytest.approx(0.1))
    assert tie.gaps == pytest.approx((0.1, 0.1))
    wrong = difference([Choice("b", {"a": -0.1, "b": -3.0})], [same])  # equal distributions, another choice
    assert wrong.value == pytest.approx(1.45)
    disjoint = difference([Choice("a", {"a": -0.1, "b": -3.0})], [Choice("c", {"c": -0.1, "d": -4.0})])
    assert disjoint.value == pytest.approx(3.9)
    ended = difference([same], [same, near])
    assert (ended.fork, ended.tokens) == (1, ("", "b"))


def test_narrow_logits_show_their_steps():
    coarse = [Choice("a", {"a": -0.3, "b": -0.425, "c": -0.8 - 1e-7, "d": -1.55})] * 6
    assert logit_step([coarse]) == pytest.approx(0.125)
    assert logit_step([coarse[:2]]) == 0  # too few to tell
    assert logit_step([[*coarse, Choice("a", {"a": -0.3, "b": -0.49})]]) == 0
    assert logit_step([]) == 0


@pytest.mark.parametrize("rounded", [False, True])
def test_the_limit_has_room_for_steps_of_logits(serve, tmp_path: Path, rounded: bool):
    server = serve(SCRIPT, step=0.0625 if rounded else None)
    _, summary = run(server, tmp_path, "properties=[full_hit]")
    assert summary["properties"]["full_hit"]["limit"] == pytest.approx(0.125 if rounded else 0.001)
    assert ("steps of 0.0625" in summary["properties"][NOISE]["what"]) == rounded


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["properties=[copy_on_write]"], "properties=copy_on_write: expected one of salt_isolation"),
        (["live.reference=reset"], "live.reference=reset with server.reset_path=null: expected the path"),
        (["server.prompts=text", "server.tokenizer=x"], "server.prompts=text with -cn conformance: expected tokens"),
        (["base_url=null", "server.engine=vlm_cpu"], "server.engine=vlm_cpu: expected one of"),
        (["server.engine=vllm_cpu"], "base_url=http://127.0.0.1:1 with server.engine=vllm_cpu: expected server"),
        (["live.largest_prompt=7"], "live.largest_prompt=7: expected more than output_tokens=6"),
        (["live.concurrency=1"], "live.concurrency=1: expected a whole number from 2"),
        (["base_url=ftp://x"], "base_url=ftp://x: expected http://HOST"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(overrides: list[str], message: str):
    with pytest.raises(Exception, match=message):
        settings("http://127.0.0.1:1", *overrides)


def test_settings_of_servers_without_an_address_are_refused():
    with pytest.raises(Exception, match="live is set without base_url"):
        compose("conformance", ["live.block_size=16"])
