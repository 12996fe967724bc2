"""How a run stands or ended: stalled, just ended, out of disk, and every failure that its log tells of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bevctl.finding import Evidence, Severity
from bevctl.monitor.facts import against_fragments
from bevctl.monitor.state import span
from bevctl.monitor.view import Trouble, View
from bevctl.runs.records import EventRecord

GIB = 2**30
LINE = 120
"""Characters of the last line that are shown."""
BY_HAND = ("interrupted", "time_limit")
"""Ends that somebody wanted."""
CAUSES = {
    "MEM002": ("cuda_oom",),
    "MEM003": ("host_oom", "killed"),
    "LOAD002": ("worker_killed", "shared_memory", "worker_exited"),
    "DISK002": ("disk_full",),
    "NAN005": ("nonfinite_input",),
    "RUN004": (
        *("nccl_timeout", "nccl_error", "rank_failed", "connection_lost"),
        *("unused_parameters", "marked_twice"),
    ),
}
"""Failures by the alarm that tells of them; all others are RUN002's."""


def stalled(view: View) -> Iterator[Trouble]:
    """No line for far longer than usual."""
    state = view.state
    if state.name != "stalled" or state.silence_s is None or state.limit_s is None:
        return
    busy = [f"GPU {gpu.index} {gpu.utilization:.0f} %" for gpu in view.gpus if gpu.utilization is not None]
    yield Trouble(
        Severity.FAIL,
        f"The run is stalled: no line for {span(state.silence_s)}",
        (
            Evidence("log", f"at most {span(state.limit_s)} without a line would be usual here"),
            Evidence("last line", view.log.last_line[:LINE]),
            *([Evidence("GPUs now", ", ".join(busy))] if busy else []),
        ),
        "A rank waits for another one (one GPU idle, the others at 100 %), or a loading process or the machine hangs.",
        "Look at the processes (py-spy dump), the GPUs and the storage; then stop the run and resume it.",
        view.progress.iter,
    )


def ended(view: View) -> Iterator[Trouble]:
    """The log just stops, or the run was stopped on purpose."""
    if view.state.name == "ended" and view.log.steps:
        yield Trouble(
            Severity.INFO,
            f"The run {view.state.why}",
            (Evidence("last line", view.log.last_line[:LINE]),),
            "Killed from outside (the reason is not in this file, as the interpreter had no chance to write it), or "
            "stopped; the launcher's output or the batch system may tell.",
            "Resume from the last checkpoint if it is to go on.",
            view.progress.iter,
        )


def died(view: View) -> Iterator[Trouble]:
    """The run is dead, and no failure in its log says why."""
    if view.state.name == "died" and view.state.failure is None and not view.events("failure"):
        yield Trouble(
            Severity.FAIL,
            f"The run died: {view.state.why}",
            (Evidence("last line", view.log.last_line[:LINE]),),
            "What ended it is not in its files: the out-of-memory killer, the batch system or a signal leaves no word "
            "there. A run that stopped on non-finite numbers says so.",
            "Look at the launcher's output and at dmesg; resume from the last checkpoint.",
            view.progress.iter,
        )


def failures_of(*causes: str) -> Callable[[View], Iterator[Trouble]]:
    """The rule for failures of these causes."""

    def rule(view: View) -> Iterator[Trouble]:
        for cause in causes:
            yield from _failures(view, [e for e in _first_causes(view) if e.data.get("cause") == cause])

    return rule


def other_failures(view: View) -> Iterator[Trouble]:
    """Failures that no other alarm tells of."""
    known = {cause for causes in CAUSES.values() for cause in causes}
    rest = [event for event in _first_causes(view) if event.data.get("cause") not in known]
    for message in dict.fromkeys(event.message for event in rest):
        yield from _failures(view, [event for event in rest if event.message == message])


def _first_causes(view: View) -> list[EventRecord]:
    return [event for event in view.events("failure") if event.data.get("role") != "consequence"]


