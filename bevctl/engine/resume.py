"""Continuing a run: what is restored from a checkpoint, what starts anew, and the sentences that say so."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bevctl.data.loader import Reshuffle
from bevctl.engine.checkpoint import Checkpoint, Reader, convert_like_weights, load_state, reader_for, to_our_layout
from bevctl.engine.dist import World, gather
from bevctl.engine.ema import WeightAverage
from bevctl.engine.load_report import LoadReport
from bevctl.engine.optim import ParameterState, load_parameter_states, saved_parameter_states
from bevctl.engine.precision import keep_fp32
from bevctl.engine.scaler import LossScaler
from bevctl.models.layouts import distinct

_BUFFER_SUFFIXES = ("running_mean", "running_var", "num_batches_tracked", "relative_position_index")
_GEOMETRY_SUFFIXES = ("dx", "bx", "nx", "frustum")


@dataclass(frozen=True)
class Setting:
    """What must be equal for a resumed run to be the uninterrupted one."""

    precision: str
    batch: int
    world: int
    accumulate: int
    iters_per_epoch: int
    seed: int


@dataclass(frozen=True)
class TrainState:
    """The objects whose content a checkpoint holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    average: WeightAverage | None
    setting: Setting
    half: bool
    """Whether the scaler's state means anything (FP16)."""
    reshuffles: list[Reshuffle] = field(default_factory=list)
    """Where the data order was changed."""
    fp32_modules: list[str] = field(default_factory=list)
    """Modules that the run came to keep in FP32, beyond those of the config."""


@dataclass
class Resumed:
    """Where the run goes on."""

    iteration: int = 0
    source: Path | None = None
    """The checkpoint; None for a new run."""
    skipped_steps: int = 0
    exact: bool = False
    """The continued run will be bit for bit the uninterrupted one (on the CPU)."""
    notes: list[str] = field(default_factory=list)


