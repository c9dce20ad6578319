"""The page: whole, escaped, and loading nothing."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from lockstep.check import compare, page, report
from lockstep.check.check import Result

VOID = {"meta", "br", "input"}


class Reader(HTMLParser):
    """Texts, and the tags that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.opened.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def parse(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert reader.opened == []
    return reader


def test_the_page_has_roots_and_every_module(gelu: Result) -> None:
    text = page.page(gelu, "lockstep check a.py b.py")
    read = parse(text)
    said = " ".join(read.texts)
    assert "DIFFERENT" in said and "GELU (erf) for GELU (tanh)" in said
    assert all(call in said for call in gelu.pairs.values())
    assert "Loss curves" in said
    places = replace(gelu.roots[0], everywhere="", names=[f"h.{n}" for n in range(6)])
    line = report.roots(replace(gelu, roots=[places]))[0]
    assert "6 places: h.0, h.1, h.2, h.3 and 2 more: " in line


def test_nothing_is_loaded_and_nothing_runs(gelu: Result) -> None:
    evil = "</td><script>alert(1)</script><img src=https://x.invalid>"
    result = replace(gelu, roots=[replace(gelu.roots[0], where=evil, cause=evil, remedy=evil)])
    text = page.page(result, evil)
    assert not re.search(r"<script|<img|<link|<iframe|url\(|@import", text)
    assert evil not in text and "&lt;script&gt;" in text
    read = parse(text)
    assert not {name for name, _ in read.attributes} & {"src", "href", "onload", "onclick"}


def test_assert_equivalent_fails_with_the_report(
    gelu: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "compare_programs", lambda *args, **options: gelu)
    with pytest.raises(AssertionError, match="GELU"):
        compare.assert_equivalent("a.trace", "b.py")
    equal = replace(gelu, verdict="equal", roots=[])
    monkeypatch.setattr(compare, "compare_programs", lambda *args, **options: equal)
    assert compare.assert_equivalent("a.trace", "b.py") is equal
    assert report.text(equal)[0].startswith("EQUAL")
