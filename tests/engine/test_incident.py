"""Bundles of steps that were not finite: what is in them, that the step comes again, and that they stay bounded."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bevctl.batch import Batch
from bevctl.config.schema import Config
from bevctl.engine import incident_keeper
from bevctl.engine.checkpoint import read_checkpoint
from bevctl.engine.dist import World
from bevctl.engine.incident import Incident, find_incidents, read_batches, read_incident
from bevctl.engine.incident_keeper import IncidentShelf
from bevctl.engine.parts import build_parts
from bevctl.engine.resume import restore
from bevctl.engine.step import StepTensors, TrainStep
from bevctl.errors import BevctlError, ExitCode

from .fakes import Bench, point_config

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")],
    ),
]


def _infinite_with_sample_3(batch: Batch, loss: Tensor) -> Tensor:
    return loss * float("inf") if "sample-3" in batch.tokens else loss


def _events(work_dir: Path, kind: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (work_dir / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == kind]


def _said(bench: Bench) -> str:
    assert isinstance(bench.console.stderr, io.StringIO)
    return bench.console.stderr.getvalue()


def _log(work_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (work_dir / "log.jsonl").read_text().splitlines()]


def _config(work_dir: Path, device: str, sections: dict[str, Any]) -> Config:
    return dataclasses.replace(point_config(work_dir, **sections), device=device)


def _replay(folder: Path, sections: dict[str, Any], device: str = "cpu") -> tuple[TrainStep, StepTensors]:
    """The recorded step again, with objects made anew."""
    incident = read_incident(folder)
    parts = build_parts(_config(folder / "replay", device, sections), World(), torch.device(device))
    resumed = restore(parts.state, read_checkpoint(folder / "state.pth"), World())
    assert resumed.exact
    assert resumed.iteration == incident.iteration - 1
    parts.state.model.train()
    step = TrainStep(parts.state, parts.state.model, parts.schedule, parts.precision, clip=parts.config.optim.clip)
    batches = read_batches(folder)
    assert batches is not None
    return step, step.run(batches, resumed.iteration)


FP16 = {"dtype": "fp16", "init_scale": 256.0, "growth_interval": 3}


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({}, id="fp32"),
        pytest.param({"precision": {"dtype": "bf16"}, "train": {"batch": 1, "accumulate": 2}}, id="bf16-accumulated"),
        pytest.param({"precision": FP16}, id="fp16"),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_the_recorded_step_comes_again_to_the_bit(
    tmp_path: Path, bench: Bench, device: str, sections: dict[str, Any]
) -> None:
    bench.sabotage = _infinite_with_sample_3
    bench.train(_config(tmp_path / "run", device, sections))
    folder, other = find_incidents(tmp_path / "run")
    incident = read_incident(folder)
    logged = _log(tmp_path / "run")[incident.iteration - 1]
    assert (incident.kind, incident.phase, incident.task) == ("forward", "forward", "object")
    assert incident.bad_losses == ["loss/object/loss_heatmap"]
    assert "sample-3" in incident.tokens[0]
    assert incident.losses["loss/object/loss_heatmap"] == math.inf
    assert incident.loss_scale == logged["loss_scale"] if "precision" in logged else 1.0
    assert incident.inner == (incident.iteration - 1) % 8
    _, tensors = _replay(folder, sections, device)
    assert {name: value.item() for name, value in tensors.losses.items()} == incident.losses
    assert tensors.loss_scale.item() == incident.loss_scale
    assert tensors.skipped.item() == 1.0
    assert read_incident(other).iteration > 8


def test_the_weights_in_the_bundle_are_those_of_the_moment(tmp_path: Path, bench: Bench) -> None:
    """Replayed without what made it fail, the step gives what training without it gave."""
    sections = {"train": {"epochs": 1, "checkpoint_interval": 1, "keep": 8}}
    bench.train(point_config(tmp_path / "good", **sections))
    bench.sabotage = _infinite_with_sample_3
    bench.train(point_config(tmp_path / "run", **sections))
    (folder,) = find_incidents(tmp_path / "run")
    bench.sabotage = None
    step, _ = _replay(folder, sections)
    number = read_incident(folder).iteration
    healthy = read_checkpoint(tmp_path / "good" / (f"iter_{number}.pth" if number < 8 else "epoch_1.pth"))
    assert all(torch.equal(value, step.state.model.state_dict()[key]) for key, value in healthy.state_dict.items())


@pytest.mark.parametrize("sections", [{}, {"train": {"accumulate": 2, "ema": 0.9}}, {"precision": FP16}])
@pytest.mark.parametrize("device", DEVICES)
def test_keeping_an_incident_changes_nothing(
    tmp_path: Path, bench: Bench, device: str, sections: dict[str, Any]
) -> None:
    bench.sabotage = _infinite_with_sample_3
    kept = bench.train(_config(tmp_path / "kept", device, sections))
    weights = bench.weights
    without = {**sections, "train": {**sections.get("train", {}), "incidents": 0}}
    plain = bench.train(_config(tmp_path / "plain", device, without))
    assert len(find_incidents(tmp_path / "kept")) == 2
    assert not find_incidents(tmp_path / "plain")
    assert all(torch.equal(value, bench.weights[name]) for name, value in weights.items())
    assert kept.checkpoint is not None
    assert plain.checkpoint is not None
    ends = [read_checkpoint(result.checkpoint).content for result in (kept, plain) if result.checkpoint]
    assert torch.equal(ends[0]["rng"][0]["torch"], ends[1]["rng"][0]["torch"])
    assert device == "cpu" or torch.equal(ends[0]["rng"][0]["cuda"], ends[1]["rng"][0]["cuda"])
    assert ends[0]["scaler"] == ends[1]["scaler"]
    if ends[0]["ema"] is not None:
        assert all(torch.equal(value, ends[1]["ema"][name]) for name, value in ends[0]["ema"].items())
    columns = [[(r["loss"], r["grad_norm"]) for r in _log(tmp_path / name)] for name in ("kept", "plain")]
    assert columns[0] == columns[1]


def test_the_ring_holds_the_steps_before(tmp_path: Path, bench: Bench) -> None:
    bench.train(point_config(tmp_path / "free", train={"epochs": 6}))
    order = bench.order

    def sabotage(batch: Batch, loss: Tensor) -> Tensor:
        return loss * float("nan") if batch.tokens == order[40] else loss

    bench.sabotage = sabotage
    bench.train(point_config(tmp_path / "run", train={"epochs": 6}))
    folder = tmp_path / "run" / "incident" / "41"
    ring = read_incident(folder).ring
    assert [entry["iteration"] for entry in ring] == list(range(10, 42))
    assert [entry["tokens"] for entry in ring] == order[9:41]
    assert [entry["skipped"] for entry in ring] == [False] * 31 + [True]
    assert (ring[-1]["epoch"], ring[-1]["inner"]) == (6, 0)
    logged = _log(tmp_path / "run")[9]
    assert {name: ring[0][name] for name in ("loss", "grad_norm", "lr", "losses")} == {
        name: logged[name] for name in ("loss", "grad_norm", "lr", "losses")
    }
    assert set(ring[0]["grad_norms"]) == {"embed", "norm", "head"}
    saved = read_checkpoint(folder / "state.pth").content
    assert [entry["iteration"] for entry in saved["ring"]] == list(range(10, 42))
    assert torch.equal(saved["ring"][-1]["rng"]["torch"], saved["rng"][0]["torch"])


def test_benign_steps_leave_no_bundle_and_no_warning(tmp_path: Path, bench: Bench) -> None:
    result = bench.train(point_config(tmp_path / "run", precision={"dtype": "fp16", "init_scale": 2.0**40}))
    assert result.code == ExitCode.OK
    events = _events(tmp_path / "run", "nonfinite")
    assert events
    assert {event["data"]["class"] for event in events} == {"calibration"}
    assert {event["data"]["phase"] for event in events} == {"backward"}
    assert not find_incidents(tmp_path / "run")
    assert "warning" not in _said(bench)


def test_the_number_is_capped_and_the_events_go_on(tmp_path: Path, bench: Bench) -> None:
    bench.sabotage = _infinite_with_sample_3
    bench.train(point_config(tmp_path / "run", train={"epochs": 5, "incidents": 2}))
    events = _events(tmp_path / "run", "nonfinite")
    assert len(events) == 5
    assert [event["data"]["incident"] is not None for event in events] == [True, True, False, False, False]
    kept = [f"incident/{folder.name}" for folder in find_incidents(tmp_path / "run")]
    assert kept == [event["data"]["incident"] for event in events[:2]]


def _shelf(work_dir: Path, limit: int = 2, gigabytes: float = 1.0) -> IncidentShelf:
    return IncidentShelf(work_dir, World(), limit, gigabytes, "seed: 0\n")


def _incident(iteration: int, kind: str = "overflow", **changes: Any) -> Incident:
    base = Incident(
        iteration=iteration,
        epoch=1,
        inner=iteration - 1,
        kind=kind,
        phase="backward",
        message="",
        bad_losses=[],
        task=None,
        tokens=[["a", "b"]],
        rank=0,
        world=1,
        losses={"loss/object/loss_bbox": math.nan},
        loss_scale=512.0,
        lr=1e-4,
        grad_norm=math.inf,
        grad_norms={"decoder": -math.inf},
        precision="fp16",
        accumulate=1,
        device="CPU",
        deterministic=False,
        versions={"torch": "2"},
        time=1.0,
        ring=[{"iteration": 1, "loss": math.nan, "losses": {"loss/a/b": math.inf}}],
    )
    return dataclasses.replace(base, **changes)


def _state(values: int = 10) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.zeros(values)}}


def test_a_document_comes_back_with_its_odd_numbers(tmp_path: Path) -> None:
    written = _incident(7)
    folder = _shelf(tmp_path).put(written, _state(), [])
    assert folder == tmp_path / "incident" / "7"
    text = (folder / "incident.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["class"] == "overflow"
    assert repr(read_incident(folder)) == repr(written)
    assert (folder / "config.yaml").read_text() == "seed: 0\n"
    assert read_batches(folder) == []


def test_a_graver_kind_takes_the_place_of_the_least_grave(tmp_path: Path) -> None:
    shelf = _shelf(tmp_path)
    for iteration, kind in ((3, "rising"), (5, "overflow")):
        assert shelf.admits(kind)
        shelf.put(_incident(iteration, kind), _state(), [])
    assert not shelf.admits("overflow")
    assert shelf.admits("forward")
    shelf.put(_incident(9, "forward"), _state(), [])
    assert [path.name for path in find_incidents(tmp_path)] == ["3", "9"]
    shelf.put(_incident(11, "collapse"), _state(), [])
    assert [path.name for path in find_incidents(tmp_path)] == ["9", "11"]
    assert not _shelf(tmp_path, limit=0).admits("forward")
    (tmp_path / "incident" / "9" / "incident.json").write_text("damaged")
    shelf.put(_incident(12), _state(), [])
    assert [path.name for path in find_incidents(tmp_path)] == ["11", "12"]


def test_size_is_capped_first_by_leaving_the_batches_out(tmp_path: Path, bench: Bench) -> None:
    bench.sabotage = _infinite_with_sample_3
    bench.train(point_config(tmp_path / "run"), max_iters=8)
    batches = read_batches(find_incidents(tmp_path / "run")[0]) or []
    size = sum(cloud.numel() * 4 for batch in batches for cloud in batch.points or ())
    assert size > 0
    roomy, tight, full = tmp_path / "roomy", tmp_path / "tight", tmp_path / "full"
    state = _state(100_000)
    _shelf(roomy, gigabytes=1e-2).put(_incident(1), state, batches)
    assert read_batches(roomy / "incident" / "1") is not None
    _shelf(tight, gigabytes=(400_000 + size // 2) / 1e9).put(_incident(1), state, batches)
    assert read_batches(tight / "incident" / "1") is None
    with pytest.raises(BevctlError, match=r"A bundle takes 0\.0004 GB, and 0\.0001 GB are left"):
        _shelf(full, gigabytes=1e-4).put(_incident(1), state, batches)
    assert not find_incidents(full)
    with pytest.raises(BevctlError, match="are left"):  # what is there counts
        _shelf(roomy, gigabytes=6e-4).put(_incident(2), state, batches)


def test_what_a_killed_run_left_half_written_goes(tmp_path: Path) -> None:
    half = tmp_path / "incident" / ".0a1b.tmp"
    half.mkdir(parents=True)
    (half / "state.pth").write_bytes(b"half")
    _shelf(tmp_path).put(_incident(1), _state(), [])
    assert [path.name for path in (tmp_path / "incident").iterdir()] == ["1"]


def test_a_bundle_goes_only_when_the_one_in_its_place_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = _shelf(tmp_path, limit=1)
    shelf.put(_incident(3), _state(), [])
    with monkeypatch.context() as patch:
        patch.setattr(incident_keeper, "write_checkpoint", _refuse)
        with pytest.raises(BevctlError, match="no space left"):
            shelf.put(_incident(5, "forward"), _state(), [])
    assert [path.name for path in (tmp_path / "incident").iterdir()] == ["3"]
    shelf.put(_incident(5, "forward"), _state(), [])
    assert [path.name for path in (tmp_path / "incident").iterdir()] == ["5"]


def _refuse(path: Path, _: Any) -> None:
    path.write_bytes(b"half")
    raise BevctlError(f"Cannot write {path}: no space left.", "", ExitCode.RUN_FAILED)


def test_a_disk_that_refuses_leaves_nothing_and_the_run_goes_on(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incident_keeper, "write_checkpoint", _refuse)
    bench.sabotage = _infinite_with_sample_3
    assert bench.train(point_config(tmp_path / "run")).code == ExitCode.OK
    assert not list((tmp_path / "run" / "incident").iterdir())
    assert "An incident could not be kept: Cannot write" in _said(bench)
    assert [event["data"]["incident"] for event in _events(tmp_path / "run", "nonfinite")] == [None, None]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "bevctl.incident/1"}', '{"schema": "bevctl.incident/2"}'])
def test_a_damaged_document_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "incident.json").write_text(text)
    with pytest.raises(BevctlError, match=r"incident\.json"):
        read_incident(tmp_path)


def test_damaged_batches_are_an_error(tmp_path: Path) -> None:
    assert read_batches(tmp_path) is None
    torch.save({"batches": [{"images": None}]}, tmp_path / "batch_0.pth")
    with pytest.raises(BevctlError, match="holds no batches"):
        read_batches(tmp_path)
