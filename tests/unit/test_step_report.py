"""The report of `thinwire bench step` on a fixed run: ratios, JSON, tables, pictures, the page in a browser."""

from __future__ import annotations

import copy
import io
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from selenium import webdriver
from selenium.webdriver.common.by import By
from typer.testing import CliRunner

from tests.browser import chromium
from thinwire.cli.app import app
from thinwire.cli.step import charts, page, tables, words
from thinwire.cli.step.methods import METHODS, method_named
from thinwire.cli.step.results import Measurement, StepPlan, StepResults, Unmeasured

MACHINE = {"cpu": "<an honest CPU>", "cores": 2, "torch": "2.13.0", "date": "2026-11-16 00:00 UTC"}
CRASH = "rank 1 was ended by SIGABRT: op.preamble.length <= op.nbytes. 19456 vs 2048."
# Seconds a step, and bytes a host, of lm-7m on 4 hosts.
STEPS = {
    "100mbit": {"ddp-adamw": 3.6, "local": 0.16, "birder": 0.2, "onebit-adam": 0.3},
    "1gbit": {"ddp-adamw": 0.48, "local": 0.16, "birder": 0.18, "onebit-adam": 0.2},
    "unlimited": {"ddp-adamw": 0.2, "local": 0.16, "birder": 0.175, "onebit-adam": 0.18},
}
BYTES = {"ddp-adamw": 45e6, "local": 300.0}
ONE_BIT_BYTES = 1.4e6
COMPUTE, OPTIMIZER, WAIT = 0.15, 0.005, 0.01


def turn(rate: str, method: str, step: float) -> Measurement:
    ours = method_named(method).ours
    return Measurement(
        model="lm-7m",
        method=method,
        rate=rate,
        step=[step, 0.9 * step, 1.2 * step],
        optimizer=[OPTIMIZER] * 3,
        exposed_wait=[WAIT] * 3 if ours else [],
        compute=[COMPUTE] * 4,
        bytes_sent=[BYTES.get(method, ONE_BIT_BYTES)] * 4,
        thinwire={"encode_seconds": 0.004} if ours else {},
    )


@pytest.fixture(scope="module")
def results() -> StepResults:
    sweep = {"birder@1MB": 1.1, "birder@4MB": 1.0, "birder@16MB": 1.05}
    plan = StepPlan(
        hosts=4,
        ranks=1,
        rates=tuple(STEPS),
        models=("lm-7m",),
        methods=("ddp-adamw", "powersgd", "birder", "birder-hierarchical", "onebit-adam", "local", *sweep),
        rounds=1,
        seconds=4.0,
    )
    turns = [turn(rate, method, step) for rate, steps in STEPS.items() for method, step in steps.items()]
    turns += [turn(rate, method, factor * STEPS[rate]["birder"]) for rate in STEPS for method, factor in sweep.items()]
    unmeasured = [
        Unmeasured("lm-7m", "powersgd", "failed", CRASH, "rank 1: terminate called"),
        Unmeasured("lm-7m", "birder-hierarchical", "skipped", "one rank per host: the same as flat"),
    ]
    return StepResults("thinwire bench step --methods all", MACHINE, plan, turns, unmeasured)


# Numbers --------------------------------------------------------------------------------------------------------------


def test_rows(results: StepResults) -> None:
    rows = {(row.rate, row.method): row for row in results.rows()}
    assert len(rows) == 3 * 7
    ours = rows["100mbit", "birder"]
    assert (ours.step.low, ours.step.median, ours.step.high) == pytest.approx((0.19, 0.2, 0.22))
    assert ours.speed_up == pytest.approx(3.6 / 0.2)
    assert ours.to_limit == pytest.approx(0.2 / 0.16)
    assert ours.exposed_wait == WAIT
    assert ours.rest == pytest.approx(0.2 - COMPUTE - OPTIMIZER - WAIT)
    assert ours.bytes_theory == 2 * 3 / 4 * 7_173_888 / 8
    # Birder's bits take 0.108 s at 100 Mbit/s, less than the computation; the dense gradients 3.4 s, which is more.
    assert ours.bound == COMPUTE
    dense = rows["100mbit", "ddp-adamw"]
    assert dense.bound == pytest.approx(8 * 2 * 3 / 4 * 4 * 7_173_888 / 100e6)
    assert dense.to_bound == pytest.approx(3.6 / dense.bound)
    assert dense.exposed_wait == pytest.approx(3.6 - COMPUTE - OPTIMIZER)
    assert dense.rest == 0
    assert rows["unlimited", "ddp-adamw"].bound == COMPUTE


