import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bevctl.monitor.trend import BLOCKS, Curve, plot, sparkline

NAN = float("nan")


def test_a_rising_line_goes_through_all_levels() -> None:
    assert sparkline(np.arange(8.0), 8) == BLOCKS


def test_many_values_are_averaged_and_a_spike_is_cut_off() -> None:
    assert sparkline(np.repeat([0.0, 1.0], 50), 2) == "▁█"
    values = np.tile([0.0, 1.0], 100)
    values[77] = 1e9
    assert set(sparkline(values, 200)) == {"▁", "█"}


def test_what_is_not_finite_is_marked_and_equal_values_are_level() -> None:
    assert sparkline(np.array([1.0, NAN, 1.0]), 3) == "▄!▄"
    assert sparkline(np.array([NAN]), 5) == "!"
    assert sparkline(np.array([]), 5) == ""


def test_ascii_alone_where_asked_for() -> None:
    assert sparkline(np.arange(8.0), 8, plain=True).isascii()
    curves = [Curve(np.arange(9.0), np.arange(9.0)), Curve(np.arange(9.0), np.arange(9.0)[::-1])]
    assert all(line.isascii() for line in plot(curves, 20, 6, plain=True))


def test_two_curves_have_their_own_marks_and_one_where_they_meet() -> None:
    x = np.arange(5.0)
    lines = plot([Curve(x, x), Curve(x, x[::-1])], 5, 5)
    drawing = [line.partition("│")[2] for line in lines[:-1]]
    assert drawing == ["○   ●", " ○ ● ", "  ◍  ", " ● ○ ", "●   ○"]
    assert lines[-1].split() == ["0", "4"]
    assert lines[0].startswith("3.92")


def test_nothing_to_draw() -> None:
    assert plot([Curve(np.arange(3.0), np.full(3, NAN))], 10, 5) == []


@given(st.lists(st.floats(), min_size=1, max_size=60), st.integers(1, 40))
def test_any_numbers_fill_their_width(values: list[float], width: int) -> None:
    with np.errstate(all="ignore"):
        assert len(sparkline(np.array(values), width)) == min(width, len(values))
        for line in plot([Curve(np.arange(float(len(values))), np.array(values))], width, 4)[:-1]:
            assert len(line.partition("│")[2]) == width
