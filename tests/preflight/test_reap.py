"""Ending what was left behind, and nothing else."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import psutil
import pytest

from bevctl.errors import BevctlError, ExitCode
from bevctl.preflight import processes, reap
from bevctl.preflight.processes import Holder, inspect
from bevctl.preflight.reap import present_gpus, reapable
from tests.preflight import fake_nvml
from tests.preflight.fake_nvml import GIB, FakeCard, h200
from tests.preflight.orphans import STUBBORN, child, orphan, script, wait_for


def holder(pid: int, **changes: object) -> Holder:
    process = inspect(pid)
    assert process is not None
    return Holder(pid, dataclasses.replace(process, **changes), {0: 2 * GIB})  # type: ignore[arg-type]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def release_when_gone(monkeypatch: pytest.MonkeyPatch, card: FakeCard, pid: int) -> None:
    """The card lists `pid` with 2 GiB for as long as it lives."""

    def memory(_: FakeCard) -> object:
        card.processes = [(pid, 2 * GIB)] if is_running(pid) else []
        return fake_nvml.SimpleNamespace(total=140 * GIB, free=138 * GIB if is_running(pid) else 140 * GIB)

    fake_nvml.install(monkeypatch, card)
    monkeypatch.setattr("pynvml.nvmlDeviceGetMemoryInfo", memory)


def test_an_orphan_is_ended_and_its_memory_comes_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with orphan(str(script(tmp_path))) as pid:
        release_when_gone(monkeypatch, h200(), pid)
        (ended,) = reap.reap(reapable([holder(pid)]))
        assert not is_running(pid)
    assert (ended.pid, ended.signal, ended.gone, ended.released) == (pid, "SIGTERM", True, {0: 2 * GIB})


def test_one_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    with orphan(str(script(tmp_path, STUBBORN.format(ready=str(ready))))) as pid:
        wait_for(ready)
        release_when_gone(monkeypatch, h200(), pid)
        (ended,) = reap.reap([holder(pid)], grace_s=0.3)
        assert not is_running(pid)
    assert (ended.signal, ended.gone) == ("SIGKILL", True)


def test_the_children_of_an_orphan_end_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    inner = script(tmp_path, STUBBORN.format(ready=str(ready)), "worker.py")
    code = f"import subprocess, sys; subprocess.run([sys.executable, {str(inner)!r}])"
    with orphan(str(script(tmp_path, code))) as pid:
        wait_for(ready)
        (worker,) = psutil.Process(pid).children()
        fake_nvml.install(monkeypatch)
        reap.reap([holder(pid)], grace_s=0.3)
        assert not is_running(worker.pid)


def test_memory_that_does_not_come_free_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reap, "_RELEASE_S", 0.3)
    with orphan(str(script(tmp_path))) as pid:
        fake_nvml.install(monkeypatch, h200(processes=[(pid, 2 * GIB)]))
        (ended,) = reap.reap([holder(pid)])
    assert (ended.gone, ended.released) == (True, {0: 0})


def test_a_pid_that_was_taken_over_by_another_process_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with orphan(str(script(tmp_path))) as pid:
        fake_nvml.install(monkeypatch)
        (ended,) = reap.reap([holder(pid, created=1.0)])
        assert is_running(pid)
    assert ended.gone


def test_only_orphans_of_this_user_that_train_are_chosen(tmp_path: Path) -> None:
    training, serving = str(script(tmp_path)), str(script(tmp_path, name="serve.py"))
    with child(training) as alive, orphan(training) as left, orphan(serving) as other:
        mine = holder(left)
        held = [holder(alive), mine, holder(left, mine=False), holder(left, zombie=True), holder(other)]
        held.append(Holder(999_999_999, None, {0: GIB}))
        assert reapable(held) == [mine]


def test_a_pid_may_name_an_orphan_that_does_not_look_like_training(tmp_path: Path) -> None:
    with orphan(str(script(tmp_path, name="serve.py"))) as pid:
        chosen = holder(pid)
        assert reapable([chosen], [pid]) == [chosen]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mine": False, "user": "alice"}, "belongs to user alice"),
        ({"zombie": True}, "dead already"),
        ({"adopted": False}, "is not orphaned"),
    ],
)
def test_a_pid_that_may_not_be_ended_is_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with orphan(str(script(tmp_path))) as pid, pytest.raises(BevctlError, match=words) as caught:
        reapable([holder(pid, **changes)], [pid])
    assert caught.value.code == ExitCode.USAGE


def test_a_pid_that_holds_no_gpu_memory_is_refused() -> None:
    with pytest.raises(BevctlError, match=f"--pid {os.getpid()}"):
        reapable([], [os.getpid()])


def test_no_driver_means_no_gpu_and_a_broken_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml.install(monkeypatch, init=fake_nvml.pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setattr("bevctl.preflight.nvml.device_traces", lambda _: [])
    assert present_gpus() == ()
    fake_nvml.install(monkeypatch, init=fake_nvml.pynvml.NVML_ERROR_UNKNOWN)
    with pytest.raises(BevctlError) as caught:
        present_gpus()
    assert caught.value.code == ExitCode.UNKNOWN


def test_the_grace_is_longer_than_a_checkpoint_takes() -> None:
    assert reap.GRACE_S > 25
    assert processes.holders([]) == []
