"""The report of `thinwire bench step` on a fixed run: ratios, bars, JSON, tables, pictures, the page in a browser."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.cli.step import charts, page, tables, words
from thinwire.cli.step.methods import METHODS, method_named
from thinwire.cli.step.results import Plan, Results, Turn, Unmeasured, Verdict

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


def turn(rate: str, method: str, step: float) -> Turn:
    ours = method_named(method).ours
    return Turn(
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
def results() -> Results:
    sweep = {"birder@1MB": 1.1, "birder@4MB": 1.0, "birder@16MB": 1.05}
    plan = Plan(
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
        Unmeasured("lm-7m", "birder-hierarchical", "skipped", "one rank a host: the same as flat"),
    ]
    return Results("thinwire bench step --methods all", MACHINE, plan, turns, unmeasured)


# Numbers --------------------------------------------------------------------------------------------------------------


def test_rows(results: Results) -> None:
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


def test_computation_is_the_same_for_all_methods_at_a_rate(results: Results) -> None:
    slow_probes = [replace(turn("100mbit", "local", 0.16), compute=[9.0, 9.0])]
    rows = replace(results, turns=results.turns + slow_probes).rows()
    assert {row.compute for row in rows} == {COMPUTE}


def test_the_parts_of_a_step_are_never_negative(results: Results) -> None:
    (row,) = replace(results, turns=[turn("1gbit", "birder", 0.1)]).rows()
    assert (row.exposed_wait, row.rest) == (WAIT, 0.0)
    (row,) = replace(results, turns=[turn("1gbit", "ddp-adamw", 0.1)]).rows()
    assert (row.exposed_wait, row.rest) == (0.0, 0.0)


def test_who_sends_nothing_waits_for_nobody(results: Results) -> None:
    (row,) = replace(results, turns=[turn("1gbit", "local", 0.16)]).rows()
    assert row.exposed_wait == 0.0
    assert row.rest == pytest.approx(0.16 - COMPUTE - OPTIMIZER)


def test_steps_that_take_turns_count_as_cycles(results: Results) -> None:
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


def test_without_a_baseline_there_are_no_ratios_to_it(results: Results) -> None:
    (row,) = replace(results, turns=[turn("1gbit", "birder", 0.1)]).rows()
    assert (row.speed_up, row.to_limit) == (None, None)


def test_figures_of_a_method_that_failed_later_do_not_count(results: Results) -> None:
    gone = Unmeasured("lm-7m", "birder", "failed", "in the second round")
    assert "birder" not in {row.method for row in replace(results, unmeasured=[gone]).rows()}


def test_bars(results: Results) -> None:
    outcomes = {verdict.what: (verdict.measured, verdict.outcome) for verdict in results.verdicts()}
    assert outcomes == {
        "100 Mbit/s: steps a second, Birder to ddp-adamw": (pytest.approx(18.0), "met"),
        "1 Gbit/s: steps a second, Birder to ddp-adamw": (pytest.approx(0.48 / 0.18), "met"),
        "unlimited: steps a second, Birder to ddp-adamw": (pytest.approx(0.2 / 0.175), "MISSED"),
        "100 Mbit/s: time a step, Birder to local": (pytest.approx(1.25), "met"),
        "1 Gbit/s: time a step, Birder to local": (pytest.approx(1.125), "MISSED"),
        "bytes that left a host to 2(n-1)/n·d/8, Birder": (pytest.approx(1.4e6 / 1_345_104), "met"),
        "2 hosts × 2 ranks: bytes that left a host to 2(N-1)/N·d/8, hierarchical Birder": (None, "not measured"),
        "100 Mbit/s: steps a second, onebit-adam to ddp-adamw": (pytest.approx(12.0), "met"),
        "100 Mbit/s: steps a second, zero-one-adam to ddp-adamw": (None, "not measured"),
        "100 Mbit/s: steps a second, onebit-lamb to ddp-adamw": (None, "not measured"),
    }


def test_bars_hold_on_the_cluster_for_which_they_were_set(results: Results) -> None:
    elsewhere = replace(results, plan=replace(results.plan, hosts=2, ranks=2))
    assert {verdict.outcome for verdict in elsewhere.verdicts()} == {"not measured"}
    theory = 2 * 1 / 2 * 7_173_888 / 8
    hierarchical = replace(turn("1gbit", "birder", 0.1), method="birder-hierarchical", bytes_sent=[1.2 * theory] * 2)
    verdicts = replace(elsewhere, turns=[hierarchical], unmeasured=[]).verdicts()
    (measured,) = (verdict for verdict in verdicts if verdict.what.startswith("2 hosts"))
    assert measured == Verdict(measured.what, 1.10, higher_is_better=False, measured=pytest.approx(1.2))  # type: ignore[arg-type]
    assert measured.outcome == "MISSED"


# JSON -----------------------------------------------------------------------------------------------------------------


def test_json_comes_back_as_it_was(results: Results) -> None:
    text = results.to_json()
    assert Results.from_json(text) == results
    data = json.loads(text)
    assert data["machine"] == MACHINE
    assert data["command"] == results.command
    assert [row["method"] for row in data["rows"][:3]] == ["ddp-adamw", "birder", "onebit-adam"]
    assert data["bars"][0]["outcome"] == "met"


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


def test_a_run_without_figures_is_a_failure(tmp_path: Path, results: Results) -> None:
    file = tmp_path / "results.json"
    file.write_text(replace(results, turns=[]).to_json(), encoding="utf-8")
    result = CliRunner().invoke(app, ["bench", "step", "--from-json", str(file), "--html", str(tmp_path / "page.html")])
    assert result.exit_code == 1
    assert "no method was measured" in result.output
    assert not (tmp_path / "page.html").exists()


# Tables and words -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 140])
def test_tables_fit_the_terminal(results: Results, width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    tables.print_results(console, results)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, printed.splitlines())) <= width
    assert "…" not in printed
    assert re.search(r"birder +200 ms", printed)
    assert "18.0×" in printed
    assert ("190–220 ms" in printed) is (width == 140)
    assert "one rank a host: the same as flat" in printed
    assert "op.preamble.length <= op.nbytes" in " ".join(printed.split())
    assert printed.count("MISSED") == 2


def test_names_of_all_methods_fit(results: Results) -> None:
    every = tuple(METHODS)
    full = Results("", MACHINE, replace(results.plan, methods=every), [turn("1gbit", name, 0.2) for name in every])
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


def test_the_picture_is_a_png(tmp_path: Path, results: Results) -> None:
    charts.write_png(tmp_path / "charts.png", results)
    assert (tmp_path / "charts.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_is_the_same_every_time_and_asks_for_nothing(results: Results) -> None:
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
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs Chromium and its driver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        *("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-quic", "no-first-run"),
        *("disable-background-networking", "disable-component-update", "disable-sync"),
        f"user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    yield chrome
    chrome.quit()


@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_draws_the_page(browser: webdriver.Chrome, tmp_path: Path, results: Results, width: int) -> None:
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
        "time a step (ms)",
    ):
        assert expected in labels
    body = browser.find_element(By.TAG_NAME, "body").text
    assert "MISSED" in body
    assert "not measured" in body


def test_dark_and_light(browser: webdriver.Chrome, tmp_path: Path, results: Results) -> None:
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
