import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevctl.monitor.figure import HEIGHT, POINTS, WIDTH, Line, Marker, figure, labels, short, ticks

X = np.arange(10.0)


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def test_a_curve_from_left_to_right_and_its_gap() -> None:
    y = np.array([0.0, 1, 2, 3, np.nan, 5, 6, 7, 8, 10])
    paths = parsed(figure("loss", "", [Line("loss", X, y)])).iter("path")
    (path,) = [element.attrib["d"] for element in paths if "line" in element.attrib["class"]]
    assert path.count("M") == 2
    points = [tuple(map(float, p)) for p in re.findall(r"([\d.]+) ([\d.]+)", path)]
    assert len(points) == 9
    assert points[0][0] < points[-1][0] <= WIDTH
    assert points[-1][1] < points[0][1] < HEIGHT


def test_values_that_are_not_finite_are_marked_and_counted() -> None:
    text = figure("grad_norm", "", [Line("grad_norm", X, np.ones(10), np.array([3.0, 7.0]))])
    assert text.count('class="bad s0"') == 2
    assert "(2 not finite)" in text


def test_a_curve_without_a_value_leaves_no_figure() -> None:
    assert figure("lr", "", [Line("lr", X, np.full(10, np.nan))]) == ""
    assert "not finite" in figure("loss", "", [Line("loss", X, np.full(10, np.nan), X)])


def test_markers_outside_the_axis_are_left_out() -> None:
    text = figure("loss", "", [Line("loss", X, X)], [Marker(5, "resumed"), Marker(50, "later")])
    assert "resumed" in text
    assert "later" not in text


def test_names_are_escaped() -> None:
    hostile = '<script>alert("x")</script>'
    text = figure(hostile, hostile, [Line(hostile, X, X), Line("b", X, X)], [Marker(1, hostile)])
    assert "<script" not in text
    parsed(text)


def test_long_curves_are_averaged() -> None:
    x = np.arange(50_000.0)
    assert figure("loss", "", [Line("loss", x, np.sin(x))]).count("L") < POINTS


def test_one_spike_does_not_flatten_the_rest() -> None:
    y = np.ones(200)
    y[100] = 1e6
    heights = re.findall(r"L[\d.]+ ([\d.]+)", figure("loss", "", [Line("loss", np.arange(200.0), y)]))
    assert float(heights[0]) < HEIGHT / 2


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0, 10, [0, 5, 10]), (0.3, 1.1, [0.4, 0.6, 0.8, 1.0]), (-2, 2, [-2, -1, 0, 1, 2])]
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 4) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12_000, "12k"), (1_500_000, "1.5M"), (2e-5, "2e-5"), (0.00015, "1.5e-4"), (1234, "1234")],
)
def test_short_numbers(value: float, text: str) -> None:
    assert short(value, 3) == text


def test_labels_tell_near_values_apart() -> None:
    assert labels([10.401, 10.402]) == ["10.401", "10.402"]


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(numbers, min_size=1, max_size=80), st.booleans())
def test_any_numbers_give_a_well_formed_figure(values: list[float], log: bool) -> None:
    y = np.array(values)
    x = np.arange(float(len(values)))
    finite = np.where(np.isfinite(y), y, np.nan)
    with np.errstate(all="ignore"):
        text = figure("any", "", [Line("any", x, finite, x[~np.isfinite(y)])], log=log)
    if text:
        parsed(text)
        assert "nan" not in text.replace("any", "")
