"""Checks of section "gpu": the table, and whether there is a GPU at all."""

from __future__ import annotations

from bevctl.preflight import gpu_compute, gpu_health, gpu_memory
from bevctl.preflight.checks import CheckSpec, Context, Outcome, failed, passed, skipped, warned
from bevctl.preflight.gpu_selection import combined, gpus_in_use
from bevctl.preflight.nvml import Gpu


def presence(context: Context) -> Outcome:
    """The GPUs of the run: there, answering, and as many as asked for."""
    here = context.once(gpus_in_use)
    if not here.used:
        return failed(here.reason, here.fix) if here.broken else skipped(here.reason)
    asked = context.gpus or 1
    required = f"{asked} usable GPU{'s' if asked > 1 else ''}"
    names = combined([(str(gpu), _answers(gpu)) for gpu in here.used])
    if len(here.used) < asked:
        fix = "Lower --gpus, or check nvidia-smi and CUDA_VISIBLE_DEVICES."
        return failed(f"only {len(here.used)}: {names.found}", fix, required=required)
    if any(gpu.lost for gpu in here.used):
        return failed(names.found, names.fix, required=required)
    if len({gpu.name for gpu in here.used}) > 1:
        fix = "Choose equal ones with CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER=PCI_BUS_ID: the slowest sets the pace."
        return warned(names.found, fix, required=required)
    more = f" ({here.visible} visible; --gpus uses more of them)" if here.visible > len(here.used) else ""
    return passed(names.found + more, required=required)


def _answers(gpu: Gpu) -> Outcome:
    if gpu.lost:
        return failed(f"does not answer: {gpu.lost}", "Reboot the machine, or use another GPU (CUDA_VISIBLE_DEVICES).")
    return passed(gpu.name)


CHECKS = (
    CheckSpec(
        "GPU001",
        "GPU and driver",
        presence,
        why="without a working driver and enough GPUs the run does not start",
    ),
    CheckSpec(
        "GPU002",
        "compute capability",
        gpu_compute.capability,
        required="7.0 (Volta) or newer",
        why="older GPUs have no tensor cores for half precision, and current torch builds no code for them",
    ),
    CheckSpec(
        "GPU003",
        "precision",
        gpu_compute.precision,
        required="hardware units for the format: BF16 from capability 8.0, FP16 from 7.0",
        why="a format without units is emulated, many times slower, or refused",
    ),
    CheckSpec(
        "GPU004",
        "torch has kernels for this GPU",
        gpu_compute.torch_kernels,
        required="the GPU's architecture among those that torch was built for",
        why='otherwise the first operation ends with "no kernel image is available for execution on the device"',
    ),
    CheckSpec(
        "GPU005",
        "driver against CUDA runtime",
        gpu_compute.driver,
        why="a driver older than torch's CUDA makes torch see no GPU",
    ),
    CheckSpec(
        "GPU006",
        "first launch",
        gpu_compute.launch,
        required="a matrix product, a convolution and bevctl's own operations give right results",
        why="a card, driver or build that is broken shows here in seconds instead of in the run",
        at_start=False,
    ),
    CheckSpec(
        "GPU007",
        "free GPU memory",
        gpu_memory.free_memory,
        why="a run that does not fit ends in its first steps with CUDA out of memory",
    ),
    CheckSpec(
        "GPU008",
        "other processes on the GPU",
        gpu_memory.memory_holders,
        required="none",
        why="they take memory and time from the run, and may take more later",
    ),
    CheckSpec(
        "GPU009",
        "orphaned training processes",
        gpu_memory.orphans,
        required="none",
        why="processes left behind by a killed run keep its GPU memory until somebody ends them",
    ),
    CheckSpec(
        "GPU010",
        "memory errors (ECC)",
        gpu_health.ecc,
        required="no uncorrected errors",
        why="an uncorrected error kills the process that meets it, or corrupts weights silently",
    ),
    CheckSpec(
        "GPU011",
        "remapped rows, retired pages",
        gpu_health.remapped_rows,
        required="no failed and no pending remap",
        why="bad memory that is not yet replaced is met again by the run",
    ),
    CheckSpec(
        "GPU012",
        "driver errors (Xid)",
        gpu_health.xid,
        required="no Xid of the hardware in the kernel log",
        why="a card that failed since the last boot often fails again",
        advisory=True,
    ),
    CheckSpec(
        "GPU013",
        "throttling",
        gpu_health.throttling,
        required="no slowdown by heat or power before the run starts",
        why="a throttled GPU makes every step slower, on all GPUs of the run",
    ),
    CheckSpec(
        "GPU014",
        "MIG",
        gpu_health.mig,
        required="off, or one GPU and an instance with enough memory",
        why="a process gets one instance with a part of the memory, and instances cannot train together",
    ),
    CheckSpec(
        "GPU015",
        "compute mode",
        gpu_health.compute_mode,
        required="default, or exclusive and free",
        why='a GPU that another process has for itself answers "all CUDA-capable devices are busy or unavailable"',
    ),
    CheckSpec(
        "GPU016",
        "access between GPUs",
        gpu_health.peer_access,
        required="direct access between all GPUs of the run",
        why="without it gradients travel through host memory, which slows every step",
    ),
    CheckSpec(
        "GPU017",
        "memory of a training step",
        gpu_memory.step_memory,
        why="activations come on top of weights and optimizer, and are most of what a run takes",
        at_start=False,
    ),
)
