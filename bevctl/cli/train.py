"""`bevctl train`: starts a training run, or continues one."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bevctl.cli.options import (
    ConfigRequest,
    config_option,
    config_options,
    engine_option,
    grad_checkpoint_option,
    json_option,
    precision_flags,
)
from bevctl.cli.ranks import RankedCommand, run_ranks, same_command
from bevctl.cli.train_external import Asked, external_options, refuse_external_options, train_external
from bevctl.console import Console
from bevctl.errors import BevctlError, ExitCode

if TYPE_CHECKING:
    import torch

    from bevctl.config.schema import Config
    from bevctl.engine.dist import World
    from bevctl.engine.launch import Cluster
    from bevctl.engine.run import RunOptions, Settle


class LossScale(click.ParamType):
    """`dynamic` or a number above 0."""

    name = "dynamic|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        if value == "dynamic":
            return "dynamic"
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if not number > 0:
            self.fail(f"{value!r} is neither dynamic nor a number above 0.", param, ctx)
        return number


class CountOrAuto(click.ParamType):
    """A whole number, or `auto`."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == AUTO:
            return AUTO
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a whole number nor {AUTO}.", param, ctx)


AUTO = "auto"


@click.command("train", cls=RankedCommand)
@config_options
@engine_option("bevctl", "mmdet3d", "external")
@external_options
@precision_flags
@config_option(
    "--precision",
    key="precision.dtype",
    type=click.Choice(["auto", "fp16", "bf16", "fp32"]),
    help="The same by name; auto: BF16 from capability 8.0, FP16 on 7.x, FP32 on a CPU.",
)
@config_option("--loss-scale", key="precision.loss_scale", type=LossScale(), help="Loss scale of FP16.")
@config_option("--batch", key="train.batch", type=CountOrAuto(), help="Samples per GPU and step; auto: as fit.")
@config_option("--accumulate", key="train.accumulate", type=int, metavar="N", help="Batches per optimizer step.")
@config_option("--workers", key="train.workers", type=CountOrAuto(), help="Loading processes per GPU; auto: as needed.")
@config_option(
    "--lr",
    key="optim.lr",
    along={"optim.lr_scaling": "none"},
    type=float,
    metavar="LR",
    help="Peak learning rate; switches the config's scaling rule off.",
)
@config_option(
    "--lr-scaling",
    key="optim.lr_scaling",
    type=click.Choice(["none", "linear", "sqrt"]),
    help="Rule from optim.base_lr to the global batch; default: none.",
)
@config_option("--warmup", key="optim.warmup", type=int, metavar="N", help="Iterations of linear warm-up.")
@config_option(
    "--epochs",
    key="train.epochs",
    along={"train.schedule_iters": None},
    type=int,
    metavar="N",
    help="Epochs to train.",
)
@click.option("--max-iters", type=click.IntRange(0), metavar="N", help="Stop at iteration N; the schedule stays.")
@config_option(
    "--on-nonfinite",
    key="train.on_nonfinite",
    type=click.Choice(["skip", "lower_scale", "fp32_module", "rewind", "halt"]),
    help="What follows a step with NaN or infinity that loss scaling does not explain; it is skipped in any case.",
)
@config_option("--grad-clip", key="optim.clip", type=float, metavar="NORM", help="Largest gradient norm.")
@grad_checkpoint_option
@click.option("--resume", metavar="CKPT|auto", help="Continue from a checkpoint; auto: the newest, if there is one.")
@config_option(
    "--load-from",
    key="model.load_from",
    multiple=True,
    metavar="CKPT",
    help="Take the weights of a checkpoint and start at iteration 0; several times: one after the other.",
)
@click.option(
    "--min-loaded",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="Least share of entries that must fit: of the file with --load-from (default: 0.5), of the model with "
    "--resume (0.9).",
)
@click.option("--gpus", type=click.IntRange(1), metavar="N", help="GPUs of this machine to use; default: 1.")
@click.option("--nnodes", type=click.IntRange(1), default=1, metavar="N", help="Machines; default: 1.")
@click.option("--rdzv-endpoint", metavar="HOST:PORT", help="Where the machines meet.")
@config_option("--work-dir", key="work_dir", metavar="DIR", help="Folder of the run; default: runs/<config name>.")
@config_option("--seed", key="seed", type=int, metavar="N", help="Seed of weights, order and augmentation.")
@config_option("--deterministic", key="train.deterministic", is_flag=True, help="Deterministic algorithms; slower.")
@config_option("--compile", key="train.compile", is_flag=True, help="torch.compile for the parts of fixed shape.")
@config_option("--tensorboard", key="train.tensorboard", is_flag=True, help="Also write event files for TensorBoard.")
@click.option("--no-preflight", is_flag=True, help="Skip the quick checks at the start.")
@click.option("-n", "--dry-run", is_flag=True, help="Show config, memory, steps and finish time; train nothing.")
@click.option("--detach", is_flag=True, help="Train in the background, writing to console.log in the work_dir.")
@json_option
@click.pass_obj
def command(
    console: Console,
    request: ConfigRequest,
    max_iters: int | None,
    resume: str | None,
    min_loaded: float | None,
    gpus: int | None,
    nnodes: int,
    rdzv_endpoint: str | None,
    no_preflight: bool,
    dry_run: bool,
    detach: bool,
) -> int:
    """Train the model of CONFIG, or continue a run with --resume.

    A run is a folder: log.txt, log.jsonl, events.jsonl, run.json, config.yaml, ranks/ (what each rank is at),
    epoch_N.pth, latest. SIGTERM or Ctrl-C writes a checkpoint and ends with exit code 6; --resume auto continues it.

    With --engine external the program of another project trains: CONFIG is its config, --repo its checkout, --python
    its interpreter. It is told precision, batch, workers, rate and checkpoint in its own way; --dry-run shows how.
    """
    if request.engine == "external":
        refused = {
            "--max-iters": max_iters is not None,
            "--min-loaded": min_loaded is not None,
            "--nnodes": nnodes > 1,
            "--rdzv-endpoint": rdzv_endpoint is not None,
        }
        asked = Asked(resume, gpus, no_preflight, dry_run, refused)
        return train_external(console, request, asked, functools.partial(_detach, console) if detach else None)
    refuse_external_options()
    if resume is not None and "model.load_from" in request.given:
        raise BevctlError("--resume and --load-from contradict each other.", "Resuming takes the weights as well.")
    found = [
        key for key, given in request.given.items() if given.value == AUTO and key in ("train.batch", "train.workers")
    ]
    config = request.without(*found).load(lambda: request.resumed(resume)).config

    from bevctl.engine.launch import Cluster
    from bevctl.engine.run import RunOptions
    from bevctl.engine.workdir import find_checkpoint, work_dir_of
    from bevctl.preflight.start import check_start, is_first_process
    from bevctl.runs.work_dir import check_unused

    for name in config.model.load_from if resume is None else ():
        find_checkpoint(name, work_dir_of(config))
    run = RunOptions(resume, min_loaded, max_iters)
    cluster = Cluster(gpus or 1, nnodes, rdzv_endpoint)
    if dry_run:
        for key in found:
            console.info(f"{key}: auto is found when training starts; shown as configured")
        return _preview(config, run, cluster, console)
    if not no_preflight and is_first_process():
        check_start(config, gpus, resume, console)
    if detach:
        check_unused(work_dir_of(config), resume)
        return _detach(console, work_dir_of(config))
    return run_ranks(console, cluster, config.device, lambda world: _train(config, run, found, world, console))


