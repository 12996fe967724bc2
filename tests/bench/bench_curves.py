"""Loss curves of a model in each precision: python -m tests.bench.bench_curves --data DIR [--minutes 15].

Trains a config once a precision from one seed, all of them side by side on one GPU, and ends them after a given time
wherever they are. Writes `results.json` (every loss, mean losses over windows of steps, command and versions) and
`losses.png`.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from bevctl.errors import ExitCode
from tests.bench.bench_convergence import ARMS, BASELINE, PRECISIONS, Run, circumstances, keep, read

ENDING_S = 120
"""Time to write a checkpoint in after the signal."""
WINDOW = 50
"""Steps that a mean loss is over."""


def train(arm: str, options: argparse.Namespace) -> Run:
    """One precision until the time is over; RuntimeError with the end of its output where it fails."""
    folder, log = options.work_dir / arm, options.work_dir / f"{arm}.log"
    sets = [f"data.root={options.data}", f"seed={options.seed}", "train.eval_interval=0", *options.set]
    arguments = [word for value in sets for word in ("--set", value)]
    command = [sys.executable, "-m", "bevctl", "train", options.config, "--work-dir", str(folder)]
    command += ["--device", options.device, "--no-preflight", *arguments, *ARMS[arm]]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        wait_for(folder / "log.jsonl", process)
        try:
            code = process.wait(60 * options.minutes)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            code = process.wait(ENDING_S)
    if code not in (ExitCode.OK, ExitCode.PREEMPTED):
        raise RuntimeError(f"{shlex.join(command)} ended with {code}:\n{log.read_text()[-2000:]}")
    return read(arm, options.seed, folder, {})


def wait_for(records: Path, process: subprocess.Popen[bytes]) -> None:
    """Until there is a record of the first step, or the process has ended."""
    while process.poll() is None and not (records.exists() and records.stat().st_size):
        time.sleep(0.2)


def windows(run: Run) -> list[float | None]:
    """Mean loss of each window of steps; None where no step of it was finite."""
    parts = (run.losses[start : start + WINDOW] for start in range(0, len(run.losses), WINDOW))
    finite = ([loss for loss in part if loss is not None] for part in parts)
    return [statistics.fmean(part) if part else None for part in finite]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="of `bevctl data synth`, or another with info files")
    parser.add_argument("--out", type=Path, default=Path("docs/evidence/multitask"))
    parser.add_argument("--work-dir", type=Path, default=Path("runs/curves"), help="folders of the runs")
    parser.add_argument("--config", default="bevfusion_multitask_fp16")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every run")
    parser.add_argument("--minutes", type=float, default=15.0, help="of training, from the first step on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arms", nargs="+", choices=[BASELINE, *PRECISIONS], default=[BASELINE, *PRECISIONS])
    parser.add_argument("--device", default="auto")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    for folder in (options.out, options.work_dir):
        folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(options.arms)) as pool:
        runs = list(pool.map(lambda arm: train(arm, options), options.arms))
    document = {
        **circumstances(options),
        "minutes": options.minutes,
        "window": WINDOW,
        "means": {run.arm: windows(run) for run in runs},
        "runs": [asdict(run) for run in runs],
    }
    keep(document, runs, options.out)
    for run in runs:
        told = " ".join("-" if mean is None else f"{mean:.3f}" for mean in windows(run))
        print(f"{run.arm:5s} {len(run.losses):5d} steps, mean loss of each {WINDOW}: {told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