def _failures(view: View, events: list[EventRecord]) -> Iterator[Trouble]:
    """One trouble for failures of one kind."""
    if not events:
        return
    first, data = events[0], events[0].data
    dragged = [e for e in view.events("failure") if e.data.get("role") == "consequence" and _same_moment(e, first)]
    times = sum(event.data.get("count", 1) for event in events)
    evidence = [Evidence(first.where or "log", first.message)]
    evidence += [Evidence("traceback", frame) for frame in data.get("frames", [])[-2:]]
    evidence += _fragmentation(view, data)
    evidence += [Evidence(e.where or "log", f"dragged along: {e.message}") for e in dragged[:4]]
    by_hand = data.get("cause") in BY_HAND
    yield Trouble(
        Severity.WARN if by_hand else Severity.FAIL,
        _title(first) + (f" ({times} times)" if times > 1 else ""),
        tuple(evidence),
        data.get("meaning") or "An exception ended the run, or was printed by a part of it.",
        data.get("fix") or None,
        first.iter,
    )


def _fragmentation(view: View, data: Mapping[str, Any]) -> Iterator[Evidence]:
    """Memory that PyTorch held and could not use, where it would have been enough."""
    if not {"reserved_gib", "allocated_gib", "tried_gib"} <= data.keys():
        return
    free, tried = data["reserved_gib"] - data["allocated_gib"], data["tried_gib"]
    if free > tried:
        yield Evidence(
            "memory",
            f"{free:.1f} GiB were reserved and free, in pieces too small for {tried:.2f} GiB; against that: "
            f"{against_fragments(view.log)}",
        )


def _same_moment(event: EventRecord, cause: EventRecord) -> bool:
    return event.data.get("cluster") == cause.data.get("cluster")


def _title(event: EventRecord) -> str:
    message = event.message.strip() or event.data.get("exception", "A failure")
    return message if len(message) <= 120 else f"{message[:117]}..."


def mismatch(view: View) -> Iterator[Trouble]:
    """A checkpoint that does not fit the model."""
    for event in view.events("checkpoint_mismatch"):
        sizes = event.data.get("size_mismatch", 0)
        counts = {kind: event.data.get(kind, 0) for kind in ("size_mismatch", "missing", "unexpected")}
        prefixes = event.data.get("prefixes", {})
        severity = Severity.FAIL if sizes or _backbone_missing(prefixes.get("missing", {})) else Severity.INFO
        evidence = [
            Evidence(event.where or "log", f"{count} keys {kind.replace('_', ' ')}: {_parts(prefixes.get(kind, {}))}")
            for kind, count in counts.items()
            if count
        ]
        yield Trouble(
            severity,
            "The checkpoint's weights do not fit the model"
            if severity is Severity.FAIL
            else "Some weights were not loaded",
            tuple(evidence) or (Evidence(event.where or "log", event.message),),
            "Model and checkpoint come from different configs; what does not fit keeps its initial values."
            if severity is Severity.FAIL
            else "Usual when training starts from a backbone or from another task's weights.",
            "Use the config that the checkpoint was made with." if severity is Severity.FAIL else None,
            event.iter,
        )


def _backbone_missing(prefixes: dict[str, int]) -> bool:
    return any("backbone" in prefix or prefix.startswith("encoders.") for prefix in prefixes)


def _parts(prefixes: dict[str, int]) -> str:
    return ", ".join(f"{prefix} ({count})" for prefix, count in list(prefixes.items())[:4]) or "names not given"


def disk_too_small(view: View) -> Iterator[Trouble]:
    """The disk will be full before the run ends."""
    disk = view.disk
    if disk is None or disk.suffices is not False or view.state.name not in ("running", "stalled"):
        return
    yield Trouble(
        Severity.WARN,
        f"The disk will be full before the end: {disk.free / GIB:.1f} GiB left",
        (Evidence(str(disk.folder), f"the checkpoints still to come need about {(disk.needed or 0) / GIB:.1f} GiB"),),
        "Checkpoints are kept longer than the space lasts.",
        "Free space, move old checkpoints away, or keep fewer (train.keep).",
        view.progress.iter,
    )
