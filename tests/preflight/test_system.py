"""The checks of disk, memory, cores and limits, on a machine or in a container that is made up in a folder."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevctl.config.load import load
from bevctl.errors import BevctlError
from bevctl.finding import CheckStatus
from bevctl.preflight import host, system
from bevctl.preflight.checks import CheckSpec, Context, Outcome
from bevctl.preflight.host import Limit
from bevctl.preflight.needs import checkpoint_bytes, gpu_state_bytes, parameters, sample_bytes
from bevctl.sizes import format_gb, format_gib, parse_size
from tests.preflight.conftest import MakeContext

GIB = 2**30


def bare(tmp_path: Path, **options: Any) -> Context:
    """A context whose CONFIG could not be read."""
    return Context(config=None, work_dir=tmp_path / "run", **options)


class TestDisk:
    def test_enough(self, make_context: MakeContext) -> None:
        outcome = system.disk_space(make_context(min_free=1))
        assert outcome.status == CheckStatus.PASS
        assert outcome.required.startswith("0 MB: --min-free")

    def test_too_little(self, make_context: MakeContext) -> None:
        outcome = system.disk_space(make_context(min_free=10**18))
        assert outcome.status == CheckStatus.FAIL
        assert "1000000000.0 GB" in outcome.required
        assert "--work-dir" in outcome.fix

    def test_the_need_is_what_the_run_keeps(self, make_context: MakeContext) -> None:
        context = make_context("train.keep=2", "model.camera=null")
        size = checkpoint_bytes(context)
        assert size == 12 * parameters(context)
        outcome = system.disk_space(context)
        assert outcome.status == CheckStatus.PASS
        assert f"5 checkpoints of {format_gb(size)}" in outcome.required

    def test_an_average_of_the_weights_makes_checkpoints_larger(self, make_context: MakeContext) -> None:
        context = make_context("model.camera=null", "train.ema=0.999")
        assert checkpoint_bytes(context) == 16 * parameters(context)

    def test_a_checkpoint_that_is_there_is_measured(self, make_context: MakeContext) -> None:
        context = make_context()
        context.work_dir.mkdir()
        (context.work_dir / "epoch_1.pth").write_bytes(bytes(3_000_000))
        assert "checkpoints of 3 MB" in system.disk_space(context).required

    def test_without_a_config_the_need_is_not_known(self, tmp_path: Path) -> None:
        outcome = system.disk_space(bare(tmp_path))
        assert (outcome.status, outcome.advisory) == (CheckStatus.UNKNOWN, True)
        assert "--min-free" in outcome.fix

    def test_the_filesystem_of_a_folder_that_is_not_there_yet(self, tmp_path: Path) -> None:
        assert system.existing(tmp_path / "a" / "b") == tmp_path

    @pytest.mark.parametrize(("files", "free", "status"), [(1000, 999, "fail"), (10**6, 10**5, "pass"), (0, 0, "pass")])
    def test_inodes(
        self, monkeypatch: pytest.MonkeyPatch, make_context: MakeContext, files: int, free: int, status: str
    ) -> None:
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_files=files, f_favail=free))
        assert system.inodes(make_context()).status == status


class TestWritable:
    def test_a_file_is_written_and_removed(self, make_context: MakeContext, tmp_path: Path) -> None:
        outcome = system.writable(make_context())
        assert outcome.status == CheckStatus.PASS
        assert str(tmp_path) in outcome.found
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
    def test_a_folder_that_refuses(self, monkeypatch: pytest.MonkeyPatch, make_context: MakeContext, code: int) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
        outcome = system.writable(make_context())
        assert outcome.status == CheckStatus.FAIL
        assert os.strerror(code) in outcome.found

    def test_a_file_in_its_place(self, make_context: MakeContext) -> None:
        context = make_context()
        context.work_dir.write_text("")
        assert "is not a folder" in system.writable(context).found

    def test_a_file_above_it(self, make_context: MakeContext, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        outcome = system.writable(make_context(f"work_dir={tmp_path}/file/run"))
        assert (outcome.status, "is not a folder" in outcome.found) == (CheckStatus.FAIL, True)

    def test_a_loop_of_links_above_it(self, make_context: MakeContext, tmp_path: Path) -> None:
        (tmp_path / "loop").symlink_to("loop")
        for below in ("loop", "loop/run"):
            outcome = system.writable(make_context(f"work_dir={tmp_path}/{below}"))
            assert outcome.status == CheckStatus.FAIL
            assert f"{tmp_path}/loop" in outcome.found

    def test_a_name_that_is_too_long(self, make_context: MakeContext, tmp_path: Path) -> None:
        context = make_context(f"work_dir={tmp_path}/{'a' * 300}", min_free=1)
        outcome = system.writable(context)
        assert outcome.status == CheckStatus.FAIL
        assert "too long" in outcome.found
        assert system.disk_space(context).status == CheckStatus.PASS

    def test_a_link_to_nothing(self, make_context: MakeContext) -> None:
        context = make_context()
        context.work_dir.symlink_to("/nowhere/at/all")
        outcome = system.writable(context)
        assert (outcome.status, "a link to nothing" in outcome.found) == (CheckStatus.FAIL, True)

    def test_a_folder_that_train_would_refuse(self, make_context: MakeContext) -> None:
        context = make_context()
        context.work_dir.mkdir()
        assert system.writable(context).status == CheckStatus.PASS
        (context.work_dir / "log.txt").write_text("")
        assert system.writable(context).status == CheckStatus.WARN
        assert system.writable(make_context(resume="auto")).status == CheckStatus.PASS


def answering(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Any program is there and prints `text`."""
    monkeypatch.setattr(system.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=text))


