"""Lines of a log file whatever its encoding, compression and line ends, block by block."""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

BLOCK = 1 << 20
_LONGEST_LINE = 8 << 20
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_]|[ -/][0-~])|[\x00\x08]")
_ENCODINGS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 31


class LineFile:
    """A log file as text.

    Bytes that are no text in its encoding become U+FFFD, escape sequences and NULs are dropped, and a carriage return
    ends a line as a line feed does (a progress bar is many lines).

    Args:
        path: plain or gzip-compressed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage = ""
        """Why reading ended early, if it did."""
        self.position = 0
        """Bytes up to the end of the last whole line that was read."""
        with path.open("rb") as file:
            start = file.read(4)
        self._zipped = start.startswith(_GZIP)
        if self._zipped:
            start = next(self._raw(0, None), b"")[:4]
        self.encoding = next((name for mark, name in _ENCODINGS if start.startswith(mark)), "utf-8")

    @property
    def seekable(self) -> bool:
        """Whether lines can be read from a byte offset."""
        return not self._zipped and self.encoding in ("utf-8", "utf-8-sig")

    def blocks(self, start: int = 0, end: int | None = None) -> Iterator[tuple[list[str], bool]]:
        """Lists of lines from byte `start`, where one begins, up to `end`; False with the one line that has no end.

        Raises OSError as the file system does.
        """
        carry = b""
        self.position = start
        for block in self._utf8(start, end):
            data = carry + block
            cut = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1
            carry = data[cut:]
            if not cut and len(data) > _LONGEST_LINE:
                carry, cut = b"", len(data)
            self.position += cut
            if cut:
                yield _split(data[:cut]), True
        if carry.endswith(b"\r"):
            self.position += len(carry)
            yield _split(carry), True
        elif carry:
            yield _split(carry + b"\n"), False

    def _utf8(self, start: int, end: int | None) -> Iterator[bytes]:
        if self.encoding.startswith("utf-8"):
            return self._raw(start, end)
        decoder = codecs.getincrementaldecoder(self.encoding)(errors="replace")
        return (decoder.decode(block).encode("utf-8", "replace") for block in self._raw(start, end))

    def _raw(self, start: int, end: int | None) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            if self._zipped:
                yield from self._unzipped(file)
                return
            file.seek(start)
            left = BLOCK if end is None else end - start
            while left > 0 and (block := file.read(min(BLOCK, left))):
                left -= 0 if end is None else len(block)
                yield block

    def _unzipped(self, file: BinaryIO) -> Iterator[bytes]:
        """What a gzip file holds, as far as it is whole; several members follow each other."""
        expand, data, inside = zlib.decompressobj(_GZIP_WINDOW), b"", False
        while data := data or file.read(BLOCK // 4):
            inside = True
            try:
                block = expand.decompress(data, BLOCK)
            except zlib.error as error:
                self.damage = f"{self.path.name} is damaged: it was read up to there ({error})."
                return
            if block:
                yield block
            data = expand.unconsumed_tail
            if expand.eof:
                data, inside = expand.unused_data.lstrip(b"\x00"), False
                expand = zlib.decompressobj(_GZIP_WINDOW)
        if inside:
            self.damage = f"{self.path.name} is cut off: it was read up to there."


def _split(data: bytes) -> list[str]:
    """The lines of `data`, which ends with a line's end."""
    text = data.decode("utf-8", "replace").removeprefix("\ufeff")
    if "\x1b" in text or "\x00" in text or "\x08" in text:
        text = _ESCAPES.sub("", text)
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.split("\n")[:-1]
