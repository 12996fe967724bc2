"""Can the GPUs compute what is asked: capability, precision, torch's kernels for them, driver, a first launch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bevctl
from bevctl.preflight.checks import Context, Outcome, failed, passed, skipped, unknown, warned
from bevctl.preflight.gpu_probe import MARK
from bevctl.preflight.gpu_selection import each_gpu, gpus_in_use
from bevctl.preflight.nvml import Gpu, NotReported

MINIMUM = (7, 0)
"""Compute capability that bevctl's precisions need."""
BF16 = (8, 0)
"""Capability from which BF16 has units of its own; torch's own test counts emulation."""
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""First Linux driver of each major CUDA version (CUDA release notes, table 3)."""
_VOLTA_LINE = (
    "Install a build that still has them: pip install 'torch>=2.4,<2.8', "
    "or pip install torch --index-url https://download.pytorch.org/whl/cu126."
)


@dataclass(frozen=True)
class TorchBuild:
    """How the torch in question was compiled."""

    version: str
    cuda: str | None
    """CUDA version; None: for the CPU only."""
    arch_list: tuple[str, ...]
    """sm_XY (machine code) and compute_XY (PTX, compiled when first used)."""


def capability(context: Context) -> Outcome:
    """GPUs older than Volta have no tensor cores, and no current torch."""

    def judge(gpu: Gpu) -> Outcome:
        if isinstance(gpu.capability, NotReported):
            return unknown(f"{gpu.name}, capability not reported ({gpu.capability.reason})")
        found = f"{gpu.name}, {_dotted(gpu.capability)}"
        if gpu.capability < MINIMUM:
            return failed(found, "Use a newer GPU, or --device cpu for a small try.")
        return passed(found)

    return each_gpu(context, judge)


def precision(context: Context) -> Outcome:
    """The number format asked for, against the units that the hardware has."""
    asked = context.precision
    if not context.once(gpus_in_use).used:
        if asked == "fp16" and not context.once(gpus_in_use).broken:
            found = "FP16 asked for, and the run uses the CPU, which emulates it: some 40 times slower than FP32"
            return warned(found, "Use --bf16 or --fp32 on a CPU, or a GPU.", required="FP32 or BF16 on a CPU")
        return skipped("no GPU to look at, see GPU001")

    def judge(gpu: Gpu) -> Outcome:
        if isinstance(gpu.capability, NotReported):
            return unknown(f"{asked}, capability not reported ({gpu.capability.reason})")
        if asked == "bf16" and gpu.capability < BF16:
            found = f"BF16 on {gpu.name}, which has no units for it (capability {_dotted(gpu.capability)})"
            return failed(found, "Use --fp16: it has tensor cores on 7.x.")
        if asked == "fp16" and gpu.capability < MINIMUM:
            return failed(f"FP16 on {gpu.name} (capability {_dotted(gpu.capability)})", "Use --fp32.")
        return passed(f"auto is {_automatic(gpu.capability)} here" if asked == "auto" else f"{asked} has its own units")

    return each_gpu(context, judge)


def torch_kernels(context: Context) -> Outcome:
    """Whether the installed torch holds machine code that these GPUs run."""
    if not context.once(gpus_in_use).used:
        return skipped("no GPU to look at, see GPU001")
    build = context.once(torch_build)
    if build.cuda is None:
        return failed(f"torch {build.version} was built for the CPU only", "Install a CUDA build: pip install torch.")

    def judge(gpu: Gpu) -> Outcome:
        if isinstance(gpu.capability, NotReported):
            return unknown(f"capability not reported ({gpu.capability.reason})")
        return _kernels_for(gpu.capability, build)

    return each_gpu(context, judge)


def _kernels_for(device: tuple[int, int], build: TorchBuild) -> Outcome:
    """Machine code runs within its major version, from its minor on; PTX on everything newer."""
    name = f"sm_{device[0]}{device[1]}"
    binaries = [_architecture(flag) for flag in build.arch_list if re.fullmatch(r"sm_\d+", flag)]
    exact = [flag for flag in build.arch_list if re.fullmatch(rf"{name}[af]", flag)]
    ptx = [_architecture(flag) for flag in build.arch_list if re.fullmatch(r"compute_\d+", flag)]
    built = f"torch {build.version} (CUDA {build.cuda}), built for {' '.join(build.arch_list) or 'nothing'}"
    if exact or any(major == device[0] and minor <= device[1] for major, minor in binaries):
        return passed(f"{name} is served by {built}")
    if any(version <= device for version in ptx):
        return warned(
            f"{built}: no machine code for {name}; its PTX is compiled at the first start, which takes minutes",
            "Install a torch that was built for this card: pip install --upgrade torch.",
        )
    return failed(f"{built}: no kernels for {name}", _install_line(device))


def _install_line(device: tuple[int, int]) -> str:
    if device < (7, 5):
        return _VOLTA_LINE
    return "Install a build for this card: pip install --upgrade torch (CUDA 12.8 or newer for capability 10 and 12)."


def driver(context: Context) -> Outcome:
    """The driver has to be of the runtime's major CUDA version or newer; within one the minor does not matter."""
    here = context.once(gpus_in_use)
    if not here.used or here.driver is None:
        return skipped("no GPU to look at, see GPU001")
    if isinstance(here.driver.cuda, NotReported):
        return unknown(f"the driver does not tell its CUDA version ({here.driver.cuda.reason})")
    build = context.once(torch_build)
    if build.cuda is None:
        return skipped("torch was built for the CPU only, see GPU004")
    major = int(build.cuda.split(".")[0])
    version = "unknown" if isinstance(here.driver.version, NotReported) else here.driver.version
    found = f"driver {version} for CUDA {_dotted(here.driver.cuda)}, torch {build.version} for CUDA {build.cuda}"
    required = f"a driver for CUDA {major}.0 or newer ({_DRIVERS.get(major, 'a newer one')} on Linux)"
    if here.driver.cuda[0] < major:
        fix = f"Update the driver, or install a torch built for CUDA {here.driver.cuda[0]}."
        return failed(found, fix, required=required)
    return passed(found, required=required)


