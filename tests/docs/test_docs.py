"""The pages are true of the code: commands compose, examples run, links and figures exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from matplotlib.image import imread

from spanlab.cli import compose, described, entries
from spanlab.core.releases import RELEASES, WORDS
from spanlab.core.repair import MapRules, map_bytes
from spanlab.model_files import find_spec
from spanlab.report.style import write_figure

from ..conf.conftest import spanlab as _spanlab
from ..support.prose import FENCE, long_sentences, sentences
from ..support.script import ROOT, docs_script

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
spanlab = _spanlab  # a fixture
README_LINES, DRAWING_LINE = 130, 15
GROUPS = ["Start", "Run", "Methods", "Your server", "Extend", "Reference"]


def fenced(page: Path, language: str) -> list[str]:
    """Code blocks of a language."""
    return [code for kind, code in FENCE.findall(page.read_text()) if kind == language]


def commands() -> list[str]:
    """Every command with an entry, once: from code blocks and from inline code.

    Those of published results are composed by tests/benchmarks/test_published.py.
    """
    found: dict[str, None] = {}
    for page in PAGES:
        text = page.read_text()
        lines = [line for code in fenced(page, "bash") for line in code.replace("\\\n", " ").splitlines()]
        lines += re.findall(r"^ {4}(bash runall\.sh .*)$", text.replace("\\\n", " "), re.MULTILINE)
        lines += re.findall(r"`(bash runall\.sh [^`]*)`", FENCE.sub("", text))
        found |= dict.fromkeys(line for line in lines if "runall.sh" in line)
    # plugins are files of the page itself: test_extending runs those commands
    skipped = ("ENTRY", "plugins=", "FOLDER")
    written = [command for command in found if not any(word in command for word in skipped)]
    manifest = yaml.safe_load((ROOT / "benchmarks" / "manifest.yaml").read_text())
    kept = [command for result in manifest.values() for command in result["commands"] if "runall.sh" in command]
    published = set(map(frozenset, map(arguments, kept)))
    once = {frozenset(arguments(command)): command for command in written}
    return [command for words, command in once.items() if words not in published]


def arguments(command: str) -> list[str]:
    """The arguments that a shell passes to the script."""
    words = shlex.split(command, comments=True)
    return words[words.index("runall.sh") + 1 :]


def test_sentences_end_at_stops_and_items():
    page = "# Head\n\nOne *two. Three*\n[four](a.b c).\n- Five 5.5 %?\n- Six\n\n| a. b |\n```\ncode. code\n```\n"
    assert sentences(page) == ["# Head", "One *two.", "Three* four.", "- Five 5.5 %?", "- Six"]


def test_readme_is_short():
    page = (ROOT / "README.md").read_text()
    assert len(page.splitlines()) <= README_LINES
    assert long_sentences(page) == []


def test_readme_shows_the_drawing_of_concepts_first():
    drawing = fenced(ROOT / "docs" / "concepts.md", "")[0]
    page = (ROOT / "README.md").read_text()
    assert drawing in page
    assert page[: page.index(drawing)].count("\n") < DRAWING_LINE


def test_first_command_prints_what_readme_shows(tmp_path: Path, spanlab):
    done = spanlab("-cn", "smoke", "output.figures=false", f"output.root={tmp_path}")
    assert done.code == 0, done.err
    printed = done.out
    lines = {line.split()[0]: line for line in printed.splitlines() if line.strip()}
    example = fenced(ROOT / "README.md", "")[0].splitlines()  # the drawing is a block of text
    assert example[-1].rstrip("…") in printed
    shown = [line.split(maxsplit=1) for line in example if "%" in line and " ms" in line]
    assert len(shown) == 5
    for arm, numbers in shown:
        for number in re.split(r"\s{2,}", numbers):
            assert number in lines[arm]


def test_pages_hold_commands():
    assert len(commands()) > 30


@pytest.mark.parametrize("command", commands())
def test_command_composes(command: str):
    words = arguments(command)
    entry = words[words.index("-cn") + 1]
    assert entry in entries()
    overrides = [word for word in words if "=" in word]
    if overrides and "-m" not in words:  # tests/conf composes entries alone; with -m, values are lists
        assert compose(entry, [word for word in overrides if not word.startswith("hydra/")])


def test_every_entry_is_described():
    text = "".join((ROOT / "docs" / name).read_text() for name in ("simulator.md", "engine.md"))
    assert {entry for entry in entries() if f"`{entry}`" not in text} == set()


def test_every_page_is_in_one_group_of_index_and_site():
    index = (ROOT / "docs" / "index.md").read_text()
    listed = {
        head.strip(): [
            (ROOT / "docs" / page).resolve() for page in re.findall(r"^\| \[[^\]]*\]\(([^)]*)\)", body, re.M)
        ]
        for head, body in re.findall(r"^## (.*)$((?:\n(?!## ).*)*)", index, re.MULTILINE)
    }
    assert list(listed) == GROUPS
    pages = sorted(page for group in listed.values() for page in group if page.parent.name == "docs")
    assert pages == sorted(set(ROOT.glob("docs/*.md")) - {ROOT / "docs" / "index.md"})
    nav = yaml.safe_load((ROOT / "docs" / "mkdocs.yml").read_text().replace("!ENV", ""))["nav"]
    assert [name for group in nav for name in group] == [*GROUPS, "Published numbers"]
    for group in nav[:-1]:
        for name, titled in group.items():
            shown = {ROOT / path for entry in titled for path in entry.values()}
            assert shown - {ROOT / "docs" / "index.md"} == {
                page for page in listed[name] if "benchmarks" not in page.parts
            }


def test_every_strategy_is_described():
    text = (ROOT / "docs" / "methods.md").read_text()
    assert {name for name in described("strategy") if f"`{name}`" not in text} == set()


def test_configuration_page_is_current():
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == docs_script("generate").page(), "run: python docs/generate.py > docs/configuration.md"


def test_releases_page_names_the_rules_that_differ():
    page = (ROOT / "docs" / "releases.md").read_text()
    differ = [rule for rule in WORDS if len({getattr(release, rule) for release in RELEASES.values()}) > 1]
    assert [rule for rule in WORDS if f"| `{rule}`: {WORDS[rule]} |" in page] == differ
    script = docs_script("releases")
    assert page.startswith(script.HEAD)
    assert page.endswith(script.TAIL)


@pytest.mark.slow  # decides all stored cases again, once per rule
def test_releases_page_is_current(capsys):
    docs_script("releases").main()
    page = (ROOT / "docs" / "releases.md").read_text()
    assert page == capsys.readouterr().out, "run: python docs/releases.py > docs/releases.md"


def test_key_without_meaning_is_refused():
    generate = docs_script("generate")
    with pytest.raises(ValueError, match=r"Study\.nothing: expected a line"):
        generate.explained(generate.Study, generate.meanings_of(generate.Study), "nothing")


def test_site_builds_in_strict_mode(tmp_path: Path):
    command = [sys.executable, ROOT / "docs" / "build.py", tmp_path]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in tmp_path.glob("site/**/*.html")}
    assert {"index.html", "docs/concepts.html", "benchmarks/quality_sweep/index.html"} <= pages
    assert "<table>" in (tmp_path / "site" / "index.html").read_text()


FORMS = (
    MapRules(),
    MapRules(dtype="bfloat16"),
    MapRules("low_rank", 4, "bfloat16"),
    MapRules("last", dtype="bfloat16"),
)


def test_weights_of_maps_follow_from_the_models():
    page = (ROOT / "docs" / "methods.md").read_text()
    rows = re.findall(r"^\| `(qwen3[\w.-]+)` \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 4
    for name, told in rows:
        model = find_spec(name)
        kv = model.kv_bytes_per_token
        sizes = [model.state_bytes, *(map_bytes(form, model) for form in FORMS)]
        assert told.split(" | ") == [f"{kv:,} B", *(f"{size / kv:,.0f}" for size in sizes)]


def test_figure_of_map_weights_is_up_to_date(tmp_path: Path):
    drawn = docs_script("map_weight")
    write_figure(drawn.draw, tmp_path / "map_weight")
    made, shown = imread(tmp_path / "map_weight.png"), imread(drawn.STEM.with_suffix(".png"))
    assert made.shape == shown.shape
    assert (made == shown).all()
