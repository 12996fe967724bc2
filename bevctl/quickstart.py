"""The whole tool on a machine with no GPU and no data: the commands a user would type, one after the other.

Every step is a process of its own, so that what is shown is what those commands do, exit codes included.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bevctl.console import Console
from bevctl.errors import BevctlError, ExitCode

CONFIGS = {"bevfusion": ("tiny", "bevfusion_multitask_fp16"), "petrv2": ("petrv2_tiny", "petrv2")}
"""For each model family the config that is trained here, and one for real data."""
FIRST_PART_ITERS = 40
"""Where the run is stopped once, to be resumed from its checkpoint."""
LOSS_WINDOW = 10
"""Steps at either end of the run whose losses are averaged."""
JUDGED = (ExitCode.OK, ExitCode.UNKNOWN)
"""Exit codes of a command that judges: something it could not look at is no reason to stop."""


@dataclass(frozen=True)
class Step:
    """One command that was run."""

    command: str
    exit: int
    seconds: float


@dataclass(frozen=True)
class Scores:
    """Of a checkpoint on the held-out scenes."""

    mAP: float
    mIoU: float | None
    """None for a model without a map head."""


@dataclass(frozen=True)
class Summary:
    """What the quickstart showed: mean losses over the first and last ten steps, held-out scores before and after."""

    steps: tuple[Step, ...]
    first_loss: float
    last_loss: float
    untrained: Scores
    trained: Scores
    run: str

    def document(self) -> dict[str, Any]:
        """Body of the `bevctl.quickstart/1` document."""
        return {
            "steps": [asdict(step) for step in self.steps],
            "loss": {"first": self.first_loss, "last": self.last_loss},
            "mAP": {"untrained": self.untrained.mAP, "trained": self.trained.mAP},
            "mIoU": {"untrained": self.untrained.mIoU, "trained": self.trained.mIoU},
            "run": self.run,
        }


class Quickstart:
    """Runs the commands in `folder` for a `model` of `CONFIGS`: the data set below `data/`, the run below `run/`."""

    def __init__(self, folder: Path, device: str, console: Console, model: str = "bevfusion") -> None:
        self.config, self.real_config = CONFIGS[model]
        self.data = folder / "data"
        self.run_dir = _unused(folder / "run")
        self.pictures = self.run_dir / "pictures"
        self.device = device
        self.console = console
        self.steps: list[Step] = []

    def run(self) -> Summary:
        """Make data, train in two parts, evaluate before and after; raises BevctlError when a command fails."""
        self._call("data", "synth", str(self.data))
        precision = self._fastest_precision()
        run = [self.config, f"--{precision}", "--work-dir", str(self.run_dir), *self._common()]
        train = ["train", *run]
        self._call("preflight", *run, fine=JUDGED)
        self._call(*train, "--max-iters", "0")
        untrained = self._evaluate("iter_0.pth", precision)
        self._call(*train, "--resume", "auto", "--max-iters", str(FIRST_PART_ITERS))
        self._call(*train, "--resume", f"iter_{FIRST_PART_ITERS}.pth")
        self._call("monitor", str(self.run_dir), "--once", fine=(*JUDGED, ExitCode.FINDINGS))
        trained = self._evaluate("latest", precision, "--show", str(self.pictures))
        losses = list(_losses(self.run_dir / "log.jsonl"))
        return Summary(
            tuple(self.steps),
            first_loss=_mean(losses[:LOSS_WINDOW]),
            last_loss=_mean(losses[-LOSS_WINDOW:]),
            untrained=untrained,
            trained=trained,
            run=str(self.run_dir),
        )

    def _common(self) -> list[str]:
        device = ["--device", self.device] if self.device != "auto" else []
        return [*device, "--set", f"data.root={self.data}"]

    def _fastest_precision(self) -> str:
        """bf16 or fp32 on a CPU, whichever did three steps faster; on a GPU, what `auto` chooses."""
        from bevctl.config.load import load
        from bevctl.engine.dist import select_device
        from bevctl.engine.precision import resolve_precision
        from bevctl.measure.timing import time_steps

        config = load(self.config, options={"data.root": str(self.data), "device": self.device}).config
        device = select_device(config.device)
        if device.type != "cpu":
            return resolve_precision("auto", device).name
        started = time.monotonic()
        seconds = {dtype: time_steps(config, dtype, device, steps=3) for dtype in ("bf16", "fp32")}
        fastest = min(seconds, key=lambda dtype: seconds[dtype])
        self.steps.append(Step("(three timed steps in bf16 and in fp32)", 0, time.monotonic() - started))
        shown = ", ".join(f"{dtype} {value:.2f} s" for dtype, value in seconds.items())
        self.console.info(f"A step takes {shown} on this CPU: training in {fastest}.")
        return fastest

    def _evaluate(self, checkpoint: str, precision: str, *arguments: str) -> Scores:
        path = str(self.run_dir / checkpoint)
        evaluate = ["eval", self.config, "--checkpoint", path, f"--{precision}", *self._common()]
        out = self._call(*evaluate, *arguments, "--json", capture=True)
        found = json.loads(out)
        return Scores(float(found["detection"]["mAP"]), (found["map"] or {}).get("mIoU"))

    def _call(self, *arguments: str, capture: bool = False, fine: tuple[int, ...] = (ExitCode.OK,)) -> str:
        """Run one bevctl command; its stdout is returned if captured, all else goes to our stderr.

        Raises BevctlError for an exit code that is not `fine`.
        """
        command = shlex.join(["bevctl", *arguments])
        self.console.info(f"\n$ {command}")
        started = time.monotonic()
        process = subprocess.run(
            [sys.executable, "-m", "bevctl", *arguments],
            stdout=subprocess.PIPE if capture else sys.stderr,
            text=True,
            check=False,
        )
        self.steps.append(Step(command, process.returncode, time.monotonic() - started))
        if process.returncode not in fine:
            raise BevctlError(
                f"`{command}` ended with exit code {process.returncode}.",
                "Its own message stands above; the command can be repeated by hand.",
                ExitCode.RUN_FAILED,
            )
        return process.stdout or ""


def _unused(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, … that does not exist, so that a second try keeps the first one's run."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _losses(log: Path) -> Iterator[float]:
    for line in log.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record.get("mode") == "train" and record.get("loss") is not None:
            yield record["loss"]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
