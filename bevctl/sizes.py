"""Sizes as people write them: GB is 10^9 bytes, GiB 2^30."""

from __future__ import annotations

import re

from bevctl.errors import BevctlError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGTP]?)(i?)B?")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def parse_size(text: str) -> int:
    """Bytes of "400GB", "1.5 TiB", "64M" or "1000"; the i makes powers of 1024. Raises BevctlError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise BevctlError(f"{text!r} is not a size.", "Write for example 400GB (10^9 bytes each) or 64GiB (2^30).")
    base = 1024 if match[3] else 1000
    return round(float(match[1]) * base ** _POWERS[match[2].upper()])


def format_gb(size: float) -> str:
    """For disks: "1.5 GB", or MB below one."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def format_gib(size: float) -> str:
    """For memory: "1.5 GiB", or MiB below one."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
