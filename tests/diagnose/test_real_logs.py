"""Real logs through each topic: the troubles in them are named, and the rest stays silent."""

from __future__ import annotations

import datetime
import json
import os
import shutil
from pathlib import Path

import pytest

from bevctl.console import strict_json
from bevctl.diagnose.report import Status, document

from .cases import ask, found, the

LOGS = Path(__file__).parents[2].parent / "shared" / "logs"
HEALTHY = ("01_", "03_", "16_", "17_", "18_mmcv_pointpillars_20220821_233842", "19_")
NAN = {
    "14_": {"NAN001": "warn"},
    "33_": {"NAN001": "fail", "NAN102": "warn"},
    "37_": {"NAN001": "fail", "NAN103": "warn"},
}
UNSTABLE = {"14_": {"NAN001": "warn", "LOSS001": "warn"}, "33_": {"NAN001": "fail"}, "37_": {"NAN001": "fail"}}
EMPTY = ("06_", "18_mmcv_pointpillars_20220821_205041", "21_", "23_")
"""Without a record that has a loss."""
pytestmark = pytest.mark.skipif(not LOGS.is_dir(), reason="the real logs are not beside this checkout")


LONG_AGO = datetime.datetime(2026, 1, 1).timestamp()


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The logs, written long ago: one without clock times belongs to a run that goes on as long as its file is new."""
    folder = tmp_path_factory.mktemp("real")
    for path in LOGS.iterdir():
        copy = shutil.copyfile(path, folder / path.name)
        os.utime(copy, (LONG_AGO, LONG_AGO))
    return folder


@pytest.fixture(params=sorted(path.name for path in LOGS.glob("[0-9]*")), ids=lambda name: name[:40])
def path(request: pytest.FixtureRequest, logs: Path) -> Path:
    """Each of the logs."""
    return logs / str(request.param)


def test_nan(path: Path) -> None:
    answer = ask("nan", path)
    expected = next((NAN[start] for start in NAN if path.name.startswith(start)), {})
    assert found(answer) == expected
    silent = Status.INCONCLUSIVE if path.name.startswith(EMPTY) else Status.CLEAR
    assert answer.status is (Status.FOUND if expected else silent)
    json.dumps(strict_json(document("nan", answer)), allow_nan=False)


def test_unstable_loss(path: Path) -> None:
    answer = ask("unstable-loss", path)
    expected = next((UNSTABLE[start] for start in UNSTABLE if path.name.startswith(start)), {})
    assert found(answer) == expected
    if path.name.startswith(HEALTHY):
        short = path.name.startswith("17_")  # seven windows
        assert answer.status is (Status.INCONCLUSIVE if short else Status.CLEAR)


def test_fp16_inactive(path: Path) -> None:
    answer = ask("fp16-inactive", path)
    assert found(answer) == {}
    known = ("01_", "03_", "18_", "19_")
    assert answer.status is (Status.CLEAR if path.name.startswith(known) else Status.INCONCLUSIVE)


def test_oom(path: Path) -> None:
    answer = ask("oom", path)
    killed = path.name.startswith("06_")
    assert found(answer) == ({"LOAD002": "fail"} if killed else {})
    other_end = ("03_", "09_", "19_", "21_")  # finished, or died of something else
    silent = Status.CLEAR if path.name.startswith(other_end) else Status.INCONCLUSIVE
    assert answer.status is (Status.FOUND if killed else silent)
    json.dumps(strict_json(document("oom", answer)), allow_nan=False)


def test_hang(path: Path) -> None:
    answer = ask("hang", path)
    killed = path.name.startswith("06_")
    assert found(answer) == ({"LOAD002": "fail"} if killed else {})
    over = ("03_", "09_", "19_", "21_")  # finished or dead; of the others only the log's end is seen
    silent = Status.CLEAR if path.name.startswith(over) else Status.INCONCLUSIVE
    assert answer.status is (Status.FOUND if killed else silent)


NO_SPEEDUP = {
    "11_": {"LOAD001": "warn"},
    "18_": {"PREC101": "warn"},
    "19_": {"PREC101": "warn"},
    "31_": {"TIME002": "warn"},
    "39_": {"TIME002": "warn"},
}


def test_no_speedup(path: Path) -> None:
    answer = ask("no-speedup", path)
    expected = next((NO_SPEEDUP[start] for start in NO_SPEEDUP if path.name.startswith(start)), {})
    assert found(answer) == expected
    assert answer.status is (Status.FOUND if expected else Status.INCONCLUSIVE)
    json.dumps(strict_json(document("no-speedup", answer)), allow_nan=False)


def test_the_auxiliary_2d_head_is_named() -> None:
    answer = ask("nan", next(LOGS.glob("37_*")))
    told = the(answer, "NAN103").evidence[0].what
    assert "enc_" in told.partition("; finite")[0]
    assert "frame_0_loss_cls" in told.partition("; finite")[2]


def test_the_header_of_a_real_log_tells_gpus_batch_and_rate() -> None:
    answer = ask("nan", next(LOGS.glob("03_*.log")))
    assert any("loss scale dynamic" in said for said in answer.looked_at)
    assert "LR002" not in [finding.id for finding in answer.findings]
