"""What went wrong, found in the text of a log: failures with their meaning, the first cause apart from what it dragged.

A failure is an EventRecord of kind `failure`. Its `data`:

- `cause`: a key of FAILURES, or `exception` for a traceback of any other kind;
- `meaning` and `fix`: sentences for the user (`fix` may be empty);
- `role`: `cause`, or `consequence` of another failure of the same moment, which `cluster` numbers;
- `exception`: the exception's name, where there was a traceback, and `frames`: its last lines of code;
- `count`: how often it was told (by several ranks, say), where more than once;
- numbers that the sentence holds, under the names in the patterns below (GiB for memory).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bevctl.runs.records import EventRecord

FAILURE = "failure"


@dataclass(frozen=True)
class Failure:
    """One kind of failure: how logs tell of it, what it means, what to do."""

    pattern: re.Pattern[str]
    meaning: str
    fix: str = ""
    dragged: bool = False
    """Follows from another failure, if there is one at the same moment."""
    raised: bool = False
    """Only an exception or an error message tells of it: in other text the words may mean anything."""


def _failure(pattern: str, meaning: str, fix: str = "", dragged: bool = False, raised: bool = False) -> Failure:
    return Failure(re.compile(pattern), meaning, fix, dragged, raised)


FAILURES = {
    "cuda_oom": _failure(
        r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|HIP out of memory|"
        r"cuda execution failed with error 2\b",
        "The GPU's memory ran out.",
        "Lower the batch, train in half precision (--fp16 or --bf16) or use --grad-checkpoint.",
    ),
    "shared_memory": _failure(
        r"killed by signal: Bus error|insufficient shared memory|^Bus error|"
        r"unable to (?:open|mmap|write to) (?:file|shared memory) ?</torch_",
        "A data loading worker ran out of shared memory (/dev/shm).",
        "Raise the container's shared memory (docker --shm-size, or --ipc=host), or use fewer workers.",
    ),
    "worker_killed": _failure(
        r"DataLoader worker \(pid\(?s?\)? ?[\d, ]+\) is killed by signal: (?P<signal>[\w ]+)",
        "A data loading worker was killed from outside; with signal Killed it was most often the kernel, because the "
        "host's memory ran out.",
        "Use fewer workers or a smaller prefetch; look at dmesg for the kernel's out-of-memory killer.",
    ),
    "host_oom": _failure(
        r"[Oo]ut [Oo]f [Mm]emory: Killed process|oom[-_]kill|Detected \d+ oom|MemoryError|"
        r"DefaultCPUAllocator: (?:can't|not enough)|Cannot allocate memory",
        "The host's memory ran out.",
        "Use fewer workers, a smaller batch or a larger memory limit of the job.",
    ),
    "disk_full": _failure(
        r"No space left on device|Disk quota exceeded|file write failed.*errno 28|PytorchStreamWriter failed writing",
        "The disk, or this user's quota, is full; the checkpoint that was being written is damaged or missing.",
        "Free space, check the quota, keep fewer checkpoints; resume from the last whole checkpoint.",
    ),
    "nonfinite_input": _failure(
        r"matrix contains invalid numeric entries|cost matrix is infeasible",
        "The Hungarian assigner got NaN or infinite costs: a late sign of NaN in the outputs of the head.",
        "Look for the first NaN before it; lower the learning rate, or train the first epoch in FP32.",
        raised=True,
    ),
    "size_mismatch": _failure(
        r"Sizes of tensors must match|size of tensor a \(\d+\) must match|shape mismatch|mat1 and mat2 shapes",
        "Tensors of different sizes met; in evaluation most often because the batch there is not what the model takes.",
        raised=True,
    ),
    "unused_parameters": _failure(
        r"Expected to have finished reduction in the prior iteration",
        "Some parameters got no gradient, which distributed training waits for.",
        "Give every parameter a part in the loss (a masked task too, times zero), or find unused parameters.",
        raised=True,
    ),
    "marked_twice": _failure(
        r"marked as ready twice|mark a variable ready only once",
        "A parameter got its gradient twice: activation checkpointing together with the search for unused parameters.",
        "Use exactly one of the two.",
        raised=True,
    ),
    "no_kernel": _failure(
        r"no kernel image is available",
        "A compiled extension, or PyTorch itself, was not built for this GPU.",
        "Install or build it for the GPU's compute capability.",
    ),
    "illegal_access": _failure(
        r"illegal memory access|device-side assert|misaligned address|CUDA error: unspecified launch failure|"
        r"CUBLAS_STATUS_EXECUTION_FAILED|CUDNN_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR)",
        "A GPU kernel failed; the line that reports it is often not the one at fault.",
        "Run once with CUDA_LAUNCH_BLOCKING=1 for the true line; labels out of range are the usual reason.",
    ),
    "undefined_symbol": _failure(
        r"undefined symbol: \w+",
        "A compiled extension was built for another version of PyTorch.",
        "Install the build that matches PyTorch and CUDA.",
        raised=True,
    ),
    "weights_only": _failure(
        r"Weights only load failed|WeightsUnpickler error",
        "torch 2.6 and newer load plain data alone, and the checkpoint holds an object of its project (mmengine's do).",
        "If you trust the file, set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1, or use a torch below 2.6.",
        raised=True,
    ),
    "gpu_lost": _failure(
        r"GPU has fallen off the bus|uncorrectable ECC error|CUDA error: device .*unavailable|NVRM: Xid",
        "The GPU failed or was lost.",
        "Look at dmesg for Xid lines; restart the machine, and have the card checked if it happens again.",
    ),
    "time_limit": _failure(
        r"DUE TO TIME LIMIT|DUE TO PREEMPTION|slurmstepd: error: .*CANCELLED",
        "The batch system ended the job.",
        "Resume from the last checkpoint, with a longer limit.",
    ),
    "segfault": _failure(
        r"Segmentation fault|killed by signal: Segmentation fault|SIGSEGV",
        "A process crashed in compiled code.",
        "Suspect compiled extensions that do not match PyTorch; run with faulthandler (python -X faulthandler).",
    ),
    "killed": _failure(
        r"^(?:.*: line \d+: +\d+ )?Killed\b|exitcode: -9\b|exit code -9\b|SIGKILL|died with <Signals\.SIGKILL",
        "A process was killed from outside, most often by the kernel because the host's memory ran out.",
        "Look at dmesg for the kernel's out-of-memory killer; use fewer workers.",
    ),
    "interrupted": _failure(
        r"^KeyboardInterrupt|^\^C", "The run was stopped by hand (Ctrl-C).", "Resume from the last checkpoint."
    ),
    "nccl_timeout": _failure(
        r"Watchdog caught collective operation timeout|collective operation timeout|NCCL timeout|"
        r"Timed out initializing process group|wait timeout after \d+ms",
        "A rank waited for the others in vain: one of them was slower than the limit, crashed or left the common path.",
        "Find what the silent rank did last; if one merely evaluates or loads slowly, raise the limit.",
        dragged=True,
    ),
    "nccl_error": _failure(
        r"NCCL error|ncclSystemError|ncclUnhandledCudaError|ncclInternalError|ncclRemoteError|DistBackendError|"
        r"NCCL WARN .*(?:failed|error)",
        "Communication between the GPUs failed.",
        "Run with NCCL_DEBUG=INFO; look for a rank that ended first, then at the network interface and driver.",
        dragged=True,
    ),
    "worker_exited": _failure(
        r"DataLoader worker \(pid\(?s?\)? ?[\d, ]+\) exited unexpectedly",
        "A data loading worker ended; why stands before it, if anywhere.",
        "Set the workers to 0 once to see its own error.",
        dragged=True,
    ),
    "rank_failed": _failure(
        r"ChildFailedError|CalledProcessError|Sending process \d+ closing signal|failed \(exitcode: -?\d+\)|"
        r"ProcessExitedException|ProcessRaisedException|SignalException|Primary job +terminated normally",
        "The launcher ended the other ranks after one of them failed.",
        dragged=True,
    ),
    "connection_lost": _failure(
        r"Connection reset by peer|Broken pipe|Connection closed by peer|EOFError|ConnectionRefusedError|"
        r"received signal SIG(?:TERM|ABRT)|recvValue failed",
        "The other side of a connection went away.",
        dragged=True,
        raised=True,
    ),
}
"""By `data["cause"]`; the first whose pattern is in the text names it."""

_WORDS = (
    "rror", "xception", "illed", "emory", "space left", "quota", "imeout", "imed out", "CANCEL", "NCCL", "Interrupt",
    "fault", "terminated", "signal", "Xid", "Broken pipe", "reset by peer", "oom", "numeric entries", "^C", "symbol",
    "exitcode", "exit code", "Weights only",
)  # fmt: skip
"""One of them is in every text that FAILURES knows: a substring search costs less than the patterns."""
_EXCEPTION = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure))(?:: (.*))?$")
_LAST_LINE = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:: (.*))?$")
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
_MEMORY = {
    "tried_gib": re.compile(r"[Tt]ried to allocate ([\d.]+) ([KMG]i?B)"),
    "capacity_gib": re.compile(r"([\d.]+) ([KMG]i?B) total capacity|total capacity of ([\d.]+) ([KMG]i?B)"),
    "free_gib": re.compile(r"([\d.]+) ([KMG]i?B) (?:free|is free)"),
    "allocated_gib": re.compile(r"([\d.]+) ([KMG]i?B) (?:already allocated|is allocated by PyTorch)"),
    "reserved_gib": re.compile(r"([\d.]+) ([KMG]i?B) reserved in total"),
    "reserved_unallocated_gib": re.compile(r"([\d.]+) ([KMG]i?B) is reserved by PyTorch but unallocated"),
}
_GIB = {"K": 2.0**-20, "M": 2.0**-10, "G": 1.0}
_FRAMES = 8
_LONGEST_TRACEBACK = 2000
_LONGEST_TEXT = 600


@dataclass(frozen=True)
class Found:
    """A failure that a line told of."""

    message: str
    data: dict[str, Any]


def classify(text: str, raised: bool = False) -> str | None:
    """The key of FAILURES that `text` tells of; None where it is no failure.

    Args:
        raised: it is an exception or an error message.
    """
    if not any(word in text for word in _WORDS):
        return None
    text = text[:4000]
    known = (
        name for name, failure in FAILURES.items() if (raised or not failure.raised) and failure.pattern.search(text)
    )
    return next(known, None)


def describe(text: str, exception: str = "", frames: Iterable[str] = (), raised: bool = False) -> Found | None:
    """The failure that `text` tells of; any text is one where it is the message of an `exception`.

    Args:
        raised: it is an error message, though no exception's.
    """
    cause = classify(f"{exception}: {text}", raised=True) if exception else classify(text, raised)
    if cause is None and not exception:
        return None
    data: dict[str, Any] = {"cause": cause or "exception"}
    if cause is None:
        data |= {"meaning": "The program ended with an exception.", "fix": ""}
    else:
        data |= {"meaning": FAILURES[cause].meaning, "fix": FAILURES[cause].fix}
        signal = FAILURES[cause].pattern.search(text)
        data |= {name: value for name, value in (signal.groupdict() if signal else {}).items() if value}
    if cause == "cuda_oom":
        data |= memory_figures(text)
    if exception:
        data |= {"exception": exception, "frames": list(frames)}
    message = f"{exception}: {text}" if exception and text else exception or text
    return Found(message[:_LONGEST_TEXT], data)


def memory_figures(text: str) -> dict[str, float]:
    """The sizes in PyTorch's out-of-memory sentence (either wording), GiB, by the names in `_MEMORY`."""
    figures = {}
    for name, pattern in _MEMORY.items():
        match = pattern.search(text)
        groups = [group for group in match.groups() if group] if match else []
        with contextlib.suppress(ValueError):
            if groups:
                figures[name] = float(groups[0]) * _GIB[groups[1][0]]
    unallocated = figures.pop("reserved_unallocated_gib", None)
    if unallocated is not None and "allocated_gib" in figures:
        figures.setdefault("reserved_gib", figures["allocated_gib"] + unallocated)
    return figures


