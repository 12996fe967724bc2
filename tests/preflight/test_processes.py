"""Who holds GPU memory, and who of them was left behind: real processes, with a simulated driver and /proc."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bevctl.preflight.nvml import Gpu, GpuProcess, NotReported
from bevctl.preflight.processes import Holder, duration, gpu_openers, holders, inspect, is_at_work, is_training
from tests.preflight.orphans import adopted, child, fake_proc, orphan, script, wait_for

GIB = 2**30
WRITING = """
import sys, time
with open(sys.argv[1], "w", buffering=1) as log:
    while True:
        log.write("Iter\\n")
        sum(range(20000))
"""


def gpu(*processes: tuple[int, int | None], index: int = 0) -> Gpu:
    return Gpu(index, f"GPU-{index}", "NVIDIA H200", minor=index, processes=tuple(GpuProcess(*p) for p in processes))


@pytest.mark.parametrize(
    "command",
    [
        "python tools/train.py configs/x.py",
        "/opt/conda/bin/python3.8 -u tools/train.py --fp16",
        "python -m bevctl train tiny",
        "python /usr/local/bin/bevctl train",
        "bevctl train --resume auto",
        "torchrun --nproc_per_node 8 tools/train.py",
        "python -m torch.distributed.launch --nproc_per_node=8 tools/train.py",
        "python /env/bin/torchpack dist-run -np 8 python tools/train.py",
        "python -c 'from multiprocessing.spawn import spawn_main; spawn_main()' --multiprocessing-fork",
        "python projects/dist_train_fp16.py",
        "python pretrain_depth.py",
    ],
)
def test_command_lines_of_training(command: str) -> None:
    assert is_training(shlex.split(command))


@pytest.mark.parametrize(
    "command",
    [
        "",
        "python",
        "python -i",
        "bash tools/train.py",
        "vim train.py",
        "python serve.py --weights train/latest.pth",
        "python -m http.server --directory training",
        "python constrain.py",
        "jupyter notebook train.ipynb",
        "bevctl eval tiny",
        "/usr/lib/xorg/Xorg :0",
    ],
)
def test_other_command_lines(command: str) -> None:
    assert not is_training(shlex.split(command))


def test_a_process_as_it_is_told(tmp_path: Path) -> None:
    with child(str(script(tmp_path)), "configs/x.py") as pid:
        process = inspect(pid)
    assert process is not None
    assert (process.parent, process.mine, process.training, process.orphan) == (os.getpid(), True, True, "")
    assert process.age_s < 60
    told = str(process)
    assert f"pid {pid} (user {process.user}, started" in told
    assert f"parent {os.getpid()} ({psutil.Process().name()}) alive" in told
    assert "tools/train.py configs/x.py" in told


def test_a_process_that_is_gone_is_none() -> None:
    assert inspect(999_999_999) is None


def test_a_long_command_is_cut(tmp_path: Path) -> None:
    with child(str(script(tmp_path)), "x" * 500) as pid:
        process = inspect(pid)
    assert process is not None
    assert len(process.command) == 160


def test_a_training_process_without_a_parent_is_an_orphan(tmp_path: Path) -> None:
    with orphan(str(script(tmp_path))) as pid:
        process = inspect(pid)
    assert process is not None
    assert process.adopted
    assert "its parent is gone" in process.orphan
    assert "its parent is gone" in str(process)
    assert Holder(pid, process, {0: GIB}).is_orphan


def test_an_orphan_under_a_subreaper_is_one_too(tmp_path: Path) -> None:
    with adopted(tmp_path, str(script(tmp_path))) as pid:
        process = inspect(pid)
    assert process is not None
    assert (process.parent_name, process.adopted) == (Path(sys.executable).name, True)
    assert "its parent is gone" in process.orphan


def test_an_orphan_that_does_not_train_is_no_orphaned_training_process(tmp_path: Path) -> None:
    with orphan(str(script(tmp_path, name="serve.py"))) as pid:
        assert not Holder(pid, inspect(pid), {0: GIB}).is_orphan


def test_a_detached_run_that_computes_and_writes_is_at_work(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with orphan(str(script(tmp_path, WRITING)), str(log)) as pid:
        wait_for(log)
        assert is_at_work(pid)
        process = inspect(pid)
        assert process is not None
        assert (process.adopted, process.orphan) == (True, "")
        assert "detached" in str(process)


def test_a_run_whose_log_is_old_is_not_at_work(tmp_path: Path) -> None:
    log, code = tmp_path / "log.txt", "import sys, time; log = open(sys.argv[1], 'w')\nwhile True: sum(range(9999))"
    with orphan(str(script(tmp_path, code)), str(log)) as pid:
        wait_for(log)
        os.utime(log, (0, 0))
        assert not is_at_work(pid)


def test_a_dead_process_that_nobody_collects(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    seen = inspect(process.pid)
    held = holders([gpu((process.pid, GIB))], fake_proc(tmp_path, {process.pid: -1}))
    process.wait()
    assert seen is not None
    assert seen.zombie
    assert f"not yet collected by its parent {os.getpid()}" in seen.orphan
    assert held == []  # a child of this process


def test_the_drivers_list_with_the_memory_of_each_gpu(tmp_path: Path) -> None:
    with orphan(str(script(tmp_path))) as pid:
        proc = fake_proc(tmp_path / "proc", {pid: 0})
        (holder,) = holders([gpu((pid, 2 * GIB)), gpu((pid, None), index=1)], proc)
    assert (holder.pid, holder.memory) == (pid, {0: 2 * GIB, 1: None})
    assert holder.is_orphan
    assert str(holder).endswith("[GPU 0: 2.00 GiB, GPU 1: an unknown amount]")


def test_this_process_and_its_children_are_not_others(tmp_path: Path) -> None:
    with child(str(script(tmp_path))) as pid:
        proc = fake_proc(tmp_path / "proc", {pid: 0, os.getpid(): 0})
        assert holders([gpu((pid, GIB), (os.getpid(), GIB))], proc) == []


def test_a_pid_of_another_container_is_not_mistaken_for_a_process_here(tmp_path: Path) -> None:
    with orphan(str(script(tmp_path))) as pid:
        (holder,) = holders([gpu((pid, GIB))], fake_proc(tmp_path / "proc", {pid: -1}))
    assert holder.process is None
    assert not holder.is_orphan
    assert "another container" in str(holder)


def test_in_a_container_the_open_device_files_tell(tmp_path: Path) -> None:
    with orphan(str(script(tmp_path))) as pid:
        proc = fake_proc(tmp_path / "proc", {pid: 1})
        assert holders([gpu()], proc) == []
        (holder,) = holders([gpu(index=1)], proc)
        assert (holder.pid, holder.memory) == (pid, {1: None})
        stranger, local = sorted(holders([gpu((4_000_000, GIB), index=1)], proc), key=lambda h: h.pid != 4_000_000)
        assert (stranger.pid, stranger.process, local.pid) == (4_000_000, None, pid)
        silent = Gpu(1, "GPU-1", "NVIDIA H200", minor=1, processes=NotReported("Not Supported", supported=False))
        assert [h.pid for h in holders([silent], proc)] == [pid]


def test_a_program_that_only_watches_the_gpu_is_no_holder(tmp_path: Path) -> None:
    with orphan(str(script(tmp_path))) as pid:
        assert holders([gpu()], fake_proc(tmp_path / "proc", {pid: 0}, cuda=False)) == []


def test_open_device_files_are_read_from_the_real_proc(tmp_path: Path) -> None:
    with child(str(script(tmp_path))) as pid:
        assert gpu_openers()[pid] == set()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59, "59 s"), (90, "2 min"), (7200, "2 h"), (200_000, "2 d")]
)
def test_ages(seconds: float, text: str) -> None:
    assert duration(seconds) == text
