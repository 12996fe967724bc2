"""What goes to which stream, in which form."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.table import Table

from bevctl.console import Console, printable, strict_json, table


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def text_of(stream: object) -> str:
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


def plain_console(**settings: object) -> Console:
    return Console(io.StringIO(), io.StringIO(), **settings)  # type: ignore[arg-type]


def test_results_go_to_stdout_and_talk_to_stderr() -> None:
    console = plain_console(verbose=1)
    console.result("a result")
    console.info("info")
    console.detail("detail")
    console.warn("careful")
    console.error("No file a.", "Make it.")
    assert text_of(console.stdout) == "a result\n"
    assert text_of(console.stderr) == "info\ndetail\nwarning: careful\nerror: No file a.\n  Make it.\n"


def test_quiet_keeps_warnings_and_errors() -> None:
    console = plain_console(quiet=True, verbose=1)
    console.info("info")
    console.detail("detail")
    console.warn("careful")
    console.error("No file a.")
    assert text_of(console.stderr) == "warning: careful\nerror: No file a.\n"


def test_detail_needs_verbose() -> None:
    console = plain_console()
    console.detail("detail")
    assert text_of(console.stderr) == ""


def test_long_lines_are_not_broken_where_nobody_watches() -> None:
    console = plain_console()
    console.info("word " * 60)
    assert text_of(console.stderr).count("\n") == 1


def test_json_mode_prints_the_document_and_nothing_else() -> None:
    console = plain_console(json=True)
    console.result("a result")
    console.document("memory", {"parameters": {"trainable": 3}})
    document = json.loads(text_of(console.stdout))
    assert list(document) == ["schema", "version", "command", "status", "parameters"]
    assert document["schema"] == "bevctl.memory/1"
    assert document["command"] == "memory"
    assert document["status"] == "ok"
    assert document["parameters"] == {"trainable": 3}


@pytest.mark.parametrize("key", ["schema", "version", "command"])
def test_a_body_cannot_say_what_the_document_is(key: str) -> None:
    with pytest.raises(AssertionError, match=key):
        plain_console(json=True).document("memory", {key: "other"})


def test_text_mode_prints_no_document() -> None:
    console = plain_console()
    console.document("memory", {})
    assert text_of(console.stdout) == ""


def test_a_body_can_state_its_own_status() -> None:
    console = plain_console(json=True)
    console.document("preflight", {"status": "warn"})
    assert json.loads(text_of(console.stdout))["status"] == "warn"


def test_numbers_that_are_not_finite_become_null_with_a_sibling() -> None:
    given_values = {"loss": math.nan, "scale": math.inf, "low": [1.0, -math.inf], "inside": [{"x": -math.inf}], "ok": 2}
    assert strict_json(given_values) == {
        "loss": None,
        "loss_nonfinite": "nan",
        "scale": None,
        "scale_nonfinite": "inf",
        "low": [1.0, None],
        "low_nonfinite": [None, "-inf"],
        "inside": [{"x": None, "x_nonfinite": "-inf"}],
        "ok": 2,
    }


def test_plain_forms_of_common_values() -> None:
    values = {"f": np.float32(0.5), "i": np.int64(3), "p": Path("a/b"), "t": (1, 2), "b": True, 4: None}
    assert strict_json(values) == {"f": 0.5, "i": 3, "p": "a/b", "t": [1, 2], "b": True, "4": None}


def test_a_value_without_a_json_form_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="object"):
        strict_json({"x": object()})


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@given(json_like)
def test_every_document_is_strict_utf8_json(value: object) -> None:
    text = json.dumps(strict_json({"value": value}), allow_nan=False, ensure_ascii=False)
    assert json.loads(text.encode())


def test_printable_spells_out_what_moves_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\x07\x9b\u202e") == "a\\x1b[2Jb\\r\\x07\\x9b\\u202e"
    assert printable("tab\tline\n×é漢") == "tab\tline\n×é漢"
    assert printable("\udc80") == "\\udc80"


@given(st.text(st.characters()))
def test_printable_output_is_inert_and_encodable(text: str) -> None:
    shown = printable(text)
    assert all(c.isprintable() or c in "\n\t" for c in shown)
    shown.encode()


def test_nothing_from_outside_is_markup_or_escape() -> None:
    console = plain_console(color="always")
    evil = "[red]x[/red] \x1b[31m :smile:"
    console.result(evil)
    console.info(evil)
    console.result(Panel(evil))
    grid = Table(title=evil)
    grid.add_column(evil)
    grid.add_row(evil)
    console.result(grid)
    everything = text_of(console.stdout) + text_of(console.stderr)
    assert "\x1b[31m" not in everything
    assert everything.count("[red]x[/red]") == 6
    assert everything.count(":smile:") == 6


def test_a_table_aligns_numbers_right_and_groups_thousands() -> None:
    console = plain_console()
    console.result(table(["part", "count"], [("fuser", 774656), ("x", 1)], title="model"))
    lines = text_of(console.stdout).splitlines()
    assert lines[0].startswith("model")
    assert any("774,656" in line for line in lines)
    assert any(line.rstrip(" │").endswith("      1") for line in lines)


def test_no_cell_of_a_table_is_cut_and_names_stay_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    console = plain_console()
    row = ("a_name_to_copy", "a-value-that-is-longer-than-there-is-room")
    console.result(table(["name", "value"], [row], named=True))
    text = text_of(console.stdout)
    assert "a_name_to_copy" in text
    assert "…" not in text
    assert "".join(line.split("│")[2].strip() for line in text.splitlines() if "│" in line) == row[1]


@pytest.mark.parametrize(
    ("color", "terminal", "environment", "coloured"),
    [
        ("auto", False, {}, False),
        ("auto", True, {}, True),
        ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"NO_COLOR": ""}, True),
        ("auto", True, {"TERM": "dumb"}, False),
        ("auto", False, {"FORCE_COLOR": "1"}, True),
        ("auto", False, {"FORCE_COLOR": "0"}, False),
        ("auto", True, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ("never", True, {"FORCE_COLOR": "1"}, False),
        ("always", False, {"NO_COLOR": "1"}, True),
    ],
)
def test_when_colour_is_used(
    color: str, terminal: bool, environment: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = Terminal() if terminal else io.StringIO()
    Console(io.StringIO(), stream, color=color).error("No file a.")
    assert ("\x1b[" in stream.getvalue()) is coloured
    assert "error: " in stream.getvalue()


def test_progress_on_a_terminal_shows_counts_and_leaves_nothing_on_stdout() -> None:
    console = Console(io.StringIO(), Terminal())
    assert console.is_terminal
    with console.progress(4, "[b]read\x1b[2J") as progress:
        progress.advance(2)
        progress.describe("write")
        progress.advance(2)
    assert "4/4" in text_of(console.stderr)
    assert "\x1b[2J" not in text_of(console.stderr)
    assert text_of(console.stdout) == ""


def test_progress_elsewhere_is_a_line_each_tenth() -> None:
    console = plain_console()
    with console.progress(100, "read") as progress:
        for _ in range(100):
            progress.advance()
    lines = text_of(console.stderr).splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("read: 10/100")
    assert lines[-1].startswith("read: 100/100")


def test_progress_of_unknown_length_is_a_line_each_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 4.0, 11.0, 12.0, 22.0])
    monkeypatch.setattr("bevctl.console.time.monotonic", lambda: next(clock))
    console = plain_console()
    with console.progress(None, "read") as progress:
        for _ in range(4):
            progress.advance()
    assert text_of(console.stderr).splitlines() == ["read: 2 in 11 s", "read: 4 in 22 s"]


def test_quiet_progress_says_nothing() -> None:
    console = plain_console(quiet=True)
    with console.progress(2, "read") as progress:
        progress.describe("still")
        progress.advance(2)
    assert text_of(console.stderr) == ""


def test_several_documents_take_a_line_each() -> None:
    stream = io.StringIO()
    console = Console(stream, io.StringIO(), json=True)
    for number in (1, 2):
        console.document("monitor", {"number": number, "deep": {"list": [1, 2]}}, one_line=True)
    assert [json.loads(line)["number"] for line in stream.getvalue().splitlines()] == [1, 2]


@pytest.mark.parametrize(("encoding", "blocks"), [("utf-8", True), ("ascii", False), ("latin-1", False)])
def test_block_characters_where_the_encoding_has_them(encoding: str, blocks: bool) -> None:
    assert Console(io.TextIOWrapper(io.BytesIO(), encoding=encoding), io.StringIO()).draws_blocks is blocks


def test_a_picture_needs_a_terminal_on_stdout() -> None:
    assert not Console(io.StringIO(), Terminal()).can_redraw
    assert Console(Terminal(), io.StringIO()).can_redraw
    assert not Console(Terminal(), io.StringIO(), json=True).can_redraw


def test_a_picture_is_replaced_and_the_terminal_put_back() -> None:
    terminal = Terminal()
    with Console(terminal, io.StringIO()).redrawn() as picture:
        assert min(picture.size) > 0
        picture.show("first")
        picture.show("second")
    text = terminal.getvalue()
    assert text.startswith("\x1b[?1049h")
    assert text.index("first") < text.index("second") < text.index("\x1b[?1049l")