def test_computation_is_the_same_for_all_methods_at_a_rate(results: StepResults) -> None:
    slow_probes = [replace(turn("100mbit", "local", 0.16), compute=[9.0, 9.0])]
    rows = replace(results, turns=results.turns + slow_probes).rows()
    assert {row.compute for row in rows} == {COMPUTE}


def test_the_parts_of_a_step_are_never_negative(results: StepResults) -> None:
    (row,) = replace(results, turns=[turn("1gbit", "birder", 0.1)]).rows()
    assert (row.exposed_wait, row.rest) == (WAIT, 0.0)
    (row,) = replace(results, turns=[turn("1gbit", "ddp-adamw", 0.1)]).rows()
    assert (row.exposed_wait, row.rest) == (0.0, 0.0)


def test_who_sends_nothing_waits_for_nobody(results: StepResults) -> None:
    (row,) = replace(results, turns=[turn("1gbit", "local", 0.16)]).rows()
    assert row.exposed_wait == 0.0
    assert row.rest == pytest.approx(0.16 - COMPUTE - OPTIMIZER)


def test_memory_is_that_of_the_turn_with_the_least(results: StepResults) -> None:
    """The first turns also load modules; files of older versions, and other systems, have no figure."""
    measured = turn("1gbit", "birder", 0.18)
    turns = [replace(measured, memory=900_000_000), replace(measured, memory=700_000_000), measured]
    turns += [replace(turn("100mbit", "birder", 0.2), memory=800_000_000)]
    found = replace(results, turns=turns, unmeasured=[])
    assert [row.memory for row in found.rows()] == [700_000_000] * 2
    assert "<th>memory a rank</th>" in page.render(found)
    assert "<td>700.00 MB</td>" in page.render(found)
    assert StepResults.from_json(found.to_json()) == found
    assert [row.memory for row in replace(found, turns=[measured]).rows()] == [None]
    assert "memory a rank" not in page.render(replace(found, turns=[measured]))
    with pytest.raises(ValueError, match=r"turns\[0\]\.memory: expected a whole number"):
        StepResults.from_json(replace(found, turns=[replace(measured, memory=-1)]).to_json())


def test_steps_that_take_turns_count_as_cycles(results: StepResults) -> None:
    """One step in sixteen exchanges and is slow: no median may lose it."""
    slow_last = [0.16] * 15 + [0.48]
    cyclic = replace(
        turn("1gbit", "zero-one-adam-local", 0.16),
        step=slow_last,
        optimizer=[0.004] * 15 + [0.02],
        exposed_wait=[0.0] * 15 + [0.16],
    )
    plan = replace(results.plan, methods=("zero-one-adam-local",))
    (row,) = replace(results, plan=plan, turns=[cyclic]).rows()
    assert (row.step.low, row.step.median, row.step.high) == pytest.approx((0.18, 0.18, 0.18))
    assert row.optimizer == pytest.approx(0.005)
    assert row.exposed_wait == pytest.approx(0.01)
    assert row.steps == 16
    quicker = replace(cyclic, step=[0.16] * 16)
    (row,) = replace(results, plan=plan, turns=[cyclic, quicker]).rows()
    assert row.step.median == pytest.approx(0.17)


def test_without_a_baseline_there_are_no_ratios_to_it(results: StepResults) -> None:
    (row,) = replace(results, turns=[turn("1gbit", "birder", 0.1)]).rows()
    assert (row.speed_up, row.to_limit) == (None, None)


def test_figures_of_a_method_that_failed_later_do_not_count(results: StepResults) -> None:
    gone = Unmeasured("lm-7m", "birder", "failed", "in the second round")
    assert "birder" not in {row.method for row in replace(results, unmeasured=[gone]).rows()}


