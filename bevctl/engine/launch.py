"""Starting one process a GPU through torch's elastic launcher, without losing what their exit codes mean."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from bevctl.engine.dist import port_in_use
from bevctl.errors import BevctlError, ExitCode

OUTCOME_DIR = "BEVCTL_OUTCOME_DIR"
"""Environment variable: the folder where a worker leaves how it ended."""
_PRECEDENCE = (ExitCode.NONFINITE, ExitCode.PREEMPTED, ExitCode.USAGE, ExitCode.RUN_FAILED)
"""Which worker's end counts: the first of these that one of them had."""


@dataclass(frozen=True)
class Cluster:
    """How many processes to start, and where they meet."""

    gpus: int
    """Processes on this machine."""
    nnodes: int = 1
    rdzv_endpoint: str | None = None
    """HOST:PORT; None on a single machine: any free port."""


def check_cluster(cluster: Cluster, device: str) -> None:
    """Tells before anything is started what cannot work.

    Raises:
        BevctlError: fewer GPUs than asked for, no meeting point for several machines, or its port is in use.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device != "cpu" and cluster.gpus > count:
        raise BevctlError(
            f"--gpus {cluster.gpus}, but {'no' if count == 0 else count} usable GPU{'' if count == 1 else 's'} here.",
            "Lower --gpus, check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu.",
        )
    if cluster.rdzv_endpoint is None:
        if cluster.nnodes > 1:
            raise BevctlError(
                f"--nnodes {cluster.nnodes} needs a meeting point.",
                "Give the same --rdzv-endpoint HOST:PORT on every machine, HOST being one of them.",
            )
        return
    host, _, port = cluster.rdzv_endpoint.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise BevctlError(
            f"--rdzv-endpoint {cluster.rdzv_endpoint!r} is not HOST:PORT.", "For example localhost:29500."
        )
    if cluster.nnodes == 1:
        _check_free(host, int(port), cluster.rdzv_endpoint)


def _check_free(host: str, port: int, endpoint: str) -> None:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise port_in_use(endpoint) from error


def launch(arguments: Sequence[str], cluster: Cluster) -> ExitCode:
    """Runs `python -m bevctl ARGUMENTS` once a GPU and returns the exit code of the run.

    A first SIGTERM or SIGINT is passed on to the workers, which write a checkpoint.

    Raises:
        BevctlError: what the decisive worker failed with.
    """
    with tempfile.TemporaryDirectory(prefix="bevctl-") as folder, _environment(folder), _quiet_agent():
        config = LaunchConfig(
            min_nodes=cluster.nnodes,
            max_nodes=cluster.nnodes,
            nproc_per_node=cluster.gpus,
            run_id=cluster.rdzv_endpoint or "bevctl",
            rdzv_backend="c10d",
            rdzv_endpoint=cluster.rdzv_endpoint or "localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
        )
        signalled = 0
        # A worker's failure is in its own words in the folder.
        with _no_process_left_behind(), contextlib.suppress(ChildFailedError):
            try:
                launch_agent(config, sys.executable, ["-m", "bevctl", *arguments])
            except SignalException as error:
                signalled = int(error.sigval)
        return _combined(_outcomes(Path(folder)), signalled)


@contextlib.contextmanager
def _no_process_left_behind() -> Iterator[None]:
    """Kills what the block started and left running, which a second signal makes the agent do."""
    before = set(psutil.Process().children(recursive=True))
    try:
        yield
    finally:
        for process in set(psutil.Process().children(recursive=True)) - before:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _combined(outcomes: list[dict[str, Any]], signalled: int) -> ExitCode:
    codes = {outcome["code"] for outcome in outcomes}
    decisive = next((code for code in _PRECEDENCE if code in codes), None)
    if decisive is None:
        if signalled:
            return ExitCode(128 + signalled)
        if codes == {ExitCode.OK}:
            return ExitCode.OK
        raise BevctlError(
            "A worker process ended without a word, killed or crashed.",
            "Look for an out-of-memory kill in dmesg, and at the messages above.",
            ExitCode.RUN_FAILED,
        )
    told = [o for o in outcomes if o["code"] == decisive and o["message"]]
    if told:
        # A rank that only lost its peers is the least to go by.
        first = next((o for o in told if o["expected"]), told[0])
        raise BevctlError(first["message"], first["hint"], decisive)
    return decisive


def _outcomes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("rank_*.json"))]


def leave_outcome(environ: Mapping[str, str], code: int, error: Exception | None = None) -> bool:
    """In a worker of `launch`: notes how it ended. Elsewhere: returns False."""
    folder = environ.get(OUTCOME_DIR)
    if folder is None or not Path(folder).is_dir():
        return False
    outcome = {"code": int(code), "message": "", "hint": "", "expected": True}
    if isinstance(error, BevctlError):
        outcome |= {"message": error.message, "hint": error.hint}
    elif error is not None:
        outcome |= {"message": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", "expected": False}
    path = Path(folder) / f"rank_{int(environ.get('RANK', '0')):05d}.json"
    path.write_text(json.dumps(outcome), encoding="utf-8")
    return True


@contextlib.contextmanager
def _environment(folder: str) -> Iterator[None]:
    """What the workers inherit: the outcome folder, and one thread each where nothing else is said (as torchrun)."""
    before = dict(os.environ)
    os.environ[OUTCOME_DIR] = folder
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Mutes the launcher's own report of failed children: the run's error is told once, by us."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.distributed.launcher")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
