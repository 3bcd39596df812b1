"""The Python blocks of each page of the README and the docs run in order, as one program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    # The recipes' code is that of scripts which tests/test_recipes.py runs.
    *[page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "recipes"],
]


def program_of(page: Path) -> str:
    """The blocks of a page as one program, with the page's line numbers in a traceback."""
    text = page.read_text()
    program = ""
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, block.start(1))
        program += "\n" * (line - program.count("\n")) + block[1]
    return program


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}.py"
    script.write_text(program_of(page))
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_the_page_of_several_processes_runs_on_two(tmp_path: Path) -> None:
    script = tmp_path / "distributed.py"
    script.write_text(program_of(ROOT / "docs" / "distributed.md"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    result = subprocess.run([*launcher, str(script)], capture_output=True, text=True, env=environment, timeout=240)
    assert result.returncode == 0, result.stderr


def test_links_to_files_resolve() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
