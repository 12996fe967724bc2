from __future__ import annotations

import os
import signal

import pytest

from bevctl.engine import signals
from bevctl.engine.signals import Interrupted, StopRequest


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Codes that the process would have ended with."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    return codes


def _send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_the_first_signal_asks_and_a_second_ends(exits: list[int]) -> None:
    with StopRequest() as stop:
        assert not stop.requested
        _send(signal.SIGTERM)
        assert (stop.requested, stop.name, exits) == (True, "SIGTERM", [])
        _send(signal.SIGINT)
        _send(signal.SIGTERM)
        assert exits == [130, 143]


def test_each_signal_is_answered_on_the_spot(exits: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest():
        _send(signal.SIGINT)
        assert capfd.readouterr().err == "SIGINT: stopping with a checkpoint; a second signal ends at once.\n"
        _send(signal.SIGTERM)
        assert capfd.readouterr().err == "Ended at once by SIGTERM.\n"
    assert exits == [143]


def test_one_rank_answers_for_all(
    exits: list[int], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with StopRequest():
        _send(signal.SIGINT)
        _send(signal.SIGINT)
    assert (exits, capfd.readouterr().err) == ([130], "")


def test_torchruns_echo_of_a_signal_is_not_a_second_one(exits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with StopRequest():
        _send(signal.SIGINT)
        _send(signal.SIGTERM)
        assert exits == []
        monkeypatch.setattr(signals, "_ECHO_S", 0.0)
        _send(signal.SIGTERM)
        assert exits == [143]


@pytest.mark.usefixtures("exits")
def test_an_interruptible_wait_is_left() -> None:
    with StopRequest() as stop:
        with pytest.raises(Interrupted), stop.interruptible():
            _send(signal.SIGTERM)
        with pytest.raises(Interrupted), stop.interruptible():
            pytest.fail("entered although a signal had come")


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
