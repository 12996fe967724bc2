"""A run that is silent: whether it hangs or is dead, which rank waits for what, and how to go on."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator, Sequence

from bevctl.diagnose import rank_beats
from bevctl.diagnose.rank_findings import cannot_run, where_they_stand
from bevctl.diagnose.rank_processes import RankProcess, processes_of, top
from bevctl.diagnose.report import DiagnoseFinding, DiagnoseRequest, Diagnosis, Remedy, Status, Table, status_of
from bevctl.diagnose.subject import Subject, from_alarm, read_subject
from bevctl.finding import Evidence, Severity
from bevctl.monitor.gpus import Gpu, live_gpus
from bevctl.monitor.progress import evaluation_lengths
from bevctl.monitor.state import LEAST_SILENCE_S, is_evaluating, kinds_since, span
from bevctl.monitor.view import Alarm, View
from bevctl.preflight.launch import contradictions_of
from bevctl.runs.records import Beat, Doing

SILENT, GPU_PATTERN, SETTINGS, ALIVE = "HANG101", "HANG102", "HANG105", "HANG106"
BUSY, IDLE = 90.0, 10.0
"""GPU utilisation in percent: a rank that waits in NCCL spins at 100, one that waits for anything else rests near 0."""
IN_USE_GIB = 1.0
"""GPU memory in use below which nobody trains on a card."""
MEANT = ("RUN004", "LOAD002")
"""Alarms of what makes the other ranks wait for ever."""
STARTING, TRAINING, SAVING, EPOCH_END, EVALUATED = (
    *("before its first training record", "in training", "after it began to save a checkpoint"),
    *("at the end of an epoch", "after an evaluation"),
)
_WHY = {
    STARTING: "Ranks that have not all come wait for each other (address, port, a rank that failed), or the data set "
    "is still being read.",
    TRAINING: "A rank waits for data, for a lock or for the storage, and the others wait for it; or the ranks do not "
    "take the same path (a head or a norm that only some of them use).",
    SAVING: "One rank saves or evaluates while the others wait for it; storage that hangs; or ranks that evaluate "
    "different numbers of samples and meet no more.",
    EVALUATED: "Ranks that took part in the evaluation and ranks that did not are out of step.",
}
_WHY[EPOCH_END] = _WHY[SAVING]


def diagnose(request: DiagnoseRequest) -> Diagnosis:
    """Whether the run hangs, and who waits for whom, by its log, its processes and the GPUs of this machine.

    Raises:
        BevctlError: what the request names cannot be read.
    """
    subject = read_subject(request, live_gpus())
    view = subject.view
    if view is None:
        return Diagnosis(Status.INCONCLUSIVE, (), [*subject.looked_at, "There is no log to look at."])
    now, beats = time.time(), view.log.beats if view.state.name != "finished" else []
    processes, last_words = processes_of(view.log, beats), rank_beats.last_words(beats, now)
    findings = [
        *_failures(subject),
        *_silence(subject, processes, last_words),
        *(gpu_pattern(_gpus(view, processes), view.state.name == "stalled")),
        *cannot_run(processes, last_words),
        *_standing(view, processes, beats, now),
        *_settings(subject),
    ]
    findings.sort(key=lambda finding: (-finding.severity.rank, -finding.confidence))
    status, said = _status(view, findings)
    tables = [*([rank_beats.table(beats, now)] if beats else []), *([_table(processes)] if processes else [])]
    looked_at = [*subject.looked_at, *_looked_at(view, processes), *_heard(view, beats), *said]
    return Diagnosis(status, findings, looked_at, tables)


def _standing(
    view: View, processes: Sequence[RankProcess], beats: Sequence[Beat], now: float
) -> Iterator[DiagnoseFinding]:
    """Where the ranks of a silent run stand, unless one of them is known to stand still."""
    if view.state.name in ("stalled", "ended") and not any(process.is_halted for process in processes):
        # Where nothing lives any more, nothing tells whether a run hung before it ended.
        is_live = view.state.name == "stalled" or bool(processes)
        yield from where_they_stand(processes, beats, now, is_live)


def _heard(view: View, beats: Sequence[Beat]) -> Iterator[str]:
    """Whose last words are missing."""
    world = view.log.header["meta"]["segments"][-1]["world"] if beats else 0
    if len(beats) < world:
        yield f"Last words of {rank_beats.names(beats)} only, of {world} ranks: the others do not write to this folder."


def _status(view: View, findings: Sequence[DiagnoseFinding]) -> tuple[Status, list[str]]:
    status, state = status_of(findings), view.state
    if status is Status.FOUND:
        return status, []
    if state.name == "ended" or (not view.log.steps and state.name != "died"):
        return Status.INCONCLUSIVE, [f"The run {state.why}: a log alone does not tell a hang from an end."]
    if state.name == "died":
        return Status.CLEAR, [f"The run is dead and does not hang: {state.why[:160]}"]
    return Status.CLEAR, [f"The run is {state.name}: {state.why}"]


def _looked_at(view: View, processes: Sequence[RankProcess]) -> Iterator[str]:
    if processes:
        yield f"Processes of the run on this machine: {', '.join(process.name for process in processes)}"
        for process in processes:
            if process.no_stack:
                yield f"{process.name}: its stack is not known, {process.no_stack}"
    elif view.state.name in ("running", "stalled", "ended"):
        host = (view.log.header.get("meta") or {}).get("host") or view.log.header.get("host")
        elsewhere = f"; it ran on {host}" if host and host != socket.gethostname() else ""
        yield f"No process of this run and this user is on this machine{elsewhere}: stacks could not be looked at."


def last_act(view: View) -> str:
    """What the run did last, by its log: one of the constants of this module."""
    log = view.log
    if not log.steps:
        return STARTING
    last = log.steps[-1].iter
    if any(v.iter is not None and v.iter >= last for v in log.validations):
        return EVALUATED
    if not is_evaluating(log, view.progress):
        return TRAINING
    saves = any(beat.doing is Doing.SAVES for beat in log.beats) or "Saving checkpoint" in log.last_line
    return SAVING if saves or "checkpoint" in kinds_since(log, last) else EPOCH_END


def _silence(
    subject: Subject, processes: Sequence[RankProcess], last_words: Sequence[Evidence]
) -> Iterator[DiagnoseFinding]:
    """The stall itself, and what the last line says of it."""
    view = subject.view
    assert view is not None
    for alarm in subject.alarms("RUN001"):
        yield from_alarm(alarm, 0.9, _next_steps(processes), (Evidence("last act", f"it stopped {last_act(view)}"),))
        yield _by_last_act(view, Severity.WARN)
    if view.state.name == "ended" and processes:
        told = span(view.state.silence_s) if view.state.silence_s is not None else "a time that the log does not tell"
        yield DiagnoseFinding(
            ALIVE,
            Severity.FAIL,
            0.9,
            f"Its processes live, and its log is silent for {told}",
            (Evidence("last line", view.log.last_line[:120]),),
            _WHY[last_act(view)],
            _next_steps(processes),
        )
    elif _is_pausing(view):
        yield _by_last_act(view, Severity.INFO, last_words)
    for alarm in subject.alarms("RUN005"):
        yield from_alarm(alarm, 0.9)


def _is_pausing(view: View) -> bool:
    """Silent for longer than between two lines, as in an evaluation."""
    long = (view.state.silence_s or 0.0) > LEAST_SILENCE_S
    return view.state.name == "running" and long and last_act(view) in (SAVING, EPOCH_END)


def _by_last_act(view: View, severity: Severity, last_words: Sequence[Evidence] = ()) -> DiagnoseFinding:
    state, act, lengths = view.state, last_act(view), evaluation_lengths(view.log)
    silence = span(state.silence_s) if state.silence_s is not None else "an unknown time"
    usual = f"evaluations took up to {span(max(lengths))} here" if lengths else "the log shows no finished evaluation"
    limit = f"; a stall from {span(state.limit_s)} on" if state.limit_s is not None else ""
    return DiagnoseFinding(
        SILENT,
        severity,
        0.6 if severity is Severity.WARN else 0.5,
        f"Silent for {silence} {act}",
        (Evidence("last line", view.log.last_line[:120]), Evidence("log", usual + limit), *last_words),
        _WHY[act] if severity is Severity.WARN else "An evaluation writes nothing for minutes: this is usual.",
        (Remedy({}, "one epoch without evaluation shows whether it is the culprit"),)
        if act in (SAVING, EPOCH_END) and severity is Severity.WARN
        else (),
    )


def _next_steps(processes: Sequence[RankProcess]) -> tuple[Remedy, ...]:
    """How to see where it hangs, where that could not be seen from here."""
    if any(process.stack for process in processes):
        return ()
    pids = ", ".join(str(process.pid) for process in processes) or "each rank's pid"
    return (
        Remedy({}, f"`py-spy dump --pid N` (pip install py-spy) for {pids}: the rank whose stack differs is the one"),
        Remedy({}, "next time start with faulthandler.register(signal.SIGUSR1): `kill -USR1 PID` then prints stacks"),
        Remedy({}, "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1 name the collective in vain"),
    )


def _gpus(view: View, processes: Sequence[RankProcess]) -> list[Gpu]:
    """The cards that the run uses, as far as the driver names its processes; else those that hold memory."""
    pids = {process.pid for process in processes}
    named = [gpu for gpu in view.gpus if pids & {pid for pid, _ in gpu.processes}]
    return named or [gpu for gpu in view.gpus if (gpu.memory_used_gib or 0.0) > IN_USE_GIB]


def gpu_pattern(gpus: Sequence[Gpu], stalled: bool) -> Iterator[DiagnoseFinding]:
    """What busy and idle cards say of a run that is silent."""
    known = [(gpu.index, gpu.utilization) for gpu in gpus if gpu.utilization is not None]
    if not stalled or not known:
        return
    idle = [index for index, utilization in known if utilization <= IDLE]
    busy = [index for index, utilization in known if utilization >= BUSY]
    if idle and busy:
        title = f"GPU {', '.join(map(str, idle))} idle, {', '.join(map(str, busy))} busy: the idle rank is the culprit"
        cause, sure = (
            "Ranks that wait in NCCL spin at 100 %: they wait for the idle one, which does something else.",
            0.85,
        )
        fix = "look at the stack and the log of the idle rank: its loader, an exception, another path through the model"
    elif len(idle) == len(known):
        title, cause = "All GPUs are idle", "Nothing is launched: the processes wait for data, storage or a lock."
        fix, sure = "look at the loading processes and at the storage (state D in ps); try workers 0 once", 0.6
    elif len(busy) == len(known) > 1:
        title, cause = "All GPUs are busy", "All ranks wait in collectives that do not match, or a kernel does not end."
        fix, sure = "compare the stacks of the ranks: parameters or heads that only some of them use", 0.5
    else:
        return
    yield DiagnoseFinding(
        GPU_PATTERN,
        Severity.WARN,
        sure,
        title,
        tuple(Evidence(f"GPU {index}", f"{utilization:.0f} %") for index, utilization in known),
        cause,
        (Remedy({}, fix),),
    )


def _failures(subject: Subject) -> Iterator[DiagnoseFinding]:
    """What the log itself tells of ranks that waited in vain, and of loading processes that died."""
    for alarm in subject.alarms(*MEANT):
        yield from_alarm(alarm, 0.85, (*_for_unused(subject, alarm.title), *_first_gone(alarm)))


def _first_gone(alarm: Alarm) -> tuple[Remedy, ...]:
    """Where to look for a rank that ended before the others noticed."""
    if not re.search(r"Connection|closing signal|exitcode|NCCL|timeout", alarm.title):
        return ()
    told = "find the rank that ended or stood still first: its own output, its exit code (-9: killed, often for memory)"
    return (Remedy({}, told),)


def _for_unused(subject: Subject, title: str) -> tuple[Remedy, ...]:
    if "finished reduction" not in title:
        return ()
    if subject.setting.checkpointing:
        return (Remedy({}, "every parameter in the loss; find_unused_parameters does not go with with_cp"),)
    return (Remedy({}, "find_unused_parameters=True, as the lines below the error name the parameters by index"),)


def _settings(subject: Subject) -> Iterator[DiagnoseFinding]:
    """Settings with which ranks part, of another project's config."""
    config, gpus, view = subject.setting.config, subject.setting.gpus or 1, subject.view
    if config is None or view is None:
        return
    found = list(contradictions_of(config, gpus))
    synced = sorted({str(n.get("type")) for n in config.find("norm_cfg", "model") if isinstance(n, dict)})
    synced = [name for name in synced if "SyncBN" in name]
    troubled = view.state.name == "stalled" or bool(subject.alarms("RUN004"))
    if synced and gpus > 1 and troubled:
        told = f"{', '.join(synced)} waits for all {gpus} ranks in every forward pass"
        found.append(
            (told, "If a head with it is left out on some ranks, use GroupNorm there, or feed it on all ranks.")
        )
    if found:
        yield DiagnoseFinding(
            SETTINGS,
            Severity.WARN if troubled else Severity.INFO,
            0.6,
            found[0][0],
            tuple(Evidence(str(config.path), said) for said, _ in found),
            "Ranks that do not take the same path wait for each other for ever, or end with an error of DDP.",
            tuple(Remedy({}, fix) for _, fix in found),
        )


def _table(processes: Sequence[RankProcess]) -> Table:
    rows = [
        (process.rank, str(process.pid), process.status, process.doing or None, top(process)) for process in processes
    ]
    return Table("processes", "Processes of the run", ("rank", "pid", "status", "doing", "stack"), rows)
