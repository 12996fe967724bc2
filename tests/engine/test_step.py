"""One step on a model whose gradients are known, and what it leaves alone when it is not finite."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bevctl.batch import Batch
from bevctl.config.schema import PrecisionConfig
from bevctl.data.loader import collate
from bevctl.engine.dist import World
from bevctl.engine.parts import build_state
from bevctl.engine.precision import Precision
from bevctl.engine.recorder import Recorder, StepFacts
from bevctl.engine.resume import RandomCapture, TrainState
from bevctl.engine.scaler import LossScaler
from bevctl.engine.schedule import Schedule
from bevctl.engine.step import TrainStep
from tests.waits import host_never_waits

from .fakes import PointData, PointNet, point_config

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("bench")


def _step(folder: Path, device: torch.device = CPU, **sections: object) -> tuple[TrainStep, list[Batch]]:
    """A step of the small model, and two batches for it."""
    config = point_config(folder, **sections)
    precision = Precision(config.precision.dtype, device.type)
    state, _ = build_state(config, precision, World(), device, iters_per_epoch=8)
    state.model.train()
    data = PointData(config, "train")
    batches = [collate([data[0, 2 * i], data[0, 2 * i + 1]]) for i in range(2)]
    return TrainStep(state, state.model, Schedule(config.optim, 16), precision, clip=config.optim.clip), batches


def _content(state: TrainState) -> dict[str, Tensor]:
    """Weights, statistics and moments, copied."""
    entries = {name: value.clone() for name, value in state.model.state_dict().items()}
    for index, moments in state.optimizer.state_dict()["state"].items():
        entries |= {f"{index}.{name}": value.clone() for name, value in moments.items()}
    return entries


def _changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name, value in after.items() if name not in before or not torch.equal(before[name], value)}


def test_discarded_gradients_leave_no_trace(tmp_path: Path) -> None:
    step, batches = _step(tmp_path)
    step.run(batches[:1], 0)
    before = _content(step.state)
    step.gradients(batches)
    assert _changed(before, _content(step.state)) == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    step.discard()
    assert _changed(before, _content(step.state)) == set()
    assert all(p.grad is None for p in step.state.model.parameters())


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_changes_nothing(tmp_path: Path, dtype: str, where: str) -> None:
    step, batches = _step(tmp_path, precision={"dtype": dtype, "init_scale": 256.0})
    step.run(batches[:1], 0)
    before = _content(step.state)
    model = step.state.model
    assert isinstance(model, PointNet)
    if where == "loss":  # finite gradients
        model.sabotage = lambda _, loss: loss + float("nan")
    else:
        model.head.weight.register_hook(lambda grad: grad * float("inf"))
    tensors = step.run(batches[1:], 1)
    assert tensors.skipped.item() == 1.0
    assert tensors.loss_scale.item() == (256.0 if dtype == "fp16" else 1.0)
    assert tensors.total.isfinite().item() == (where == "gradient")
    assert tensors.grad_norm.isfinite().item() == (where == "loss")
    assert _changed(before, _content(step.state)) == set()
    assert step.state.scaler.value.item() == (128.0 if dtype == "fp16" else 1.0)
    assert step.state.scaler.growth_tracker.item() == 0


def test_each_part_has_its_norm_and_a_bad_one_does_not_spoil_the_others(tmp_path: Path) -> None:
    step, batches = _step(tmp_path)
    tensors = step.run(batches, 0)
    assert set(tensors.grad_norms) == {"embed", "norm", "head"}
    together = torch.stack(list(tensors.grad_norms.values())).norm()
    assert together.item() == pytest.approx(tensors.grad_norm.item(), rel=1e-5)
    model = step.state.model
    assert isinstance(model, PointNet)
    model.head.bias.register_hook(lambda grad: grad * float("nan"))
    tensors = step.run(batches, 1)
    finite = {part: bool(norm.isfinite()) for part, norm in tensors.grad_norms.items()}
    assert finite == {"embed": True, "norm": True, "head": False}


class _Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict({"camera": nn.Linear(2, 2), "lidar": nn.Linear(2, 2)})
        self.decoder = nn.Linear(2, 2)
        self.heads = nn.ModuleDict({"map": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})


def test_parts_are_children_and_members_of_dicts(tmp_path: Path) -> None:
    step, _ = _step(tmp_path)
    model = _Headed()
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": list(named.values()), "names": list(named)}], lr=1e-3, fused=True)
    state = dataclasses.replace(step.state, model=model, optimizer=optimizer)
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    parts = TrainStep(state, model, step.schedule, step.precision)._clip()[1]
    assert {name: norm.item() for name, norm in parts.items()} == {
        "encoders.camera": pytest.approx(math.sqrt(6)),
        "encoders.lidar": pytest.approx(math.sqrt(6)),
        "decoder": pytest.approx(math.sqrt(6)),
        "heads.map": pytest.approx(math.sqrt(12)),
    }


@given(st.lists(st.floats(-50, 50, width=32), min_size=8, max_size=8), st.sampled_from([None, 0.5, 35.0]))
def test_clips_as_torch_does_to_the_bit(values: list[float], limit: float | None) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "names": ["weight", "bias"]}], lr=1.0)
    state = TrainState(model, optimizer, LossScaler(PrecisionConfig(), False, CPU), None, None, half=False)  # type: ignore[arg-type]
    step = TrainStep(state, model, None, None, clip=limit)  # type: ignore[arg-type]
    twins = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    for parameters in (list(model.parameters()), twins):
        flat = torch.tensor(values)
        parameters[0].grad, parameters[1].grad = flat[:6].view(2, 3).clone(), flat[6:].clone()
    norm, _ = step._clip()
    expected = nn.utils.clip_grad_norm_(twins, limit or math.inf)
    assert torch.equal(norm, expected)
    for ours, theirs in zip(model.parameters(), twins, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_update_never_asks_the_device_for_a_number(tmp_path: Path) -> None:
    """Nor do remembering, undoing and packing for the recorder; the loss scale moves and a step is skipped."""
    device = torch.device("cuda")
    step, batches = _step(tmp_path, device, precision={"dtype": "fp16", "init_scale": 2.0**40})
    losses = step.gradients(batches)
    step.update(losses, 0)  # the first makes the optimizer's state
    recorder = Recorder(World(), device, 4, 10, 0)
    with host_never_waits():
        tensors = step.update(losses, 1)
        step.discard()
        recorder.push(StepFacts(1, 2, 1, 1e-3, 0.0, RandomCapture.now()), tensors)
        outcome = recorder.settle()
    assert outcome is not None
    assert outcome.record.loss == pytest.approx(sum(v.item() for k, v in losses.items() if k.startswith("loss/")))
