"""Which GPUs the run will use, and one outcome out of what is found on each of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bevctl.finding import CheckStatus
from bevctl.preflight.checks import Context, Outcome, skipped
from bevctl.preflight.nvml import Driver, Gpu, Memory, NotReported, NvmlUnavailable, read_driver, visible

_WORST_FIRST = (CheckStatus.FAIL, CheckStatus.UNKNOWN, CheckStatus.WARN, CheckStatus.PASS, CheckStatus.SKIP)


@dataclass(frozen=True)
class GpusInUse:
    """The outcome of looking for GPUs."""

    driver: Driver | None
    used: tuple[Gpu, ...] = ()
    visible: int = 0
    """GPUs that CUDA shows a process here; `used` are the first of them."""
    reason: str = ""
    """Why none is used."""
    fix: str = ""
    broken: bool = False
    """There is a GPU or a driver, or GPUs were asked for, and none can be used."""


def gpus_in_use(context: Context) -> GpusInUse:
    """What the run will find when it starts here, with this environment."""
    if context.device == "cpu":
        return GpusInUse(None, reason="the run uses the CPU (--device cpu)")
    asked = context.gpus is not None or context.device == "cuda"
    try:
        driver = read_driver()
    except NvmlUnavailable as error:
        fix = error.fix or "Run where there is an NVIDIA GPU, or say --device cpu."
        return GpusInUse(None, reason=error.reason, fix=fix, broken=error.present or asked)
    shown = visible(driver.gpus)
    if not driver.gpus:
        return GpusInUse(driver, reason="the NVIDIA driver answers, but sees no GPU", fix=_LOST, broken=True)
    if not shown:
        hidden = f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r} hides every GPU"
        return GpusInUse(driver, reason=hidden, fix="Unset CUDA_VISIBLE_DEVICES or name a GPU in it.", broken=asked)
    return GpusInUse(driver, tuple(shown[: context.gpus or 1]), len(shown))


_LOST = "Look at `nvidia-smi` and `dmesg | grep -i nvrm`; reboot, or give the GPU to this machine or container."


def each_gpu(context: Context, judge: Callable[[Gpu], Outcome]) -> Outcome:
    """The judgements on all GPUs that the run uses, as one outcome; skipped where there is none to look at."""
    gpus = context.once(gpus_in_use).used
    if not gpus:
        return skipped("no GPU to look at, see GPU001")
    return combined([(str(gpu), judge(gpu)) for gpu in gpus])


def combined(judged: Sequence[tuple[str, Outcome]]) -> Outcome:
    """One outcome of several: the worst status, everything found, and what to do about those that are not well."""
    outcomes = [outcome for _, outcome in judged]
    worst = min(outcomes, key=lambda o: _WORST_FIRST.index(o.status) + (1.5 if _is_idle(o) else 0))
    groups: dict[str, list[str]] = {}
    for name, outcome in judged:
        groups.setdefault(outcome.found, []).append(name)
    found = "; ".join(f"{_enumerate(names)}: {text}" for text, names in groups.items())
    fixes = dict.fromkeys(outcome.fix for outcome in outcomes if outcome.fix)
    return dataclasses.replace(worst, found=found, fix=" ".join(fixes))


def _is_idle(outcome: Outcome) -> bool:
    """Whether it is an unknown that decides nothing, and so stands behind a warning and before a pass."""
    return outcome.status == CheckStatus.UNKNOWN and outcome.advisory


def _enumerate(names: Sequence[str]) -> str:
    """ "GPU 0, 1, 2" for the names of several GPUs."""
    first, *rest = names
    return ", ".join([first, *(name.rpartition(" ")[2] for name in rest)])


def usable_memory(gpu: Gpu) -> Memory | NotReported:
    """The memory that one process gets: the GPU's, or in MIG mode that of the instance it is given."""
    if gpu.mig is not True:
        return gpu.memory
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    instances = [i for i in gpu.mig_instances if not named.startswith("MIG-") or i.uuid in named.split(",")]
    return instances[0].memory if instances else NotReported("it is in MIG mode and has no instance")
