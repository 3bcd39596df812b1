"""What the files about the package say of each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line
)


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_citation_has_the_version_of_the_package() -> None:
    version = PROJECT["project"]["version"]
    assert re.search(rf"^version: {re.escape(version)}$", text("CITATION.cff"), re.MULTILINE)
    assert re.search(rf"^## (Unreleased|{re.escape(version)}\b)", text("CHANGELOG.md"), re.MULTILINE)


def test_everything_the_sdist_is_to_hold_is_there() -> None:
    listed = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert [name for name in listed if not (ROOT / name).exists()] == []


def test_every_requirement_is_pinned() -> None:
    project = PROJECT["project"]
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += extra
    names = {re.split(r"[\[<>=!~ ]", requirement)[0] for requirement in wanted} - {"functional_amp"}
    normal = {re.sub(r"[-_.]+", "-", pin).lower() for pin in PINS}
    assert {name for name in names if re.sub(r"[-_.]+", "-", name).lower() not in normal} == set()


def test_the_floor_of_torch_is_stated_where_people_look() -> None:
    (floor,) = [re.fullmatch(r"torch>=(\S+)", line) for line in PROJECT["project"]["dependencies"] if "torch" in line]
    assert floor is not None
    assert f"torch {floor[1]}" in text("README.md") and f"torch {floor[1]}" in text("CONTRIBUTING.md")
