"""`bevctl train --engine external`: another project's tree and interpreter train, started and watched from here."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bevctl.cli.options import ConfigRequest, Handler
from bevctl.console import Console
from bevctl.errors import BevctlError, ExitCode

if TYPE_CHECKING:
    from bevctl.config.foreign import ForeignConfig
    from bevctl.external.launch import Launch
    from bevctl.external.trees import Tree
    from bevctl.external.wanted import Wanted
    from bevctl.preflight.checks import Context

LAUNCHERS = ("auto", "torchrun", "torch.distributed.launch", "torchpack", "none")
_GIVEN = "bevctl.cli.train_external.given"
_FIELDS = {
    "precision.dtype": "precision",
    "precision.loss_scale": "loss_scale",
    "train.batch": "batch",
    "train.workers": "workers",
    "train.accumulate": "accumulate",
    "train.epochs": "epochs",
    "train.schedule_iters": "",
    "optim.lr": "lr",
    "optim.lr_scaling": "lr_scaling",
    "optim.warmup": "warmup",
    "optim.clip": "clip",
    "model.load_from": "load_from",
    "seed": "seed",
    "train.deterministic": "deterministic",
    "work_dir": "",
    "device": "",
}
"""Config key of an option that another project can be told → field of `Wanted`; empty: used here alone."""


def external_options(function: Handler) -> Handler:
    """Add the options of --engine external; they are kept for `train_external`."""
    for option in reversed(_options()):
        function = option(function)
    return function


def _options() -> list[Callable[[Handler], Handler]]:
    def remember(context: click.Context, parameter: click.Parameter, value: object) -> None:
        if value is not None:
            context.meta.setdefault(_GIVEN, {})[parameter.name] = value

    def option(*names: str, **attributes: Any) -> Callable[[Handler], Handler]:
        return click.option(*names, callback=remember, expose_value=False, **attributes)

    return [
        option("--python", metavar="EXE", help="External: the interpreter that trains; default: this one."),
        option("--repo", metavar="DIR", help="External: the project's checkout; default: the nearest above CONFIG."),
        option("--launcher", type=click.Choice(LAUNCHERS), help="External: what starts the processes; default: auto."),
        option(
            "--max-restarts",
            type=click.IntRange(0),
            metavar="N",
            help="External: after a failure go on from the last checkpoint, at most N times; default: 0.",
        ),
    ]


def refuse_external_options() -> None:
    """Raises BevctlError where an option of --engine external is given without it."""
    given: Mapping[str, object] = click.get_current_context().meta.get(_GIVEN, {})
    for name in given:
        raise BevctlError(
            f"--{name.replace('_', '-')} belongs to --engine external.", "Add --engine external, or leave it out."
        )


@dataclass(frozen=True)
class Asked:
    """Options of `bevctl train` that are no values of our config."""

    resume: str | None
    gpus: int | None
    no_preflight: bool
    dry_run: bool
    refused: Mapping[str, bool]
    """Option → whether it is given, of those that another project cannot be told."""


def train_external(console: Console, request: ConfigRequest, asked: Asked, detach: Callable[[Path], int] | None) -> int:
    """Starts the run, or shows how.

    Args:
        detach: starts this command again in the background, given the work_dir; None: the run is not detached.
    """
    from bevctl.external.checkpoints import choose_resume
    from bevctl.external.run import ExternalRun, Policy
    from bevctl.preflight.start import check_context
    from bevctl.runs.work_dir import check_unused, claimed

    _refuse(request, asked)
    options: Mapping[str, Any] = click.get_current_context().meta.get(_GIVEN, {})
    config, tree = _config_and_tree(request, options.get("repo"))
    launch = _launch(request, asked, options, config, tree)
    work_dir = launch.work_dir
    check_unused(work_dir, asked.resume)
    resume = choose_resume(asked.resume, work_dir, console.info, tree.root)
    if asked.dry_run:
        return _show(launch, resume, console)
    if not asked.no_preflight:
        # Its processes meet at a port that is free, unless MASTER_PORT names one.
        check_context(_context(launch, request, asked), console, () if "MASTER_PORT" in os.environ else ("LAUNCH001",))
    if detach is not None:
        return detach(work_dir)
    for note in launch.notes:
        console.info(note)
    console.info(
        f"{tree.kind.title} trains in {work_dir}; follow it with bevctl monitor {shlex.quote(str(work_dir))} --follow"
    )
    with claimed(work_dir):
        result = ExternalRun(launch, Policy(options.get("max_restarts", 0)), console).run(resume)
    if result.code == ExitCode.PREEMPTED:
        console.info("Continue with --resume auto.")
    status = {ExitCode.OK: "ok", ExitCode.PREEMPTED: "preempted"}.get(ExitCode(result.code), "stopped")
    body = {"engine": "external", "work_dir": work_dir, "checkpoint": result.checkpoint, "restarts": result.restarts}
    console.document("train", body, status)
    return result.code


def _refuse(request: ConfigRequest, asked: Asked) -> None:
    unknown = [value.name for key, value in request.given.items() if key not in _FIELDS]
    for option in [*unknown, *(option for option, given in asked.refused.items() if given)]:
        raise BevctlError(
            f"{option} is nothing that --engine external can tell another project.",
            "Set the project's own key with --set KEY=VALUE.",
        )


def _config_and_tree(request: ConfigRequest, repo: str | None) -> tuple[ForeignConfig, Tree]:
    from bevctl.config.foreign import is_foreign, read_foreign
    from bevctl.external.trees import find_root, read_tree

    if request.source is None:
        raise BevctlError("--engine external needs CONFIG, a file of the project.", "Give its path.")
    tree = read_tree(Path(repo)) if repo else None
    folders = [Path(), *([tree.root, tree.cwd] if tree else [])]
    path = next((folder / request.source for folder in folders if (folder / request.source).is_file()), None)
    if path is None:
        raise BevctlError(f"Config file {request.source} does not exist.", "Give its path, or one inside --repo.")
    config = read_foreign(path)
    if not is_foreign(path):
        raise BevctlError(f"{path} is no config of another project.", "Leave --engine external out for bevctl's own.")
    return config, tree or read_tree(find_root(path))


def _launch(
    request: ConfigRequest, asked: Asked, options: Mapping[str, Any], config: ForeignConfig, tree: Tree
) -> Launch:
    from bevctl.external.interpreter import Interpreter, find_interpreter
    from bevctl.external.launch import plan_launch
    from bevctl.preflight.checks import Context
    from bevctl.preflight.environment import read_environment

    python = find_interpreter(options.get("python") or sys.executable)
    environment = read_environment(Context(config=None, work_dir=Path(), python=str(python)))
    interpreter = Interpreter(python, environment.torch.get("version") or environment.versions.get("torch"))
    given = request.given.get("work_dir")
    work_dir = Path(str(given.value) if given else Path("runs", config.path.stem)).absolute()
    wanted = _wanted(request, asked, work_dir, tree)
    return plan_launch(tree, config, wanted, interpreter, work_dir, options.get("launcher", "auto"))


def _wanted(request: ConfigRequest, asked: Asked, work_dir: Path, tree: Tree) -> Wanted:
    from bevctl.external.checkpoints import find_checkpoint
    from bevctl.external.overrides import read_overrides
    from bevctl.external.wanted import Wanted

    fields = {_FIELDS[key]: value.value for key, value in request.given.items() if _FIELDS[key]}
    if fields.get("precision") == "auto":
        del fields["precision"]
    names: Any = fields.pop("load_from", ())
    if len(names) > 1:
        raise BevctlError("--load-from: another project takes one file.", "Give one.")
    return Wanted(
        gpus=asked.gpus or 1,
        load_from=str(find_checkpoint(names[0], work_dir, tree.root)) if names else None,
        overrides=read_overrides(request.sets),
        **fields,  # type: ignore[arg-type]
    )


def _context(launch: Launch, request: ConfigRequest, asked: Asked) -> Context:
    """What the checks at the start look at: the config as it will be trained."""
    from bevctl.preflight.request import context_of_foreign
    from bevctl.preflight.start import TIMEOUT_S

    given = {key: value.value for key, value in request.given.items()} | {"work_dir": launch.work_dir}
    return context_of_foreign(
        launch.config,
        given,
        source=request.source,
        config_path=launch.config.path,
        python=str(launch.interpreter.path),
        repo=launch.tree.root,
        gpus=asked.gpus,
        resume=asked.resume,
        timeout=TIMEOUT_S,
    )


def _show(launch: Launch, resume: Path | None, console: Console) -> int:
    from bevctl.external.launch import shown_command
    from bevctl.external.run import free_port

    command = launch.command(resume, free_port())
    for note in launch.notes:
        console.result(note)
    if launch.overlay is not None:
        console.result(f"\n{launch.overlay.path} would be written:\n\n{launch.overlay.text}")
    else:
        console.result("\nNo config is written.\n")
    for line in shown_command(command, launch.tree.cwd, launch.environment):
        console.result(line)
    body = {
        "dry_run": True,
        "engine": "external",
        "tree": {"kind": launch.tree.kind.name, "path": launch.tree.root},
        "launcher": launch.launcher,
        "argv": command,
        "cwd": launch.tree.cwd,
        "environment": dict(launch.environment),
        "overlay": {"path": launch.overlay.path, "text": launch.overlay.text} if launch.overlay else None,
        "work_dir": launch.work_dir,
        "notes": list(launch.notes),
    }
    console.document("train", body)
    return ExitCode.OK
