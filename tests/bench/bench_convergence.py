"""Whether FP16 and BF16 train as well as FP32: python tests/bench/bench_convergence.py [--jobs 3] [--arms fp32 fp16].

Makes a synthetic set where there is none, trains a reduced model once for each arm and seed, several runs side by side
on one GPU, and evaluates each on the held-out scenes; called again, it goes on where it was stopped. Equal seeds mean
equal initial weights and data, so what counts is the difference from FP32 of the same seed; `lidar` and `camera` are
FP32 with that sensor alone. Writes `results.json` (raw numbers, loss of each step, paired differences with 95 %
intervals) and `losses.png`. Exits 1 where FP16 or BF16 is off by more than 0.3 points and the interval does not hold
zero.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.figure import Figure
from scipy import stats

from bevctl.files import atomic_write_text

ARMS = {
    "fp32": ["--fp32"],
    "fp16": ["--fp16"],
    "bf16": ["--bf16"],
    "lidar": ["--fp32", "--set", "model.camera=null"],
    "camera": ["--fp32", "--set", "model.lidar=null", "--set", "model.camera.view.kind=lss"],
}
BASELINE, PRECISIONS = "fp32", ("fp16", "bf16")
METRICS = {"mAP": "detection", "NDS": "detection", "mIoU": "map"}
SYNTH = ("train_scenes", "val_scenes", "keyframes", "lidar_beams", "image_scale")
"""Options of `bevctl data synth` that a study may choose."""
TOLERANCE = 0.003
CONFIDENCE = 0.95
SMOOTHED_STEPS = 25


@dataclass(frozen=True)
class Run:
    """One training run and what came out."""

    arm: str
    seed: int
    metrics: dict[str, float]
    """Of the last epoch, on the held-out scenes."""
    losses: list[float | None]
    """Of each step; null where it was not finite."""
    seconds: float
    device: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Difference:
    """A metric of an arm less that of FP32, over the seeds that both have."""

    arm: str
    metric: str
    each: list[float]
    mean: float
    interval: tuple[float, float] | None
    """Of the mean, by Student's t; None for a single seed."""

    @property
    def agrees(self) -> bool:
        """Close to zero, or not to be told from it."""
        low, high = self.interval or (self.mean, self.mean)
        return abs(self.mean) <= TOLERANCE or low <= 0 <= high


def bevctl(arguments: Sequence[str], log: Path) -> None:
    """Run a command with its output in a file; RuntimeError with the end of it where it fails."""
    command = [sys.executable, "-m", "bevctl", *arguments]
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}:\n{log.read_text()[-2000:]}")


def make_data(options: argparse.Namespace) -> None:
    """A synthetic set, unless one is there."""
    if options.data.exists():
        return
    made_as = [f"--{name.replace('_', '-')}={value}" for name, value in synthetic(options).items()]
    bevctl(["data", "synth", str(options.data), "--version=v1.0-trainval", *made_as], options.work_dir / "data.log")


def synthetic(options: argparse.Namespace) -> dict[str, object]:
    """With what the set is made."""
    return {name: getattr(options, name) for name in SYNTH}


def train(arm: str, seed: int, options: argparse.Namespace) -> Run:
    """One run, evaluated after its last epoch; one that is there already is only read."""
    folder = options.work_dir / f"{arm}-{seed}"
    if not evaluation(folder, options.epochs).exists():
        sets = [f"data.root={options.data}", f"seed={seed}", f"train.epochs={options.epochs}"]
        sets += [f"train.eval_interval={options.epochs}", *options.set]
        arguments = [word for value in sets for word in ("--set", value)]
        where = ["--work-dir", str(folder), "--device", options.device]
        bevctl(["train", options.config, *where, *arguments, *ARMS[arm]], options.work_dir / f"{arm}-{seed}.log")
    return read(arm, seed, folder, scores(evaluation(folder, options.epochs)))


def read(arm: str, seed: int, folder: Path, metrics: dict[str, float]) -> Run:
    """What the folder of a run that has ended says of it."""
    document = json.loads((folder / "run.json").read_text())
    segment = document["segments"][0]
    return Run(
        arm=arm,
        seed=seed,
        metrics=metrics,
        losses=losses(folder / "log.jsonl"),
        seconds=document["ended"] - segment["started"],
        device=segment["device"],
        versions=segment["versions"],
    )


def evaluation(folder: Path, epoch: int) -> Path:
    return folder / "eval" / f"epoch_{epoch}.json"