def launch(context: Context) -> Outcome:
    """A matrix product, a convolution and our own operations, launched on each GPU and compared with the CPU."""
    if not context.once(gpus_in_use).used:
        return skipped("no GPU to look at, see GPU001")
    report = context.once(probe)
    if "devices" not in report:
        return unknown(
            "a first launch did not come back in time", "Give it longer with --timeout; see GPU012 and dmesg."
        )
    if not report["devices"]:
        return failed(f"torch sees no GPU: {report['reason'] or 'no reason given'}", "See GPU004 and GPU005.")
    devices = dict(zip((gpu.index for gpu in context.once(gpus_in_use).used), report["devices"], strict=False))

    def judge(gpu: Gpu) -> Outcome:
        if gpu.index not in devices:
            return failed("torch does not see it", "See GPU001, and CUDA_VISIBLE_DEVICES.")
        errors = {name: error for name, error in devices[gpu.index].items() if error}
        if errors:
            return failed("; ".join(f"{name}: {error}" for name, error in errors.items()), _launch_fix(errors))
        return passed(f"{', '.join(devices[gpu.index])}: right results")

    return each_gpu(context, judge)


def _launch_fix(errors: dict[str, str]) -> str:
    text = " ".join(errors.values()).lower()
    if "no kernel image" in text:
        return "The build has no kernels for this card, see GPU004."
    if "out of memory" in text:
        return "Something holds the memory, see GPU008 and GPU009."
    if "busy or unavailable" in text:
        return "Another process has the GPU for itself, see GPU008 and GPU015."
    return "Try another GPU with CUDA_VISIBLE_DEVICES; look at `dmesg | grep -i nvrm`."


def torch_build(context: Context) -> TorchBuild:
    """The build of the torch that will train, without a process of its own where it is imported already."""
    torch = sys.modules.get("torch")
    if torch is not None and context.python is None:
        flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)() or ""
        return TorchBuild(torch.__version__, torch.version.cuda, tuple(flags.split()))
    report = context.once(probe)
    return TorchBuild(report["version"], report["cuda"], tuple(report["arch_list"]))


def probe(context: Context) -> dict[str, Any]:
    """What `gpu_probe.py` tells; without "devices" when a launch hangs.

    Raises RuntimeError with the last line of its output where torch cannot even be imported.
    """
    used = context.once(gpus_in_use).used
    asked = context.precision if context.precision in _DTYPES else _automatic_for(used)
    script = Path(__file__).with_name("gpu_probe.py")
    command = [context.python or sys.executable, str(script), str(len(used)), _DTYPES[asked]]
    environment = dict(os.environ)
    if context.python is None:
        command.append("--own")
        own = str(Path(bevctl.__file__).parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH")]))
    # Ended here, before the check is given up and leaves it behind.
    said, complained = _output(command, environment, 0.9 * context.timeout)
    report: dict[str, Any] = {}
    for line in said.splitlines():
        if line.startswith(MARK):
            report |= json.loads(line[len(MARK) :])
    if not report:
        last = (complained.strip().splitlines() or ["no answer"])[-1]
        raise RuntimeError(f"{command[0]} cannot use torch: {last}")
    return report


def _output(command: list[str], environment: Mapping[str, str], limit_s: float) -> tuple[str, str]:
    """What a command says on stdout and stderr until it ends, or until it is ended after `limit_s`."""
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            said = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            said = process.communicate()
    return said[0].decode(errors="replace"), said[1].decode(errors="replace")


def _automatic_for(gpus: tuple[Gpu, ...]) -> str:
    known = [gpu.capability for gpu in gpus if not isinstance(gpu.capability, NotReported)]
    return _automatic(min(known)) if known else "fp32"


def _automatic(device: tuple[int, int]) -> str:
    """What precision `auto` is on this capability."""
    return "bf16" if device >= BF16 else "fp16" if device >= MINIMUM else "fp32"


def _architecture(flag: str) -> tuple[int, int]:
    """(7, 0) of sm_70, (12, 0) of compute_120."""
    digits = flag.partition("_")[2]
    return int(digits[:-1]), int(digits[-1])


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
