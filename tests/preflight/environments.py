"""Made-up Python environments: a real interpreter with a folder of stub packages in front of its path."""

from __future__ import annotations

import struct
from pathlib import Path

EXTENSION_ABSENT = "raise ImportError('/site/mmcv/_ext.so: undefined symbol: _ZNK2at10TensorBase8data_ptrIdEEPT_v')\n"


def distribution(site: Path, name: str, version: str, module: str | None = None, source: str = "") -> None:
    """Metadata of an installed distribution, and its module."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nText: {name}\n")
    if module is not None:
        package(site, module, source)


def package(site: Path, dotted: str, source: str = "") -> None:
    """A package with its source, and empty packages above it."""
    folder = site.joinpath(*dotted.split("."))
    folder.mkdir(parents=True, exist_ok=True)
    for above in (folder, *folder.parents):
        if above == site:
            break
        (above / "__init__.py").touch()
    (folder / "__init__.py").write_text(source)


def torch(site: Path, version: str, cuda: str | None = "11.3") -> None:
    """A torch that imports, and says what it was built for."""
    distribution(
        site, "torch", version.split("+")[0], "torch", "from . import _C, version\n__version__ = version.__version__\n"
    )
    package(site, "torch._C", "def _cuda_getArchFlags():\n    return 'sm_70 sm_75'\n")
    text = f"__version__ = '{version}'\ndebug = False\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n"
    (site / "torch" / "version.py").write_text("from typing import Optional\n" + text)


def legacy(site: Path, extension: str = "") -> None:
    """The classic stack: torch 1.12, mmcv-full 1.7.0, mmdet, mmdet3d 1.0.0rc6; `extension` is mmcv/_ext's source."""
    torch(site, "1.12.1+cu113")
    distribution(site, "numpy", "1.23.5", "numpy")
    distribution(site, "mmcv-full", "1.7.0", "mmcv", "__version__ = '1.7.0'\n")
    package(site, "mmcv._ext", extension)
    package(site, "mmcv.ops", "def get_compiling_cuda_version():\n    return '11.3'\n")
    distribution(site, "mmdet", "2.28.2", "mmdet", "import mmcv\n")
    distribution(site, "mmsegmentation", "0.30.0", "mmseg")
    distribution(site, "mmdet3d", "1.0.0rc6", "mmdet3d", "import mmdet\n")
    package(site, "mmdet3d.ops", "from mmcv import ops\n")
    distribution(site, "nuscenes-devkit", "1.1.9", "nuscenes")


def interpreter(folder: Path, executable: Path, site: Path) -> Path:
    """A program that is `executable` with `site` in front of its path and none of its own packages."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {executable} -S "$@"\n')
    path.chmod(0o755)
    return path


def library_with_kernels(path: Path, *entries: tuple[int, int]) -> None:
    """A file with a CUDA fat binary inside; entries are (kind: 1 for PTX, 2 for machine code, architecture)."""
    body = b"".join(struct.pack("<HHIQIIHHI", kind, 0, 64, 40, 0, 0, 0, 0, sm) + bytes(72) for kind, sm in entries)
    header = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x7fELF" + bytes(1000) + header + body + bytes(500))
