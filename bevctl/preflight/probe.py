"""What is installed in a Python environment, and whether its compiled parts import; prints one JSON document.

Standard library only, Python 3.6 and newer: it is run as a script by the interpreter in question
(`EXE probe.py [--timeout S] [--no-imports]`), and imports nothing of bevctl. Every import that it tries runs in a
process of its own, so that a crash or a hang of one is a result. The document comes behind MARK, because what an
environment prints by itself when it starts may stand before it.
"""

import argparse
import concurrent.futures
import glob
import json
import mmap
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

MARK = "BEVCTL_PROBE "
PACKAGES = (
    "torch", "torchvision", "numpy", "mmcv", "mmcv-full", "mmcv-lite", "mmdet", "mmsegmentation", "mmdet3d", "mmengine",
    "spconv", "cumm", "torchpack", "mpi4py", "nuscenes-devkit", "setuptools", "numba", "yapf", "timm", "bevctl",
)  # fmt: skip
"""Distributions that are looked for; wheels named for a CUDA version (spconv-cu120) count as their project."""
_TORCH_DETAILS = (
    "import json, torch; flags = getattr(torch._C, '_cuda_getArchFlags', lambda: None)() or ''; "
    "print({mark!r} + json.dumps({{'arch_list': flags.split(), 'cuda': torch.version.cuda}}))"
)
_MMCV_DETAILS = (
    "import json, mmcv._ext, mmcv.ops as ops; "
    "print({mark!r} + json.dumps({{'compiling_cuda': ops.get_compiling_cuda_version()}}))"
)
_MAX_ERROR = 300
_FATBIN_MAGIC = b"\x50\xed\x55\xba"
_ELF, _PTX = 2, 1


def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that one import may take")
    parser.add_argument("--no-imports", action="store_true", help="read metadata only")
    options = parser.parse_args(arguments)
    path = search_path()
    print(MARK + json.dumps(probe(path, options.timeout, not options.no_imports)))


def probe(path: List[str], timeout: float, imports: bool) -> Dict[str, Any]:
    """The whole document: interpreter, packages, torch's build, compiled files, programs, outcomes of imports."""
    packages = installed(path)
    attempts = imports_of(packages) if imports else []
    return {
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "packages": packages,
        "torch": torch_build(path),
        "pkg_resources": find(path, os.path.join("pkg_resources", "__init__.py")) is not None,
        "kernels": compiled_architectures(path),
        "programs": {name: shutil.which(name) for name in ("mpirun", "nvcc", "torchpack")},
        "imports": try_imports(attempts, timeout),
    }


def search_path() -> List[str]:
    """Folders that this interpreter imports from, without the one this script lies in."""
    here = os.path.dirname(os.path.abspath(__file__))
    return [folder for folder in sys.path if os.path.isdir(folder) and os.path.abspath(folder) != here]


def find(path: List[str], name: str) -> Optional[str]:
    """The first file or folder `name` on the path, or None."""
    return next((found for found in (os.path.join(folder, name) for folder in path) if os.path.exists(found)), None)


def installed(path: List[str]) -> Dict[str, Dict[str, Any]]:
    """Distribution → {version, where, cuda} from the metadata on the path; `cuda` is the version in a wheel's name."""
    found = {}  # type: Dict[str, Dict[str, Any]]
    for folder in path:
        for entry in sorted(listdir(folder)):
            if not entry.endswith((".dist-info", ".egg-info")):
                continue
            name, version = read_metadata(os.path.join(folder, entry))
            project, cuda = split_cuda(name.lower().replace("_", "-"))
            if project in PACKAGES and project not in found:
                found[project] = {"version": version, "where": folder, "cuda": cuda}
    return found


