from __future__ import annotations

from collections.abc import Callable

import pytest

from bevctl.errors import ExitCode
from bevctl.explain import explanations
from bevctl.preflight.checks import all_checks
from tests.conftest import Outcome

Invoke = Callable[..., Outcome]
SPECS = {spec.id: spec for specs in all_checks().values() for spec in specs}


@pytest.mark.parametrize("id", SPECS)
def test_every_check_is_explained(id: str) -> None:
    entry = explanations()[id]
    assert entry.title == SPECS[id].name
    assert all(len(text) > 20 for text in (entry.meaning, entry.decided, entry.do))


def test_explain_one(invoke: Invoke) -> None:
    outcome = invoke("explain", "file005")
    assert outcome.code == ExitCode.OK
    for words in ("FILE005: checkpoint finite", "Meaning", "How it is decided", "What to do"):
        assert words in outcome.out
    document = invoke("explain", "FILE005", "--json").document
    assert document["schema"] == "bevctl.explain/1"
    assert document["id"] == "FILE005"


def test_explain_lists_all(invoke: Invoke) -> None:
    assert set(SPECS) <= {line.split()[0] for line in invoke("explain").out.splitlines()}
    assert {entry["id"] for entry in invoke("explain", "--json").document["findings"]} >= set(SPECS)


def test_an_unknown_id_gets_the_nearest(invoke: Invoke) -> None:
    outcome = invoke("explain", "FILE05")
    assert outcome.code == ExitCode.USAGE
    assert "FILE005" in outcome.err


def test_nothing_near_an_id_is_answered_with_the_way_to_the_list(invoke: Invoke) -> None:
    assert invoke("explain", "QQQ").err == "error: No finding 'QQQ'.\n  `bevctl explain` lists them all.\n"
