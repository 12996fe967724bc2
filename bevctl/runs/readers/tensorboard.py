"""Event files of TensorBoard, from the wire format: TFRecord frames around protocol buffers, no package needed.

A frame is the length (8 bytes), its masked CRC-32C, the data, its masked CRC-32C; all little-endian. The data is an
`Event` (wall_time = 1, step = 2, summary = 5) with `Summary.Value`s (tag = 1, simple_value = 2, tensor = 8).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from bevctl.runs.collect import Collector
from bevctl.runs.layout import Layout, Row, is_count, is_loss, is_moment
from bevctl.runs.readers.names import scores
from bevctl.runs.readers.text import Place

_LONGEST = 64 << 20
_FRAME = 16
"""Bytes of a frame around its data."""
_VALIDATION = ("val/", "eval/", "test/", "valid/", "validation/")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC = _crc_table()


def masked_crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) as TFRecord stores it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def is_event_file(path: Path) -> bool:
    """Whether a file begins with a TFRecord frame. Raises OSError as the file system does."""
    with path.open("rb") as file:
        return _length(file.read(12)) is not None


def _length(head: bytes) -> int | None:
    """The length in a frame's first 12 bytes; None where the checksum is wrong."""
    if len(head) < 12:
        return None
    length, checksum = struct.unpack("<QI", head)
    return length if masked_crc32c(head[:8]) == checksum else None


def frames(file: BinaryIO) -> Iterator[bytes]:
    """The data of the whole frames; ends at the first broken one."""
    while (length := _length(file.read(12))) is not None and length <= _LONGEST:
        data = file.read(length + 4)
        if len(data) < length + 4:
            return
        yield data[:length]


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value, place
        shift += 7
    raise ValueError("endless number")


def _fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Number, wire type and value of each field of a message. Raises ValueError or IndexError where it is broken."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if kind == _VARINT:
            value: int | bytes
            value, place = _varint(data, place)
        else:
            if kind == _BYTES:
                size, place = _varint(data, place)
            elif kind in (_FIXED64, _FIXED32):
                size = 8 if kind == _FIXED64 else 4
            else:
                raise ValueError("unknown wire type")
            value = data[place : place + size]
            if len(value) < size:
                raise ValueError("message cut off")
            place += size
        yield key >> 3, kind, value


@dataclass
class Scalars:
    """The numbers of one event."""

    time: float = 0.0
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)


def parse_event(data: bytes) -> Scalars | None:
    """The scalars of an `Event`; None where it has none or is broken."""
    event = Scalars()
    try:
        for number, kind, value in _fields(data):
            if number == 1 and kind == _FIXED64:
                event.time = struct.unpack("<d", value)[0]  # type: ignore[arg-type]
            elif number == 2 and kind == _VARINT and isinstance(value, int):
                event.step = value - (1 << 64) if value >> 63 else value
            elif number == 5 and isinstance(value, bytes):
                _summary(value, event.values)
    except (ValueError, IndexError, struct.error):
        return None
    return event if event.values else None


def _summary(data: bytes, values: dict[str, float]) -> None:
    for number, _, value in _fields(data):
        if number != 1 or not isinstance(value, bytes):
            continue
        tag, scalar = "", None
        for part, kind, content in _fields(value):
            if not isinstance(content, bytes):
                continue
            if part == 1:
                tag = content.decode("utf-8", "replace")
            elif part == 2 and kind == _FIXED32:
                scalar = struct.unpack("<f", content)[0]
            elif part == 8:
                scalar = _tensor(content)
        if tag and scalar is not None:
            values[tag] = scalar


def _tensor(data: bytes) -> float | None:
    """The value of a TensorProto with one float or double: tensor_content = 4, float_val = 5, double_val = 6."""
    kind_of_number = 0
    content = b""
    for number, kind, value in _fields(data):
        if number == 1 and isinstance(value, int):
            kind_of_number = value
        elif number in (4, 5, 6) and isinstance(value, bytes) and kind in (_BYTES, _FIXED32, _FIXED64):
            content = value
    if kind_of_number == 1 and len(content) == 4:
        return float(struct.unpack("<f", content)[0])
    if kind_of_number == 2 and len(content) == 8:
        return float(struct.unpack("<d", content)[0])
    return None


class EventFiles:
    """Reads event files of one run; the scalars of one step, which come one by one, make one record."""

    def __init__(self, out: Collector) -> None:
        self._out = out
        self._step: int | None = None
        self._values: dict[str, float] = {}
        self._time = 0.0

    def read(self, path: Path) -> None:
        """Takes all of a file. Raises OSError as the file system does."""
        place = Place(path.name)
        self._out.begin("start", "A run starts", place.file)
        whole = 0
        with path.open("rb") as file:
            for data in frames(file):
                whole += len(data) + _FRAME
                event = parse_event(data)
                if event is not None and is_count(event.step):
                    self._take(event)
        if whole < path.stat().st_size:
            self._out.note(f"{path.name} was read up to byte {whole}: what follows is damaged or not complete yet.")
        self.finish()

    def _take(self, event: Scalars) -> None:
        if event.step != self._step:
            self.finish()
            self._step = event.step
        self._values |= event.values
        if is_moment(event.time):
            self._time = event.time

    def finish(self) -> None:
        """Reports the step that was gathered."""
        values, self._values = self._values, {}
        if self._step is None or not values:
            return
        out = self._out
        out.time = self._time or None
        validation = {name: value for name, value in values.items() if name.startswith(_VALIDATION)}
        train = {name.removeprefix("train/"): value for name, value in values.items() if name not in validation}
        epoch = train.pop("epoch", 1.0)
        number = int(epoch) if math.isfinite(epoch) and 0 < epoch < 1e9 else 1
        if any(is_loss(name) or name in ("lr", "learning_rate") for name in train):
            out.step(Row(Layout(tuple(train)), list(train.values()), number, self._step, out.time))
        else:
            validation |= train
        if validation:
            plain = {
                name.partition("/")[2] if name.startswith(_VALIDATION) else name: v for name, v in validation.items()
            }
            out.validation(number, out.last.iter if out.last else None, scores(plain))
