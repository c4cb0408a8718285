"""What one result looks like: JSON and CSV that parse, tables and pictures that fit the terminal."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hma_cli.report import render as module
from hma_cli.report.layout import fitted
from hma_cli.report.render import render
from hma_cli.report.result import Finding, Picture, Result, Span, Table

MARKUP = re.compile(r"\[[^\]]*\]")
STYLES = {"dead": ("·", "dim", "dead"), "cached": ("▒", "cyan", "cached"), "moves": ("█", "green", "moves")}


def picture(*spans: tuple[int, int, str], length: int, label: str = "0 full") -> Picture:
    bar = tuple(Span(start=start, stop=stop, style=style) for start, stop, style in spans)
    return Picture(title="The sequence", length=length, unit="tokens", bars=((label, bar),), styles=STYLES)


def drawn(one: Picture, width: int) -> list[str]:
    return MARKUP.sub("", module._drawn(one, width)).splitlines()


def bar(one: Picture, width: int = 120) -> str:
    return drawn(one, width)[1].split("  ", 1)[1]


def test_a_bar_shows_dead_cached_and_moving_stretches_in_proportion() -> None:
    assert bar(picture((0, 50, "dead"), (50, 75, "cached"), (75, 100, "moves"), length=100)) == (
        "·" * 50 + "▒" * 25 + "█" * 25
    )


def test_what_moves_is_seen_however_short_it_is() -> None:
    assert bar(picture((0, 999_999, "dead"), (999_999, 1_000_000, "moves"), length=1_000_000)) == "·" * 99 + "█"


def test_a_token_that_is_neither_is_left_blank() -> None:
    """The last prompt token is computed on D; where characters are fewer than tokens it shares the last one."""
    assert bar(picture((0, 9, "moves"), length=10)) == "█" * 90 + " " * 10
    assert bar(picture((0, 4095, "moves"), length=4096)) == "█" * 100


@given(st.integers(1, 5000), st.data())
def test_every_character_is_the_most_important_span_that_touches_it(length: int, data: st.DataObject) -> None:
    first, second = sorted(data.draw(st.tuples(st.integers(0, length), st.integers(0, length))))
    spans = ((0, first, "dead"), (first, second, "cached"), (second, length, "moves"))
    one = picture(*(span for span in spans if span[0] < span[1]), length=length)
    found = bar(one)
    assert len(found) == 100
    for index, mark in enumerate(found):
        tokens = (index * length // 100, max(0, -(-(index + 1) * length // 100) - 1))
        touching = [style for start, stop, style in spans if any(start <= token < stop for token in tokens)]
        assert list(STYLES).index(next(name for name in STYLES if STYLES[name][0] == mark)) >= max(
            list(STYLES).index(style) for style in touching
        )


@pytest.mark.parametrize("width", [40, 80, 140, 200])
def test_a_picture_is_no_wider_than_the_terminal(width: int) -> None:
    lines = drawn(picture((0, 4096, "moves"), length=131_072, label="10 sliding_window"), width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for part in ("· dead", "▒ cached", "█ moves", "one character: 1,"):
        assert part in text or width != 140
        assert part.split(":")[0] in text


def wide(**changes: Any) -> Table:
    return Table(
        **{
            "title": "Groups",
            "columns": ("group", "kind", "window or chunk", "page bytes", "descriptors", "bytes"),
            "rows": (
                (0, "sliding_window", "1,024", "65,536", 320, 20_971_520),
                (1, "full", "–", "65,536", 40_960, 2_684_354_560),
            ),
            "optional": ("page bytes", "window or chunk"),
            **changes,
        }
    )


def printed(table: Table, width: int) -> str:
    from rich.console import Console

    stream = io.StringIO()
    Console(file=stream, width=width).print(module._rich_table(table, width), crop=False)
    return stream.getvalue()


@pytest.mark.parametrize("width", [30, 40, 50, 60, 70, 80, 140, 200])
def test_no_number_is_ever_cut(width: int) -> None:
    text = printed(wide(), width)
    assert "…" not in text
    for number in ("320", "40,960", "20,971,520", "2,684,354,560"):
        assert number in text
    if width >= 50:  # what cannot be left out takes 44 characters
        assert max(map(len, text.splitlines())) <= width


def test_columns_are_left_out_one_by_one_and_named() -> None:
    assert fitted(wide(), 140).left_out == fitted(wide(), 70).left_out == ()
    assert not fitted(wide(), 140).narrow
    assert fitted(wide(), 70).narrow
    assert fitted(wide(), 55).left_out == ("page bytes",)
    assert fitted(wide(), 49).left_out == ("page bytes", "window or chunk")
    assert "Too narrow for: page bytes, window or chunk." in printed(wide(), 49)
    assert fitted(wide(optional=()), 20).left_out == ()


def test_a_table_of_words_is_left_to_wrap() -> None:
    words = Table(title="t", columns=("a", "b"), rows=(("some words " * 9, "more"),))
    assert not fitted(words, 30).narrow
    assert max(map(len, printed(words, 30).splitlines())) <= 30


def test_a_table_without_rows_is_its_headings() -> None:
    assert "descriptors" in printed(wide(rows=()), 80)


def result(**changes: Any) -> Result:
    return Result(**{"schema": "hma.test/1", "data": {"a": 1, "b": [None, True, "–"]}, **changes})


def test_json_begins_with_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    render(result(), "json")
    text = capsys.readouterr().out
    assert json.loads(text) == {"schema": "hma.test/1", "a": 1, "b": [None, True, "–"]}
    assert text.endswith("}\n")


def test_csv_quotes_what_needs_it(capsys: pytest.CaptureFixture[str]) -> None:
    rows = ({"name": 'a, "b"\nc', "number": 1}, {"name": "", "number": None})
    render(result(records=rows), "csv")
    found = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert found == [{"name": 'a, "b"\nc', "number": "1"}, {"name": "", "number": ""}]


def test_the_order_on_paper(capsys: pytest.CaptureFixture[str]) -> None:
    findings = (Finding(level="ok", text="fine [not markup]", remedy="do [this]"), Finding(level="problem", text="bad"))
    pictures = (picture((0, 10, "moves"), length=10),)
    render(result(text="first [text]", tables=(wide(),), pictures=pictures, findings=findings))
    out = capsys.readouterr().out
    parts = ["first [text]", "Groups", "The sequence", "✓ fine [not markup] do [this]", "✗ bad"]
    assert [out.index(part) for part in parts] == sorted(out.index(part) for part in parts)
