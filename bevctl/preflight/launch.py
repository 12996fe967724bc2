"""Checks of section "launch": will the processes meet, and do batch, learning rate, loss scale and resume agree?"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator, Mapping

from bevctl.config.foreign import ForeignConfig
from bevctl.preflight import all_reduce, launch_resume
from bevctl.preflight.checks import CheckSpec, Context, Outcome, failed, passed, skipped, warned
from bevctl.preflight.plan import Plan, of_plan

OPENMMLAB_PORT = 29500
"""Default of the dist_train.sh scripts."""
LR_TOLERANCE = 1.3
"""How far outside the linear and the square-root rule a learning rate may lie before it is worth a word."""
STATIC_SCALES = (128.0, 1024.0)
"""Fixed loss scales that the public recipes use."""
LARGEST_SCALE = 2.0**24


def port_free(context: Context) -> Outcome:
    """LAUNCH001: the port where the processes meet is free."""
    wanted = _port(context, os.environ)
    if wanted is None:
        return skipped("one process, or bevctl picks a free port by itself")
    host, port = wanted
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        fix = f"Choose another with MASTER_PORT or PORT; `ss -ltnp 'sport = :{port}'` shows who has it."
        return failed(f"port {port} cannot be used: {reason}", fix)
    return passed(f"port {port} is free")


def _port(context: Context, environ: Mapping[str, str]) -> tuple[str, int] | None:
    """(address to bind, port), None where nothing fixes a port or it belongs to another machine."""
    text = environ.get("MASTER_PORT") or (environ.get("PORT") if context.foreign is not None else None)
    if text is None and not (context.foreign is not None and (context.gpus or 1) > 1):
        return None
    port = int(text) if text and text.isdigit() else OPENMMLAB_PORT
    address = environ.get("MASTER_ADDR", "")
    local = address in ("", "localhost", "127.0.0.1", socket.gethostname())
    return ("", port) if local else None


def hosts_resolve(_: Context) -> Outcome:
    """LAUNCH002: this machine's name and MASTER_ADDR resolve."""
    names = dict.fromkeys((socket.gethostname(), "localhost", os.environ.get("MASTER_ADDR") or "localhost"))
    resolved, failing = [], []
    for name in names:
        try:
            resolved.append(f"{name} is {socket.getaddrinfo(name, None)[0][4][0]}")
        except (OSError, UnicodeError) as error:
            failing.append(f"{name}: {getattr(error, 'strerror', None) or error}")
    if failing:
        fix = "Add the name to /etc/hosts, or set MASTER_ADDR and GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME."
        return failed(f"does not resolve: {'; '.join(failing)}", fix)
    return passed(", ".join(resolved))


@of_plan
def learning_rate(context: Context, plan: Plan) -> Outcome:
    """LAUNCH004: the learning rate lies between what the two rules make of this batch."""
    if plan.base_batch is None or plan.base_lr is None:
        return skipped("no base: optim.base_batch and optim.base_lr are not set")
    if context.config is not None and context.config.optim.lr_scaling != "none":
        from bevctl.engine.schedule import peak_lr

        return passed(peak_lr(context.config.optim, plan.global_batch)[1])
    if plan.lr is None:
        return skipped("the config's learning rate could not be worked out")
    ratio = plan.global_batch / plan.base_batch
    linear, root = plan.base_lr * ratio, plan.base_lr * math.sqrt(ratio)
    said = (
        f"lr {plan.lr:g} at global batch {plan.global_batch}; from {plan.base_lr:g} at batch {plan.base_batch} the "
        f"linear rule gives {linear:.3g}, the square-root rule {root:.3g}"
    )
    low, high = sorted((linear, root))
    if low / LR_TOLERANCE <= plan.lr <= high * LR_TOLERANCE:
        return passed(said)
    return warned(said, f"Use --lr {linear:.3g} (linear) or {root:.3g} (square root), or --lr-scaling.")


