"""The files of docs/extending.md, as plugins of studies."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from spanlab.cli import compose, main, registries
from spanlab.errors import sentence
from spanlab.registry import MOVED, forget
from spanlab.study.run import run_study

from ..support.script import docs_script

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
#: Entry and overrides of the command that the page gives for each file.
COMMANDS = {
    found[1]: (entry, shlex.split(command))
    for entry, command in re.findall(r"^bash runall.sh -cn (\w+) (.*)$", PAGE.replace("\\\n", " "), re.MULTILINE)
    if (found := re.search(r"plugins=\[(\w+\.py)\]", command))
}
LOG = re.search(r"^```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
TOY = (
    "seeds=[0]",
    "load.rates_rps=[]",
    "load.arms=[]",
    "output.figures=false",
    "tracking.kind=none",
    "executor.kind=here",
)
SMALL = ("workload.documents=2", "workload.questions_per_document=3")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with every file of the page and its log; later tests have no name of its plugins."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    (tmp_path / "requests.jsonl").write_text(LOG)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for file in tmp_path.glob("*.py"):
        forget(str(file))


def run(root: Path, *overrides: str, entry: str = "smoke") -> tuple[Path, dict]:
    """The folder and the summary of a small study."""
    folder = run_study(compose(entry, [*TOY, *overrides]), entry, root / "outputs", show=False)
    return folder, json.loads((folder / "summary.json").read_text())


def refused(*overrides: str) -> str:
    """The sentence about settings that do not compose."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 the sentence is the result
        compose("smoke", list(overrides))
    return str(error.value)


def run_command(name: str, root: Path) -> tuple[Path, dict]:
    """The study of the page's command for a file, at a small size."""
    entry, command = COMMANDS[name]
    small = () if "workload=plugin" in command or entry != "smoke" else SMALL
    return run(root, *small, *(word for word in command if not word.startswith("load.")), entry=entry)


def test_page_has_a_command_for_each_file():
    assert len(FILES) == 14
    assert COMMANDS.keys() == FILES.keys()


