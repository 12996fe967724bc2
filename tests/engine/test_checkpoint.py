from __future__ import annotations

import os
import pickle
import resource
import stat
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bevctl.engine.checkpoint import load_weights, newest_checkpoints, read_checkpoint, write_checkpoint
from bevctl.engine.shelf import Shelf
from bevctl.errors import BevctlError, ExitCode


def _content(epoch: int = 1) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.arange(5000.0), "bias": torch.ones(2)}, "meta": {"epoch": epoch, "iter": 7}}


def test_round_trip_with_torchs_weights_only_reader(tmp_path: Path) -> None:
    path = tmp_path / "epoch_1.pth"
    write_checkpoint(path, _content())
    plain = torch.load(path, weights_only=True)
    assert plain["meta"] == {"epoch": 1, "iter": 7}
    checkpoint = read_checkpoint(path)
    assert torch.equal(checkpoint.state_dict["weight"], torch.arange(5000.0))
    assert (checkpoint.epoch, checkpoint.iteration, checkpoint.origin) == (1, 7, "mmcv")
    assert [p.name for p in tmp_path.iterdir()] == ["epoch_1.pth"]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_told(tmp_path: Path, share: float) -> None:
    path = tmp_path / "epoch_1.pth"
    write_checkpoint(path, _content())
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(BevctlError, match="truncated or damaged") as caught:
        read_checkpoint(path)
    assert caught.value.code == ExitCode.USAGE
    assert "\n" not in caught.value.message


def test_one_flipped_bit_is_told_by_the_checksum(tmp_path: Path) -> None:
    path = tmp_path / "epoch_1.pth"
    write_checkpoint(path, _content())
    data = bytearray(path.read_bytes())
    data[data.index(np.arange(5000, dtype=np.float32)[100:200].tobytes())] ^= 1
    path.write_bytes(data)
    assert torch.load(path, weights_only=True)["meta"]["epoch"] == 1, "torch itself does not notice"
    with pytest.raises(BevctlError, match="checksum"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "content", [b"not a checkpoint", b"\x80\x02}q\x00.", bytes(range(256)), b"PK\x03\x04" + bytes(60)]
)
def test_garbage_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(content)
    with pytest.raises(BevctlError):
        read_checkpoint(path)


def test_a_folder_and_an_absent_file_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.pth"):
        with pytest.raises(BevctlError, match="Cannot read"):
            read_checkpoint(path)


class _Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch executed",)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_callable_in_the_file_is_named_and_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, legacy: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}, "meta": _Evil()}, "evil.pth", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(BevctlError, match=r"posix.system"):
        read_checkpoint(Path("evil.pth"))
    assert not Path("executed").exists()


def _save_as_mmengine(path: Path) -> None:
    """As mmengine writes: HistoryBuffer objects, NumPy scalars and arrays beside the weights."""
    name = "mmengine.logging.history_buffer"
    module = types.ModuleType(name)
    buffer_class = type("HistoryBuffer", (), {"__module__": name})
    module.HistoryBuffer = buffer_class  # type: ignore[attr-defined]
    buffer = buffer_class()
    buffer.__dict__ = {"_log_history": np.arange(3.0), "_max_length": 1000, "last": np.float64(0.5)}
    content = {
        "meta": {"epoch": 2, "iter": 20, "mmengine_version": "0.10.2"},
        "state_dict": OrderedDict(weight=torch.ones(3)),
        "message_hub": {"log_scalars": {"train/loss": buffer}},
    }
    with pytest.MonkeyPatch.context() as patch:
        for part in ("mmengine", "mmengine.logging", name):
            patch.setitem(sys.modules, part, module)
        torch.save(content, path)


def test_mmengine_objects_become_inert(tmp_path: Path) -> None:
    path = tmp_path / "epoch_2.pth"
    _save_as_mmengine(path)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    checkpoint = read_checkpoint(path)
    assert (checkpoint.origin, checkpoint.epoch) == ("mmengine", 2)
    assert torch.equal(checkpoint.state_dict["weight"], torch.ones(3))