@of_plan
def loss_scale(_: Context, plan: Plan) -> Outcome:
    """LAUNCH005: a fixed loss scale is of a size that works."""
    if plan.half is False:
        return skipped("no FP16, no loss scale")
    scale = plan.loss_scale
    if scale is None:
        return skipped("the loss scale could not be worked out")
    if isinstance(scale, str):
        return passed(f"{scale}: it starts at 65536 and finds its size in the first steps")
    said = f"fixed at {scale:g}"
    if not math.isfinite(scale) or not 0 < scale <= LARGEST_SCALE:
        return failed(said, "Use `dynamic`, or 512.")
    if not STATIC_SCALES[0] <= scale <= STATIC_SCALES[1]:
        return warned(said, f"Use `dynamic`, or a number from {STATIC_SCALES[0]:g} to {STATIC_SCALES[1]:g}.")
    return passed(f"{said}: it does not adapt, so a layer that overflows once does it at every step")


def contradictions(context: Context) -> Outcome:
    """LAUNCH007: no settings that exclude each other in a distributed run of another project."""
    if context.foreign is None:
        return skipped("the bundled engine has no such settings")
    found = list(contradictions_of(context.foreign, context.gpus or 1))
    if found:
        return failed("; ".join(said for said, _ in found), " ".join(fix for _, fix in found))
    return passed("none of those that are known")


def contradictions_of(config: ForeignConfig, gpus: int) -> Iterator[tuple[str, str]]:
    """Settings that exclude each other in a run on so many GPUs: what is wrong, and what to do."""
    checkpointed = any(value is True for value in config.find("with_cp", "model"))
    if config.get("find_unused_parameters") is True and checkpointed:
        where = config.origin("find_unused_parameters")
        yield (
            f"with_cp and find_unused_parameters are both on ({where})",
            "Switch one of them off: recomputed parameters would be marked ready twice.",
        )
    norms = {str(norm.get("type")) for norm in config.find("norm_cfg", "model") if isinstance(norm, dict)}
    synced = sorted(name for name in norms if name.endswith("SyncBN") or name.startswith("naiveSyncBN"))
    if synced and gpus == 1:
        yield (
            f"{', '.join(synced)} needs a process group, and one process has none",
            "Use BN, or start through the distributed launcher even with one GPU.",
        )


CHECKS: tuple[CheckSpec, ...] = (
    CheckSpec(
        "LAUNCH001",
        "port",
        port_free,
        required="a free port",
        why="a port that a dead run still holds ends the start with address already in use",
    ),
    CheckSpec(
        "LAUNCH002",
        "host names",
        hosts_resolve,
        required="names with an address",
        why="gloo and NCCL look up this machine's name, and hang or fail without an address",
    ),
    CheckSpec(
        "LAUNCH003",
        "all-reduce",
        all_reduce.check,
        required="a right sum on every rank",
        why="processes that do not reach each other hang at the first step until a timeout of half an hour",
        deep=True,
    ),
    CheckSpec(
        "LAUNCH004",
        "learning rate for this batch",
        learning_rate,
        required="between the linear and the square-root rule",
        why="a learning rate made for another batch explodes, or costs accuracy",
    ),
    CheckSpec(
        "LAUNCH005",
        "loss scale",
        loss_scale,
        required=f"dynamic, or {STATIC_SCALES[0]:g} to {STATIC_SCALES[1]:g}",
        why="too small a scale loses small gradients, too large a one overflows at every step",
    ),
    CheckSpec(
        "LAUNCH006",
        "resume and config agree",
        launch_resume.check,
        required="epochs left, the learning rate within a factor of 2",
        why="a schedule that starts over, or is over, wastes the run",
        at_start=False,
    ),
    CheckSpec(
        "LAUNCH007",
        "settings that exclude each other",
        contradictions,
        why="the run dies in its first step with a message about parameters or process groups",
    ),
)
