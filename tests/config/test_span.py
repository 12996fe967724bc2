import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevctl.config.span import SETTLING_ITERS, Span, parse_span


def test_a_range_leaves_the_first_iterations_out() -> None:
    assert parse_span("18:20") == Span(18, 20, SETTLING_ITERS + 1, math.inf)


@pytest.mark.parametrize(
    ("text", "span"),
    [
        (":20", Span(-math.inf, 20)),
        (" 2.5 : ", Span(2.5, math.inf)),
        ("1:2@500:9000", Span(1, 2, 500, 9000)),
        ("1:2@:30", Span(1, 2, 1, 30)),
        ("1:2@5:", Span(1, 2, 5, math.inf)),
    ],
)
def test_open_sides_and_iterations(text: str, span: Span) -> None:
    assert parse_span(text) == span


@pytest.mark.parametrize("text", ["", ":", "3", "a:b", "3:2", "nan:1", "1:nan", "1:2:3", "1:2@", "1:2@7", "1:2@9:8"])
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(ValueError, match="low:high"):
        parse_span(text)


@pytest.mark.parametrize(("text", "shown"), [("1:2", "1 to 2"), (":2", "at most 2"), ("1:", "at least 1")])
def test_as_a_sentence_says_it(text: str, shown: str) -> None:
    assert str(parse_span(text)) == shown


@given(st.text(max_size=20))
def test_no_text_does_anything_but_parse_or_raise_value_error(text: str) -> None:
    try:
        span = parse_span(text)
    except ValueError:
        return
    assert span.low <= span.high
    assert span.first <= span.last
