"""`bevctl preflight`: exit codes, JSON, selection, --reap, and the check at the start of `bevctl train`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest

from bevctl.preflight import checks, processes, reap
from bevctl.preflight.checks import CheckSpec, Context, Outcome, failed, passed, unknown, warned
from tests.conftest import Outcome as Ran
from tests.preflight import fake_nvml
from tests.preflight.fake_nvml import GIB
from tests.preflight.orphans import orphan, script

Invoke = Callable[..., Ran]
KEYS = {"id", "name", "section", "status", "advisory", "found", "required", "why", "fix"}


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_nvml.install(monkeypatch, init=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setattr("bevctl.preflight.nvml.device_traces", lambda _: [])


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Context]]:
    """Puts one check a function in place of all; returns the contexts that they are called with."""

    def put(*functions: Callable[[Context], Outcome], advisory: bool = False) -> list[Context]:
        seen: list[Context] = []

        def watching(function: Callable[[Context], Outcome]) -> Callable[[Context], Outcome]:
            def watched(context: Context) -> Outcome:
                seen.append(context)
                return function(context)

            return watched

        specs = tuple(
            CheckSpec(f"SYS90{number}", "a check", watching(function), "it matters", advisory=advisory)
            for number, function in enumerate(functions)
        )
        monkeypatch.setattr(checks, "all_checks", lambda: {"system": specs})
        return seen

    return put


@pytest.mark.parametrize(
    ("outcomes", "options", "code", "status"),
    [
        ([passed("fine")], [], 0, "pass"),
        ([passed("fine"), warned("odd", "Look.")], [], 0, "warn"),
        ([warned("odd", "Look.")], ["--fail-on", "warn"], 1, "warn"),
        ([unknown("dark"), warned("odd", "Look.")], [], 3, "unknown"),
        ([unknown("dark"), failed("bad", "Mend it.")], [], 1, "fail"),
    ],
)
def test_exit_codes_and_status(
    invoke: Invoke,
    table: Callable[..., list[Context]],
    outcomes: list[Outcome],
    options: list[str],
    code: int,
    status: str,
) -> None:
    table(*[lambda _, o=outcome: o for outcome in outcomes])
    text, document = invoke("preflight", "tiny", *options), invoke("preflight", "tiny", *options, "--json")
    assert (text.code, document.code) == (code, code)
    assert (document.document["schema"], document.document["status"]) == ("bevctl.preflight/1", status)
    assert text.out.splitlines()[-1].startswith(status.upper())


def test_the_document_lists_every_check_with_all_fields(invoke: Invoke, tmp_path: Path) -> None:
    ran = invoke("preflight", "tiny", "--only", "system", "--skip", "SYS001", "--work-dir", tmp_path / "run", "--json")
    found = ran.document["checks"]
    assert [check["id"] for check in found] == [s.id for specs in checks.all_checks().values() for s in specs]
    assert all(set(check) == KEYS for check in found)
    assert {check["status"] for check in found if check["section"] != "system"} == {"skip"}
    assert all(check["found"] for check in found)
    by_id = {check["id"]: check for check in found}
    assert by_id["SYS001"]["found"] == "left out with --skip"
    assert by_id["SYS003"]["status"] == "pass"


def test_gpu_checks_are_skipped_where_there_is_no_gpu(invoke: Invoke, tmp_path: Path) -> None:
    ran = invoke("preflight", "tiny", "--only", "gpu", "--work-dir", tmp_path / "run", "--json")
    assert ran.code == 0
    assert {c["status"] for c in ran.document["checks"]} == {"skip"}


def test_fewer_gpus_than_asked_for_fail(invoke: Invoke) -> None:
    ran = invoke("preflight", "tiny", "--only", "GPU001", "--gpus", "2", "--json")
    assert ran.code == 1
    assert ran.document["checks"][0]["status"] == "fail"


def test_fp16_on_a_cpu_is_a_warning(invoke: Invoke) -> None:
    ran = invoke("preflight", "tiny", "--only", "gpu003", "--fp16", "--device", "cpu", "--json")
    assert (ran.code, ran.document["status"]) == (0, "warn")
    assert invoke("preflight", "tiny", "--only", "gpu003", "--fp16", "--fail-on", "warn").code == 1


def test_what_the_command_line_says_reaches_the_checks(
    invoke: Invoke, table: Callable[..., list[Context]], tmp_path: Path
) -> None:
    seen = table(lambda _: passed("fine"))
    words = ["--bf16", "--batch", "6", "--workers", "5", "--gpus", "3", "--min-free", "400GB", "--timeout", "7"]
    words += ["--deep", "--python", "/usr/bin/python3", "--resume", f"{tmp_path}/none.pth"]
    words += ["--work-dir", f"{tmp_path}/r"]
    assert invoke("preflight", "tiny", *words).code == 0
    (context,) = seen
    assert (context.precision, context.batch, context.workers, context.gpus) == ("bf16", 6, 5, 3)
    assert (context.min_free, context.timeout, context.deep) == (400 * 10**9, 7.0, True)
    assert (context.python, context.resume) == ("/usr/bin/python3", str(tmp_path / "none.pth"))
    assert (context.work_dir, context.device, context.source) == (tmp_path / "r", "auto", "tiny")
    assert context.config is not None
    assert context.origins["train.batch"].where == "--batch"


@pytest.mark.parametrize("text", ["model: [", "", "no_such_key: 1\n", "\x00\x01"])
def test_a_broken_config_is_for_the_checks_to_tell(
    invoke: Invoke, table: Callable[..., list[Context]], tmp_path: Path, text: str
) -> None:
    seen = table(lambda c: failed(c.config_error.message, "Mend it.") if c.config_error else passed("fine"))
    path = tmp_path / "config.yaml"
    path.write_text(text)
    ran = invoke("preflight", path, "--fp16", "--batch", "2")
    (context,) = seen
    if text:  # an empty file is a config of defaults
        assert ran.code == 1
        assert (context.config, context.source) == (None, str(path))
    assert (context.precision, context.batch) == ("fp16", 2)


def test_a_config_that_is_not_there_is_a_finding_too(invoke: Invoke, table: Callable[..., list[Context]]) -> None:
    seen = table(lambda c: failed("missing", "Look.") if c.config_error else passed("fine"))
    assert invoke("preflight", "no/such/config.yaml").code == 1
    assert seen[0].config_error is not None


def test_an_override_that_is_wrong_is_a_usage_error(invoke: Invoke, table: Callable[..., list[Context]]) -> None:
    table(lambda _: passed("fine"))
    for words in (["--set", "train.bach=4"], ["--set", "train.batch=0"], ["--batch", "0"]):
        ran = invoke("preflight", "tiny", *words, "--json")
        assert ran.code == 2
        assert "train.ba" in ran.document["error"]["message"]


MMCV = """
optimizer = dict(type='AdamW', lr=2e-4)
data = dict(samples_per_gpu=3, workers_per_gpu=6)
work_dir = 'work_dirs/petr'
"""


@pytest.mark.parametrize(("line", "precision"), [("fp16 = dict(loss_scale=512.)\n", "fp16"), ("", "fp32")])
def test_a_config_of_mmcv_is_read_for_what_the_checks_need(
    invoke: Invoke, table: Callable[..., list[Context]], tmp_path: Path, line: str, precision: str
) -> None:
    seen = table(lambda _: passed("fine"))
    path = tmp_path / "petr.py"
    path.write_text(MMCV + line)
    assert invoke("preflight", path).code == 0
    assert invoke("preflight", path, "--bf16", "--workers", "1").code == 0
    first, second = seen
    assert first.foreign is not None
    assert (first.config, first.precision, first.batch, first.workers) == (None, precision, 3, 6)
    assert first.work_dir == Path("work_dirs/petr")
    assert (second.precision, second.batch, second.workers) == ("bf16", 3, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "GPU099"], "GPU099"),
        (["--skip", "sytem"], "sytem"),
        (["--min-free", "lots"], "lots"),
        (["--timeout", "0"], "0"),
        (["--gpus", "0"], "0"),
        (["--yes"], "--reap"),
        (["--pid", "1"], "--reap"),
    ],
)
def test_usage_errors(invoke: Invoke, words: list[str], message: str) -> None:
    ran = invoke("preflight", "tiny", *words, "--json")
    assert ran.code == 2
    assert message in ran.document["error"]["message"] + ran.document["error"]["hint"]


def test_a_check_that_hangs_does_not_keep_the_program() -> None:
    code = (
        "import sys, threading; from bevctl.preflight import checks; from bevctl.cli.main import main\n"
        "hang = checks.CheckSpec('SYS900', 'hangs', lambda _: threading.Event().wait(), 'it matters')\n"
        "checks.all_checks = lambda: {'system': (hang,)}\n"
        "sys.argv = ['bevctl', 'preflight', 'tiny', '--timeout', '0.2', '--json']\n"
        "main()"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ)
    assert time.monotonic() - started < 20
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["checks"][0]["status"] == "unknown"


def test_without_torch_dependent_checks_torch_is_not_imported(tmp_path: Path) -> None:
    code = (
        "import sys, time; from bevctl.cli.main import run\n"
        f"code = run(['preflight', 'tiny', '-q', '--only', 'gpu,system', '--skip', 'SYS001', "
        f"'--work-dir', {str(tmp_path / 'run')!r}, '--device', 'cpu'])\n"
        "print('torch' in sys.modules, time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported, seconds = done.stdout.split()[-2:]
    assert imported == "False"
    assert float(seconds) < 1.0  # 0.25 on a quiet machine


class TestReap:
    @pytest.fixture
    def left(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[int]:
        """An orphan on the only GPU."""
        with orphan(str(script(tmp_path))) as pid:
            fake_nvml.install(monkeypatch, fake_nvml.h200(processes=[(pid, 2 * GIB)]))
            monkeypatch.setattr(processes, "gpu_openers", lambda _: {pid: {0}})
            monkeypatch.setattr(reap, "_RELEASE_S", 0.3)
            yield pid

    def test_it_lists_and_exits_1_without_yes(self, invoke: Invoke, left: int) -> None:
        for words in ([], ["--yes", "--dry-run"]):
            ran = invoke("preflight", "--reap", *words)
            assert ran.code == 1
            assert f"pid {left}" in ran.out
            assert "GPU 0: 2.00 GiB" in ran.out
            assert "--yes" in ran.err
        assert os.path.exists(f"/proc/{left}")

    def test_it_ends_with_yes(self, invoke: Invoke, left: int) -> None:
        ran = invoke("preflight", "--reap", "--yes", "--json")
        assert ran.code == 0
        (entry,) = ran.document["reap"]
        assert (entry["pid"], entry["memory"], entry["ended"]["gone"]) == (left, {"0": 2 * GIB}, True)
        assert (ran.document["status"], ran.document["checks"]) == ("pass", [])

    def test_preflight_names_it_and_how_to_end_it(self, invoke: Invoke, left: int) -> None:
        ran = invoke("preflight", "tiny", "--only", "GPU008,GPU009", "--json")
        by_id = {check["id"]: check for check in ran.document["checks"]}
        assert by_id["GPU009"]["status"] == "warn"
        assert f"pid {left}" in by_id["GPU009"]["found"]
        assert "bevctl preflight --reap --yes" in by_id["GPU009"]["fix"]
        assert f"kill {left}" in by_id["GPU009"]["fix"]

    def test_nothing_to_end(self, invoke: Invoke) -> None:
        ran = invoke("preflight", "--reap", "--json")
        assert ran.code == 0
        assert ran.document["reap"] == []

    def test_a_pid_that_is_no_orphan(self, invoke: Invoke) -> None:
        ran = invoke("preflight", "--reap", "--pid", str(os.getpid()), "--yes")
        assert ran.code == 2
        assert str(os.getpid()) in ran.err
