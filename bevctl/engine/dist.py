"""Where this process stands among its peers, and the few things ranks must agree on."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import distributed, nn

from bevctl.engine.signals import Interrupted, Interruptible
from bevctl.errors import BevctlError, ExitCode

_TIMEOUT = datetime.timedelta(minutes=30)
_ALLOCATOR_VARIABLES = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class World:
    """Rank of this process, number of processes, and rank within this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def world_from_environment(environ: Mapping[str, str] = os.environ) -> World:
    """The world that torchrun describes in RANK, WORLD_SIZE and LOCAL_RANK; a world of one without them.

    Raises:
        BevctlError: only some of the variables are set, or one is not a number.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    found = {name: environ[name] for name in names if name in environ}
    if not found.keys() & {"RANK", "LOCAL_RANK"}:
        return World()
    missing = [name for name in names if name not in found]
    if missing or not all(value.isdigit() for value in found.values()):
        raise BevctlError(
            f"The environment describes a distributed run incompletely: {found or 'nothing'}.",
            "Start with `bevctl train --gpus N` or torchrun, or unset RANK, WORLD_SIZE and LOCAL_RANK.",
        )
    return World(*(int(found[name]) for name in names))


def select_device(requested: str, world: World = World()) -> torch.device:
    """The device of this rank for `auto`, `cpu` or `cuda`.

    Raises:
        BevctlError: CUDA was asked for and is absent, or this machine has fewer GPUs than ranks.
    """
    if requested == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0 and requested == "auto" and world.size == 1:
        return torch.device("cpu")
    if world.local_rank >= count:
        raise BevctlError(
            f"{count} usable GPU(s) here, but this run needs {world.local_rank + 1} on this machine.",
            "Lower --gpus, check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu.",
        )
    _let_segments_grow()
    torch.cuda.set_device(world.local_rank)
    return torch.device("cuda", world.local_rank)


def _let_segments_grow() -> None:
    """The allocator's segments grow where they are instead of leaving gaps, unless the environment says how it works.

    Read when CUDA starts; a recorded part has a pool of its own, so that the gaps would be many.
    """
    if not _ALLOCATOR_VARIABLES & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


@contextlib.contextmanager
def process_group(world: World, device: torch.device) -> Iterator[None]:
    """Connects the ranks (NCCL between GPUs, gloo between CPUs) for as long as the block runs.

    Raises:
        BevctlError: the meeting point cannot be opened, for example because its port is in use.
    """
    if world.size == 1:
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        distributed.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise _connection_error(error) from error
    try:
        yield
    finally:
        distributed.destroy_process_group()


def _connection_error(error: Exception) -> BevctlError:
    address = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        return port_in_use(address)
    reason = str(error).splitlines()[0]
    return BevctlError(
        f"The ranks cannot connect at {address}: {reason}.",
        "Check MASTER_ADDR and MASTER_PORT, and that every rank was started.",
        ExitCode.RUN_FAILED,
    )


def port_in_use(address: str) -> BevctlError:
    return BevctlError(
        f"The port of {address} is in use by another process.",
        "Choose a free one with --rdzv-endpoint HOST:PORT, or MASTER_PORT when you call torchrun yourself.",
        ExitCode.RUN_FAILED,
    )


def gather(world: World, value: Any) -> list[Any]:
    """`value` of every rank, by rank; plain Python objects only."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    distributed.all_gather_object(values, value)
    return values


def on_main(
    world: World, work: Callable[[], _Result], interruptible: Interruptible = contextlib.nullcontext
) -> _Result:
    """The result of `work` done on rank 0 alone, on every rank; BevctlError and Interrupted are raised on all too.

    `work` runs inside `interruptible`, where a signal may end it; it must not wait for another rank.
    """
    outcome = list(_attempt(work, interruptible)) if world.is_main else [None, None]
    if world.size > 1:
        distributed.broadcast_object_list(outcome, src=0)
    result: _Result = _told(outcome)
    return result


def on_each(
    world: World, work: Callable[[], _Result], interruptible: Interruptible = contextlib.nullcontext
) -> list[_Result]:
    """The results of `work` by rank, on every rank; a BevctlError or Interrupted of one rank is raised on all.

    `work` runs inside `interruptible`, as that of `on_main` does.
    """
    return [_told(outcome) for outcome in gather(world, _attempt(work, interruptible))]


def _attempt(work: Callable[[], Any], interruptible: Interruptible) -> tuple[Any, Exception | None]:
    """What `work` returns, and what it raises if that concerns every rank: none may go on while another leaves."""
    try:
        with interruptible():
            return work(), None
    except (BevctlError, Interrupted) as error:
        return None, error


def _told(outcome: Sequence[Any]) -> Any:
    """The result of an attempt, or its error raised."""
    result, error = outcome
    if error is not None:
        raise error
    return result


def broadcast_buffers(world: World, model: nn.Module) -> None:
    """Gives every rank the buffers of rank 0: training leaves each rank its own BatchNorm statistics."""
    if world.size > 1:
        for buffer in model.buffers():
            distributed.broadcast(buffer, src=0)
