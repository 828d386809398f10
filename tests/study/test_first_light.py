"""The entry `first_light`: stages run in order, failures are named, finished stages are kept, and a folder remains."""

import json
from pathlib import Path

import pytest

from spanlab.cli import compose
from spanlab.compiled import HOME
from spanlab.study.first_light import FirstLight, Stage, run_first_light

ON_HUB = "model=HuggingFaceTB/SmolLM2-1.7B-Instruct"  # composed with a packaged model instead: there is no network
WRITES = (
    "from pathlib import Path; folder = Path(r'{out}'); (folder / 'found.json').write_text(str(folder)); print(folder)"
)


def python(code: str, minutes: float = 1.0) -> Stage:
    return Stage(["python", "-c", code], minutes, ["*.json"])


def settings_of(tmp_path: Path, stages: dict[str, Stage], **more: object) -> FirstLight:
    settings = FirstLight(stages, engine_device="cpu", name="mine", cards=str(tmp_path / "cards"), **more)
    settings.output.root, settings.output.if_exists = str(tmp_path / "out"), "resume"
    return settings


def statuses(tmp_path: Path) -> dict[str, str]:
    card = json.loads((tmp_path / "cards" / "mine" / "card.json").read_bytes())
    return {name: stage["status"] for name, stage in card["stages"].items()}


def test_a_failed_stage_is_named_and_the_others_run_on(tmp_path: Path):
    stages = {"first": python(WRITES), "broken": python("raise SystemExit(3)"), "last": python(WRITES)}
    assert not run_first_light(settings_of(tmp_path, stages), HOME)
    assert statuses(tmp_path) == {"first": "done", "broken": "failed: exit code 3", "last": "done"}
    page = (tmp_path / "cards" / "mine" / "README.md").read_text()
    assert "failed: exit code 3" in page and page.index("`first`") < page.index("`broken`") < page.index("`last`")


def test_a_stage_that_takes_too_long_is_ended(tmp_path: Path):
    stages = {"endless": python("import time; time.sleep(600)", minutes=0.01), "next": python(WRITES)}
    assert not run_first_light(settings_of(tmp_path, stages), HOME)
    assert statuses(tmp_path) == {"endless": "failed: took longer than 0.0 minutes", "next": "done"}


def test_what_would_begin_too_late_is_left_out(tmp_path: Path):
    stages = {"long": python("import time; time.sleep(600)"), "late": python(WRITES)}
    assert not run_first_light(settings_of(tmp_path, stages, minutes=0.01), HOME)
    assert statuses(tmp_path)["late"] == "left out: no time"


def test_only_what_is_not_done_runs_again(tmp_path: Path):
    flag = tmp_path / "flag"
    once = f"from pathlib import Path; Path(r'{flag}').touch(exist_ok=False)"
    waits = f"from pathlib import Path; raise SystemExit(not Path(r'{flag}.more').exists())"
    stages = {"once": python(once), "waits": python(waits)}
    assert not run_first_light(settings_of(tmp_path, stages), HOME)
    Path(f"{flag}.more").touch()
    assert run_first_light(settings_of(tmp_path, stages), HOME)  # `once` would fail if it ran twice
    assert not run_first_light(settings_of(tmp_path, stages | {"once": python(once + " ")}), HOME)  # another command


def test_what_is_left_names_no_place_of_this_machine(tmp_path: Path):
    assert run_first_light(settings_of(tmp_path, {"first": python(WRITES)}), HOME)
    card = tmp_path / "cards" / "mine"
    assert (card / "first" / "found.json").read_text() == "{out}"
    assert (card / "first" / "log.txt").read_text() == "{out}\n"
    assert not any(str(tmp_path) in path.read_text() for path in card.rglob("*") if path.is_file())


@pytest.mark.parametrize("chosen", [[], pytest.param(["stages=toy"], marks=pytest.mark.slow)], ids=["card", "toy"])
def test_every_stage_is_a_command_that_composes(chosen: list[str]):
    settings = compose("first_light", chosen)
    for stage in settings.stages.values():
        program, *arguments = (
            word.replace("{out}", "out").replace(ON_HUB, "model=smollm2-135m") for word in stage.command
        )
        if program == "spanlab":
            compose(arguments[1], arguments[2:])
        else:
            assert arguments[0] == "-m" or (HOME / arguments[0]).is_file()


def test_a_card_takes_an_hour_and_a_toy_has_its_stages():
    card, toy = (compose("first_light", typed) for typed in ([], ["stages=toy"]))
    assert sum(stage.minutes for stage in card.stages.values()) <= card.minutes == 60
    assert list(card.stages) == list(toy.stages)


def test_a_stage_that_is_not_there_is_refused():
    with pytest.raises(Exception, match="only=warm"):
        compose("first_light", ["only=[warm]"])


@pytest.mark.slow
def test_the_toy_runs_to_its_end(tmp_path: Path):
    more = [f"output.root={tmp_path / 'out'}", f"cards={tmp_path / 'cards'}", "name=mine"]
    assert run_first_light(compose("first_light", ["stages=toy", *more]), HOME)
    assert set(statuses(tmp_path).values()) == {"done"}
