"""A tree of mmcv's kind whose training script needs nothing but Python, and does what `mode` in its config says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bevctl.config.foreign import read_foreign
from bevctl.external.interpreter import Interpreter
from bevctl.external.launch import Launch, plan_launch
from bevctl.external.trees import read_tree
from bevctl.external.wanted import Wanted

from .trees import write

TRAIN = """
import argparse, os, re, signal, subprocess, sys, time

if False:
    import mmcv

parser = argparse.ArgumentParser()
parser.add_argument("config")
parser.add_argument("--work-dir")
parser.add_argument("--resume-from")
parser.add_argument("--launcher")
parser.add_argument("--cfg-options", nargs="+", default=[])
args = parser.parse_args()
options = dict(option.split("=", 1) for option in args.cfg_options)
mode, epochs, pause = options["mode"], int(options.get("epochs", 2)), float(options.get("pause", 0.01))
ignores = signal.SIG_IGN
start = int(re.search(r"epoch_(\\d+)", args.resume_from)[1]) if args.resume_from else 0
log = open(os.path.join(args.work_dir, time.strftime("%Y%m%d_%H%M%S") + ".log"), "a")

def say(text):
    now = time.time()
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now)) + ",%03d" % (now % 1 * 1000)
    line = stamp + " - mmdet - INFO - " + text
    log.write(line + "\\n")
    log.flush()
    print(line, flush=True)

if mode == "startup":
    raise ImportError("cannot import name 'Config' from 'mmcv'")
if mode == "stubborn":
    signal.signal(signal.SIGTERM, ignores)
    signal.signal(signal.SIGINT, ignores)
if mode == "orphan":
    code = "import time; time.sleep(60)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
say("Set random seed to 0")
print("\\r 50%|#####     | \\x1b[A", end="")
for epoch in range(start + 1, epochs + 1):
    for step in range(1, 5):
        time.sleep(pause)
        say("Epoch [%d][%d/4]\\tlr: 1.000e-04, eta: 0:00:09, time: 0.011, data_time: 0.001, memory: 512, "
            "loss: %.4f, grad_norm: 3.1000" % (epoch, step, 9.0 / (4 * epoch + step)))
        if mode == "nan" and step == 2:
            raise ValueError("matrix contains invalid numeric entries")
        if mode == "oom" and step == 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1.10 GiB")
        if mode == "torn" and epoch == 2 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "once" and not args.resume_from and epoch == 2:
            raise RuntimeError("NCCL error: unhandled system error")
        if mode == "always" and step == 3:
            raise RuntimeError("NCCL error: unhandled system error")
    with open(os.path.join(args.work_dir, "epoch_%d.pth" % epoch), "wb") as file:
        file.write(b"\\x80\\x02 a pickle, as far as one can see")
say("done")
"""


def tree(folder: Path) -> tuple[Path, Path]:
    """The checkout and its config."""
    root = folder / "tree"
    write(root / "tools" / "train.py", TRAIN + "\n# takes LOCAL_RANK from 'LOCAL_RANK'\n")
    text = "model = dict(type='A')\ndata = dict(samples_per_gpu=1)\noptimizer = dict(lr=1e-4)\n"
    return root, write(root / "configs" / "tiny.py", text + "runner = dict(max_epochs=2)\n")


def launch(folder: Path, mode: str, batch: int | None = None, **options: object) -> Launch:
    """A start of the fake in a mode; `options` are for its script."""
    root, config = tree(folder)
    overrides = tuple({"mode": mode, **options}.items())
    wanted = Wanted(batch=batch, overrides=overrides)
    interpreter = Interpreter(Path(os.path.abspath(sys.executable)), "1.12.1")
    return plan_launch(read_tree(root), read_foreign(config), wanted, interpreter, folder / "run")
