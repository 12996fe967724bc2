"""From what is asked for to the command that starts another project's training, complete before anything is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bevctl.config.foreign import ForeignConfig, changed
from bevctl.config.foreign_summary import summary
from bevctl.errors import BevctlError
from bevctl.external.dialects import Job, spelled, words
from bevctl.external.interpreter import Interpreter, environment_of
from bevctl.external.overlay import Overlay
from bevctl.external.trees import Tree
from bevctl.external.wanted import Wanted, changes_of

LAUNCHERS = ("torchrun", "torch.distributed.launch", "torchpack", "none")
_TOLD = ("precision", "batch_per_gpu", "workers_per_gpu", "lr", "schedule", "epochs", "heads")
"""Facts of the config that are said at the start."""
_PLAIN = re.compile(r"[\w@%+=:,./{}\[\]-]+")
"""Words that torchpack's wrapper, which quotes nothing, hands on as they are."""
_RUN = (1, 9)
"""torch.distributed.run came with torch 1.9."""
_DASHED = (2, 0)
"""From torch 2.0 on torch.distributed.launch says --local-rank, which scripts that know --local_rank refuse."""


@dataclass(frozen=True)
class Launch:
    """Everything about a start, except the checkpoint it resumes and the port its processes meet at."""

    tree: Tree
    config: ForeignConfig
    """As it will be trained."""
    job: Job
    launcher: str
    """One of LAUNCHERS."""
    interpreter: Interpreter
    environment: Mapping[str, str | None]
    """What it has differently from ours; None: taken out."""
    notes: tuple[str, ...]

    @property
    def work_dir(self) -> Path:
        return self.job.work_dir

    @property
    def overlay(self) -> Overlay | None:
        return self.job.overlay

    def command(self, resume: Path | None, port: int) -> list[str]:
        """The command line. Raises BevctlError for an option that the training script does not define."""
        script = str(self.tree.script.path.relative_to(self.tree.cwd))
        told = words(self.job, resume)
        python = str(self.interpreter.path)
        if self.launcher == "none":
            return [python, script, *told]
        if self.launcher == "torchpack":
            return [*_torchpack(self.interpreter, self.job.wanted.gpus, told), python, script, *told]
        module = "torch.distributed.run" if self.launcher == "torchrun" else self.launcher
        meeting = ["--nnodes=1", "--node_rank=0", "--master_addr=127.0.0.1", f"--master_port={port}"]
        return [python, "-m", module, *meeting, f"--nproc_per_node={self.job.wanted.gpus}", script, *told]


def _torchpack(interpreter: Interpreter, gpus: int, told: list[str]) -> list[str]:
    program = interpreter.program("torchpack")
    start = [str(program)] if program else [str(interpreter.path), "-c", "from torchpack.launch import main; main()"]
    # Its wrapper that mutes the other ranks joins the words without quotes; -v goes without the wrapper.
    plain = all(_PLAIN.fullmatch(word) for word in told)
    return [*start, "dist-run", "-np", str(gpus), *([] if plain else ["-v"])]


def plan_launch(
    tree: Tree, config: ForeignConfig, wanted: Wanted, interpreter: Interpreter, work_dir: Path, launcher: str = "auto"
) -> Launch:
    """The start of a run.

    Args:
        launcher: one of LAUNCHERS; auto: the one that this tree and torch want.

    Raises:
        BevctlError: config and tree do not belong together, or what is asked for cannot be said to this project.
    """
    if config.kind != tree.kind.config_kind:
        raise BevctlError(
            f"{config.path} is a config of {config.kind}; {tree.root} is {tree.kind.title}, which takes those of "
            f"{tree.kind.config_kind}.",
            "Name the tree that the config belongs to with --repo.",
        )
    changes, notes = changes_of(config, tree, wanted)
    chosen = choose_launcher(tree, interpreter, wanted.gpus) if launcher == "auto" else launcher
    distributed = chosen in LAUNCHERS[:2]
    job = spelled(config, changes, Job(tree, tree.inside(config.path), work_dir.absolute(), wanted, distributed))
    trained = changed(config, changes | dict(wanted.overrides))
    # OpenPCDet counts the GPUs it sees, whatever the launcher was told.
    shown = wanted.gpus if tree.kind.name == "openpcdet" and distributed else None
    launch = Launch(
        tree=tree,
        config=trained,
        job=job,
        launcher=chosen,
        interpreter=interpreter,
        environment=environment_of(interpreter, tree, job.work_dir, shown),
        notes=(*(str(fact) for fact in summary(trained) if fact.name in _TOLD), *notes),
    )
    launch.command(Path("/checkpoint.pth"), 0)
    return launch


def choose_launcher(tree: Tree, interpreter: Interpreter, gpus: int) -> str:
    """The launcher that a tree wants on so many GPUs.

    Raises BevctlError where its script and its torch do not agree on how a process learns its rank.
    """
    script, torch = tree.script, _numbers(interpreter.torch)
    if "torchpack" in script.imports and re.search(
        r"torchpack import .*\bdistributed\b|torchpack\.distributed", script.text
    ):
        return "torchpack"
    if gpus == 1 and tree.kind.name != "mit-bevfusion":
        return "none"
    if script.reads_rank_from_environment or not script.has("--local_rank"):
        return "torchrun" if torch is None or torch >= _RUN else "torch.distributed.launch"
    if torch is not None and torch >= _DASHED and not script.has("--local-rank"):
        raise BevctlError(
            f"{script.path} learns its rank from --local_rank alone, which torch {interpreter.torch} does not pass.",
            "Use a torch below 2.0, or a checkout whose script reads LOCAL_RANK.",
        )
    return "torch.distributed.launch"


def _numbers(version: str | None) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else None


def shown_command(command: list[str], cwd: Path, environment: Mapping[str, str | None]) -> list[str]:
    """Lines that do by hand, in a shell, what bevctl does."""
    lines = [f"cd {shlex.quote(str(cwd))}"]
    for name, value in sorted(environment.items()):
        lines.append(f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}")
    return [*lines, shlex.join(command)]
