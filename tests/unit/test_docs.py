"""README and documentation: the site builds without warnings, opens in a browser offline, and quotes real results."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

import thinwire
from tests.browser import chromium
from thinwire.cli.step import words

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = (README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")))
OPENED = ("index.html", "guide.html", "benchmarks/index.html", "protocol.html", "api/optimizers.html")
SECONDS = 90


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the site, built as `make docs` does."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("needs mkdocs (the `docs` extra)")
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of requests that succeed."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where a server on the loopback interface has the site."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with chromium(tmp_path_factory.mktemp("chromium"), performance="ALL") as chrome:
        yield chrome


def requests(browser: webdriver.Chrome) -> list[str]:
    """The addresses that pages have asked for since the last call."""
    events = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    sent = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [url for url in sent if not url.startswith(("data:", "blob:", "chrome:", "chrome-untrusted:"))]


def broken_images(browser: webdriver.Chrome) -> list[str]:
    return browser.execute_script(
        "return [...document.images].filter(image => !(image.complete && image.naturalWidth > 0)).map(one => one.src)"
    )


# The site -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", OPENED)
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_opens_the_page(browser: webdriver.Chrome, address: str, page: str, width: int) -> None:
    browser.set_window_size(width, 1200)
    browser.get(f"{address}/{page}")
    heading = browser.find_element(By.CSS_SELECTOR, "article h1")
    assert heading.is_displayed()
    WebDriverWait(browser, SECONDS).until(lambda _: broken_images(browser) == [])
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    assert browser.get_log("browser") == []
    asked = requests(browser)
    assert f"{address}/{page}" in asked
    assert [url for url in asked if not url.startswith(f"{address}/")] == []


def test_navigation_reaches_every_page(browser: webdriver.Chrome, address: str, site: Path) -> None:
    browser.set_window_size(1280, 1200)
    browser.get(f"{address}/index.html")
    links = browser.find_elements(By.CSS_SELECTOR, ".md-nav--primary a.md-nav__link")
    targets = {urlsplit(str(link.get_attribute("href"))).path.removeprefix("/") for link in links}
    reports = {file.with_suffix(".html").name for file in (ROOT / "docs" / "benchmarks").glob("lm-*.json")}
    pages = {str(path.relative_to(site)) for path in site.rglob("*.html") if path.name not in reports}
    assert targets == pages - {"404.html"}
    browser.find_element(By.LINK_TEXT, "Fault tolerance").click()
    WebDriverWait(browser, SECONDS).until(lambda _: browser.current_url.endswith("/fault-tolerance.html"))
    assert browser.find_element(By.CSS_SELECTOR, "article h1").text.startswith("Fault tolerance")
    assert browser.get_log("browser") == []


def test_the_search_finds_a_word_of_the_glossary(browser: webdriver.Chrome, address: str) -> None:
    browser.set_window_size(1280, 1200)
    browser.get(f"{address}/index.html")
    browser.find_element(By.CSS_SELECTOR, "input.md-search__input").send_keys("residual")
    results = WebDriverWait(browser, SECONDS).until(
        lambda _: browser.find_elements(By.CSS_SELECTOR, ".md-search-result__item a")
    )
    assert any("glossary.html" in str(result.get_attribute("href")) for result in results)
    assert browser.get_log("browser") == []
    assert [url for url in requests(browser) if not url.startswith(f"{address}/")] == []


@pytest.mark.parametrize(
    ("page", "picture", "labels"),
    [
        ("how-it-works.html", "architecture.svg", {"bucket", "encode", "merge", "commit round", "apply"}),
        ("architecture.html", "components.svg", {"attach.py", "rule.py: UpdateRule", "session.py: Session"}),
    ],
)
def test_the_diagram_is_there(
    browser: webdriver.Chrome, address: str, page: str, picture: str, labels: set[str]
) -> None:
    browser.get(f"{address}/{page}")
    (diagram,) = browser.find_elements(By.CSS_SELECTOR, f"article img[src$='{picture}']")
    WebDriverWait(browser, SECONDS).until(lambda _: broken_images(browser) == [])
    assert diagram.size["width"] > 400
    browser.get(f"{address}/images/{picture}")
    texts = browser.find_elements(By.CSS_SELECTOR, "text")
    assert labels <= {text.text for text in texts}
    size = browser.execute_script(
        "const box = document.documentElement.viewBox.baseVal; return [box.width, box.height]"
    )
    for text in texts:  # none sticks out of the picture
        box = browser.execute_script(
            "const b = arguments[0].getBBox(); return [b.x, b.y, b.x + b.width, b.y + b.height]", text
        )
        assert box[0] >= 0
        assert box[1] >= 0
        assert box[2] <= size[0], text.text
        assert box[3] <= size[1], text.text


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    reference = "".join(path.read_text(encoding="utf-8") for path in (site / "api").glob("*.html"))
    for name in set(thinwire.__all__) - {"__version__"}:
        assert f'id="thinwire.{name}"' in reference, name


def test_the_site_works_offline(site: Path) -> None:
    """Pages name no script, style, font or image of another host."""
    loaded = re.compile(r"""<(?:script|img|iframe|source)[^>]*\ssrc="(?:https?:)?//|<link[^>]*\shref="(?:https?:)?//""")
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not loaded.search(text), path.name


# The sources ----------------------------------------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(page: Path) -> None:
    """As they are followed on a forge, where `mkdocs build --strict` does not look. Other hosts are not asked."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = unquote(target).partition("#")
        if ":" in path:
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, target


def rows_of(run: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of a stored run of `thinwire bench step`, by rate and method."""
    stored = json.loads((ROOT / "docs" / "benchmarks" / f"{run}.json").read_text(encoding="utf-8"))
    return {(row["rate"], row["method"]): row for row in stored["rows"]}


