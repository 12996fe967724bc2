"""Predicted against measured GPU memory, and plans under a hard cap: python tests/bench/bench_memory.py [--out FILE].

Trains a few steps of the multitask model in each of ROWS (precision, batch, checkpointing) on simulated samples of
full size, one row after the other in one process, and predicts the same rows in other processes meanwhile. Then
chooses plans for cards of 32 and 16 GB as `bevctl memory --fit` does, and trains them with torch's memory capped.
`--out` gets everything as JSON after each row; `--read FILE` measures nothing and compares that file anew.
Exits 1 where a prediction is more than 10 % off, parts do not add up within 5 %, or a chosen plan does not train.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bevctl.config.load import load
from bevctl.config.rules import PARTS
from bevctl.config.schema import Config
from bevctl.data.loader import collate
from bevctl.engine.dist import select_device
from bevctl.measure.bench_inputs import street_item
from bevctl.measure.memory import Need, predict
from bevctl.measure.memory_inputs import batch_sizes, sizes_of
from bevctl.measure.memory_measured import Measured, measure_memory
from bevctl.measure.memory_plans import MARGIN, Job, Planner, best_fit
from bevctl.measure.memory_trace import SampleSize
from bevctl.measure.step_times import StepTimes

Row = tuple[str, int, bool]
ROWS: tuple[Row, ...] = (
    *(("fp16", batch, recomputed) for batch in (4, 1, 8) for recomputed in (False, True)),
    *(("fp32", 1, recomputed) for recomputed in (False, True)),
)
"""Precision, batch, and whether activations are recomputed; kernels of FP32 take long to compile and come last."""
SAMPLES = 8
CARDS = {"32GB": 32, "16GB": 16}
USABLE = 0.985
"""Of the GiB on a card's label, as in `bevctl memory`."""
STEPS = 4
OFF, PARTS_OFF = 0.10, 0.05


def setting(config: Config, row: Row) -> Config:
    model = dataclasses.replace(config.model, checkpointing=PARTS if row[2] else ())
    return dataclasses.replace(config, model=model, train=dataclasses.replace(config.train, batch=row[1]))


def name_of(row: Row) -> str:
    return f"{row[0]} batch {row[1]}{' checkpointing' if row[2] else ''}"


def hide_gpu() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)


def predicted(config: Config, row: Row, sizes: list[SampleSize]) -> Need:
    return predict(setting(config, row), row[0], sizes)


def chosen(config: Config, sizes: list[SampleSize], card: int) -> dict[str, Any] | None:
    """The plan for a card of so many bytes."""
    plan = best_fit(Planner(config, sizes_of(sizes, ""), StepTimes({}), Job(1), card).plans(), card)
    return None if plan is None else dict(plan.document())


def sized_item(config: Config, seed: int) -> tuple[Any, SampleSize]:
    """A sample and its size."""
    item = street_item(config, seed)
    return item, batch_sizes(config, collate([item]))[0]


def measured(config: Config, row: Row, items: list[Any]) -> dict[str, Any]:
    started = time.perf_counter()
    batch = collate(items[: row[1]]).pin_memory()
    said: list[str] = []
    try:
        found: Measured | str = measure_memory(setting(config, row), row[0], [batch], CUDA, STEPS, said.append)
    except (RuntimeError, LookupError, TypeError, ValueError, AssertionError) as error:
        found = f"{type(error).__name__}: {str(error)[:300]}"
    release()
    result = dataclasses.asdict(found) if isinstance(found, Measured) else {"error": found}
    return {"row": row, "said": said, "seconds": time.perf_counter() - started, **result}


def release() -> None:
    gc.collect()  # a recorded part and its module refer to each other
    torch.cuda.empty_cache()


def under_cap(config: Config, plan: dict[str, Any], card: int, items: list[Any], context: int) -> dict[str, Any]:
    """Trains a plan with no more memory than a card has beside CUDA's own."""
    total = torch.cuda.get_device_properties(CUDA).total_memory
    row = (str(plan["precision"]), int(plan["batch"]), bool(plan["checkpointing"]))
    repeated = [items[i % len(items)] for i in range(row[1])]
    torch.cuda.set_per_process_memory_fraction((card - context) / total)
    try:
        result = measured(config, row, repeated)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return {"card": card, "plan": plan["name"], "predicted_device": plan["device_bytes_p99"], **result}