class TestQuota:
    HEADER = (
        "Disk quotas for user me (uid 1000):\n"
        "     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace\n"
    )

    @pytest.mark.parametrize(
        ("row", "status", "words"),
        [
            ("/dev/sda1 500000 900000 1000000 0 10 0 0 0", "pass", "512 MB left"),
            ("/dev/sda1 1000000* 900000 1000000 0 10 0 0 0", "fail", "1.0 GB of 1.0 GB used"),
            ("nfs:/home 900001* 900000 0 0 10 0 0 0", "fail", "nfs:/home"),
            ("/dev/sda1 500000 0 0 0 10 0 0 0", "pass", "no quota"),
            ("", "pass", "no quota"),
        ],
    )
    def test_rows(
        self, monkeypatch: pytest.MonkeyPatch, make_context: MakeContext, row: str, status: str, words: str
    ) -> None:
        answering(monkeypatch, self.HEADER + row + "\n")
        outcome = system.quota(make_context())
        assert (outcome.status.value, words in outcome.found) == (status, True)

    def test_without_the_program_it_is_not_known(
        self, monkeypatch: pytest.MonkeyPatch, make_context: MakeContext
    ) -> None:
        monkeypatch.setattr(system.shutil, "which", lambda _: None)
        assert system.quota(make_context()).status == CheckStatus.UNKNOWN
        assert _spec("SYS004").advisory


class TestSharedMemory:
    def usage(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        monkeypatch.setattr(system.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))

    def test_what_docker_gives_is_too_little(self, monkeypatch: pytest.MonkeyPatch, make_context: MakeContext) -> None:
        self.usage(monkeypatch, 64 * 2**20)
        context = make_context("train.workers=8", "train.batch=4", gpus=2)
        outcome = system.shared_memory(context)
        assert outcome.status == CheckStatus.FAIL
        assert "--shm-size" in outcome.fix
        assert "32 batches of 4 samples" in outcome.required
        self.usage(monkeypatch, 2 * 8 * 2 * 4 * sample_bytes(context))
        assert system.shared_memory(context).status == CheckStatus.PASS

    def test_without_workers_it_is_not_used(self, make_context: MakeContext) -> None:
        assert system.shared_memory(make_context("train.workers=0")).status == CheckStatus.SKIP

    def test_a_machine_without_it(self, make_context: MakeContext, tmp_path: Path) -> None:
        assert system.shared_memory(make_context(), tmp_path / "shm").status == CheckStatus.FAIL

    def test_without_a_config_the_need_is_not_known(self, tmp_path: Path) -> None:
        outcome = system.shared_memory(bare(tmp_path, workers=4))
        assert (outcome.status, outcome.advisory) == (CheckStatus.UNKNOWN, True)

    def test_the_size_of_a_sample(self, make_context: MakeContext) -> None:
        points = 10 * 35_000 * 5 * 4
        images = 6 * 3 * 256 * 704
        lidar = make_context("model.camera=null", "model.map=null", "data.sweeps=9")
        both = make_context("model.camera.image_size=[256, 704]", "model.map=null", "data.sweeps=9")
        assert sample_bytes(lidar) == points
        assert sample_bytes(both) == images + points
        padded = dataclasses.replace(
            lidar, config=load("petrv2_seg", sets=["model.map=null", "model.object={}"]).config
        )
        assert sample_bytes(padded) == 12 * (3 + 1) * 928 * 1600, "two moments, and a byte a pixel that says padding"
        with_map = make_context("model.camera=null", "data.sweeps=9")
        assert with_map.config is not None
        assert sample_bytes(with_map) == points + 4 * len(with_map.config.data.map_classes) * _cells(with_map)


