"""Published results can be reproduced: commands compose, schemas are present, commits are clean, pages have marks."""

import json
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import probe_report
import publish
import pytest
import yaml
from headline import FIGURE_BYTES, LINES, schema_of
from publish import MARK, pages
from texts import TEXTS, texts_of

from spanlab.cli import compose
from spanlab.report.sweep import SweepRow
from spanlab.settings import Study
from spanlab.study.run import run_study

from ..support.prose import long_sentences

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
MANIFEST: dict[str, dict[str, Any]] = yaml.safe_load((FOLDER / "manifest.yaml").read_text())
PUBLISHED = [name for name in MANIFEST if (FOLDER / name / "headline.json").exists()]
#: Results that were published before the present schema. Publishing one of them again takes it off this list.
OUTDATED = {
    *("clean/quality_cpu_engine", "clean/quality_cpu_sim", "clean/system_prompts_cpu", "clean/narrativeqa_cpu"),
    *("fidelity/quality_fidelity", "fidelity/pic_fidelity", "checkpoint_bench/cpu"),
}


MEASURED = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.json"))
#: Measured from a tree with changes that were not committed.
DIRTY = {"kernels/results_cpu.json"}


def current(names: list[str], outdated: set[str]) -> list[Any]:
    """Names as parameters; an outdated result is expected to fail, and to be taken off its list when it does not."""
    mark = pytest.mark.xfail(strict=True, reason="to be measured and published again")
    return [pytest.param(name, marks=mark if name in outdated else ()) for name in names]


@cache
def composed(name: str, command: publish.Command) -> Any:
    """Settings of a command."""
    return publish.settings_of(name, command)


@pytest.mark.parametrize("name", MANIFEST)
def test_commands_compose_and_write_the_run(name: str):
    for command in map(publish.command_of, MANIFEST[name]["commands"]):
        settings = composed(name, command)
        folder = settings.folder if isinstance(settings, Study) else probe_report.FOLDER
        assert MANIFEST[name]["run"] == f"{settings.output.root}/{folder}/{settings.output.run or command.entry}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_composes_from_entry_and_overrides(name: str):
    result = publish.manifest(ROOT)[name]
    stored = publish.stored_command(result, ROOT)
    assert composed(name, stored) is not None
    assert stored == publish.command_of(result.commands[0])


@pytest.mark.parametrize("name", MANIFEST)
def test_every_result_has_a_place_on_a_page(name: str):
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *FOLDER.rglob("*.md")]
    texts = "".join(page.read_text() for page in pages)
    shown = [table for table in MANIFEST[name]["tables"] if table != "sweep"]  # for CSV alone
    if f"<!-- {name} -->" not in texts:
        assert [table for table in shown if f"<!-- {name}:{table} -->" not in texts] == []


@pytest.fixture(scope="module")
def present(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], dict[str, str]]:
    """Hashes of the keys that the present code writes of an arm and of a row."""

    @cache
    def hashes() -> dict[str, str]:
        toy = ("workload.documents=2", "workload.questions_per_document=2", "only=[none]", "output.figures=false")
        given = [*toy, "load.rates_rps=[]", "load.arms=[]", "seeds=[0]"]
        run = run_study(compose("smoke", given), "smoke", tmp_path_factory.mktemp("schema"))
        row = dict.fromkeys(field.name for field in fields(SweepRow))
        return schema_of(json.loads((run / "summary.json").read_text()) | {"rows": [row]})

    return hashes


@pytest.mark.parametrize("name", current(PUBLISHED, OUTDATED))
def test_what_is_published_has_the_present_schema(name: str, present):
    folder, entry = FOLDER / name, MANIFEST[name]
    found = json.loads((folder / "headline.json").read_text())
    assert {"commit", "clean", "date", "caveats", "versions", "machine", "seeds", "workload", "config"} <= set(found)
    assert found["config"], "settings of an older form"
    assert found["schema"].items() <= present().items()
    files = [f"{table}.csv" for table in (*entry["tables"], *entry.get("rows", ()))]
    files += [f"{figure}.png" for figure in entry["figures"]] + [Path(file).name for file in entry.get("files", ())]
    assert [file for file in files if not (folder / file).is_file()] == []


def test_published_files_are_small():
    headlines = list(FOLDER.rglob("headline.json"))
    assert len(headlines) == len(PUBLISHED)
    assert [path for path in headlines if len(path.read_text().splitlines()) > LINES] == []
    assert [path for path in FOLDER.rglob("*.png") if path.stat().st_size > FIGURE_BYTES] == []


@pytest.mark.parametrize(
    "name", current([str(path.relative_to(FOLDER)) for path in sorted(FOLDER.rglob("*.json"))], DIRTY)
)
def test_no_published_commit_is_dirty(name: str):
    found = json.loads((FOLDER / name).read_text())
    commits = [found[key] for key in ("commit", "commits") if isinstance(found, dict) and key in found]
    assert not isinstance(found, dict) or found.get("clean", True)
    assert "-dirty" not in str(commits)
    assert "unknown" not in str(commits)


def test_every_filled_mark_belongs_to_a_script():
    # filled by other scripts
    others = {
        "conformance_vllm_0_32",
        "conformance_vllm_0_33",
        "peers",
        "rendezvous",
        "simulators",
        "live_answers",
        "twin_live",
        "numbers",
        "profiles",
    }
    others |= {"table:cuda", "table:cpu"}
    marks = {mark for page in pages(ROOT) for mark in MARK.findall(page.read_text())}
    unknown = {mark for mark in marks - TEXTS.keys() - others if mark.partition(":")[0] not in MANIFEST}
    assert unknown == set()
    assert TEXTS.keys() <= marks


def test_generated_texts_are_current_and_short():
    """Pages hold what texts.py makes of the published data."""
    results = {source.rpartition("/")[0] for text in TEXTS.values() for source in text.sources}
    texts = texts_of(results, ROOT)
    assert texts.keys() == TEXTS.keys()
    for page in pages(ROOT):
        content = page.read_text()
        for mark in texts.keys() & set(MARK.findall(content)):
            assert f"<!-- {mark} -->\n{texts[mark]}<!-- /{mark} -->" in content
    assert {mark: long for mark, text in texts.items() if (long := long_sentences(text))} == {}