@pytest.fixture
def tiny_disk() -> Iterator[None]:
    """Writing more than 100 kB to a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("tiny_disk")
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, keep=1)
    shelf.put("epoch_1.pth", _content())
    before = (tmp_path / "epoch_1.pth").read_bytes()
    for name in ("epoch_1.pth", "epoch_2.pth"):
        with pytest.raises(BevctlError, match="Earlier checkpoints are untouched") as caught:
            shelf.put(name, {"state_dict": {"weight": torch.zeros(100_000)}})
        assert caught.value.code == ExitCode.RUN_FAILED
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch_1.pth", "latest"]
    assert (tmp_path / "latest").read_bytes() == before


def test_keeps_the_newest_and_what_the_run_did_not_write(tmp_path: Path) -> None:
    (tmp_path / "epoch_9.pth").write_bytes(b"somebody's own")
    shelf = Shelf(tmp_path, keep=2)
    for epoch in (1, 2, 3):
        shelf.put(f"epoch_{epoch}.pth", _content(epoch))
        if epoch == 1:
            shelf.duplicate("epoch_1.pth", "best.pth")
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"epoch_2.pth", "epoch_3.pth", "epoch_9.pth", "best.pth", "latest"}
    assert read_checkpoint(tmp_path / "latest").epoch == 3
    assert read_checkpoint(tmp_path / "best.pth").epoch == 1
    assert newest_checkpoints(tmp_path)[0] == tmp_path / "epoch_3.pth"
    assert stat.S_ISLNK((tmp_path / "latest").lstat().st_mode)
    assert os.readlink(tmp_path / "latest") == "epoch_3.pth"


class _Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"map": nn.Linear(3, width)})
        self.fuser = nn.Linear(3, 3)
        self.fuser.register_buffer("dx", torch.full((3,), 0.3))


def test_report_counts_what_did_not_fit(tmp_path: Path) -> None:
    theirs = _Net(width=5).state_dict()
    theirs["fuser.dx"] = torch.full((3,), 0.4)
    theirs["heads.other.weight"] = theirs.pop("fuser.bias")
    torch.save({"state_dict": {f"module.{k}": v for k, v in theirs.items()}}, tmp_path / "x.pth")
    model = _Net()
    report = load_weights(model, tmp_path / "x.pth")
    assert torch.equal(model.fuser.weight, theirs["fuser.weight"])
    assert report.loaded == ["fuser.weight"]
    assert report.missing == ["fuser.bias"]
    assert report.unexpected == ["heads.other.weight"]
    assert sorted(report.mismatched) == ["heads.map.bias", "heads.map.weight"]
    assert torch.equal(model.state_dict()["fuser.dx"], torch.full((3,), 0.3)), "geometry follows the config"
    said = " | ".join(report.sentences())
    assert "2 mismatched: heads.map" in said
    assert "fuser.dx" in said


def test_nothing_that_fits_is_an_error(tmp_path: Path) -> None:
    torch.save({"state_dict": {"backbone.conv.weight": torch.ones(3)}}, tmp_path / "x.pth")
    with pytest.raises(BevctlError, match="Not one of the 1 entries"):
        load_weights(_Net(), tmp_path / "x.pth")


def test_another_size_of_the_same_model_is_told_by_a_shape(tmp_path: Path) -> None:
    theirs = {name: torch.ones(*value.shape, 2) for name, value in _Net().state_dict().items()}
    torch.save({"state_dict": theirs}, tmp_path / "x.pth")
    with pytest.raises(BevctlError, match="Not one of the") as caught:
        load_weights(_Net(), tmp_path / "x.pth")
    name, value = next(item for item in _Net().state_dict().items() if not item[0].startswith("fuser.dx"))
    assert f"{name} is {(*value.shape, 2)} in the file and {tuple(value.shape)} in the model" in caught.value.hint


def test_a_file_without_weights_is_an_error(tmp_path: Path) -> None:
    torch.save({"meta": {"epoch": 1}}, tmp_path / "x.pth")
    with pytest.raises(BevctlError, match="no model weights"):
        read_checkpoint(tmp_path / "x.pth")