def speed(row: dict[str, Any], figure: str = "speed_up") -> str:
    return f"{words.ratio(row[figure]).removesuffix('×')} ({words.seconds(row['step']['median'])})"


FIRST_TABLE = {
    "DDP + AdamW": ("ddp-adamw", "AdamW"),
    'AdamW over `thinwire.compress(model, "int4")`': ("compress-int4", "AdamW, int4"),
    "`thinwire.OneBitAdam`, first 30 % of a run": ("onebit-adam-4bit-warmup", None),
    "`thinwire.OneBitAdam`, the rest": ("onebit-adam-4bit", "1-bit Adam, 4-bit warm-up"),
    "`thinwire.Birder`": ("birder", "Birder, bit"),
    "nothing is sent": ("local", None),
}
"""The rows of the README: methods of the benchmark, and of the study."""


def test_the_first_table_of_the_readme_quotes_a_benchmark_and_the_study() -> None:
    rows = rows_of("lm-7m-4x1-compress")
    ends = (ROOT / "docs" / "convergence" / "tables.md").read_text(encoding="utf-8").split("\n### ")[0]
    lines = [line.strip("| ").split(" | ") for line in README.read_text(encoding="utf-8").splitlines()]
    for title, (method, studied) in FIRST_TABLE.items():
        (cells,) = [cells for cells in lines if cells[0] == title][:1]
        assert cells[3:5] == [speed(rows["100mbit", method]), speed(rows["1gbit", method])]
        if studied is not None:
            assert f"| {studied} | " in ends
            (end,) = [line.split(" | ")[2] for line in ends.splitlines() if line.startswith(f"| {studied} | 0.")][:1]
            assert cells[5] == end


def test_the_picture_of_the_readme_quotes_the_benchmark() -> None:
    rows = rows_of("lm-7m-4x1-compress")
    methods = ("ddp-adamw", "compress-int4", "onebit-adam-4bit", "birder", "local")
    picture = (ROOT / "docs" / "images" / "speed.svg").read_text(encoding="utf-8")
    drawn = re.findall(r'<rect class="\w+-bar" [^>]*width="([\d.]+)"[^>]*>\n<text [^>]*>([^<]+)</text>', picture)
    times = [rows[rate, method]["step"]["median"] for rate in ("100mbit", "1gbit") for method in methods]
    assert [label for _, label in drawn] == [words.seconds(seconds) for seconds in times]
    for first in (0, len(methods)):
        widest = float(drawn[first][0])
        of_rate = slice(first, first + len(methods))
        for (width, _), seconds in zip(drawn[of_rate], times[of_rate], strict=True):
            assert float(width) == pytest.approx(widest * seconds / times[first], abs=0.1)


def test_the_first_page_quotes_the_benchmark() -> None:
    rows = rows_of("lm-7m-4x1-compress")
    text = " ".join((ROOT / "docs" / "index.md").read_text(encoding="utf-8").split())
    one_bit, birder, int4 = (
        words.ratio(rows["100mbit", method]["speed_up"]).removesuffix("×")
        for method in ("onebit-adam-4bit", "birder", "compress-int4")
    )
    assert f"`OneBitAdam` takes {one_bit} times as many steps per second" in text
    assert f"Birder {birder}, and AdamW over 4-bit averages {int4}." in text


def test_the_table_of_all_methods_quotes_its_run() -> None:
    rows = rows_of("lm-7m-4x1")
    table = (ROOT / "docs" / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for name, method in (("**Birder**", "birder"), ("no network: nothing is sent", "local")):
        (line,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")][:1]
        for row in [rows[rate, method] for rate in ("100mbit", "1gbit", "unlimited")]:
            assert words.ratio(row["speed_up"]).removesuffix("×") in line
            assert f"({words.seconds(row['step']['median'])})" in line


QUOTED = {
    "### Keep your optimizer: `thinwire.compress`": ("lm-7m-4x1-compress", ("100mbit", "1gbit"), "speed_up"),
    "### Local steps, on slower links": ("lm-7m-4x1-slow-links", ("10mbit", "20mbit", "100mbit"), "to_limit"),
    "### A larger model": ("lm-50m-4x1", ("100mbit", "1gbit"), "speed_up"),
    "### A larger model on eight hosts": ("lm-50m-8x1", ("100mbit", "1gbit"), "speed_up"),
}
"""By heading, the run that a table quotes, its columns, and what they say."""


def quoted_rows(text: str, run: str, rates: tuple[str, ...], figure: str) -> int:
    """Check the rows of a table whose first column names a method; their number."""
    rows = rows_of(run)
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    for first, *cells in lines:
        method = first.strip("| `")
        measured = [rows[rate, method] for rate in rates]
        expected = [speed(row, figure) for row in measured]
        assert cells[-1 - len(rates) : -1] == expected, method
        assert cells[-1] == words.byte_count(measured[-1]["bytes_sent"]) + " |", method
    return len(lines)


@pytest.mark.parametrize("heading", QUOTED)
def test_tables_of_the_benchmarks_quote_their_runs(heading: str) -> None:
    run, rates, figure = QUOTED[heading]
    text = (ROOT / "docs" / "benchmarks" / "README.md").read_text(encoding="utf-8")
    section = text.split(heading + "\n")[1].split("\n#")[0]
    assert f"({run}.html)" in section
    assert quoted_rows(section, run, rates, figure) >= 5


def test_the_table_of_compressed_averages_quotes_its_run() -> None:
    text = (ROOT / "docs" / "compress.md").read_text(encoding="utf-8")
    section = text.split("## Speed and quality\n")[1].split("\n#")[0]
    assert quoted_rows(section, "lm-7m-4x1-compress", ("100mbit", "1gbit"), "speed_up") == 7
