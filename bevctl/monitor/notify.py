"""Telling somebody of a new alarm: a command or a web address, once an alarm."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bevctl
from bevctl.console import strict_json
from bevctl.errors import BevctlError
from bevctl.files import atomic_write_text
from bevctl.finding import Severity
from bevctl.monitor.report import Report, alarm_document
from bevctl.monitor.view import Alarm

TIMEOUT_S = 30.0


class Notifier:
    """Sends each alarm of a run above info once, for as long as it stands; a cleared alarm that returns is new.

    What was sent is kept in the user's cache directory, so that calls from cron do not repeat it.
    """

    def __init__(self, target: str, cache: Path | None = None) -> None:
        self.target = target
        self._cache = cache or _cache_folder()
        if not _is_url(target) and not _words(target):
            raise BevctlError("--notify is empty.", "Give a command, or an http(s) address.")

    def tell(self, report: Report) -> list[str]:
        """Sends the new alarms; returns a sentence for each that could not be sent (it is tried again)."""
        memory = self._memory(report)
        known = _read(memory)
        standing = {_key(alarm): alarm for alarm in report.alarms if alarm.severity is not Severity.INFO}
        problems = []
        sent = [key for key in known if key in standing]
        for key, alarm in standing.items():
            if key in known:
                continue
            problem = self._send(report, alarm)
            if problem:
                problems.append(f"{alarm.id} could not be sent to {self.target}: {problem}")
            else:
                sent.append(key)
        if sent != known:
            atomic_write_text(memory, json.dumps(sent))
        return problems

    def _memory(self, report: Report) -> Path:
        name = f"{report.log.path.resolve()}\n{self.target}"
        return self._cache / f"{hashlib.sha256(name.encode('utf-8', 'backslashreplace')).hexdigest()[:32]}.json"

    def _send(self, report: Report, alarm: Alarm) -> str:
        """What went wrong; empty for nothing."""
        document = strict_json(
            {
                "schema": "bevctl.alarm/1",
                "version": bevctl.__version__,
                "run": str(report.log.path),
                "state": report.state.name,
                "alarm": alarm_document(alarm),
            }
        )
        text = json.dumps(document, allow_nan=False)
        return _post(self.target, text) if _is_url(self.target) else _call(self.target, text, document)


def _key(alarm: Alarm) -> str:
    """Two alarms of one id about different things are two; a figure that moves makes no new alarm."""
    words = "".join(c for c in alarm.title if not c.isdigit())
    return f"{alarm.id} {alarm.severity.value} {hashlib.sha256(words.encode()).hexdigest()[:12]}"


def _is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def _words(target: str) -> list[str]:
    try:
        return shlex.split(target)
    except ValueError as error:
        raise BevctlError(f"--notify {target!r} is no command: {error}.", "Quote it as a shell would.") from None


def _post(url: str, text: str) -> str:
    request = urllib.request.Request(url, data=text.encode(), headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            return ""
    except (urllib.error.URLError, OSError, ValueError) as error:
        return str(error)


def _call(command: str, text: str, document: Mapping[str, Any]) -> str:
    """Runs the command, without a shell, with the document on its stdin and the main fields in its environment."""
    alarm = document["alarm"]
    facts = {"ID": alarm["id"], "SEVERITY": alarm["severity"], "TITLE": alarm["title"], "RUN": document["run"]}
    environment = {
        **os.environ,
        **{f"BEVCTL_ALARM_{key}": str(value).replace("\0", "") for key, value in facts.items()},
    }
    try:
        ended = subprocess.run(
            _words(command),
            input=text,
            text=True,
            env=environment,
            timeout=TIMEOUT_S,
            check=False,
            stdout=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return f"exit code {ended.returncode}" if ended.returncode else ""


def _read(memory: Path) -> list[str]:
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [str(key) for key in known] if isinstance(known, list) else []


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "bevctl" / "notified"