def test_page_names_the_key_of_each_registry():
    rows = re.findall(r"^\| an? [\w ]+ \| `\w+` \| `[\w.]+` \| `([\w.]+)`", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(registries())


#: A file of the page, the key that takes its name, and what tables say of it.
ADDED = [
    ("prompts_only.py", "arms.NAME.policy", "prompts_only", "mine"),
    ("two_turns.py", "workload.kind", "two_turns", "modelled: 20 groups of two prompts"),
    ("documents_log.py", "workload.log.format", "documents_log", "3 requests as documents_log, content ids"),
    ("bursts.py", "arrivals.kind", "bursts", "· bursts ·"),
    ("per_token.py", "timing.kind", "per_token", "simulated, per_token timing"),
    ("longest_prompt.py", "analyses", "longest_prompt", "Longest prompt"),
]


@pytest.mark.slow  # the next test adds all of them in one file
@pytest.mark.parametrize(("file", "key", "name", "told"), ADDED, ids=[name for _, _, name, _ in ADDED])
def test_one_file_adds_a_name_to_list_docs_and_tables(
    file: str, key: str, name: str, told: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr("sys.argv", ["spanlab", "--list", key, f"plugins=[{file}]"])
    main()
    assert f"\n  {name}" in capsys.readouterr().out
    folder, summary = run_command(file, here)
    assert summary["plugins"].keys() == {str(here / file)}
    assert f"`{name}" in docs_script("generate").page()  # the plugin is still loaded
    assert told in (folder / "tables.json").read_text()


def test_one_file_adds_a_name_of_each_kind(here: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    (here / "mine.py").write_text("\n".join(FILES[file] for file, *_ in ADDED))
    for _, key, name, _ in ADDED:
        monkeypatch.setattr("sys.argv", ["spanlab", "--list", key, "plugins=[mine.py]"])
        main()
        assert f"\n  {name}" in capsys.readouterr().out
    both = ("plugins=[mine.py]", "output.run=mine")
    chosen = (*both, "only=[mine,kv_only]", "+strategy@arms.mine=last", "arms.mine.policy=prompts_only")
    chosen += ("arrivals=as_given", "arrivals.kind=bursts", "arrivals.rate_rps=null", "timing.kind=per_token")
    chosen += ("workload=plugin", "workload.kind=two_turns", "+workload.options.groups=20", "workload.documents=null")
    chosen += ("workload.questions_per_document=null", "analyses=[summary,longest_prompt]")
    folders = [run(here, *chosen)[0], run(here, *both, "log=requests.jsonl", entry="explain")[0]]
    tables, page = "".join((folder / "tables.json").read_text() for folder in folders), docs_script("generate").page()
    for _, _, name, told in ADDED:
        assert f"`{name}" in page
        assert told in tables


def test_options_of_a_plugin_are_listed_with_their_bounds(here: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("sys.argv", ["spanlab", "--list", "arms.NAME.cost", "plugins=[pairs.py]"])
    main()
    declared = ("a number, zero or more", "price of a token without its pairs")
    assert f"\n    cost_options.base=1.0  {'; '.join(declared)}" in capsys.readouterr().out
    row = f"| `pairs` | `arms.NAME.cost_options.base` | {declared[0]} | `1.0` | {declared[1]} |"
    assert row in docs_script("generate").page()
    arm = ("plugins=[pairs.py]", "+strategy@arms.mine=planned", "arms.mine.cost=pairs")
    sentence = "arms.mine.cost_options.base=-1: expected zero or more"
    assert refused(*arm, "+arms.mine.cost_options.base=-1") == sentence


@pytest.mark.parametrize("name", [name for name in FILES if name not in {file for file, *_ in ADDED}])
def test_plugin_of_the_page_runs(name: str, here: Path):
    folder, summary = run_command(name, here)
    assert summary["plugins"].keys() == {str(here / name)}
    assert all((folder / "records" / f"{arm}.jsonl").stat().st_size for arm in summary.get("arms", ()))


def test_all_plugins_run_in_two_processes(here: Path):
    mine = ("+strategy@arms.mine=radix", "arms.mine.placement.kind=middle", "arms.mine.eviction=fewest_uses")
    mine += (
        "arms.mine.policy=prompts_only",
        "timing.kind=per_token",
        "arrivals=as_given",
        "arrivals.kind=bursts",
        "arrivals.rate_rps=null",
    )
    mine += (
        "workload=plugin",
        "workload.kind=two_turns",
        "workload.documents=null",
        "analyses=[summary,longest_prompt]",
    )
    every = f"plugins=[{','.join(FILES)}]"
    once = ("workload.questions_per_document=null", "output.figures=true", "only=[mine,kv_only]")
    folder, summary = run(here, every, *mine, *once, "executor=local", "workers=2")
    assert summary["longest_prompt"] == 700
    assert (folder / "figures" / "prompt_lengths.png").is_file()
    alone, _ = run(here, every, *mine, *once, "output.run=alone", "output.figures=false")
    for arm in ("mine", "kv_only"):
        assert (folder / "records" / f"{arm}.jsonl").read_bytes() == (alone / "records" / f"{arm}.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            "shore=0.5",
            "arms.mine.placement.options.shore: no such option of middle; expected one of share (did you mean share?)",
        ),
        ("share=half", "arms.mine.placement.options.share=half: expected a number"),
        ("share=true", "arms.mine.placement.options.share=True: expected a number"),
    ],
)
def test_wrong_options_are_refused(options: str, sentence: str, here: Path):
    arm = ("+strategy@arms.mine=radix", "arms.mine.placement.kind=middle", f"+arms.mine.placement.options.{options}")
    assert refused("plugins=[middle.py]", *arm) == sentence


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (FILES["middle.py"] + "1 / 0", "ZeroDivisionError: division by zero"),
        ("def broken(:", "SyntaxError: invalid syntax"),
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
    ],
)
def test_failing_plugin_is_named(code: str, words: str, here: Path):
    (here / "bad.py").write_text(code)
    assert refused("plugins=[bad.py]").startswith(f"plugins={here / 'bad.py'}: {words}")


@pytest.mark.parametrize("name", ["missing.py", "no_such_module"])
def test_missing_plugin_is_named(name: str, here: Path):
    assert re.match(rf"plugins=.*{name}: .*; expected a Python file, or a module", refused(f"plugins=[{name}]"))


def test_taken_name_names_both_files(here: Path):
    (here / "again.py").write_text(FILES["middle.py"].replace('"middle"', '"last"'))
    said = refused("plugins=[again.py]")
    assert "placement last: expected one file to register it, not both " in said
    assert f"core/placement/rules.py and {here / 'again.py'}" in said


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        ("[1.5]", "position 1.5 in request"),
        ("[0]", "position 0 in request"),
        ("[info.prompt + 1]", "expected whole numbers from 1 to"),
        ("[7, 7]", "expected each once"),
    ],
)
def test_impossible_positions_end_their_arm(positions: str, words: str, here: Path):
    (here / "odd.py").write_text(FILES["middle.py"].replace("(max(1, int(share * info.prompt)),)", positions))
    arm = ("plugins=[odd.py]", "+strategy@arms.mine=radix", "arms.mine.placement.kind=middle", "only=[mine,kv_only]")
    with pytest.raises(ValueError, match=r"arms.mine.placement.kind=middle: .*" + re.escape(words)):
        run(here, *SMALL, *arm)


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_moved_module_names_its_new_place(old: str, new: str, here: Path):
    (here / "old.py").write_text(f"import {old}\n")
    expected = f"plugins={here}/old.py: {old} has moved; expected an import from {new}"
    assert refused("plugins=[old.py]") == expected
    import_module(new)


