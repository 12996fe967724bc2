"""The all-reduce of a step, tried out: processes of its own exchange gradients of the planned size."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bevctl.errors import BevctlError
from bevctl.preflight.checks import Context, Outcome, failed, passed, skipped, unknown
from bevctl.preflight.gpu_selection import gpus_in_use
from bevctl.preflight.needs import NotKnown, parameters

_FALLBACK_BYTES = 2**26
"""Where the model is not known."""
_LEAST_RANKS = 2


def check(context: Context) -> Outcome:
    """LAUNCH003: ranks meet, and the sum over them is right on each: NCCL between GPUs, gloo on the CPU."""
    if context.python is not None:
        return skipped("it is tried with this interpreter only")
    gpus = len(context.once(gpus_in_use).used)
    on_gpu = gpus > 1
    if gpus == 1 and (context.gpus or 1) == 1:
        return skipped("one GPU exchanges nothing")
    ranks = gpus if on_gpu else max(context.gpus or 1, _LEAST_RANKS)
    size = _gradient_bytes(context)
    started = time.monotonic()
    try:
        run("nccl" if on_gpu else "gloo", ranks, size, max(context.timeout - 1.0, 1.0))
    except TimeoutError:
        fix = "Look at NCCL_DEBUG=INFO, the firewall, and NCCL_SOCKET_IFNAME."
        return unknown(f"{ranks} ranks did not finish in time; they were ended", fix)
    except BevctlError as error:
        return failed(error.message, error.hint)
    took = time.monotonic() - started
    return passed(f"{ranks} ranks, {'NCCL' if on_gpu else 'gloo'}, {size / 1e6:.0f} MB, {took:.1f} s with start")


def _gradient_bytes(context: Context) -> int:
    try:
        return 4 * context.once(parameters)
    except NotKnown:
        return _FALLBACK_BYTES


def run(backend: str, ranks: int, size: int, timeout: float) -> None:
    """Sums `size` bytes over `ranks` processes once.

    Raises TimeoutError (every process is ended then), and BevctlError with what the first failing rank said.
    """
    with tempfile.TemporaryDirectory(prefix="bevctl-") as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
        command = [
            sys.executable,
            "-m",
            "bevctl.preflight.all_reduce_rank",
            backend,
            str(Path(folder, "meet")),
            str(size),
        ]
        processes = [
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for rank in range(ranks)
        ]
        try:
            _wait(processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> None:
    while any(process.poll() is None for process in processes):
        _raise_failure(processes)
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)
    _raise_failure(processes)


def _raise_failure(processes: list[subprocess.Popen[bytes]]) -> None:
    for rank, process in enumerate(processes):
        if process.poll():
            lines = process.communicate()[1].decode(errors="replace").strip().splitlines()
            said = lines[-1] if lines else f"exit code {process.returncode}"
            raise BevctlError(f"rank {rank} failed: {said:.300}", "NCCL_DEBUG=INFO says more; check the GPUs' links.")
