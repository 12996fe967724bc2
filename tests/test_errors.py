"""Errors carry their sentence, hint and code through every process border."""

from __future__ import annotations

import pickle

import pytest

from bevctl.errors import BevctlError, ExitCode, did_you_mean


def test_pickling_keeps_message_hint_and_code() -> None:
    error = pickle.loads(pickle.dumps(BevctlError("No file a.", "Make it.", ExitCode.RUN_FAILED)))
    assert (error.message, error.hint, error.code) == ("No file a.", "Make it.", ExitCode.RUN_FAILED)
    assert str(error) == "No file a."


def test_the_default_code_is_usage() -> None:
    assert BevctlError("No file a.").code == ExitCode.USAGE == 2


def test_every_code_has_a_meaning_of_its_own() -> None:
    meanings = [code.meaning for code in ExitCode]
    assert len(set(meanings)) == len(ExitCode)


@pytest.mark.parametrize(
    ("word", "hint"),
    [("bacth", "Did you mean 'batch'?"), ("BATCH", "Known: batch, epochs."), ("", "Known: batch, epochs.")],
)
def test_did_you_mean(word: str, hint: str) -> None:
    assert did_you_mean(word, ["epochs", "batch"]) == hint
