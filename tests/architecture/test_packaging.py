"""Pinned, declared and packaged files agree, and no file contains paths of the machine that made it."""

import hashlib
import re
import subprocess
import tomllib
from importlib.metadata import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from spanlab.model_files import EMBEDDER, MODELS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = sorted((ROOT / "requirements").glob("*.txt"))
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
PLACES = re.compile(rb"(?<![\w.})])/(?:work|root|home|Users)/\w")
# The address of a package index: given to an option or variable, or recognised by its path.
INDEXES = re.compile(
    rb"(?i)(?:index|find.?links)\W*(?:urls?)?[\s=:\"']*https?://|https?://[^\s\"'()<>]+/(?:simple|whl)\b"
)
NOT_SHIPPED = {"outputs", "wandb", "multirun", "__pycache__", "uv.lock"}


def read_pins(name: str) -> dict[str, list[Requirement]]:
    """Project name to its pins; there are several where the Python version decides."""
    pins: dict[str, list[Requirement]] = {}
    for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
        if line and not line.startswith((" ", "#")):
            pin = Requirement(line.removesuffix("\\"))
            pins.setdefault(canonicalize_name(pin.name), []).append(pin)
    return pins


def satisfied(wanted: list[str], pins: dict[str, list[Requirement]]) -> bool:
    for text in wanted:
        requirement = Requirement(text)
        for pin in pins.get(canonicalize_name(requirement.name), [Requirement("missing==0")]):
            (exact,) = pin.specifier
            assert requirement.specifier.contains(exact.version), f"{text} is pinned as {pin}"
    return True


def shipped_files() -> list[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if (ROOT / ".git").exists():
        listed = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
        return [path for name in listed if name and (path := ROOT / name).is_file()]
    return [path for path in ROOT.rglob("*") if path.is_file() and is_shipped(path.relative_to(ROOT))]


def is_shipped(path: Path) -> bool:
    hidden = path.parts[0].startswith(".") and (len(path.parts) > 1 and path.parts[0] != ".ci")
    return not hidden and NOT_SHIPPED.isdisjoint(path.parts)


def test_torch_is_pinned_apart_because_its_build_depends_on_the_machine():
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+\n", (ROOT / "requirements" / "torch.txt").read_text())
    assert not any(
        name in read_pins(wider) for wider in ("answers", "engine", "dev") for name in ("torch", "nvidia-cublas")
    )


@pytest.mark.parametrize("file", [path for path in PINS if path.name != "torch.txt"], ids=lambda path: path.name)
def test_pins_name_no_address_and_are_all_hashed(file):
    text = file.read_text()
    assert "://" not in text
    assert "--index-url" not in text
    blocks = re.findall(r"^[\w.\[\]-]+==\S+.*(?:\n[ ]{4}--hash=sha256:[0-9a-f]{64}.*)+", text, re.MULTILINE)
    starts = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    assert len(blocks) == len(starts) > 0


def test_pins_satisfy_what_the_project_asks_for():
    groups, extras = PROJECT["dependency-groups"], PROJECT["project"]["optional-dependencies"]
    sim = PROJECT["project"]["dependencies"]
    assert satisfied(sim, read_pins("sim"))
    assert satisfied(sim + extras["cluster"], read_pins("cluster"))
    engine = [need for need in extras["engine"] if not need.startswith("torch")] + groups["torch-needs"]
    assert satisfied(sim + extras["cluster"] + engine, read_pins("engine"))
    assert satisfied(sim + extras["cluster"] + engine + extras["answers"], read_pins("answers"))
    assert satisfied(sim + engine + groups["dev"], read_pins("dev"))
    assert satisfied(PROJECT["build-system"]["requires"] + groups["build"], read_pins("build"))
    assert satisfied(groups["uv"], read_pins("uv"))
    assert satisfied(sim + groups["compile"], read_pins("compile"))


@pytest.mark.parametrize("wider", ["answers", "cluster", "compile", "engine", "dev"])
def test_wider_environments_repeat_the_simulators_pins(wider):
    pins = read_pins(wider)
    assert {name: pins.get(name) for name in read_pins("sim")} == read_pins("sim")


def test_models_are_pinned_for_answers_alone():
    packages = {model.distribution: model.version for model in (*MODELS.values(), EMBEDDER)}
    for name, version in packages.items():
        assert [str(pin.specifier) for pin in read_pins("answers")[name]] == [f"=={version}"]
        assert not any(name in read_pins(other) for other in ("sim", "cluster", "engine", "dev"))


def test_the_simulator_needs_no_accelerator_stack():
    heavy = re.compile(r"torch.*|triton.*|transformers|nvidia-.*|jax.*")
    assert [name for name in read_pins("sim") if heavy.fullmatch(name)] == []


@pytest.mark.parametrize(
    "line",
    ["--index-url {}", "--extra-index-url={}", 'UV_INDEX="{}"', "find-links: {}", "see {}/simple/x", "{}/whl/cpu"],
)
def test_index_addresses_are_recognised_on_any_host(line):
    assert INDEXES.search(line.format("https" + "://host.example").encode())
    assert not INDEXES.search(line.format("a name").encode())


def test_no_shipped_file_knows_a_machine_or_a_registry():
    guilty = []
    for path in shipped_files():
        found = PLACES.search(content := path.read_bytes()) or INDEXES.search(content)
        guilty += [f"{path.relative_to(ROOT)}: {found[0]!r}"] if found else []
    assert guilty == []


def test_the_licence_is_apache_2_in_text_and_metadata():
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2
    installed = metadata("spanlab")
    assert installed["License-Expression"] == PROJECT["project"]["license"] == "Apache-2.0"
    assert installed.get_all("License-File") == ["LICENSE"]
