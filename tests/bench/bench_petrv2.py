"""Time and memory of a training step of PETRv2 on a GPU: python -m tests.bench.bench_petrv2 [--config petrv2].

Random images of the config's size with 30 objects a sample; batches of 1 and 4, with and without checkpointing of the
image branch, in FP16 and in FP32 with TF32 off and on. Each is what `bevctl train` runs: CUDA graphs, clipping, AdamW.
Medians with p10 and p90, peak memory, the time of each part, launches. Then the loss scale over --scale-steps steps of
FP16, with statistics of BatchNorm taken from the images as a pretrained backbone would bring its own. Exits 1 where a
target is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import cast

import torch

from bevctl.config.load import load
from bevctl.config.schema import Config
from bevctl.measure.bench import bench
from bevctl.measure.bench_inputs import Inputs
from bevctl.measure.bench_report import Report, Result
from bevctl.measure.timing import build_step
from bevctl.models.petrv2 import PetrImageEncoder
from tests.models.rig import rig_batch, settle_statistics

LIMITS = {(4, False): (150.0, 24.0), (4, True): (190.0, 9.0), (1, False): (55.0, None)}
"""For FP16, by batch and checkpointing: ms and GiB."""
LEAST_SPEEDUP, MOST_MEMORY = 2.0, 0.54
"""FP16 against FP32 without TF32; memory at the largest batch without checkpointing."""
LEAST_SCALE = 128.0
_BATCHES = 4


def variant(name: str, batch: int, checkpointing: bool, graphs: bool) -> Config:
    config = load(name).config
    model = dataclasses.replace(config.model, checkpointing=("camera",) if checkpointing else ())
    train = dataclasses.replace(config.train, batch=batch, cuda_graphs=graphs)
    return dataclasses.replace(config, model=model, train=train)


def inputs_for(config: Config) -> Inputs:
    batches = [rig_batch(config, config.train.batch, seed) for seed in range(_BATCHES)]
    pinned = [batch.pin_memory() if torch.cuda.is_available() else batch for batch in batches]
    return Inputs(list(pinned), "synthetic", None)


def show(result: Result, what: str) -> None:
    if result.step_s is None or result.split is None:
        print(f"{result.precision:5s} {what}: {result.error}")
        return
    allocated, reserved = ((size or 0) / 2**30 for size in (result.allocated_bytes, result.reserved_bytes))
    print(
        f"{result.precision:5s} {what}: {1e3 * result.step_s.median:7.1f} ms "
        f"({1e3 * result.step_s.p10:.1f} to {1e3 * result.step_s.p90:.1f}), {allocated:.2f} GiB allocated, "
        f"{reserved:.2f} reserved, host {1e3 * (result.host_s or 0):.1f} ms, "
        f"{result.launches or 0:.0f} launches of {1e3 * (result.kernel_s or 0):.1f} ms, "
        f"MFU {result.mfu or 0:.1%}, loss {result.loss:.5g}"
    )
    split = result.split
    parts = [f"data {1e3 * split.data:.2f}"]
    for name in dict.fromkeys((*split.forward_by_part, *split.backward_by_part)):
        forward, backward = split.forward_by_part.get(name, 0.0), split.backward_by_part.get(name, 0.0)
        parts.append(f"{name} {1e3 * forward:.2f} / {1e3 * backward:.2f}")
    print(f"      {', '.join(parts)}, optimizer {1e3 * split.optimizer:.2f}")


def missed(report: Report, batch: int, checkpointing: bool) -> list[str]:
    """Targets that the report misses, in words."""
    found = []
    by_name = {result.precision: result for result in report.results if result.step_s is not None}
    fp16 = by_name.get("fp16")
    what = f"batch {batch}{', checkpointing' if checkpointing else ''}"
    if fp16 is not None and fp16.step_s is not None and (batch, checkpointing) in LIMITS:
        milliseconds, gibibytes = LIMITS[batch, checkpointing]
        if 1e3 * fp16.step_s.median > milliseconds:
            found.append(f"{what}: {1e3 * fp16.step_s.median:.1f} ms, not {milliseconds:g}")
        if gibibytes is not None and (fp16.allocated_bytes or 0) > gibibytes * 2**30:
            found.append(f"{what}: {(fp16.allocated_bytes or 0) / 2**30:.2f} GiB, not {gibibytes:g}")
    ratio = report.ratios().get("fp16/fp32")
    if ratio is not None and (ratio["speed"] or 0) < LEAST_SPEEDUP:
        found.append(f"{what}: FP16 is {ratio['speed']:.2f} times as fast as FP32, not {LEAST_SPEEDUP:g}")
    if ratio is not None and batch == 4 and not checkpointing and (ratio["memory"] or 1) > MOST_MEMORY:
        found.append(f"{what}: FP16 takes {ratio['memory']:.1%} of FP32's memory, not {MOST_MEMORY:.0%}")
    return found


def settled_scale(config: Config, steps: int, device: torch.device) -> float:
    """Loss scale after `steps` steps of FP16, told every tenth of them."""
    step = build_step(config, "fp16", device)
    batches = inputs_for(config).batches
    encoder = cast("PetrImageEncoder", step.state.model.get_submodule("encoders.camera"))
    images = cast("torch.Tensor", rig_batch(config, config.train.batch).images).to(device)
    settle_statistics(encoder.backbone, encoder.normalize(images).flatten(0, 1))
    for number in range(steps):
        tensors = step.run([batches[number % len(batches)]], number)
        if number % max(1, steps // 10) == 0:
            loss, norm = float(tensors.total), float(tensors.grad_norm)
            print(f"  step {number}: loss {loss:.4g}, gradient {norm:.4g}, scale {float(tensors.loss_scale):g}")
    return float(step.state.scaler.value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="petrv2")
    parser.add_argument("--batches", type=int, nargs="+", default=(4, 1))
    parser.add_argument("--precisions", nargs="+", default=("fp16", "fp32", "tf32"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-checkpointing", action="store_true", help="only without")
    parser.add_argument("--no-graphs", action="store_true", help="without CUDA graphs")
    parser.add_argument("--scale-steps", type=int, default=150, help="0 for none")
    parser.add_argument("--device", default="cuda", help="cpu only shows that this runs")
    options = parser.parse_args()
    device, failures = torch.device(options.device), []
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {options.config}, {options.steps} steps each")
    for batch in options.batches:
        for checkpointing in (False,) if options.no_checkpointing else (False, True):
            config = variant(options.config, batch, checkpointing, not options.no_graphs)
            report = bench(config, options.precisions, device, options.steps, lambda _: None, inputs_for(config))
            for result in report.results:
                show(result, f"batch {batch}{', checkpointing' if checkpointing else '               '}")
            print(f"      {report.forward_flops / 1e12:.2f} TFLOP forward, ratios {report.ratios()}")
            failures += missed(report, batch, checkpointing)
    if options.scale_steps:
        print(f"loss scale over {options.scale_steps} steps of one sample:")
        scale = settled_scale(variant(options.config, 1, False, not options.no_graphs), options.scale_steps, device)
        if scale <= LEAST_SCALE:
            failures.append(f"the loss scale ends at {scale:g}, not above {LEAST_SCALE:g}")
    print("\n".join(f"missed: {failure}" for failure in failures) or "all targets met")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