# JSON -----------------------------------------------------------------------------------------------------------------


def test_json_comes_back_as_it_was(results: StepResults) -> None:
    text = results.to_json()
    assert StepResults.from_json(text) == results
    data = json.loads(text)
    assert data["machine"] == MACHINE
    assert data["command"] == results.command
    assert [row["method"] for row in data["rows"][:3]] == ["ddp-adamw", "birder", "onebit-adam"]
    assert "bars" not in data


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"benchmark": "step", "format": 0}', '{"benchmark": "step", "format": 1}']
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text, encoding="utf-8")
    result = CliRunner().invoke(app, ["bench", "step", "--from-json", str(file)], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "--from-json" in result.output
    assert "other.json" in result.output


def test_a_run_without_figures_is_a_failure(tmp_path: Path, results: StepResults) -> None:
    file = tmp_path / "results.json"
    file.write_text(replace(results, turns=[]).to_json(), encoding="utf-8")
    result = CliRunner().invoke(app, ["bench", "step", "--from-json", str(file), "--html", str(tmp_path / "page.html")])
    assert result.exit_code == 1
    assert "no method was measured" in result.output
    assert not (tmp_path / "page.html").exists()


BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"


STEP_FILES = sorted(BENCHMARKS.glob("lm-*.json"))


@pytest.mark.parametrize("file", STEP_FILES, ids=lambda file: file.stem)
def test_published_files_are_read_and_their_pages_are_up_to_date(file: Path) -> None:
    results = StepResults.from_json(file.read_text(encoding="utf-8"))
    page_of_file = file.with_suffix(".html").read_text(encoding="utf-8")
    # Charts depend on the version of matplotlib.
    charts_left_out = re.compile(r"<svg.*?</svg>", re.DOTALL)
    assert charts_left_out.sub("", page.render(results)) == charts_left_out.sub("", page_of_file)


# Tables and words -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 140])
def test_tables_fit_the_terminal(results: StepResults, width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    tables.print_results(console, results)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, printed.splitlines())) <= width
    assert "…" not in printed
    assert re.search(r"birder +200 ms", printed)
    assert "18.0×" in printed
    assert ("190–220 ms" in printed) is (width == 140)
    assert "one rank per host: the same as flat" in printed
    assert "op.preamble.length <= op.nbytes" in " ".join(printed.split())
    assert "MISSED" not in printed


def test_names_of_all_methods_fit(results: StepResults) -> None:
    every = tuple(METHODS)
    full = StepResults("", MACHINE, replace(results.plan, methods=every), [turn("1gbit", name, 0.2) for name in every])
    console = Console(file=io.StringIO(), width=80)
    tables.print_results(console, full)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, printed.splitlines())) <= 80
    for name in every:
        assert re.search(rf"^ *{name} ", printed, re.MULTILINE)


def test_words() -> None:
    assert [words.seconds(value) for value in (0.00123, 0.1234, 0.9996, 1.234, 12.345)] == [
        "1.23 ms",
        "123 ms",
        "1 s",
        "1.23 s",
        "12.35 s",
    ]
    assert [words.rate(rate) for rate in ("100mbit", "2.5gbit", "512kbit", "unlimited")] == [
        "100 Mbit/s",
        "2.5 Gbit/s",
        "512 kbit/s",
        "unlimited",
    ]
    assert [words.ratio(value) for value in (None, 0.987, 17.96)] == ["", "0.99×", "18.0×"]
    assert words.span(0.5, 1.5) == "0.5–1.5 s"


# Pictures and page ----------------------------------------------------------------------------------------------------


def test_the_picture_is_a_png(tmp_path: Path, results: StepResults) -> None:
    charts.write_png(tmp_path / "charts.png", results)
    assert (tmp_path / "charts.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_is_the_same_every_time_and_asks_for_nothing(results: StepResults) -> None:
    text = page.render(results)
    assert text == page.render(results)
    # The namespaces of SVG are names, not addresses.
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)|<script|<img|<iframe", without_names)
    assert not re.search(r'(src|href)="(?!#|data:)', without_names)
    identifiers = re.findall(r' id="([^"]*)"', text)
    assert len(identifiers) == len(set(identifiers))
    assert "&lt;an honest CPU&gt;" in text
    assert "op.nbytes. 19456 vs 2048" in text


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with chromium(tmp_path_factory.mktemp("chromium")) as chrome:
        yield chrome


