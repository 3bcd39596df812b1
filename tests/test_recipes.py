"""docs/recipes: every block of code is cut from the script that its section names, every script has a section."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.recipes import RECIPES

PAGES = sorted((RECIPES.parent.parent / "docs" / "recipes").glob("*.md"))
SCRIPTS = sorted(RECIPES.glob("*.py"))
LINK = re.compile(r"\]\(\.\./\.\./examples/recipes/(\w+\.py)\)")


def excerpts(page: Path) -> list[tuple[str, str]]:
    """Each Python block of a page, with the script that was last linked before it."""
    script, found = "", []
    for match in re.finditer(rf"{LINK.pattern}|^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        script = match[1] or script
        if match[2]:
            found.append((script, match[2]))
    return found


def is_excerpt(block: str, source: str) -> bool:
    """Whether a block is some consecutive lines of a source, less their common indentation."""
    lines, count = source.splitlines(), len(block.splitlines())
    parts = ("\n".join(lines[start : start + count]) for start in range(len(lines) - count + 1))
    return any(textwrap.dedent(part).strip() == textwrap.dedent(block).strip() for part in parts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_is_cut_from_the_scripts_that_it_names(page: Path):
    for script, block in excerpts(page):
        assert script, f"{page.name}: a block before any script is named:\n{block}"
        source = (RECIPES / script).read_text()
        assert is_excerpt(block, source), f"{page.name}: not in {script}:\n{block}"
    assert excerpts(page) or page.stem == "index"


def test_a_block_that_differs_in_a_letter_is_no_excerpt():
    source = (RECIPES / "sam.py").read_text()
    assert is_excerpt("for batch in window:\n    total", source.replace("    total = fa.accumulate", "    total\n#"))
    assert not is_excerpt("for batch in windows:", source)


def test_every_script_has_a_section_and_every_section_a_line_in_the_index():
    named = {script for page in PAGES for script, _ in excerpts(page)}
    assert named == {script.name for script in SCRIPTS}
    index = next(page for page in PAGES if page.stem == "index").read_text()
    for page in PAGES:
        assert page.stem == "index" or f"({page.name}" in index, f"{page.name} is not in the index"
        for title in re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE):
            anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            assert f"({page.name}#{anchor})" in index, f"{page.name}: {title} is not in the index"


def test_links_of_the_recipes_resolve():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^)]*)\)", page.read_text()):
            to = page if not target else page.parent / target
            assert to.exists(), f"{page.name} links to {target}"
            if anchor:
                titles = re.findall(r"^#+ (.+)$", to.read_text(), re.MULTILINE)
                assert anchor in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles], anchor


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_recipe_is_short_says_what_it_is_and_returns_its_result(script: Path):
    lines = script.read_text().splitlines()
    assert len(lines) <= 90 and lines[0].startswith('"""') and lines[0].endswith(f': {script.name}."""')
    assert "def main(" in script.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_recipe_runs_by_itself_and_prints_what_came_out(script: Path):
    needed = {"lora": ("transformers", "peft"), "digits": ("sklearn",), "early_stopping": ("tensorboard",)}
    for library in needed.get(script.stem, ()):
        pytest.importorskip(library)
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