def compare(document: dict[str, Any]) -> int:
    """Prints the table; returns the number of misses."""
    missed = 0
    head = f"{'GiB':30} {'allocated':>17} {'reserved':>17} {'nvidia-smi':>17} {'start':>6} {'parts':>6} {'s/iter':>7}"
    print(f"{head}\n{'':30} {'pred.  meas.':>17} {'pred.  meas.':>17} {'pred.  meas.':>17}")
    for found in document["rows"]:
        name, need = name_of(tuple(found["row"])), document["predictions"].get(name_of(tuple(found["row"])))
        if "error" in found or need is None:
            print(f"{name:30} {found.get('error', 'not predicted')}")
            missed += 1
            continue
        errors = [need[key] / found[key] - 1 for key in ("allocated", "reserved", "device")]
        pairs = zip(("allocated", "reserved", "device"), errors, strict=True)
        cells = [f"{gib(need[key]):5.2f} {gib(found[key]):5.2f} {error:+4.0%}" for key, error in pairs]
        parts = sum(found["components"].values()) - found["components"].get("CUDA context", 0)
        share = parts / found["allocated"]
        told = f"{gib(found['start_reserved']):6.2f} {share:6.1%} {found['step_s']:7.4f}"
        print(f"{name:30} {' '.join(f'{cell:>17}' for cell in cells)} {told}")
        missed += (abs(errors[0]) > OFF) + (abs(share - 1) > PARTS_OFF)
    return missed + by_part(document) + caps(document)


def by_part(document: dict[str, Any]) -> int:
    """Each part, predicted and measured."""
    for found in document["rows"]:
        need = document["predictions"].get(name_of(tuple(found["row"])))
        if "error" in found or need is None:
            continue
        names = dict.fromkeys((*need["components"], *found["components"]))
        pairs = [(name, need["components"].get(name, 0), found["components"].get(name, 0)) for name in names]
        told = ", ".join(f"{name} {a / 2**20:.0f}|{b / 2**20:.0f}" for name, a, b in pairs if max(a, b) > 2**20)
        pools = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in found["pools"].items())
        print(f"{name_of(tuple(found['row']))}, MiB predicted|measured: {told}; pools: {pools}")
    return 0


def caps(document: dict[str, Any]) -> int:
    for found in document.get("caps", []):
        outcome = (
            found.get("error") or f"trains, reserved {gib(found['reserved']):.2f} GiB, {found['step_s']:.4f} s/iter"
        )
        print(f"card of {gib(found['card']):.1f} GiB: {found['plan']}: {outcome}")
    return sum("error" in found for found in document.get("caps", []))


def gib(size: float) -> float:
    return size / 2**30


def run(options: argparse.Namespace) -> dict[str, Any]:
    config = load(options.config).config
    config = dataclasses.replace(config, device="cuda")
    select_device("cuda")  # and with it how the allocator works
    started = time.perf_counter()
    rows = [row for row in ROWS if options.only is None or row[0] == options.only]
    document: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn"), hide_gpu) as pool:
        items, sizes = map(list, zip(*pool.map(partial(sized_item, config), range(SAMPLES)), strict=True))
        print(
            f"{len(items)} samples in {time.perf_counter() - started:.0f} s: {[size.points for size in sizes]} points"
        )
        document["sizes"] = [dataclasses.asdict(size) for size in sizes]
        needs = {name_of(row): pool.submit(predicted, config, row, sizes[: row[1]]) for row in rows}
        fits = {card: pool.submit(chosen, config, sizes, round(gb * 2**30 * USABLE)) for card, gb in CARDS.items()}
        for row in rows:
            document["rows"].append(measured(config, row, items))
            print(name_of(row), document["rows"][-1].get("error", "measured"), flush=True)
            save(document, options.out)
        document["predictions"] = {name: results(future) for name, future in needs.items()}
        document["caps"] = []
        context = max((r["components"]["CUDA context"] for r in document["rows"] if "error" not in r), default=2**29)
        for card, gb in CARDS.items():
            plan = fits[card].result()
            if plan is not None:
                document["caps"].append(under_cap(config, plan, round(gb * 2**30 * USABLE), items, context))
            save(document, options.out)
    document["seconds"] = time.perf_counter() - started
    save(document, options.out)
    return document


def results(future: Future[Need]) -> dict[str, Any]:
    return dataclasses.asdict(future.result())


def save(document: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(document))


def predicted_again(document: dict[str, Any], config: Config) -> dict[str, Any]:
    """The document with what this version predicts for its samples."""
    sizes = [SampleSize(s["points"], tuple(s["sites"]), s["boxes"]) for s in document["sizes"]]
    rows = [tuple(found["row"]) for found in document["rows"]]
    needs = {name_of(row): dataclasses.asdict(predicted(config, row, sizes[: row[1]])) for row in rows}
    return {**document, "predictions": needs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="bevfusion_multitask_fp16")
    parser.add_argument("--only", choices=("fp16", "fp32", "caps"), help="rows of one precision, or none")
    parser.add_argument("--processes", type=int, default=6, help="that predict meanwhile")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", type=Path)
    options = parser.parse_args()
    if options.read is not None:
        document = predicted_again(json.loads(options.read.read_text()), load(options.config).config)
    else:
        document = run(options)
    missed = compare(document)
    print(f"{missed} misses (predictions within {OFF:.0%}, parts within {PARTS_OFF:.0%}; margin of plans {MARGIN:.0%})")
    return 1 if missed else 0


CUDA = torch.device("cuda")

if __name__ == "__main__":
    sys.exit(main())