def _cells(context: Context) -> int:
    assert context.config is not None
    assert context.config.model.map is not None
    low, high, step = context.config.model.map.xbound
    return round((high - low) / step) ** 2


@pytest.mark.parametrize(("soft", "status"), [(100, "fail"), (1024, "pass"), (system.resource.RLIM_INFINITY, "pass")])
def test_open_files(monkeypatch: pytest.MonkeyPatch, make_context: MakeContext, soft: int, status: str) -> None:
    monkeypatch.setattr(system.resource, "getrlimit", lambda _: (soft, 4096))
    outcome = system.open_files(make_context("train.workers=4", "train.batch=4"))
    assert outcome.status == status
    assert ("the hard limit is 4096" in outcome.fix) == (status == "fail")


@pytest.mark.parametrize(("available", "status"), [(1, "fail"), (5, "warn"), (8, "pass")])
def test_host_memory(monkeypatch: pytest.MonkeyPatch, make_context: MakeContext, available: int, status: str) -> None:
    monkeypatch.setattr(system, "memory_available", lambda: Limit(available * GIB, "this machine"))
    outcome = system.host_memory(make_context("train.workers=10", "device=cpu"))
    assert outcome.status == status
    assert f"{available}.0 GiB available (this machine)" in outcome.found


@pytest.mark.parametrize(("have", "status"), [(2.5, "warn"), (10.0, "pass")])
def test_cores(monkeypatch: pytest.MonkeyPatch, make_context: MakeContext, have: float, status: str) -> None:
    monkeypatch.setattr(system, "cores", lambda: Limit(have, "the limit of its cgroup v2"))
    outcome = system.cpu_cores(make_context("train.workers=4", gpus=2))
    assert outcome.status == status
    assert f"{have:g} cores (the limit of its cgroup v2)" in outcome.found
    assert outcome.required == "8, for 2 x 4 loading processes"


class TestClock:
    @pytest.mark.parametrize(("answer", "status"), [("yes", "pass"), ("no", "warn"), ("", "unknown")])
    def test_in_step(
        self, monkeypatch: pytest.MonkeyPatch, make_context: MakeContext, answer: str, status: str
    ) -> None:
        answering(monkeypatch, answer + "\n")
        assert system.clock(make_context()).status == status
        assert _spec("SYS009").advisory

    def test_behind(self, monkeypatch: pytest.MonkeyPatch, make_context: MakeContext) -> None:
        monkeypatch.setattr(system.time, "time", lambda: 0.0)
        outcome = system.clock(make_context())
        assert outcome.status == CheckStatus.WARN
        assert "before bevctl was installed" in outcome.found


def _spec(id: str) -> CheckSpec:
    return next(spec for spec in system.CHECKS if spec.id == id)


def test_every_check_runs_here(make_context: MakeContext) -> None:
    for spec in system.CHECKS:
        outcome = spec.function(make_context("model.camera=null"))
        assert isinstance(outcome, Outcome)
        assert outcome.status in (CheckStatus.PASS, CheckStatus.WARN) or spec.advisory, spec.id


