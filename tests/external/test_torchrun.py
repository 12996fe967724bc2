"""Several processes by torch's own launcher, whose workers live in sessions of their own: started, stopped, gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bevctl.errors import ExitCode
from bevctl.external.process import left_behind

from .trees import write

TRAIN = """
import argparse, os, time
import torch
import torch.distributed as dist

if False:
    import mmcv

parser = argparse.ArgumentParser()
parser.add_argument("config")
parser.add_argument("--work-dir")
parser.add_argument("--resume-from")
parser.add_argument("--launcher")
args = parser.parse_args()
rank, gpu = int(os.environ["RANK"]), torch.cuda.is_available()
dist.init_process_group("nccl" if gpu else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler(device.type, enabled=gpu)
start = int(args.resume_from[-5]) if args.resume_from else 0
for epoch in range(start + 1, 4):
    for step in range(1, 5):
        x = torch.randn(32, 64, device=device)
        with torch.autocast(device.type, dtype=torch.float16 if gpu else torch.bfloat16):
            loss = model(x).float().pow(2).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        time.sleep(0.01 if args.resume_from else 0.3)
        if rank == 0:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S") + ",000"
            print("%s - mmdet - INFO - Epoch [%d][%d/4]\\tlr: 1.000e-01, eta: 0:00:09, time: 0.300, data_time: 0.001, "
                  "loss: %.4f" % (stamp, epoch, step, loss.item()), flush=True)
    if rank == 0:
        torch.save({"state_dict": model.module.state_dict(), "meta": {"epoch": epoch, "iter": 4 * epoch}},
                   os.path.join(args.work_dir, "epoch_%d.pth" % epoch))
    dist.barrier()
"""


def begin(folder: Path, *more: str) -> subprocess.Popen[str]:
    write(folder / "tree" / "tools" / "train.py", TRAIN)
    config = write(folder / "tree" / "configs" / "tiny.py", "model = dict(type='A')\ndata = dict(samples_per_gpu=1)\n")
    command = [sys.executable, "-m", "bevctl", "train", str(config), "--engine", "external", "--gpus", "2", *more]
    command += ["--no-preflight", "--work-dir", str(folder / "run")]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def stopped(tmp_path: Path) -> None:
    process = begin(tmp_path)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "epoch_1.pth").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    workers = left_behind(str(tmp_path / "run"))
    assert len(workers) >= 3, "the launcher and two workers"
    assert len({os.getsid(worker.pid) for worker in workers}) > 1, "a signal to one group would not reach them all"
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == ExitCode.PREEMPTED, said
    assert left_behind(str(tmp_path / "run")) == []
    assert not any(worker.is_running() for worker in workers)


def resumed(tmp_path: Path) -> None:
    process = begin(tmp_path, "--resume", "auto")
    _, said = process.communicate(timeout=120)
    assert process.returncode == ExitCode.OK, said
    assert "Epoch [3][4/4]" in said
    segments = json.loads((tmp_path / "run" / "run.json").read_text())["segments"]
    assert [segment["world"] for segment in segments] == [2, 2]
    assert segments[1]["resume"].endswith(".pth")


@pytest.mark.slow
def test_stopped_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    stopped(tmp_path)


@pytest.mark.gpu
def test_stopped_and_resumed_on_gpus(tmp_path: Path) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    stopped(tmp_path)
    resumed(tmp_path)