@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_draws_the_page(browser: webdriver.Chrome, tmp_path: Path, results: StepResults, width: int) -> None:
    file = tmp_path / "report.html"
    file.write_text(page.render(results), encoding="utf-8")
    browser.set_window_size(width, 2000)
    browser.get(file.as_uri())
    assert browser.get_log("browser") == []
    requested = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [name for name in requested if not name.startswith("data:")] == []
    # Nothing sticks out; wide tables scroll in a box of their own.
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")

    drawings = browser.find_elements(By.CSS_SELECTOR, "svg")
    assert len(drawings) == 3 + 3 + 1 + 3  # speed and time and buckets at each rate, and bytes
    for drawing in drawings:
        assert drawing.size["width"] >= 300
        assert drawing.size["height"] >= 120
        # Every bar, line and label has a size, and a colour that the page defines.
        shapes = browser.execute_script(
            "return [...arguments[0].querySelectorAll('path')].filter(path => path.getBBox().width > 0).length", drawing
        )
        assert shapes >= 4
        unknown = browser.execute_script(
            "return [...arguments[0].outerHTML.matchAll(/var\\((--\\w+)\\)/g)].map(found => found[1])"
            ".filter(name => !getComputedStyle(document.documentElement).getPropertyValue(name))",
            drawing,
        )
        assert unknown == []
    labels = " ".join(text.text for text in browser.find_elements(By.CSS_SELECTOR, "svg text"))
    for expected in (
        "birder",
        "powersgd",
        "failed",
        "18.0×",
        "exposed wait",
        "1.40 MB",
        "bucket_mb",
        "time per step (ms)",
    ):
        assert expected in labels
    body = browser.find_element(By.TAG_NAME, "body").text
    assert "MISSED" not in body


def test_dark_and_light(browser: webdriver.Chrome, tmp_path: Path, results: StepResults) -> None:
    file = tmp_path / "report.html"
    file.write_text(page.render(results), encoding="utf-8")
    seen = {}
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.get(file.as_uri())
        seen[scheme] = browser.execute_script(
            "return [getComputedStyle(document.body).backgroundColor,"
            " getComputedStyle(document.querySelector('svg text')).fill]"
        )
    assert seen["light"][0] == seen["dark"][0].replace("rgb(20, 24, 31)", "rgb(255, 255, 255)")
    assert seen["light"][1] != seen["dark"][1]


# Files that somebody else has written --------------------------------------------------------------------------------

RUN = "window.injected = 1"
PAYLOADS = [
    f'<img src=x onerror="{RUN}">',
    f'"><script>{RUN}</script>',
    f"</script><script>{RUN}</script>",
    f"</style></svg></code></pre><script>{RUN}</script>",
    f"'><svg onload='{RUN}'>",
    f"<iframe srcdoc='<script>top.{RUN}</script>'>",
    f"javascript:{RUN}",
    "<!-- ]]> <plaintext>",
    "&lt;b&gt; &amp; &#60;i&#62;",
    'colour #d1495b of id="none" \\1 \\g<0>',
    "$\\frac{1}{$ and $x^2$",
    "[red]x[/red] [/] [/bold] :smile: [link=file:///]",
    "日本語 ✓ 😀",
]
Document = dict[str, Any]


@pytest.fixture
def document(results: StepResults) -> Document:
    """A small file: one rate, two methods with figures and two without."""
    methods = ("ddp-adamw", "birder", "powersgd", "birder-hierarchical", "birder@4MB")
    plan = replace(results.plan, rates=("1gbit",), methods=methods)
    turns = [turn("1gbit", method, 0.2) for method in ("ddp-adamw", "birder", "birder@4MB")]
    return json.loads(replace(results, plan=plan, turns=turns).to_json())