class TestContainer:
    """Files as the kernel shows them, below a folder."""

    def machine(self, root: Path, cgroup: str, **files: str) -> Path:
        self.write(root, "proc/meminfo", "MemTotal:  67108864 kB\nMemAvailable:   33554432 kB\nHugePages_Total: 0\n")
        self.write(root, "proc/self/cgroup", cgroup)
        for name, text in files.items():
            self.write(root, "sys/fs/cgroup/" + name.replace("__", "/").replace("--", "."), text)
        return root

    def write(self, root: Path, name: str, text: str) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def test_without_a_limit_the_machine_counts(self, tmp_path: Path) -> None:
        root = self.machine(tmp_path, "0::/\n")
        self.write(root, "sys/fs/cgroup/memory.max", "max\n")
        self.write(root, "sys/fs/cgroup/memory.current", "1000\n")
        self.write(root, "sys/fs/cgroup/cpu.max", "max 100000\n")
        assert host.memory_available(root) == Limit(32 * GIB, "this machine")
        assert host.cores(root) == Limit(len(os.sched_getaffinity(0)), "this machine")

    def test_limits_of_cgroup_v2(self, tmp_path: Path) -> None:
        root = self.machine(tmp_path, "0::/job/step\n")
        self.write(root, "sys/fs/cgroup/job/memory.max", f"{8 * GIB}\n")
        self.write(root, "sys/fs/cgroup/job/memory.current", f"{6 * GIB}\n")
        self.write(root, "sys/fs/cgroup/job/memory.stat", f"anon 1\ninactive_file {GIB}\n")
        self.write(root, "sys/fs/cgroup/job/step/cpu.max", "50000 100000\n")
        assert host.memory_available(root) == Limit(3 * GIB, "the limit of its cgroup v2")
        assert host.cores(root) == Limit(0.5, "the limit of its cgroup v2")

    def test_limits_of_cgroup_v1(self, tmp_path: Path) -> None:
        root = self.machine(tmp_path, "9:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n")
        self.write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{4 * GIB}\n")
        self.write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{GIB}\n")
        self.write(root, "sys/fs/cgroup/memory/memory.stat", f"cache 5\ntotal_inactive_file {GIB // 2}\n")
        self.write(root, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "75000\n")
        self.write(root, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
        assert host.memory_available(root) == Limit(3.5 * GIB, "the limit of its cgroup v1")
        assert host.cores(root) == Limit(0.75, "the limit of its cgroup v1")

    def test_no_limit_in_cgroup_v1(self, tmp_path: Path) -> None:
        root = self.machine(tmp_path, "9:memory:/\n4:cpu,cpuacct:/\n")
        self.write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
        self.write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{GIB}\n")
        self.write(root, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
        assert host.memory_available(root).source == "this machine"
        assert host.cores(root).source == "this machine"

    def test_a_machine_without_cgroups(self, tmp_path: Path) -> None:
        self.write(tmp_path, "proc/meminfo", "MemAvailable:   1024 kB\n")
        assert host.memory_available(tmp_path) == Limit(2**20, "this machine")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("400GB", 400 * 10**9),
        ("64GiB", 64 * 2**30),
        ("1.5 TiB", 3 * 2**39),
        ("10M", 10**7),
        ("1000", 1000),
        ("2kB", 2000),
        ("7 B", 7),
        ("1K", 1000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e3", "1 gigabyte", "5iB", "1,5GB", "nan", "1GBGB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(BevctlError, match="is not a size"):
        parse_size(text)


@given(st.integers(0, 10**15))
def test_a_plain_number_is_bytes_and_survives_its_own_unit(size: int) -> None:
    assert parse_size(str(size)) == size
    assert parse_size(f"{size}KiB") == 1024 * size
    assert abs(parse_size(format_gb(size)) - size) <= max(10**8, 10**6)
    assert format_gib(size).endswith("iB")


def test_gpu_state_is_four_numbers_a_parameter_and_cuda(make_context: MakeContext) -> None:
    context = make_context("model.camera=null")
    assert gpu_state_bytes(context) == 16 * parameters(context) + 2**29
