"""The site of docs/: what its settings name, and its pages as built and as a browser shows them."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BROWSER = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
WITH_MKDOCS = all(importlib.util.find_spec(name) for name in ("material", "mkdocstrings", "mathjax"))


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_the_landing_page_names_what_people_come_from() -> None:
    page = (DOCS / "index.md").read_text()
    part = page.partition("## Coming from")[2].partition("\n## ")[0]
    assert [row.split(" |")[0] for row in part.split("\n| ")[3:]] == [
        "flash-linear-attention", "mamba_ssm", "mlstm_kernels", "transformers", "RWKV-LM",
    ]  # fmt: skip
    for link in re.findall(r"\]\(([^)]+)\)", part):
        file, _, place = link.partition("#")
        headings = re.findall(r"^#+ (.*)$", (DOCS / file).read_text(), flags=re.MULTILINE)
        assert not place or place in map(anchor, headings), link


def test_what_the_landing_page_takes_from_the_readme_is_marked_there() -> None:
    readme = (ROOT / "README.md").read_text()
    asked = re.findall(r'^--8<-- "README.md:(\w+)"$', (DOCS / "index.md").read_text(), flags=re.MULTILINE)
    assert asked == ["train", "measured"]
    parts = [readme.partition(f"[start:{name}] -->\n")[2].partition(f"<!-- --8<-- [end:{name}]")[0] for name in asked]
    code = parts[0].splitlines()
    assert (code[0], code[-1]) == ("```python", "```") and 10 <= len(code) - 2 <= 14
    assert parts[1].startswith("<!-- measured: ") and parts[1].endswith("<!-- /measured -->\n")


def test_scripts_and_styles_are_files_of_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    (scripts,) = re.findall(r"^extra_javascript: \[(.*)\]$", text, flags=re.MULTILINE)
    (styles,) = re.findall(r"^extra_css: \[(.*)\]$", text, flags=re.MULTILINE)
    assert "http" not in scripts + styles and "font: false" in text
    assert all((DOCS / name).is_file() for name in styles.split(", "))
    assert (DOCS / scripts.split(", ")[0]).is_file() and scripts.endswith("assets/mathjax/tex-chtml.js")
    assert re.findall(r"^ +scheme: (\w+)", text, flags=re.MULTILINE) == ["default", "slate"]


# The built site


class Page(HTMLParser):
    """Files that a page loads, and the ids of its elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "link", "iframe") and given.get("rel") not in ("canonical", "next", "prev"):
            self.loads += filter(None, [given.get("src"), given.get("href")])
        self.ids += filter(None, [given.get("id")])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not WITH_MKDOCS:
        pytest.skip("the docs extra is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages(folder: Path) -> dict[str, Page]:
    found = {str(path.relative_to(folder)): Page(path.read_text()) for path in folder.rglob("*.html")}
    assert len(found) > 25
    return found


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    """So that they are whole without a network."""
    for name, page in pages(site).items():
        for link in page.loads:
            assert not re.match(r"https?:|//", link), (name, link)
            there = site / link.lstrip("/") if link.startswith("/") else (site / name).parent / link
            assert link.startswith(("data:", "#")) or there.resolve().exists(), (name, link)


@pytest.mark.slow
def test_mathjax_finds_its_fonts_beside_it(site: Path) -> None:
    script = site / "assets" / "mathjax" / "tex-chtml.js"
    fonts = {path.name for path in (script.parent / "output" / "chtml" / "fonts" / "woff-v2").glob("*.woff")}
    assert script.stat().st_size > 1e6 and {"MathJax_Main-Regular.woff", "MathJax_AMS-Regular.woff"} <= fonts


@pytest.mark.slow
def test_every_name_stands_once(site: Path) -> None:
    """A function whose file has its name too."""
    for name, page in pages(site).items():
        assert len({*page.ids}) == len(page.ids), (name, [x for x in page.ids if page.ids.count(x) > 1])
    listed = [x.rpartition(".")[2] for x in pages(site)["reference/ops.html"].ids if x.startswith("flexsp.ops.")]
    for name in ("mamba3", "rg_lru", "selective_scan", "recurrent_mamba3", "Mamba3State", "chunk_gla"):
        assert listed.count(name) == 1, name


@pytest.mark.slow
def test_the_search_knows_parts_of_names(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    separator = re.compile(index["config"]["separator"])
    words = {word for row in index["docs"] for word in separator.split(re.sub(r"<[^>]+>", " ", row["text"]))}
    for asked in ("clip_grad", "numpy", "rank", "init_sequence_parallel", "cu_seqlens"):
        assert any(word.startswith(asked) for word in words), asked
    assert "manual_seed" in words  # of torch.manual_seed


# In a browser


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    if BROWSER is None:
        pytest.skip("there is no Chromium")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("localhost", 0), functools.partial(Quiet, directory=str(site))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()


def shown(address: str, *options: str) -> tuple[str, str]:
    """What Chromium makes of a page, and what it says on the way."""
    assert BROWSER is not None
    common = "--headless=new --no-sandbox --disable-gpu --virtual-time-budget=20000 --enable-logging=stderr"
    done = subprocess.run([BROWSER, *common.split(), *options, address], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["index.html", "math.html", "reference/ops.html"])
def test_pages_have_no_errors_in_a_browser(name: str, address: str) -> None:
    page, said = shown(f"{address}/{name}", "--dump-dom")
    assert "</html>" in page and not re.search(r"CONSOLE.*(error|404)", said, flags=re.IGNORECASE), said
    formulas = page.count("<mjx-container")
    raw = len(re.findall(r"class=\"arithmatex\"", page))
    assert formulas == raw and (formulas > 200) == (name == "math.html") and "<mjx-merror" not in page


PROBE = """<!DOCTYPE html><title>not yet</title><iframe id="page" src="{name}" width="{width}" height="1600"></iframe>
<script>page.onload = () => setTimeout(() => {{
  document.title = "wide " + page.contentDocument.documentElement.scrollWidth;
}}, 5000)</script>"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["index.html", "math.html", "tested.html", "use.html", "reference/ops.html"])
def test_pages_are_no_wider_than_a_telephone(name: str, site: Path, address: str) -> None:
    """Tables, code and formulas that are wider scroll in boxes of their own."""
    (site / "probe.html").write_text(PROBE.format(name=name, width=390))
    try:
        page, _ = shown(f"{address}/probe.html", "--dump-dom")
    finally:
        (site / "probe.html").unlink()
    (width,) = re.findall(r"<title>wide (\d+)</title>", page)
    assert int(width) <= 390


@pytest.mark.slow
@pytest.mark.parametrize("width", [1400, 600])
@pytest.mark.parametrize("dark", [False, True])
def test_text_is_visible(dark: bool, width: int, address: str, tmp_path: Path) -> None:
    """On a picture of the landing page: most of it is ground, light or dark, and some of it is far from that."""
    import matplotlib.image

    picture = tmp_path / "page.png"
    options = [f"--window-size={width},900", "--hide-scrollbars", f"--screenshot={picture}"]
    shown(f"{address}/index.html", *options, *(["--blink-settings=preferredColorScheme=0"] if dark else []))
    light = matplotlib.image.imread(picture)[60:, :, :3].mean(-1)  # below the header
    if dark:
        light = 1 - light
    assert (light > 0.8).mean() > 0.7 and 0.005 < (light < 0.5).mean() < 0.2