def snapshot(
    state: TrainState,
    world: World,
    iteration: int,
    skipped_steps: int,
    meta: Mapping[str, Any],
    random: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of a checkpoint after `iteration` attempted steps; every rank must call it.

    Args:
        random: random state of this rank; the present one by default.
    """
    epoch, inner = divmod(iteration, state.setting.iters_per_epoch)
    return {
        "state_dict": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "scaler": state.scaler.state_dict() if state.half else None,
        "ema": state.average.state_dict() if state.average else None,
        "rng": gather(world, random_state() if random is None else random),
        "data": {
            "epoch": epoch,
            "batch": inner * state.setting.accumulate,
            "reshuffles": [list(reshuffle) for reshuffle in state.reshuffles],
        },
        "meta": {
            **meta,
            "epoch": epoch,
            "iter": iteration,
            "setting": asdict(state.setting),
            "skipped_steps": skipped_steps,
            "fp32_modules": list(state.fp32_modules),
        },
    }


def restore(
    state: TrainState, checkpoint: Checkpoint, world: World, min_loaded: float = 0.0, every_part: bool = False
) -> Resumed:
    """Puts a checkpoint into the objects of a run.

    In the same setting everything is restored. In another one, or from another project's file, the epoch is kept, the
    iteration is epoch × new length (so the schedule goes on at the same fraction), and data order and random state
    start anew from the seed.

    Raises:
        BevctlError: no weight fits the model, a smaller share of its entries than `min_loaded`, or, where `every_part`
            must be there, none of one of its parts.
    """
    report = load_state(state.model, checkpoint)
    report.require(share_of_model=min_loaded, every_part=every_part)
    changes = [*_changes(state.setting, checkpoint), *_new_entries(report)]
    resumed = Resumed(source=checkpoint.path, exact=not changes)
    resumed.notes = [f"Resuming from {checkpoint.path} (written by {_writer(checkpoint)})", *report.sentences()]
    if changes:
        _restore_position_by_epoch(state, checkpoint, changes, resumed)
    else:
        resumed.iteration = checkpoint.iteration or 0
        resumed.skipped_steps = int(checkpoint.meta.get("skipped_steps", 0))
        epoch, inner = divmod(resumed.iteration, state.setting.iters_per_epoch)
        resumed.notes.append(
            f"Same setting: continuing at iteration {resumed.iteration} (epoch {epoch + 1}, {inner} of "
            f"{state.setting.iters_per_epoch} done) with the same data order and random state"
        )
    resumed.notes.append(_restore_optimizer(state.optimizer, checkpoint, reader_for(state.model)))
    resumed.notes.extend(_restore_scaler(state, checkpoint))
    resumed.notes.extend(_restore_average(state, checkpoint))
    resumed.notes.extend(_restore_fp32_modules(state, checkpoint))
    if resumed.exact:
        state.reshuffles[:] = [Reshuffle(*entry) for entry in checkpoint.content["data"].get("reshuffles", [])]
        set_random_state(checkpoint.content["rng"][world.rank])
    return resumed


def _writer(checkpoint: Checkpoint) -> str:
    version = checkpoint.meta.get("version") or checkpoint.meta.get(f"{checkpoint.origin}_version") or ""
    where = ", ".join(
        f"{name} {value}"
        for name, value in (("epoch", checkpoint.epoch), ("iteration", checkpoint.iteration))
        if value is not None
    )
    return f"{checkpoint.origin} {version}".strip() + (f"; {where}" if where else "")


def _changes(setting: Setting, checkpoint: Checkpoint) -> list[str]:
    """What differs from the setting the checkpoint was made in, as "name old -> new"."""
    if checkpoint.origin != "bevctl":
        return [f"written by {checkpoint.origin}"]
    saved = checkpoint.meta.get("setting", {})
    return [
        f"{name.replace('_', ' ')} {saved.get(name)} -> {value}"
        for name, value in asdict(setting).items()
        if saved.get(name) != value
    ]


def _new_entries(report: LoadReport) -> list[str]:
    count = len(report.missing) + len(report.mismatched)
    return [f"{count} entries of the model new"] if count else []


def _restore_position_by_epoch(state: TrainState, checkpoint: Checkpoint, changes: list[str], resumed: Resumed) -> None:
    length = state.setting.iters_per_epoch
    resumed.notes.append(f"Setting changed: {', '.join(changes)}")
    if checkpoint.epoch is None:
        resumed.notes.append("The file names no epoch: training starts at epoch 1")
        return
    resumed.iteration = checkpoint.epoch * length
    resumed.notes.append(
        f"Epoch kept: {checkpoint.epoch} completed, iteration = {checkpoint.epoch} x {length} = {resumed.iteration}; "
        "the schedule goes on at the same fraction, data order and random state start anew from the seed"
    )
    saved_length = checkpoint.meta.get("setting", {}).get("iters_per_epoch")
    inner = (checkpoint.iteration or 0) - checkpoint.epoch * saved_length if saved_length else 0
    if inner > 0:
        resumed.notes.append(f"The {inner} iterations already done of epoch {checkpoint.epoch + 1} are done again")


def _restore_optimizer(optimizer: torch.optim.Optimizer, checkpoint: Checkpoint, read: Reader) -> str:
    saved = checkpoint.content.get("optimizer")
    if not isinstance(saved, Mapping) or not saved.get("state"):
        return "Optimizer state: fresh, the file has none"
    if checkpoint.origin == "bevctl":
        states = saved_parameter_states(saved)
    else:
        states = foreign_parameter_states(checkpoint, read)
        if not states:
            return "Optimizer state: fresh, the file's does not match its own weights"
    total = sum(len(group["params"]) for group in optimizer.param_groups)
    fresh = load_parameter_states(optimizer, states)
    if not fresh:
        return f"Optimizer state: restored for all {total} parameters"
    return f"Optimizer state: restored for {total - len(fresh)} of {total} parameters, fresh for the rest"


def foreign_parameter_states(checkpoint: Checkpoint, read: Reader = to_our_layout) -> dict[str, ParameterState]:
    """AdamW states of an mmcv or mmengine file under our parameter names; empty where they cannot be assigned.

    Those files number the parameters in the order of the model. That order is the state dict's without its buffers, a
    shared one once; the view transform's four geometry entries are frozen parameters there (numbered, without state).
    """
    saved = checkpoint.content["optimizer"]
    indices = [index for group in saved.get("param_groups", []) for index in group.get("params", [])]
    names = [name for name in distinct(checkpoint.state_dict) if not name.endswith(_BUFFER_SUFFIXES)]
    without_geometry = [name for name in names if name.rpartition(".")[2] not in _GEOMETRY_SUFFIXES]
    for candidate in (names, without_geometry):
        if len(candidate) == len(indices):
            numbered = dict(zip(candidate, sorted(indices), strict=True))
            return _assign_foreign_states(checkpoint, saved["state"], numbered, read)
    return {}


def _assign_foreign_states(
    checkpoint: Checkpoint, state: Mapping[int, Any], numbered: Mapping[str, int], read: Reader
) -> dict[str, ParameterState]:
    weights = checkpoint.state_dict
    present = {name: state[index] for name, index in numbered.items() if index in state}
    if any(not _is_adam_state(s, weights[name]) for name, s in present.items()):
        return {}
    averages = convert_like_weights(checkpoint, {name: s["exp_avg"] for name, s in present.items()}, read)
    # Conversions may change signs, which squares do not have.
    squares = convert_like_weights(checkpoint, {name: s["exp_avg_sq"] for name, s in present.items()}, read)
    steps = convert_like_weights(checkpoint, {name: _step_everywhere(s) for name, s in present.items()}, read)
    return {
        name: {"step": steps[name].abs().max(), "exp_avg": average, "exp_avg_sq": squares[name].abs()}
        for name, average in averages.items()
    }


def _step_everywhere(state: Mapping[str, Any]) -> Tensor:
    """The step count in the shape of its parameter, so that it can be renamed as the parameter is."""
    return torch.as_tensor(state["step"], dtype=torch.float32).expand(state["exp_avg"].shape)


def _is_adam_state(state: Any, weight: Tensor) -> bool:
    if not isinstance(state, Mapping) or not {"step", "exp_avg", "exp_avg_sq"} <= state.keys():
        return False
    return all(isinstance(state[k], Tensor) and state[k].shape == weight.shape for k in ("exp_avg", "exp_avg_sq"))


def _restore_scaler(state: TrainState, checkpoint: Checkpoint) -> list[str]:
    if not state.half:
        return []
    saved = checkpoint.loss_scaler
    if not state.scaler.dynamic:
        if saved is not None:
            state.scaler.load_state_dict(saved)
        why = "by the config" if state.scaler.ceiling is None else "since an overflow"
        return [f"Loss scale: fixed at {state.scaler.value.item():.10g} {why}"]
    if saved is None:
        return [f"Loss scale: fresh at {state.scaler.value.item():.10g}, the file has none"]
    state.scaler.load_state_dict(saved)
    return [f"Loss scale: restored at {state.scaler.value.item():.10g}"]


def _restore_average(state: TrainState, checkpoint: Checkpoint) -> list[str]:
    if state.average is None:
        return []
    saved = checkpoint.content.get("ema")
    if isinstance(saved, Mapping):
        state.average.load_state_dict(saved)
        return ["Weight average: restored"]
    state.average.load_state_dict(state.model.state_dict())
    return ["Weight average: starts from the loaded weights, the file has none"]


def _restore_fp32_modules(state: TrainState, checkpoint: Checkpoint) -> list[str]:
    """Keeps in FP32 what the run that wrote the file came to keep there."""
    saved = checkpoint.meta.get("fp32_modules", []) if checkpoint.origin == "bevctl" else []
    new = [name for name in saved if name not in state.fp32_modules]
    if not new:
        return []
    keep_fp32(state.model, new, state.scaler.value.device.type)
    state.fp32_modules.extend(new)
    return [f"Kept in FP32 since an overflow: {', '.join(new)}"]


@dataclass(frozen=True)
class RandomCapture:
    """State of every generator of this process, as the libraries give it: cheap enough for every step."""

    torch: Tensor
    cuda: Tensor | None
    numpy: Any
    python: Any

    @staticmethod
    def now() -> RandomCapture:
        return RandomCapture(
            torch=torch.get_rng_state(),
            cuda=torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
            numpy=np.random.get_state(),  # noqa: NPY002 (the legacy global generator is what libraries use)
            python=random.getstate(),
        )

    def plain(self) -> dict[str, Any]:
        """The same in types that the weights-only reader takes; `set_random_state` puts it back."""
        version, words, gauss = self.python
        return {
            "torch": self.torch,
            "cuda": self.cuda,
            "numpy": {
                "words": torch.from_numpy(self.numpy[1].astype(np.int64)),
                "position": int(self.numpy[2]),
                "has_gauss": int(self.numpy[3]),
                "gauss": float(self.numpy[4]),
            },
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        }


def random_state() -> dict[str, Any]:
    """State of every generator of this process, in types that the weights-only reader takes."""
    return RandomCapture.now().plain()


def set_random_state(state: Mapping[str, Any]) -> None:
    """The inverse of `random_state`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    saved = state["numpy"]
    words = saved["words"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, saved["position"], saved["has_gauss"], saved["gauss"]))  # noqa: NPY002
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Undoes the block's random draws: a run that is resumed after an evaluation does not repeat it."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)
