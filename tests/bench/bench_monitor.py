"""How long `bevctl monitor` takes with a log of a gigabyte: python tests/bench/bench_monitor.py [--size 1e9].

Makes a text log of mmcv's format and the same content as JSON lines, then measures, each in a process of its own:
a plain `json.loads` of every line, a full read of the text, `bevctl monitor --since 1h` without and with the index.
Prints CPU seconds and peak memory, and exits 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WINDOW_S = 21.0
PER_EPOCH = 3850
MAP_CLASSES = ("drivable_area", "ped_crossing", "walkway", "stop_line", "carpark_area", "divider")
LOSSES = (
    *(f"loss/map/{name}/focal" for name in MAP_CLASSES),
    "loss/object/loss_heatmap",
    "loss/object/layer_-1_loss_cls",
    "loss/object/layer_-1_loss_bbox",
    "stats/object/matched_ious",
    "loss",
    "grad_norm",
)
PLAIN_JSON = "import json, sys\nfor line in open(sys.argv[1], encoding='utf-8'): json.loads(line)"
FULL_READ = "import sys\nfrom bevctl.runs.source import open_source\nopen_source(sys.argv[1]).read()"


@dataclass(frozen=True)
class Cost:
    cpu_s: float
    peak_mb: float


def write_logs(text: Path, lines: Path, size: float) -> int:
    """Writes the text log (about `size` bytes) and its content as JSON lines; returns the number of lines."""
    rng = random.Random(7)
    pool = [[round(rng.uniform(0.05, 3.0), 4) for _ in LOSSES] for _ in range(500)]
    start = datetime.datetime.now() - datetime.timedelta(seconds=size / 560 * WINDOW_S)
    written = count = 0
    with text.open("w", encoding="utf-8") as text_file, lines.open("w", encoding="utf-8") as json_file:
        while written < size:
            epoch, window = divmod(count, PER_EPOCH // 50)
            values = dict(zip(LOSSES, pool[count % len(pool)], strict=True))
            stamp = f"{start + datetime.timedelta(seconds=count * WINDOW_S):%Y-%m-%d %H:%M:%S},{count % 1000:03d}"
            items = ", ".join(f"{name}: {value:.4f}" for name, value in values.items())
            written += text_file.write(
                f"{stamp} - mmdet3d - INFO - Epoch [{epoch + 1}][{50 * window + 50}/{PER_EPOCH}]\tlr: 2.000e-05, "
                f"eta: 1 day, 2:03:04, time: 0.{400 + count % 50}, data_time: 0.021, memory: 18432, {items}\n"
            )
            record = {"mode": "train", "stamp": stamp, "epoch": epoch + 1, "iter": 50 * window + 50, "lr": 2e-05}
            record |= {"eta": "1 day, 2:03:04", "time": 0.4 + count % 50 / 1000, "data_time": 0.021, "memory": 18432}
            json_file.write(json.dumps(record | values) + "\n")
            count += 1
    return count


def measure(*arguments: str | Path, cache: Path) -> Cost:
    """CPU time and peak memory of a Python process; its output is dropped."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)}
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)], env=environment, cwd=cache, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Cost(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=1e9, help="bytes of the text log")
    size = parser.parse_args().size
    with tempfile.TemporaryDirectory() as folder:
        text, lines, cache = Path(folder, "train.log"), Path(folder, "train.json"), Path(folder)
        count = write_logs(text, lines, size)
        print(f"{text.stat().st_size / 1e6:.0f} MB, {count} train lines, Python {sys.version.split()[0]}")
        monitor = ("-m", "bevctl", "monitor", text, "--since", "1h", "--from-end", "--json", "--once")
        costs = {
            "json.loads per line": measure("-c", PLAIN_JSON, lines, cache=cache),
            "full read": measure("-c", FULL_READ, text, cache=cache),
            "monitor --since 1h, first": measure(*monitor, cache=cache),
            "monitor --since 1h, again": measure(*monitor, cache=cache),
        }
    for name, cost in costs.items():
        print(f"{name:28} {cost.cpu_s:8.2f} s CPU {cost.peak_mb:7.0f} MB")
    plain, full, first, again = costs.values()
    targets = {
        f"full read {full.cpu_s / plain.cpu_s:.2f} x json.loads, at most 2": full.cpu_s <= 2 * plain.cpu_s,
        "first call under 1 s CPU": first.cpu_s < 1,
        "first call under 150 MB": first.peak_mb < 150,
        f"second call {full.cpu_s / again.cpu_s:.0f} x cheaper than a full read, at least 20": full.cpu_s
        >= 20 * again.cpu_s,
    }
    for target, met in targets.items():
        print(f"{'met   ' if met else 'MISSED'} {target}")
    return 0 if all(targets.values()) else 1


if __name__ == "__main__":
    started = time.monotonic()
    code = main()
    print(f"{time.monotonic() - started:.0f} s")
    sys.exit(code)
