"""`lockstep report`: what the page says of runs, and that their text stays text."""

import base64
import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import chart
from lockstep.chart import Line
from lockstep.cli import commands
from lockstep.exits import DONE, MISTAKE
from lockstep.judge.tolerances import ENVELOPE
from lockstep.run import directory
from parity_tests.browser import Browser
from parity_tests.browser import tab as tab
from parity_tests.monitor.conftest import make_run

DRAW = chart._draw_svg
EVIL = "</pre><script>alert(1)</script><img src=https://x.invalid>'\"&"


@pytest.fixture
def here(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pictures have their words and tables alone: to draw a page takes a second."""
    monkeypatch.setattr(chart, "_draw_svg", lambda *given: "")
    return here


@pytest.fixture
def drawn(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(chart, "_draw_svg", DRAW)
    return here


def write_curves(folder: Path, ours: Path, theirs: Path, envelope: list[float]) -> Path:
    sides = {
        name: {"framework": record.framework, "config": record.config.to_json()}
        for name, record in zip("ab", map(directory.read_record, (ours, theirs)))
    }
    folder.mkdir()
    content = {**sides, "compared": ["a", "b"], "envelope": envelope}
    (folder / "curves.json").write_text(json.dumps(content))
    return folder


def report(*runs: Path) -> str:
    assert commands.main(["report", *map(str, runs), "--out", "r.html"]) == DONE
    return Path("r.html").read_text()


def words(page: str) -> str:
    return " ".join(re.sub("<style.*?</style>|<[^>]*>", " ", page).split())


def pictures(page: str) -> dict[str, str]:
    """Each SVG by its description."""
    found = re.findall('<img alt="([^"]*)" src="data:image/svg[+]xml;base64,([^"]*)">', page)
    return {words: base64.b64decode(code).decode() for words, code in found}


def described(page: str, title: str) -> str:
    (words,) = (words for words in pictures(page) if words.startswith(title))
    return words


def test_curves_gap_differences_and_sample(here: Path) -> None:
    a = make_run(here / "a", "jax", policy="bf16")
    make_run(here / "b", "torch", policy="bf16", noise=1e-3, keep=3)
    (a / directory.SAMPLE).write_text("to be or not")
    page = report(Path("a"), Path("b"))
    for title in ("Training loss", "Validation loss", "Loss scale", "Throughput", "Peak memory"):
        assert f"<h2>{title}" in page
    said = words(page)
    assert "framework jax torch" in said and "keep 2 3" in said and "lr 0.002" not in said
    assert "a skipped 2 steps: 7, 8" in said and "to be or not" in said
    assert "Gap of the losses: a against b" in said and "no envelope is known" in said
    assert "Utilization" not in said  # what no run has is no chart


def test_the_envelope_judges_a_pair_of_the_same_programs(here: Path) -> None:
    a = make_run(here / "a", "jax", policy="bf16")
    b = make_run(here / "b", "torch", policy="bf16", noise=1e-3)
    wide = write_curves(here / "wide", a, b, [0.004] * 40)
    narrow = write_curves(here / "narrow", b, a, [1e-6] * 40)
    other = make_run(here / "c", "torch", policy="fp16")
    foreign = write_curves(here / "foreign", a, other, [0.004] * 40)
    said = [words(report(a, b, curves)) for curves in (wide, narrow, foreign)]
    verdict = [re.search(r"(equal|different): gap over envelope", text) for text in said]
    assert [v and v[1] for v in verdict] == ["equal", "different", None]
    assert "noise envelope" in said[0] and "called different" in said[0]
    assert f"tolerance {ENVELOPE.bound:g}" in said[0]


def test_gradient_norms_by_kind_and_by_layer(here: Path) -> None:
    """Several modules' norms join by squares: 3 and 4 make 5, and twice 3 the root of 18."""
    page = report(make_run(Path("a"), norms=True), make_run(Path("b"), "torch"))
    kinds = described(page, "Gradient norm by kind of module: a")
    layers = described(page, "Gradient norm by layer: a")
    assert "attn.qkv from 50 at step 10 to 200 at step 40" in kinds
    assert "head from 10 at step 10 to 40 at step 40" in kinds and "blocks" not in kinds
    assert "layer 0 from 42.4 at step 10" in layers and "layer 1 from 56.6 at step 10" in layers
    assert "Gradient norm by layer: b" not in page  # it has no --norms


def test_other_experiments_have_no_gap(here: Path) -> None:
    a, b = make_run(here / "a", "jax"), make_run(here / "b", "torch", lr=1e-3)
    assert "Gap of" not in words(report(a, b))


def test_without_matplotlib_it_says_what_to_install(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    make_run(here / "a")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert commands.main(["report", "a", "--out", "r.html"]) == MISTAKE
    assert "pip install 'lockstep-gpt[plot]'" in capsys.readouterr().err
    assert not Path("r.html").exists()


def test_numbers_of_any_size_make_a_page(drawn: Path, capsys: Any) -> None:
    """An untrusted log may hold whatever a float can be; a real one has nulls."""
    run, rows = make_run(drawn / "a"), []
    for step, loss in enumerate([1e308, -1e308, 0.0, None, 5e-324, -1.0], 1):
        of_step = {"kind": "train", "step": step, "loss": loss, "skipped": False}
        rows.append({**of_step, "grad_norm": loss, "lr": 0.0, "loss_scale": 0.0, "mfu": loss})
    (run / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = report(run, make_run(drawn / "b", "torch", rows=3))
    assert len(pictures(page)) > 4 and "nan" not in "".join(pictures(page).values())
    (run / "log.jsonl").write_text("")
    assert "0 of 40" in words(report(run))
    assert commands.main(["runs", str(drawn), "--compare", "a", "b"]) == DONE
    assert "no step in common" in capsys.readouterr().out


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a run with markup in its name and its sample, and in keys of its log."""
    with contextlib.chdir(folder := tmp_path_factory.mktemp("spoilt")):
        run = make_run(Path(EVIL.replace("/", "|")), "jax")
        (run / directory.SAMPLE).write_text(EVIL)
        with (run / "log.jsonl").open("a") as log:
            row = {"kind": "eval", "step": 9, "val_loss": 1.5, EVIL: 1.0}
            log.write(json.dumps(row) + "\n" + json.dumps({"kind": "norms", "step": 9, EVIL: 1.0}))
        report(run, make_run(Path("b"), "torch", noise=1e-3, norms=True))
    return folder / "r.html"


def test_markup_stays_text(spoilt: Path) -> None:
    page = spoilt.read_text()
    for text in (page, *pictures(page).values()):
        assert not re.search(r"<script|<img src|<iframe|@import|\son\w+=", text)
    assert page.count("&lt;script&gt;") >= 3
    assert "Content-Security-Policy" in page


def test_in_a_browser(tab: Browser, spoilt: Path) -> None:
    """Both schemes, by the system's wish and by the switch; keyboard and screen reader."""
    for scheme in ("light", "dark"):
        tab.require_readable(spoilt, scheme)
    assert tab.evaluate("[...document.images].every(i => i.naturalWidth > 0)")
    colour = "getComputedStyle(document.body).backgroundColor"
    dark = tab.evaluate(colour)
    tab.press("Tab", 9)
    assert tab.evaluate("document.activeElement.id") == "system"
    tab.press("ArrowRight", 39)
    assert tab.evaluate(colour) == "rgb(255, 255, 255)" != dark
    tab.press("ArrowRight", 39)
    assert tab.evaluate(colour) == dark
    for _ in range(2):  # the wide table of runs can be scrolled
        tab.press("Tab", 9)
    assert tab.evaluate("document.activeElement.innerText") == "Training loss: table"
    tab.press("Enter", 13, "\r")
    assert tab.evaluate("document.querySelector('details').open")
    assert {"radio", "image", "table", "columnheader", "heading"} <= tab.require_names()
    tab.require_inert(spoilt)
    silent = spoilt.with_name("silent.html")
    silent.write_text(re.sub('alt="[^"]*"', "", spoilt.read_text()))
    tab.open(silent)
    with pytest.raises(AssertionError, match="image"):
        tab.require_names()


def test_a_chart_of_no_number_is_none() -> None:
    x = np.arange(40)
    assert chart.draw("t", [Line("a", x, np.full(40, np.nan))]) == ""
    long = chart.draw("t", [Line("a", np.arange(10**5), np.random.default_rng(0).random(10**5))])
    assert len(long) < 10**6  # bytes