def scores(path: Path) -> dict[str, float]:
    document = json.loads(path.read_text())
    return {metric: document[task][metric] for metric, task in METRICS.items()}


def losses(path: Path) -> list[float | None]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    values = [record["loss"] for record in records if record["mode"] == "train"]
    return [value if value is not None and math.isfinite(value) else None for value in values]


def difference(arm: str, metric: str, runs: Sequence[Run]) -> Difference:
    """Paired by seed."""
    score = {(run.arm, run.seed): run.metrics[metric] for run in runs}
    seeds = sorted({run.seed for run in runs if (arm, run.seed) in score and (BASELINE, run.seed) in score})
    each = [score[arm, seed] - score[BASELINE, seed] for seed in seeds]
    mean = statistics.fmean(each)
    if len(each) < 2:
        return Difference(arm, metric, each, mean, None)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(each) - 1)) * statistics.stdev(each) / math.sqrt(len(each))
    return Difference(arm, metric, each, mean, (mean - half, mean + half))


def smoothed(values: Sequence[float | None]) -> list[float]:
    """Mean of the last steps up to each, of those that were finite."""
    windows = (values[max(0, end - SMOOTHED_STEPS) : end] for end in range(1, len(values) + 1))
    finite = ([value for value in window if value is not None] for window in windows)
    return [statistics.fmean(window) if window else math.nan for window in finite]


def plot(runs: Sequence[Run], path: Path) -> None:
    """All loss curves: a colour for each arm, a line for each seed."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for index, (arm, group) in enumerate(itertools.groupby(runs, key=lambda run: run.arm)):
        for number, run in enumerate(group):
            axes.plot(smoothed(run.losses), color=f"C{index}", linewidth=0.8, label=None if number else arm)
    axes.set(xlabel="step", ylabel=f"loss, mean of {SMOOTHED_STEPS} steps", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=150)


def circumstances(options: argparse.Namespace) -> dict[str, object]:
    """With what a study was made, for its document."""
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "config": options.config,
        "set": options.set,
    }


def write(options: argparse.Namespace, runs: Sequence[Run], differences: Sequence[Difference]) -> None:
    document = {
        **circumstances(options),
        "epochs": options.epochs,
        "data": synthetic(options),
        "side_by_side": options.jobs,
        "runs": [asdict(run) for run in runs],
        "differences": [asdict(d) | {"agrees": d.agrees} for d in differences],
    }
    keep(document, runs, options.out)


def keep(document: dict[str, object], runs: Sequence[Run], folder: Path) -> None:
    """`results.json`, without spaces between the many losses, and `losses.png`."""
    atomic_write_text(folder / "results.json", json.dumps(document, separators=(",", ":")) + "\n")
    plot(runs, folder / "losses.png")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/evidence/convergence"))
    parser.add_argument("--work-dir", type=Path, default=Path("runs/convergence"), help="folders of the runs")
    parser.add_argument("--data", type=Path, default=Path("data/synth-convergence"), help="made if it is not there")
    parser.add_argument("--train-scenes", type=int, default=40)
    parser.add_argument("--val-scenes", type=int, default=15)
    parser.add_argument("--keyframes", type=int, default=8, help="samples a scene")
    parser.add_argument("--lidar-beams", type=int, default=32, help="few leave something to the cameras")
    parser.add_argument("--image-scale", type=float, default=0.5, help="small images load fast")
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every run")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--jobs", type=int, default=3, help="runs side by side")
    parser.add_argument("--device", default="auto")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    for folder in (options.out, options.work_dir):
        folder.mkdir(parents=True, exist_ok=True)
    make_data(options)
    with ThreadPoolExecutor(options.jobs) as pool:
        pending = [pool.submit(train, arm, seed, options) for arm in options.arms for seed in options.seeds]
        runs = [future.result() for future in pending]
    compared = [arm for arm in options.arms if arm != BASELINE and BASELINE in options.arms]
    differences = [difference(arm, metric, runs) for arm in compared for metric in METRICS]
    write(options, runs, differences)
    print(f"{runs[0].device}, {len(runs)} runs of {len(runs[0].losses)} steps")
    for d in differences:
        interval = "one seed" if d.interval is None else f"{100 * d.interval[0]:+.2f} to {100 * d.interval[1]:+.2f}"
        print(f"{d.arm:6s} - {BASELINE}  {d.metric:4s} {100 * d.mean:+.2f} points ({interval})")
    return 0 if all(d.agrees for d in differences if d.arm in PRECISIONS) else 1


if __name__ == "__main__":
    sys.exit(main())
