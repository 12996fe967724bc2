"""Event files of TensorBoard, made here from the wire format."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest

from bevctl.runs.readers.tensorboard import is_event_file, masked_crc32c, parse_event
from bevctl.runs.source import open_source


def _field(number: int, kind: int, content: bytes) -> bytes:
    return _varint(number << 3 | kind) + (_varint(len(content)) if kind == 2 else b"") + content


def _varint(value: int) -> bytes:
    data = b""
    while value > 0x7F:
        data += bytes([value & 0x7F | 0x80])
        value >>= 7
    return data + bytes([value])


def _event(time: float, step: int, tag: str, value: float, tensor: bool = False) -> bytes:
    if tensor:  # DT_FLOAT = 1, float_val = 5 (packed)
        number = _field(8, 2, _field(1, 0, _varint(1)) + _field(5, 2, struct.pack("<f", value)))
    else:
        number = _field(2, 5, struct.pack("<f", value))
    summary = _field(1, 2, _field(1, 2, tag.encode()) + number)
    return _field(1, 1, struct.pack("<d", time)) + _field(2, 0, _varint(step)) + _field(5, 2, summary)


def _frame(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    checksums = (struct.pack("<I", masked_crc32c(part)) for part in (length, data))
    return length + next(checksums) + data + next(checksums)


def _file(path: Path, events: list[bytes]) -> Path:
    version = _field(1, 1, struct.pack("<d", 1.0)) + _field(3, 2, b"brain.Event:2")
    path.write_bytes(b"".join(_frame(event) for event in (version, *events)))
    return path


EVENTS = [
    event
    for step in (50, 100, 150)
    for event in (
        _event(1e9 + step, step, "train/loss", step / 100),
        _event(1e9 + step, step, "train/loss_cls", 0.5, tensor=True),
        _event(1e9 + step, step, "learning_rate", 0.25),
        _event(1e9 + step, step, "epoch", 2.0),
    )
]


def test_checksum() -> None:
    # CRC-32C of "123456789" is 0xE3069283 (RFC 3720's polynomial); TFRecord rotates it by 15 bits and adds a constant.
    crc = 0xE3069283
    assert masked_crc32c(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32


def test_scalars_of_a_step_are_one_record(tmp_path: Path) -> None:
    scores = [_event(1e9 + 160, 150, "val/mAP", 0.5), _event(1e9 + 170, 200, "train/loss", math.nan)]
    path = _file(tmp_path / "events.out.tfevents.1", EVENTS + scores)
    log = open_source(path).read()
    assert (log.format, [step.iter for step in log.steps]) == ("tensorboard", [50, 100, 150, 200])
    first = log.steps[0]
    assert (first.time, first.epoch, first.loss, first.lr, first.losses) == (1e9 + 50, 2, 0.5, 0.25, {"loss_cls": 0.5})
    assert math.isnan(log.steps[-1].loss or 0)
    assert log.validations[0].metrics == {"mAP": 0.5}
    assert log.interval == 50


def test_windows_and_folders_of_event_files(tmp_path: Path) -> None:
    (tmp_path / "tf_logs").mkdir()
    _file(tmp_path / "tf_logs" / "events.out.tfevents.1", EVENTS)
    log = open_source(tmp_path).read(since=1e9 + 100)
    assert (log.format, [step.iter for step in log.steps]) == ("tensorboard", [100, 150])


@pytest.mark.parametrize("cut", [1, 5, 30, 60])
def test_a_file_that_is_cut_off(tmp_path: Path, cut: int) -> None:
    path = _file(tmp_path / "events.out.tfevents.1", EVENTS)
    path.write_bytes(path.read_bytes()[:-cut])
    log = open_source(path).read()
    assert [step.iter for step in log.steps] == [50, 100, 150]
    assert any("not complete" in note for note in log.notes)


def test_broken_messages() -> None:
    whole = _event(1.0, 5, "loss", 0.5)
    assert parse_event(whole) is not None
    for end in range(len(whole)):
        broken = parse_event(whole[:end])
        assert broken is None or broken.values in ({}, {"loss": 0.5})
    assert parse_event(b"\xff" * 40) is None


def test_other_files_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for data in (b"", b"12345678901", b"123456789012345"):
        path.write_bytes(data)
        assert not is_event_file(path)