@dataclass
class FailureScanner:
    """Finds failures in lines that come one by one, tracebacks of several processes mixed included."""

    _frames: list[str] = field(default_factory=list)
    _depth: int = 0
    """Lines of the traceback that is open; 0 outside one."""
    _continues: bool = False
    """The line before was an exception's, whose message may go on."""
    _chained: bool = False

    def scan(self, line: str) -> tuple[bool, Found | None]:
        """Whether the line is part of what a failure prints, and the failure where it completes one."""
        if line.startswith("Traceback (most recent call last)"):
            self._depth, self._frames, self._continues = 1, [], False
            return True, None
        if line.startswith(_CHAINED):
            self._chained = True
            return True, None
        if line[:1] in " \t":
            return self._indented(line), None
        self._continues = False
        match = (_LAST_LINE if self._depth else _EXCEPTION).match(line)
        if match is not None:
            found = describe(match[2] or "", match[1], self._frames)
            self._depth, self._frames, self._continues = 0, [], True
        else:
            found = None if "Warning: " in line else describe(line)
        if found is not None and self._chained:
            found.data["chained"] = True
            self._chained = False
        return found is not None, found

    def _indented(self, line: str) -> bool:
        if not self._depth:
            return self._continues
        self._depth += 1
        if line.startswith("  File "):
            self._frames = [*self._frames[1 - _FRAMES :], line.strip()[:300]]
        if self._depth > _LONGEST_TRACEBACK:
            self._depth = 0
        return True


def settle(events: list[EventRecord]) -> None:
    """Sets `cluster` and `role` of every failure: of those at one moment one is the cause, the others follow."""
    clusters: list[list[EventRecord]] = [[]]
    for event in events:
        known = clusters[-1]
        if event.kind in ("start", "resume"):
            clusters.append([])
        elif event.kind == FAILURE and known and known[0].iter != event.iter:
            clusters.append([event])
        elif event.kind == FAILURE:
            known.append(event)
    for number, cluster in enumerate(clusters):
        first = min(cluster, key=_suspicion, default=None)
        for event in cluster:
            event.data |= {"cluster": number, "role": "cause" if event is first else "consequence"}


def _suspicion(event: EventRecord) -> int:
    """Rank as a first cause: what explains itself, then any exception, then what follows from others."""
    failure = FAILURES.get(event.data.get("cause", ""))
    if (failure is not None and failure.dragged) or event.data.get("chained"):
        return 2
    return 0 if failure is not None else 1