def _train(config: Config, run: RunOptions, found: Sequence[str], world: World, console: Console) -> int:
    from bevctl.engine.run import train

    settle = _settle(found, console.info if world.is_main else console.detail) if found else None
    result = train(config, run, world, console, settle)
    if world.is_main:
        if result.code == ExitCode.PREEMPTED:
            console.info(f"Checkpoint written: {result.checkpoint}. Continue with --resume auto.")
        status = "preempted" if result.code == ExitCode.PREEMPTED else "ok"
        body = {"work_dir": result.work_dir, "iter": result.iteration, "checkpoint": result.checkpoint}
        console.document("train", body, status)
    return result.code


def _settle(found: Sequence[str], tell: Callable[[str], None]) -> Settle:
    """Finds the values of the keys that were left to `auto`."""
    from bevctl.measure.finder import Wanted, settle

    wanted = Wanted(batch="train.batch" in found, workers="train.workers" in found)
    return lambda config, world, device: settle(config, world, device, wanted, tell)


def _preview(config: Config, run: RunOptions, cluster: Cluster, console: Console) -> int:
    from bevctl.config.load import to_dict, to_yaml
    from bevctl.engine.dist import World, select_device
    from bevctl.engine.parts import build_parts
    from bevctl.engine.preview import preview
    from bevctl.engine.workdir import work_dir_of

    world = World(size=cluster.gpus * cluster.nnodes)
    parts = build_parts(config, world, select_device(config.device))
    work_dir = work_dir_of(config)
    planned = preview(parts, work_dir, run.max_iters)
    memory, told = _expected_memory(config, parts.device, world.size)
    console.result(to_yaml(config).rstrip())
    for line in (*parts.notes, *planned.sentences(told), f"Folder of the run: {work_dir}"):
        console.result(line)
    numbers = {**vars(planned), "duration_s": planned.duration_s, "memory": memory}
    console.document("train", {"dry_run": True, "config": to_dict(config), "work_dir": work_dir, **numbers})
    return ExitCode.OK


def _expected_memory(config: Config, device: torch.device, gpus: int) -> tuple[dict[str, int | None] | None, str]:
    """The predicted memory of a GPU as a document and in words; None where nothing is predicted."""
    from bevctl.measure.memory_expected import expected_memory

    if config.device == "cpu":
        return None, "activations come on top"
    try:
        expected = expected_memory(config, device, gpus)
    except BevctlError as error:
        return None, f"activations come on top. {error.message}"
    return expected.document(), expected.sentence()


def _detach(console: Console, work_dir: Path) -> int:
    """Starts the same command in a session of its own, so that it survives this terminal."""
    from bevctl.runs.work_dir import CONSOLE_LOG

    work_dir.mkdir(parents=True, exist_ok=True)
    log = work_dir / CONSOLE_LOG
    environment = {name: value for name, value in os.environ.items() if name != "BEVCTL_TRAIN_DETACH"}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "bevctl", *same_command(console, without="--detach")],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    console.result(f"Training in the background as process {process.pid}.")
    console.result(f"Follow it: tail -f {shlex.quote(str(log))}\nStop it with a checkpoint: kill {process.pid}")
    console.document("train", {"pid": process.pid, "work_dir": work_dir, "console_log": Path(log)}, "started")
    return ExitCode.OK