def listdir(folder: str) -> List[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def split_cuda(name: str) -> Tuple[str, Optional[str]]:
    """("spconv", "12.0") for spconv-cu120; ("torch", None) for torch."""
    match = re.match(r"(spconv|cumm)-cu(\d+)(\d)$", name)
    return (match.group(1), f"{match.group(2)}.{match.group(3)}") if match else (name, None)


def read_metadata(entry: str) -> Tuple[str, str]:
    """(name, version) of a *.dist-info or *.egg-info; what its file does not say comes from its name."""
    stem = os.path.basename(entry).rsplit(".", 1)[0]
    name, _, version = stem.partition("-")
    version = version.split("-py")[0]
    for file in (os.path.join(entry, "METADATA"), os.path.join(entry, "PKG-INFO"), entry):
        head = read_text(file, 20000).split("\n\n")[0]
        fields = dict(re.findall(r"^(Name|Version): *(\S+)", head, flags=re.MULTILINE))
        if fields:
            return fields.get("Name", name), fields.get("Version", version)
    return name, version


def read_text(file: str, limit: int) -> str:
    try:
        with open(file, encoding="utf-8", errors="replace") as stream:
            return stream.read(limit)
    except OSError:
        return ""


def torch_build(path: List[str]) -> Dict[str, Optional[str]]:
    """What torch/version.py says without importing torch: version, CUDA and ROCm it was built for; {} if absent."""
    file = find(path, os.path.join("torch", "version.py"))
    text = read_text(file, 5000) if file else ""
    values = re.findall(r"^(__version__|cuda|hip)\b[^=\n]*= *(?:'([^']*)'|None)", text, flags=re.MULTILINE)
    return {name.strip("_"): value or None for name, value in values}


def compiled_architectures(path: List[str]) -> Dict[str, List[str]]:
    """Compiled file of the OpenMMLab family or spconv → CUDA architectures of the kernels in it."""
    patterns = (
        os.path.join("mmcv", "_ext*.so"),
        os.path.join("mmdet3d", "ops", "**", "*.so"),
        os.path.join("spconv", "*.so"),
        os.path.join("cumm", "*.so"),
    )
    found = {}  # type: Dict[str, List[str]]
    for folder in path:
        for pattern in patterns:
            for file in sorted(glob.glob(os.path.join(glob.escape(folder), pattern), recursive=True)):
                found.setdefault(os.path.relpath(file, folder), architectures(file))
    return found


def architectures(file: str) -> List[str]:
    """Sorted "sm_75" / "compute_90" of the CUDA kernels in a shared library; [] where it holds none.

    nvcc embeds them as "fat binaries": a 16-byte header (magic, version, header size, size) before entries whose
    headers give kind (1: PTX, 2: machine code), header size, data size and, at byte 28, the architecture.
    """
    names = set()  # type: set[str]
    try:
        with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            start = data.find(_FATBIN_MAGIC)
            while start != -1:
                names.update(fatbin_entries(data, start))
                start = data.find(_FATBIN_MAGIC, start + 4)
    except (OSError, ValueError):  # unreadable or empty
        return []
    return sorted(names, key=lambda name: (name.split("_")[0], int(name.split("_")[1])))


def fatbin_entries(data: mmap.mmap, start: int) -> Iterator[str]:
    if start + 16 > len(data):
        return
    _, version, header, size = struct.unpack_from("<IHHQ", data, start)
    position, end = start + header, min(start + header + size, len(data))
    while version == 1 and header == 16 and position + 32 <= end:
        kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, position)
        (architecture,) = struct.unpack_from("<I", data, position + 28)
        if kind not in (_ELF, _PTX) or entry_header < 32 or not 20 <= architecture < 1000:
            return
        yield f"{'sm' if kind == _ELF else 'compute'}_{architecture}"
        position += entry_header + entry_size


def imports_of(packages: Dict[str, Dict[str, Any]]) -> List[Tuple[str, str]]:
    """(name, code) of each import worth trying, given what is installed."""
    attempts = []
    if "torch" in packages:
        attempts.append(("torch", _TORCH_DETAILS.format(mark=MARK)))
    if packages.keys() & {"mmcv", "mmcv-full", "mmcv-lite"}:
        attempts.append(("mmcv", "import mmcv"))
        attempts.append(("mmcv._ext", _MMCV_DETAILS.format(mark=MARK)))
    for name in ("mmengine", "mmdet"):
        if name in packages:
            attempts.append((name, "import " + name))
    if "mmdet3d" in packages:
        attempts.append(("mmdet3d", "import mmdet3d"))
        modern = re.match(r"1\.[1-9]|[2-9]", packages["mmdet3d"]["version"] or "")
        operators = "mmdet3d.models" if modern else "mmdet3d.ops"
        attempts.append((operators, "import " + operators))
    if "spconv" in packages:
        name = "spconv" if (packages["spconv"]["version"] or "").startswith("1.") else "spconv.pytorch"
        attempts.append((name, "import " + name))
    return attempts


def try_imports(attempts: List[Tuple[str, str]], timeout: float) -> Dict[str, Dict[str, Any]]:
    """Name → {ok, error, …}, each from a process of its own, two at a time."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        outcomes = list(pool.map(lambda attempt: try_import(attempt[1], timeout), attempts))
    return {name: outcome for (name, _), outcome in zip(attempts, outcomes)}


def try_import(code: str, timeout: float) -> Dict[str, Any]:
    """{ok: true | false | null (no answer in time), error, and what the code printed behind MARK}."""
    # Without the working directory on the path: a folder there must not stand for an installed package.
    code = "import sys; sys.path[:] = [folder for folder in sys.path if folder]; " + code
    try:
        process = subprocess.run(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            timeout=timeout, universal_newlines=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"ok": None, "error": f"no answer within {timeout:g} s"}
    outcome = printed_details(process.stdout)
    outcome["ok"] = process.returncode == 0
    outcome["error"] = None if outcome["ok"] else last_error(process)
    return outcome


def printed_details(text: str) -> Dict[str, Any]:
    """The mapping that a program printed behind MARK; {} where there is none."""
    lines = [line[len(MARK) :] for line in text.splitlines() if line.startswith(MARK)]
    try:
        details = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return details if isinstance(details, dict) else {}


def last_error(process: "subprocess.CompletedProcess[str]") -> str:
    """The exception's own line of a traceback, or the signal that ended the process."""
    if process.returncode < 0:
        return f"ended by signal {-process.returncode}"
    lines = [line.strip() for line in process.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
    return (errors or lines or [f"exit code {process.returncode}"])[-1][:_MAX_ERROR]


if __name__ == "__main__":
    main()
