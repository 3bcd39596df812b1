"""The house: which way imports run, how long files are, and where the mode of execution is asked for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "functional_amp"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
WINGS = ("debug", "testing")
"""Tools beside the step: they may look at anything."""

FLOORS = [
    ("checks", "dtypes", "innermost", "mode", "registry", "torch_private", "traced_tree"),
    ("tree",),
    ("selection",),
    ("values",),
    ("engine",),
    ("stages", "optim", "precision", "ranks"),
    ("initial", "step"),
]
"""Who may import whom: a file imports from its own floor, and from those before it. All others are above."""


def room(file: str) -> str:
    """The first folder of a file, or its name."""
    return file.split("/")[0].removesuffix(".py")


def floor(name: str) -> int:
    return next((height for height, rooms in enumerate(FLOORS) if name in rooms), len(FLOORS))


def imports(file: str, *, everywhere: bool = True) -> Iterator[str]:
    """The modules of the package that a file imports (at its top, or everywhere), without the package's name."""
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            names = [node.module or ""]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.split(".")[0] == "functional_amp":
                yield name.partition(".")[2]


@pytest.mark.parametrize("file", [file for file in FILES if file != "__init__.py" and room(file) not in WINGS])
def test_imports_run_one_way(file):
    wrong = [name for name in imports(file) if floor(name.split(".")[0]) > floor(room(file)) or not name]
    assert not wrong


def test_no_file_imports_itself_by_way_of_others():
    modules = {file: file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in FILES}
    reached = {
        modules[file]: set(imports(file, everywhere=False)) - {modules[file]} for file in FILES if file != "__init__.py"
    }
    for _ in reached:
        reached = {name: seen.union(*(reached.get(other, set()) for other in seen)) for name, seen in reached.items()}
    assert [name for name, seen in reached.items() if name in seen] == []


def test_the_step_is_the_only_room_that_knows_them_all():
    everything = {"engine", "optim", "stages", "values"}
    knowing = [f for f in FILES if everything <= {name.split(".")[0] for name in imports(f)}]
    assert [file for file in knowing if room(file) not in (*WINGS, "__init__")] == ["step.py"]


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_below_300_lines(file):
    assert len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) < 300


QUESTIONS = re.compile(
    r"\b(?:in_graph|transformed|mode|is_compiling|is_inference_mode_enabled|functorch_active)\(\)", re.ASCII
)
"""A graph, a transform, an inference mode? By source text."""


def questions(file: str) -> int:
    source = (PACKAGE / file).read_text(encoding="utf-8")
    return len([match for match in QUESTIONS.finditer(source) if not source[: match.start()].endswith("def ")])


def test_how_a_stage_runs_is_asked_in_one_room():
    rooms = ("mode", "tree", "torch_private", "engine")
    asked = {file: questions(file) for file in FILES if room(file) not in rooms}
    # The bridge to modules asks on behalf of modules of the user's.
    asked = {file: count for file, count in asked.items() if count and room(file) not in (*WINGS, "module")}
    assert sum(asked.values()) <= 10, asked
