"""What a check is, what it is told, and the table of all checks.

To add a check: write a function `(Context) -> Outcome` in the file of its section and a line in that file's CHECKS.
Section files import torch, numpy and yaml inside functions only, so that listing the checks stays cheap.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bevctl.errors import BevctlError
from bevctl.finding import Check, CheckStatus

if TYPE_CHECKING:
    from bevctl.config.foreign import ForeignConfig
    from bevctl.config.layers import Origin
    from bevctl.config.schema import Config

SECTIONS = ("gpu", "software", "files", "data", "system", "launch")
"""Sections in the order of the table; `bevctl.preflight.<section>` holds the CHECKS of each."""

Shared = TypeVar("Shared")


class Unfinished(Exception):
    """What a check needs was begun by an earlier check and has not come back."""


@dataclass(frozen=True)
class Context:
    """Everything that a check may look at; the same object for all of them."""

    config: Config | None
    """None when CONFIG could not be read as one of ours; the fields below then hold what is known without it."""
    work_dir: Path
    foreign: ForeignConfig | None = None
    """CONFIG of another project; `config` is None then."""
    config_error: BevctlError | None = None
    """Why CONFIG is neither."""
    source: str | None = None
    """CONFIG as it was given; None: not given."""
    config_path: Path | None = None
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """Where each value of the config comes from, by dotted key."""
    precision: str = "auto"
    """auto, fp16, bf16 or fp32."""
    asked_precision: str | None = None
    """--fp16, --bf16 or --fp32, which CONFIG of another project does not follow; None: not given."""
    batch: int = 1
    """Samples a GPU."""
    workers: int = 0
    """Loading processes a GPU."""
    device: str = "auto"
    """auto, cpu or cuda."""
    gpus: int | None = None
    """--gpus; None: not given, one is used."""
    resume: str | None = None
    python: str | None = None
    """--python: the interpreter whose environment is judged; None: this one."""
    repo: Path | None = None
    """--repo: the checkout of the project that will train CONFIG; None: the nearest above CONFIG."""
    min_free: int | None = None
    """--min-free in bytes; None: what the run will write."""
    deep: bool = False
    """--deep: also the checks that take longer or talk to other machines."""
    timeout: float = 60.0
    """Seconds that one check may take."""
    _shared: dict[Callable[[Context], Any], Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def base(self) -> Path:
        """Where relative paths in CONFIG of another project start: the folder that its program will run in."""
        folder = "tools" if self.foreign is not None and self.foreign.kind == "openpcdet" else ""
        return Path() if self.repo is None else self.repo / folder

    def once(self, make: Callable[[Context], Shared]) -> Shared:
        """`make(self)`, computed by the first check that asks and shared by the others; so is its exception.

        Raises Unfinished, instead of hanging too, when an earlier check was cut off inside `make`.
        """
        if make not in self._shared:
            self._shared[make] = Unfinished(f"{make.__name__} did not come back for an earlier check")
            try:
                self._shared[make] = make(self)
            except Exception as error:
                self._shared[make] = error
        value = self._shared[make]
        if isinstance(value, Exception):
            raise value
        return value


@dataclass(frozen=True)
class Outcome:
    """What one check found; the rest of a `Check` comes from its `CheckSpec`."""

    status: CheckStatus
    found: str
    fix: str = ""
    required: str = ""
    """Instead of the spec's, where it depends on the run."""
    advisory: bool = False
    """This outcome, when unknown, decides nothing; for example a field that the card does not report."""


def passed(found: str, *, required: str = "") -> Outcome:
    """The requirement is met."""
    return Outcome(CheckStatus.PASS, found, required=required)


def warned(found: str, fix: str, *, required: str = "") -> Outcome:
    """The run will start, but the user should know."""
    return Outcome(CheckStatus.WARN, found, fix, required)


def failed(found: str, fix: str, *, required: str = "") -> Outcome:
    """The run will not start, or will die."""
    return Outcome(CheckStatus.FAIL, found, fix, required)


def skipped(reason: str) -> Outcome:
    """The check does not apply to this run."""
    return Outcome(CheckStatus.SKIP, reason)


def unknown(reason: str, fix: str = "", *, advisory: bool = False) -> Outcome:
    """It could not be found out."""
    return Outcome(CheckStatus.UNKNOWN, reason, fix, advisory=advisory)


@dataclass(frozen=True)
class CheckSpec:
    """One line of the table: a check and what is always true of it."""

    id: str
    name: str
    function: Callable[[Context], Outcome]
    why: str
    """What goes wrong in a run otherwise."""
    required: str = ""
    advisory: bool = False
    """Never decides status or exit code when unknown."""
    at_start: bool = True
    """Quick enough for the start of `bevctl train`."""
    deep: bool = False
    """Only with --deep."""

    def check(self, section: str, outcome: Outcome) -> Check:
        """The finished line: this check with what it found."""
        return Check(
            self.id,
            self.name,
            section,
            outcome.status,
            outcome.found,
            outcome.required or self.required,
            self.why,
            outcome.fix,
            self.advisory or outcome.advisory,
        )


def all_checks() -> dict[str, tuple[CheckSpec, ...]]:
    """Every check, by section."""
    return {section: importlib.import_module(f"bevctl.preflight.{section}").CHECKS for section in SECTIONS}
