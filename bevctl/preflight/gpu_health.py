"""Are the GPUs well: memory errors, driver errors in the kernel log, throttling, and modes that get in the way."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from bevctl.preflight.checks import Context, Outcome, failed, passed, skipped, unknown, warned
from bevctl.preflight.gpu_memory import holders_in_use
from bevctl.preflight.gpu_selection import combined, each_gpu, gpus_in_use, usable_memory
from bevctl.preflight.nvml import COMPUTE_EXCLUSIVE, COMPUTE_PROHIBITED, POWER_CAP, SLOWDOWNS, Gpu, NotReported

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(.*)")
_HARDWARE_XIDS = {
    48: "double-bit memory error",
    62: "microcontroller halted",
    63: "memory row remapped",
    64: "memory row could not be remapped",
    74: "NVLink error",
    79: "fell off the bus",
    92: "many single-bit memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "system processor does not answer",
    120: "system processor error",
}
"""Xids that point at the card or its slot; the others come from programs too (NVIDIA, Xid errors)."""
_KERNEL_LOG_BYTES = 2**20


def ecc(context: Context) -> Outcome:
    """Uncorrected memory errors."""

    def judge(gpu: Gpu) -> Outcome:
        count = gpu.ecc_uncorrected
        if isinstance(count, NotReported):
            return _not_reported(count)
        if count:
            found = f"{count} uncorrected error{'s' if count > 1 else ''} since the driver was loaded"
            return warned(found, f"Reset the GPU when it is idle (nvidia-smi -i {gpu.index} -r), then watch the count.")
        return passed("no uncorrected errors")

    return each_gpu(context, judge)


def remapped_rows(context: Context) -> Outcome:
    """Spare memory rows (Ampere and newer) or retired pages (before)."""

    def judge(gpu: Gpu) -> Outcome:
        remap = gpu.remap
        if isinstance(remap, NotReported):
            return _retired_pages(gpu)
        if remap.failed:
            return failed("a bad row could not be remapped", "Have the card replaced; use another until then.")
        if remap.pending:
            return warned("a row remap waits for a reset", f"Reset the idle GPU: nvidia-smi -i {gpu.index} -r.")
        return passed(f"{remap.correctable + remap.uncorrectable} rows remapped, none pending")

    return each_gpu(context, judge)


def _retired_pages(gpu: Gpu) -> Outcome:
    if isinstance(gpu.retired_pending, NotReported):
        return _not_reported(gpu.retired_pending)
    if gpu.retired_pending:
        return warned("a page waits to be retired", "Reboot, or reset the idle GPU.")
    return passed("no page waits to be retired")


def xid(context: Context) -> Outcome:
    """Errors that the driver wrote to the kernel log; NVML keeps no history of them."""
    gpus = context.once(gpus_in_use).used
    if not gpus:
        return skipped("no GPU to look at, see GPU001")
    lines = kernel_log()
    if lines is None:
        return unknown("the kernel log cannot be read by this user", "As root: dmesg | grep -i xid.")
    return combined([(str(gpu), _judge_xids(gpu, lines)) for gpu in gpus])


def _judge_xids(gpu: Gpu, lines: Iterable[str]) -> Outcome:
    seen = [m for m in map(_XID.search, lines) if m and _same_bus(m[1], gpu.bus_id)]
    bad = [match for match in seen if int(match[2]) in _HARDWARE_XIDS]
    if not bad:
        others = ", ".join(dict.fromkeys(match[2] for match in seen))
        return passed(f"only Xids that programs cause: {others}" if others else "no Xid in the kernel log")
    found = ", ".join(dict.fromkeys(f"Xid {match[2]} ({_HARDWARE_XIDS[int(match[2])]})" for match in bad))
    return warned(found, "Read `dmesg | grep -i xid`; if it comes again after a reboot, have the card checked.")


def _same_bus(logged: str, bus_id: str) -> bool:
    """Whether "0000:3b:00" of the log and "00000000:3B:00.0" of NVML are the same slot."""
    return bus_id.lower().lstrip("0").startswith(logged.lower().lstrip("0").split(".")[0])


def kernel_log(root: Path = Path("/")) -> list[str] | None:
    """Lines of the kernel's messages, from /dev/kmsg or the system's log file; None where neither may be read."""
    lines = _kmsg(root / "dev/kmsg")
    if lines is not None:
        return lines
    for name in ("var/log/kern.log", "var/log/messages", "var/log/syslog"):
        try:
            with (root / name).open("rb") as file:
                file.seek(max(0, os.path.getsize(file.name) - _KERNEL_LOG_BYTES))
                return file.read().decode(errors="replace").splitlines()
        except OSError:
            continue
    return None


def _kmsg(path: Path) -> list[str] | None:
    """All records of the device, which hands out one a read and never ends by itself."""
    try:
        device = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines = []
    try:
        with contextlib.suppress(BlockingIOError):  # after the newest
            while record := os.read(device, 8192):
                lines.append(record.decode(errors="replace"))
    except OSError:
        return lines or None
    finally:
        os.close(device)
    return lines


def throttling(context: Context) -> Outcome:
    """Clocks held back by heat or power right now."""

    def judge(gpu: Gpu) -> Outcome:
        events = gpu.clock_events
        if isinstance(events, NotReported):
            return _not_reported(events)
        heat = "" if isinstance(gpu.temperature, NotReported) else f" at {gpu.temperature} °C"
        reasons = [text for bit, text in SLOWDOWNS.items() if events & bit]
        if events & ~POWER_CAP & sum(SLOWDOWNS):
            return warned(f"{', '.join(reasons)}{heat}", "Check cooling, fans and power supply of the machine.")
        return passed(f"{reasons[0] if reasons else 'not throttled'}{heat}")

    return each_gpu(context, judge)


def mig(context: Context) -> Outcome:
    """MIG cuts a GPU into instances; a process gets one of them, and several cannot train together."""
    several = (context.gpus or 1) > 1

    def judge(gpu: Gpu) -> Outcome:
        if isinstance(gpu.mig, NotReported):
            return passed("no MIG on this card") if not gpu.mig.supported else _not_reported(gpu.mig)
        if not gpu.mig:
            return passed("off")
        memory = usable_memory(gpu)
        if isinstance(memory, NotReported):
            return failed("on, without an instance", "Make one (nvidia-smi mig -cgi), or have MIG switched off.")
        found = f"on, {len(gpu.mig_instances)} instances; the run gets one, with {memory.total / 2**30:.1f} GiB"
        if several:
            return failed(found, "Training on several GPUs needs MIG off: as root, nvidia-smi -mig 0.")
        return warned(found, "Choose the instance with CUDA_VISIBLE_DEVICES=MIG-<uuid>; nvidia-smi -L lists them.")

    return each_gpu(context, judge)


def compute_mode(context: Context) -> Outcome:
    """Modes that keep a process, or a second one, off the GPU."""

    def judge(gpu: Gpu) -> Outcome:
        mode, fix = gpu.compute_mode, f"As root: nvidia-smi -i {gpu.index} -c DEFAULT."
        if isinstance(mode, NotReported):
            return _not_reported(mode)
        if mode == COMPUTE_PROHIBITED:
            return failed("prohibited: no process may compute on it", fix)
        if mode != COMPUTE_EXCLUSIVE:
            return passed("shared by any number of processes")
        others = [holder for holder in context.once(holders_in_use) if gpu.index in holder.memory]
        if others:
            return failed(f"exclusive, and pid {others[0].pid} has it", f"End that process. {fix}")
        return passed("exclusive, and free: one process may use it, as training does")

    return each_gpu(context, judge)


def peer_access(context: Context) -> Outcome:
    """How the GPUs of a run reach each other."""
    used = context.once(gpus_in_use).used
    if len(used) < 2:
        return skipped("fewer than two GPUs talk to each other")
    indices = {gpu.index for gpu in used}

    def judge(gpu: Gpu) -> Outcome:
        peers = {other: status for other, status in gpu.peers.items() if other in indices}
        silent = next((status for status in peers.values() if isinstance(status, NotReported)), None)
        if silent is not None:
            return _not_reported(silent)
        links = "NVLink not reported" if isinstance(gpu.nvlinks, NotReported) else f"{gpu.nvlinks} NVLinks active"
        blocked = ", ".join(f"GPU {other}: {status}" for other, status in peers.items() if status != "ok")
        if blocked:
            fix = (
                "It works, slower, through host memory. Virtual machines: allow P2P (ACS off); see nvidia-smi topo -m."
            )
            return warned(f"no direct access to {blocked}; {links}", fix)
        return passed(f"direct access to all others; {links}")

    return each_gpu(context, judge)


def _not_reported(field: NotReported) -> Outcome:
    """A field that the card or the driver does not have decides nothing; one that fails does."""
    return unknown(f"not reported ({field.reason})", advisory=not field.supported)
