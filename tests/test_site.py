"""The documentation site: it builds without a warning, has every public name, and a browser finds its way in it."""

from __future__ import annotations

import functools
import http.server
import importlib
import pkgutil
import re
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PUBLIC = ("functional_amp", "functional_amp.debug", "functional_amp.ranks", "functional_amp.testing")
PHONE = {"width": 375, "height": 667}


def public_names() -> dict[int, str]:
    """What `from module import name` gives, by identity: two modules may have one thing."""
    found: dict[int, str] = {}
    for module_name in PUBLIC:
        for name, value in vars(importlib.import_module(module_name)).items():
            if not name.startswith("_") and not isinstance(value, types.ModuleType):
                found.setdefault(id(value), f"{module_name}.{name}")
    return found


def documented() -> dict[int, str]:
    """What the reference shows. A module wins over a function of its name, to the generator as to `resolve_name`."""
    found: dict[int, str] = {}
    for page in sorted((DOCS / "reference").glob("*.md")):
        for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE):
            value = pkgutil.resolve_name(name)
            assert id(value) not in found, f"{page.name} shows {name} again"
            found[id(value)] = name
    return found


def test_every_public_name_is_in_the_reference_once() -> None:
    public, shown = public_names(), documented()
    missing = sorted(public[key] for key in set(public) - set(shown))
    assert not missing, f"docs/reference lacks {missing}: add a line '::: name' for each to one of its pages"
    # A module of models, shown as a whole.
    assert [shown[key] for key in set(shown) - set(public)] == ["functional_amp.testing.references"]


# --- the built site --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the site needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


class Links(HTMLParser):
    """The targets and the anchors of a page."""

    def __init__(self, page: Path):
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.targets.append(value)
            if name in ("id", "name") and value is not None:
                self.anchors.add(value)


@pytest.mark.slow
def test_no_link_within_the_site_is_broken(site: Path) -> None:
    pages = {path.resolve(): Links(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 25
    broken = []
    for page, links in pages.items():
        for link in links.targets:
            target, anchor = urldefrag(link)
            if urlsplit(link).scheme or link.startswith("//"):
                continue
            path = (page.parent / unquote(target)).resolve() if target else page
            path = path / "index.html" if path.is_dir() else path
            found = path.exists() and (not anchor or path not in pages or unquote(anchor) in pages[path].anchors)
            if not found:
                broken.append(f"{page.relative_to(site.resolve())}: {link}")
    assert broken == []


@pytest.mark.slow
def test_functions_are_shown_and_not_the_files_of_their_name(site: Path) -> None:
    heading = re.compile(r'<h[23] id="([^"]+)" class="doc doc-heading">\s*<code class="[^"]*doc-symbol-module">')
    shown = [name for page in site.glob("reference/*/index.html") for name in heading.findall(page.read_text())]
    assert shown == ["functional_amp.testing.references"], "write functional_amp.optim.sgd.sgd, not functional_amp.sgd"


@pytest.mark.slow
def test_no_page_asks_another_host_for_anything(site: Path) -> None:
    asks = re.compile(r"<(?:script|img|iframe|link)[^>]+(?:src|href)=\"?(https?:)?//[^>]*>")
    for page in site.rglob("*.html"):
        assert [tag for tag in asks.finditer(page.read_text()) if "canonical" not in tag[0]] == [], page


# --- in a browser ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium: playwright's own, or one of the system."""
    api = pytest.importorskip("playwright.sync_api", reason="the browser needs the extra `docs`")
    system = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with api.sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path)
        if not own.exists() and system is None:
            pytest.skip("no browser: run `playwright install chromium`, or install chromium")
        program = None if own.exists() else system
        # Containers have no user namespaces, which the sandbox needs; the pages are our own.
        try:
            started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        except api.Error as error:  # a system without the libraries that it needs
            pytest.skip(f"no browser starts here: {str(error).splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The site, served: search works in a web worker, which needs http."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_pages_render_without_an_error_and_fit_a_phone(site: Path, browser: Any, address: str) -> None:
    page, errors = browser.new_page(viewport=PHONE), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("response", lambda response: errors.append(response.url) if response.status >= 400 else None)
    for path in sorted(site.rglob("index.html")):
        page.goto(f"{address}/{path.parent.relative_to(site).as_posix()}/")
        assert page.locator("h1").first.is_visible(), path
        pictures = page.locator("article img")
        assert all(pictures.nth(i).evaluate("image => image.naturalWidth > 0") for i in range(pictures.count())), path
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"], f"{path}: {width} pixels wide"
        text = page.locator("article p, article li").first
        if text.count():  # the pages of examples are code alone
            assert text.evaluate("element => parseFloat(getComputedStyle(element).fontSize)") >= 14, path
    page.close()
    assert errors == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, found", [("growth_interval", "scalers"), ("unscaled twice", "units"), ("explain", "falling")]
)
def test_search_finds(browser: Any, address: str, words: str, found: str) -> None:
    page = browser.new_page()
    page.goto(address)
    page.locator("input.md-search__input").click()
    page.keyboard.type(words)
    results = page.locator("a.md-search-result__link")
    results.first.wait_for(timeout=20_000)
    assert any(found in results.nth(i).get_attribute("href") for i in range(results.count()))
    page.close()


# --- the pictures ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_draws_every_picture_of_the_concepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")
    monkeypatch.syspath_prepend(DOCS / "pictures")
    script = importlib.import_module("concepts")
    monkeypatch.setattr(script, "HERE", tmp_path)
    script.main()
    shown = set(re.findall(r"pictures/(\w+\.svg)", "".join(page.read_text() for page in DOCS.rglob("*.md"))))
    assert {path.name for path in tmp_path.iterdir()} == shown == {path.name for path in DOCS.glob("pictures/*.svg")}