READ = ("command", "machine", "plan", "turns", "unmeasured")
NAMES_A_FIELD = re.compile(rf"({'|'.join(READ)})\b")


def refusal_of(document: Document) -> str | None:
    try:
        StepResults.from_json(json.dumps(document))
    except ValueError as error:
        return str(error)
    return None


def with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy in which every string, names of fields included, is what `change` makes of it."""
    if isinstance(value, dict):
        return {change(name): with_strings(one, change) for name, one in value.items()}
    if isinstance(value, list):
        return [with_strings(one, change) for one in value]
    return change(value) if isinstance(value, str) else value


def strings_of(value: Any) -> set[str]:
    found: set[str] = set()

    def note(text: str) -> str:
        found.add(text)
        return text

    with_strings(value, note)
    return found


def hostile(document: Document, changed: dict[str, str]) -> Document:
    return document | {name: with_strings(document[name], lambda text: changed.get(text, text)) for name in READ}


FREE = (
    *("thinwire bench step --methods all", "<an honest CPU>", "2.13.0", "2026-11-16 00:00 UTC", "cpu", "torch"),
    *("powersgd", "failed", "birder-hierarchical", "skipped", CRASH, "one rank per host: the same as flat"),
)
"""Strings of the file that may be anything, and that the page shows."""


def test_which_strings_may_be_anything(document: Document) -> None:
    refused = set()
    for text in strings_of({name: document[name] for name in READ}):
        refusal = refusal_of(hostile(document, {text: PAYLOADS[0]}))
        if refusal is not None:
            refused.add(text)
            assert NAMES_A_FIELD.match(refusal), refusal
    assert refused == {
        *("lm-7m", "1gbit", "ddp-adamw", "birder", "birder@4MB", "date"),
        *("hosts", "ranks", "rates", "models", "methods", "rounds", "seconds"),
        *("model", "method", "rate", "step", "optimizer", "exposed_wait", "compute", "bytes_sent", "thinwire"),
        "memory",
        *("outcome", "reason", "details"),
    }
    assert refused.isdisjoint(FREE)


def test_no_string_of_a_file_becomes_part_of_the_page(
    browser: webdriver.Chrome, tmp_path: Path, document: Document
) -> None:
    file = tmp_path / "report.html"

    def load(changed: dict[str, str]) -> tuple[set[str], str]:
        """Names of elements, and the text of the page."""
        file.write_text(page.render(StepResults.from_json(json.dumps(hostile(document, changed)))), encoding="utf-8")
        browser.get(file.as_uri())
        assert browser.execute_script("return window.injected") is None, changed
        assert browser.get_log("browser") == [], changed
        elements = "[...document.querySelectorAll('*')]"
        handlers = f"return {elements}.flatMap(e => e.getAttributeNames()).filter(name => name.startsWith('on'))"
        assert browser.execute_script(handlers) == [], changed
        links = f"return {elements}.flatMap(e => [e.href, e.src]).filter(to => /^javascript:/.test(to))"
        assert browser.execute_script(links) == [], changed
        assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth"), changed
        names = browser.execute_script(f"return {elements}.map(e => e.tagName)")
        return set(names), browser.execute_script("return document.body.textContent")

    usual, _ = load({})
    assert usual.isdisjoint({"SCRIPT", "IMG", "IFRAME"})
    # Every string in turn, with one of the payloads, and all of them together with each: a page takes half a second.
    places = [({text}, PAYLOADS[number % len(PAYLOADS)]) for number, text in enumerate(FREE)]
    places += [(set(FREE), payload) for payload in PAYLOADS]
    for texts, payload in places:
        # Names of fields and methods stay different.
        changed = {text: payload + f" {number}" * (len(texts) > 1) for number, text in enumerate(sorted(texts))}
        names, text = load(changed)
        assert names <= usual, changed
        for shown in changed.values():
            assert shown in text, changed


@pytest.mark.parametrize("payload", PAYLOADS)
def test_names_are_printed_as_they_are(tmp_path: Path, document: Document, payload: str) -> None:
    """Rich takes [red] for a colour and [/] for its end, and matplotlib $x$ for a formula."""
    results = StepResults.from_json(
        json.dumps(hostile(document, dict.fromkeys(("powersgd", "failed", CRASH), payload)))
    )
    console = Console(file=io.StringIO(), width=300)
    tables.print_results(console, results)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"{payload} {payload} on lm-7m: {payload}" in printed
    charts.write_png(tmp_path / "charts.png", results)


def test_a_file_cannot_steer_the_terminal(document: Document) -> None:
    steering = "\x1b]0;title\x07 \x1b[2J \r \u202e \u2028 \x9b"
    results = StepResults.from_json(json.dumps(hostile(document, {CRASH: steering})))
    console = Console(file=io.StringIO(), width=300)
    tables.print_results(console, results)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    escaped = r"\x1b]0;title\x07 \x1b[2J \r \u202e \u2028 \x9b"
    assert escaped in printed
    assert escaped in page.render(results)
    for character in "\x1b\x07\r\u202e\u2028\x9b":
        assert character not in printed


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield from places_in(one, (*path, key))


def replaced(document: Document, path: tuple[Any, ...], value: Any) -> Document:
    changed = copy.deepcopy(document)
    inner: Any = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


WRONG = [
    *(None, True, -1, 0, 0.5, 10**400, math.nan, math.inf, -math.inf, 1e300, 1e-300),
    *("", "1", "x" * 2_000_000, "\ud800", "\x00", [], [[]], {}, {"": 1}, [1] * 3, ["a", "a"]),
]


def test_wrong_values_are_refused_by_name_or_do_no_harm(document: Document) -> None:
    refused = 0
    for name in READ:
        for path in places_in(document[name], (name,)):
            for value in WRONG:
                changed = replaced(document, path, value)
                refusal = refusal_of(changed)
                if refusal is not None:
                    refused += 1
                    assert NAMES_A_FIELD.match(refusal), (path, refusal)
                    assert len(refusal) < 500, path
                    continue
                results = StepResults.from_json(json.dumps(changed))
                console = Console(file=io.StringIO(), width=100)
                tables.print_results(console, results)
                # Not the results themselves: NaN differs from NaN.
                assert StepResults.from_json(results.to_json()).to_json() == results.to_json()
    assert refused > 1000


@pytest.mark.parametrize("seconds", [1e-9, 1e9])
@pytest.mark.parametrize("sent", [0, 1e18])
def test_extreme_figures_are_drawn(tmp_path: Path, document: Document, seconds: float, sent: float) -> None:
    extreme = {"step": [seconds], "compute": [1 / seconds], "optimizer": [0], "bytes_sent": [sent]}
    first = [document["turns"][0] | extreme, *document["turns"][1:]]
    for turns in (first, [one | extreme for one in document["turns"]]):
        results = StepResults.from_json(json.dumps(document | {"turns": turns}))
        page.render(results)
        charts.write_png(tmp_path / "charts.png", results)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[" * 200_000, "nested too deeply"),
        ('{"benchmark": "step", "format": ' + "1" * 5000 + "}", "4300 digits"),
        ("\xff", "utf-8"),
        ('{"benchmark": "step", "format": 1, "command": 1, "machine": {}}', "plan: missing"),
    ],
)
def test_what_is_no_file_of_ours_is_told_in_a_line(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "[" / "]other.json"
    file.parent.mkdir()
    file.write_bytes(text.encode("latin-1"))
    result = CliRunner().invoke(app, ["bench", "step", "--from-json", str(file)], env={"COLUMNS": "300"})
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert "--from-json" in result.output
    assert "[/]other.json" in result.output
    assert complaint in result.output


def test_a_wrong_field_is_named_by_the_command(tmp_path: Path, document: Document) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps(replaced(document, ("turns", 1, "step", 2), math.nan)), encoding="utf-8")
    html = tmp_path / "page.html"
    arguments = ["bench", "step", "--from-json", str(file), "--html", str(html)]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "300", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert "other.json': turns[1].step[2]: expected a number from 1e-09 to 1e+09, got nan" in result.output
    assert not html.exists()