def test_moved_module_is_named_beside_an_old_folder(here: Path, monkeypatch: pytest.MonkeyPatch):
    import spanlab

    (here / "earlier" / "models").mkdir(parents=True)
    monkeypatch.setattr(spanlab, "__path__", [*spanlab.__path__, str(here / "earlier")])
    (here / "old.py").write_text("from spanlab.models import find_spec\n")
    sentence = refused("plugins=[old.py]")
    sys.modules.pop("spanlab.models", None)  # the folder; a process that this one starts could not import it
    assert sentence.endswith("spanlab.models has moved; expected an import from spanlab.model_files")


def test_changed_plugin_is_not_resumed(here: Path):
    arm = ("plugins=[middle.py]", "+strategy@arms.mine=radix", "arms.mine.placement.kind=middle", "only=[mine]", *SMALL)
    run(here, *arm)
    run(here, *arm, "output.if_exists=resume")
    (here / "middle.py").write_text(FILES["middle.py"].replace("0.5", "0.75"))
    with pytest.raises(ValueError, match=r"has other settings \(plugins: .*middle.py \w+ there"):
        run(here, *arm, "output.if_exists=resume")


def test_module_is_a_plugin_that_stays(here: Path, monkeypatch: pytest.MonkeyPatch):
    (here / "module_of_mine.py").write_text(FILES["middle.py"].replace('"middle"', '"module_of_mine"'))
    monkeypatch.syspath_prepend(here)
    arm = ("+strategy@arms.mine=radix", "arms.mine.placement.kind=module_of_mine")
    assert compose("smoke", ["plugins=[module_of_mine]", *arm]).plugins == ["module_of_mine"]
    assert compose("smoke", ["plugins=[spanlab.core.eviction]", *arm]).arms["none"].eviction == "lru"


MINE = ("+strategy@arms.mine=radix", "arms.mine.placement.kind=middle", "only=[mine,kv_only]", *SMALL)
RULE = "return Rule(lambda info: (max(1, int(share * info.prompt)),))"


@pytest.mark.parametrize("executor", ["{kind: local, workers: 1}", "{kind: local, workers: 2}", "here"])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            "info.promt",
            r"AttributeError: 'PrefillInfo' object has no attribute 'promt'; expected one of .*mean prompt\?\)",
        ),
        ("1 // 0", r"ZeroDivisionError: .*"),
        ("exit(0)", r"it ended the program with 0; expected a return value, or an error"),
        ("exit('done')", r"it ended the program with 'done'; .*"),
    ],
)
def test_error_in_a_plugin_names_its_line(executor: str, wrong: str, words: str, here: Path):
    (here / "bad.py").write_text(FILES["middle.py"].replace("info.prompt", wrong))
    line = 1 + (here / "bad.py").read_text().splitlines().index(f"    {RULE.replace('info.prompt', wrong)}")
    with pytest.raises(ValueError, match=rf"^plugins={here}/bad.py:{line}: {words}; SPANLAB_TRACEBACK=1 shows"):
        run(here, "plugins=[bad.py]", f"executor={executor}", *MINE)


def test_user_error_of_a_plugin_gets_its_line(here: Path):
    (here / "bad.py").write_text(FILES["middle.py"].replace("info.prompt", "int('many')"))
    with pytest.raises(ValueError, match=r"^invalid literal for int\(\) with base 10: 'many'") as error:
        run(here, "plugins=[bad.py]", *MINE)
    assert re.fullmatch(rf"invalid literal .* 'many'; raised in {here}/bad.py:\d+", sentence(error.value))


def test_error_in_an_analysis_names_its_line(here: Path):
    name = next(name for name, code in FILES.items() if "ANALYSES.add" in code)
    code = re.sub(r"(def \w+\(finished\):\n)", r"\1    finished.folders\n", FILES[name])
    (here / "bad.py").write_text(code)
    analysis = re.search(r'Analysis\("(\w+)"', code)[1]
    with pytest.raises(ValueError, match=rf"^plugins={here}/bad.py:\d+: AttributeError: .*did you mean folder\?"):
        run(here, "plugins=[bad.py]", f"analyses=[summary,{analysis}]", "only=[none,kv_only]", *SMALL)


def test_check_of_a_plugins_analysis_refuses_a_study(here: Path):
    name = next(name for name, code in FILES.items() if "ANALYSES.add" in code)
    refusal = refused(f"plugins=[{name}]", "analyses=[summary,longest_prompt]", "only=[none]")
    assert refusal == "only=['none'] with analyses=longest_prompt: expected two arms or more"


def test_plugin_that_exits_while_it_is_loaded_is_named(here: Path):
    (here / "bad.py").write_text("raise SystemExit(0)")
    assert refused("plugins=[bad.py]") == f"plugins={here}/bad.py: SystemExit: 0; expected a file that can be run"


def test_option_without_a_type_is_named(here: Path):
    (here / "bad.py").write_text(FILES["middle.py"].replace("share: float = 0.5", "share=0.5"))
    assert refused("plugins=[bad.py]", *MINE[:2]) == (
        f"{here}/bad.py: middle(share=0.5): placement middle: expected a type, such as share: int = 3"
    )
