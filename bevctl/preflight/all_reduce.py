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
    with tempfile.TemporaryDirectory(prefix="bevctl-") as name:
        folder = Path(name)
        started = [_Rank(rank, ranks, [backend, str(folder / "meet"), str(size)], folder) for rank in range(ranks)]
        try:
            deadline = time.monotonic() + timeout
            while sum(rank.is_done() for rank in started) < ranks:
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(0.05)
        finally:
            for rank in started:
                rank.end()


class _Rank:
    """One process of the trial."""

    def __init__(self, rank: int, ranks: int, arguments: list[str], folder: Path) -> None:
        self._rank = rank
        self._words = folder / f"rank_{rank}.txt"
        environment = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with self._words.open("wb") as words:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bevctl.preflight.all_reduce_rank", *arguments],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=words,
            )

    def is_done(self) -> bool:
        """Whether it has ended well. Raises BevctlError with its last words when it has not."""
        code = self._process.poll()
        if code:
            lines = self._words.read_text(errors="replace").strip().splitlines()
            said = lines[-1] if lines else f"exit code {code}"
            hint = "NCCL_DEBUG=INFO says more; check the links between the GPUs."
            raise BevctlError(f"rank {self._rank} failed: {said:.300}", hint)
        return code == 0

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
