"""What a diagnosis without a replay looks at: a run's log with the alarms it raises, its set-up, its checkpoints."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bevctl.diagnose.report import DiagnoseFinding, DiagnoseRequest, Remedy
from bevctl.diagnose.setting import Setting, setting_of
from bevctl.errors import BevctlError
from bevctl.finding import Evidence
from bevctl.monitor.gpus import Gpu
from bevctl.monitor.report import Circumstances, Report, report_on
from bevctl.monitor.view import Alarm, View
from bevctl.runs.records import RunLog
from bevctl.runs.source import open_source

_NUMBERED = re.compile(r"(epoch|iter|checkpoint_epoch|step)_?(\d+)\.(?:pth|pt|ckpt)$")
_MOST_CHECKPOINTS = 200


@dataclass(frozen=True)
class Subject:
    """Everything that is known without running anything."""

    report: Report | None
    """The log and its alarms; None where only a checkpoint or a config is given."""
    setting: Setting
    checkpoints: tuple[Path, ...] = ()
    """Of the run's folder and of --checkpoint, oldest first."""
    looked_at: tuple[str, ...] = ()

    @property
    def view(self) -> View | None:
        return self.report.view if self.report is not None else None

    @property
    def has_records(self) -> bool:
        """Whether the log holds training records."""
        return self.report is not None and self.report.log.records > 0

    def alarms(self, *ids: str) -> list[Alarm]:
        """The log's alarms with one of these ids, the worst first."""
        return [alarm for alarm in self.report.alarms if alarm.id in ids] if self.report is not None else []

    def remedy(self, why: str, **settings: object) -> Remedy:
        """A remedy; its settings (`optim__lr=…` for optim.lr) only count for a run that bevctl's config describes."""
        known = {key.replace("__", "."): value for key, value in settings.items()}
        return Remedy(known if self.setting.own else {}, why)


def read_subject(request: DiagnoseRequest, gpus: tuple[Gpu, ...] = ()) -> Subject:
    """Reads what the request names.

    Args:
        gpus: this machine's cards, for a run that goes on here.

    Raises:
        BevctlError: nothing is named, or what is named cannot be read.
    """
    if request.run is None and request.checkpoint is None and request.config is None and request.source is None:
        raise BevctlError(
            "Nothing to look at.", "Name a run's folder or log, or give --checkpoint, --config, --source."
        )
    run = _run_of(request.run)
    checkpoints = _checkpoints(run if run is not None and run.is_dir() else None, request.checkpoint)
    log = None if run is None else _read(run, may_lack=bool(checkpoints))
    against = open_source(request.against).read() if request.against is not None else None
    report = report_on(log, Circumstances(now=time.time(), against=against, gpus=gpus)) if log is not None else None
    setting = setting_of(log, request.config)
    return Subject(report, setting, checkpoints, tuple(_looked_at(log, against, setting, request)))


def _run_of(path: Path | None) -> Path | None:
    """The run's folder where that of a recorded incident is named."""
    is_incident = path is not None and (path / "incident.json").is_file()
    return path.resolve().parents[1] if path is not None and is_incident else path


def _read(path: Path, may_lack: bool) -> RunLog | None:
    """The log; None for a folder that has only checkpoints."""
    try:
        return open_source(path).read()
    except BevctlError:
        if may_lack and path.is_dir():
            return None
        raise


def _checkpoints(folder: Path | None, given: Path | None) -> tuple[Path, ...]:
    """Numbered checkpoints of a run by number (epochs and iterations mixed: by age), then the one that is named."""
    names = {path: _NUMBERED.match(path.name) for path in (folder.iterdir() if folder is not None else ())}
    numbers = {path: (name[1], int(name[2][:12])) for path, name in names.items() if name and path.is_file()}
    of_one_kind = len({kind for kind, _ in numbers.values()}) == 1
    ordered = sorted(numbers, key=lambda path: numbers[path][1] if of_one_kind else path.stat().st_mtime)
    others = [path for path in ordered[-_MOST_CHECKPOINTS:] if path != given]
    return (*others, *([given] if given is not None else []))


def _looked_at(log: RunLog | None, against: RunLog | None, setting: Setting, request: DiagnoseRequest) -> Sequence[str]:
    said = []
    if log is not None:
        said.append(f"{log.path}: {log.records} training records ({log.format})")
        said += log.notes
    if against is not None:
        said.append(f"{against.path}: {against.records} training records, to compare with")
    if setting.precision_told:
        said.append(setting.precision_told)
    elif log is not None:
        said.append("Neither the log nor a config says in which number format the run trains.")
    if request.config is None and log is not None and not setting.where:
        said.append("No config was given, and the log holds none.")
    return [*said, *setting.notes]


def from_alarm(
    alarm: Alarm, confidence: float, fix: Sequence[Remedy] = (), more: Sequence[Evidence] = ()
) -> DiagnoseFinding:
    """An alarm of the log as a finding: its own words first, then the remedies.

    Args:
        more: further evidence.
    """
    own = (Remedy({}, alarm.fix),) if alarm.fix else ()
    evidence = (*alarm.evidence, *more)
    return DiagnoseFinding(alarm.id, alarm.severity, confidence, alarm.title, evidence, alarm.cause, (*fix, *own))
