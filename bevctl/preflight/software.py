"""Checks of section "software": is what the run imports there, of versions that fit, and built for this GPU?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bevctl.errors import BevctlError
from bevctl.finding import CheckStatus
from bevctl.preflight import nvml
from bevctl.preflight.checks import CheckSpec, Context, Outcome, failed, passed, skipped, unknown, warned
from bevctl.preflight.compatibility import (
    MMCV_FLAVOURS,
    Problem,
    mmcv_install,
    newest_capability,
    problems,
    satisfies,
    torch_for_python,
)
from bevctl.preflight.environment import Environment, read_environment, try_imports
from bevctl.preflight.gpu_selection import gpus_in_use
from bevctl.preflight.plan import is_foreign_run

OWN_PYTHON = ">=3.10,<3.13"
OWN_TORCH = ">=2.4"
AMP_TORCH = ">=1.6"
"""torch.cuda.amp, which every mixed-precision hook of mmcv from 1.3 on and of mmengine uses, came with 1.6."""
_LEGACY = ("mmcv", "mmcv-full", "mmcv-lite", "mmdet", "mmdet3d", "mmengine", "mmsegmentation", "spconv")

Judge = Callable[[Context, Environment], Outcome]


def _of_environment(judge: Judge) -> Callable[[Context], Outcome]:
    """A check that needs the probe's answer, and is skipped where the check of the interpreter has failed."""

    @functools.wraps(judge)
    def check(context: Context) -> Outcome:
        try:
            environment = context.once(read_environment)
        except BevctlError as error:
            return skipped(f"nothing is known about the environment: {error.message}")
        return judge(context, environment)

    return check


def interpreter(context: Context) -> Outcome:
    """SOFT001: the interpreter runs, and is of a version that can train."""
    try:
        environment = context.once(read_environment)
    except BevctlError as error:
        return failed(error.message, error.hint)
    found = f"Python {environment.python} ({environment.executable})"
    if is_foreign_run(context):
        return passed(found, required="3.6 or newer")
    if not satisfies(environment.python, OWN_PYTHON):
        return failed(found, "Make an environment with Python 3.11 and install bevctl there.", required=OWN_PYTHON)
    return passed(found, required=OWN_PYTHON)


@_of_environment
def torch_version(context: Context, environment: Environment) -> Outcome:
    """SOFT002: torch is installed and new enough, by its metadata."""
    wanted = AMP_TORCH if is_foreign_run(context) else OWN_TORCH
    version = environment.torch.get("version") or environment.versions.get("torch")
    if version is None:
        built = torch_for_python(environment.python)
        fix = f"{environment.executable} -m pip install 'torch{built or ''}'"
        return failed("torch is not installed", fix, required=wanted)
    found = f"torch {version} ({_build(environment)})"
    if satisfies(version, wanted) is False:
        return failed(found, f"{environment.executable} -m pip install 'torch{wanted}'", required=wanted)
    if not _build_has_gpu(environment) and context.device != "cpu" and nvml.device_traces():
        fix = "Install a build for CUDA: pytorch.org/get-started/locally lists them; or say --device cpu."
        return warned(f"{found}, and this machine has an NVIDIA GPU", fix, required=wanted)
    return passed(found, required=wanted)


def _build_has_gpu(environment: Environment) -> bool:
    return bool(environment.torch.get("cuda") or environment.torch.get("hip"))


def _build(environment: Environment) -> str:
    if environment.torch.get("hip"):
        return f"built for ROCm {environment.torch['hip']}"
    cuda = environment.torch.get("cuda")
    return f"built for CUDA {cuda}" if cuda else "built for CPUs"


@_of_environment
def torch_imports(context: Context, environment: Environment) -> Outcome:
    """SOFT003: `import torch` works."""
    if "torch" not in environment.versions:
        return skipped("torch is not installed")
    if context.python is None:
        return _import_here()
    return _import_outcome(context, ["torch"])


def _import_here() -> Outcome:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library that torch loads is not there
        return failed(f"does not import: {error!s:.300}", _REINSTALL)
    return passed(f"torch {torch.__version__} imports")


_REINSTALL = "Install what the message names, or reinstall the package for this torch."


def _import_outcome(context: Context, modules: list[str]) -> Outcome:
    imports = context.once(try_imports)
    tried = {name: imports[name] for name in modules if name in imports}
    broken = {name: result for name, result in tried.items() if result["ok"] is False}
    silent = [name for name, result in tried.items() if result["ok"] is None]
    if broken:
        said = "; ".join(f"{name}: {result['error']}" for name, result in broken.items())
        return failed(f"does not import: {said}", _import_fix(broken, context.once(read_environment)))
    if silent:
        return unknown(f"no answer in time: {', '.join(silent)}", "Give it longer with --timeout.")
    return passed(f"imports: {', '.join(tried)}")


def _import_fix(broken: Mapping[str, Mapping[str, Any]], environment: Environment) -> str:
    said = " ".join(str(result["error"]) for result in broken.values())
    install = _mmcv_install(environment)
    if "undefined symbol" in said and "mmcv._ext" in broken and install:
        return f"It was compiled for another torch: {install}."
    if "undefined symbol" in said:
        return "It was compiled for another torch: reinstall the wheel for this torch, or build it anew beside it."
    if "_ext" in said or "mmcv._ext" in broken:
        return (
            f"This mmcv has no operators: {install}."
            if install
            else "This mmcv has no operators: install mmcv-full (mmcv 1) or build mmcv 2 with MMCV_WITH_OPS=1 and "
            "--no-build-isolation, so that its setup sees torch."
        )
    if "incompatible" in said:
        return "Install the versions that the message names."
    return _REINSTALL


def _mmcv_install(environment: Environment) -> str:
    """How to install this environment's mmcv with operators for its torch; empty without both."""
    version, torch = environment.versions.get("mmcv"), environment.torch.get("version")
    if version is None or torch is None:
        return ""
    flavour = "mmcv-full" if satisfies(version, "<2.0.0rc1") else "mmcv"
    return mmcv_install(flavour, version, torch.split("+")[0], environment.torch.get("cuda"))


@_of_environment
def one_mmcv(context: Context, environment: Environment) -> Outcome:
    """SOFT004: of mmcv, mmcv-full and mmcv-lite there is one, and it is one with operators."""
    flavours = [name for name in MMCV_FLAVOURS if name in environment.packages]
    level = "fail" if is_foreign_run(context) else "warn"
    if not flavours:
        return _no_mmcv(context, environment)
    found = ", ".join(f"{name} {environment.packages[name]['version']}" for name in flavours)
    pip = f"{environment.executable} -m pip"
    if len(flavours) > 1:
        keep = f"{flavours[0]}=={environment.packages[flavours[0]]['version']}"
        fix = f"{pip} uninstall -y {' '.join(flavours)}, then {pip} install {keep}: they overwrite each other's files."
        return _at_level(level, found, fix)
    without_operators = flavours[0] == "mmcv-lite" or (
        flavours[0] == "mmcv" and satisfies(environment.versions["mmcv"], "<2.0.0rc1")
    )
    if without_operators and ("mmdet3d" in environment.packages or context.foreign is not None):
        full = "mmcv-full" if satisfies(environment.versions["mmcv"], "<2.0.0rc1") else "mmcv"
        install = _mmcv_install(environment) or f"install {full} of the same version"
        fix = f"{pip} uninstall -y {flavours[0]}, then {install}."
        return _at_level(level, f"{found}, which has no operators", fix)
    return passed(found)


def _no_mmcv(context: Context, environment: Environment) -> Outcome:
    if not is_foreign_run(context):
        return skipped("mmcv is not installed, and the bundled engine does not use it")
    if context.foreign is not None or environment.packages.keys() & {"mmdet", "mmdet3d"}:
        return failed("none of mmcv, mmcv-full, mmcv-lite", "Install the mmcv that this project's README names.")
    return skipped("mmcv is not installed, nor is anything that needs it")


def _at_level(level: str, found: str, fix: str) -> Outcome:
    return Outcome(CheckStatus(level), found, fix)


@_of_environment
def versions_fit(context: Context, environment: Environment) -> Outcome:
    """SOFT005: the versions run together, by compatibility.yaml."""
    found = problems(environment.versions, environment.pkg_resources, environment.python)
    if not found:
        installed = (f"{name} {package['version']}" for name, package in environment.packages.items())
        return passed(", ".join(installed) or "none of the packages in the table is installed")
    said = "; ".join(f"{problem.found}: {problem.why} (source: {problem.source})" for problem in found)
    fixes = dict.fromkeys(problem.fix for problem in found)
    level = "fail" if any(_level(problem, context) == "fail" for problem in found) else "warn"
    return _at_level(level, said, "; ".join(fixes))


def _level(problem: Problem, context: Context) -> str:
    """A broken OpenMMLab stack beside the bundled engine, which does not use it, stops no run."""
    beside = not is_foreign_run(context) and any(name in _LEGACY for name in problem.packages)
    return "warn" if beside else problem.level


@_of_environment
def operators_import(context: Context, environment: Environment) -> Outcome:
    """SOFT006: what the OpenMMLab packages and spconv have compiled imports, each in a process of its own."""
    present = [name for name in _LEGACY if name in environment.packages]
    if not present:
        return skipped("none of mmcv, mmdet, mmdet3d, mmengine, spconv is installed")
    if not is_foreign_run(context):
        return skipped(f"the bundled engine uses none of {', '.join(present)}")
    return _import_outcome(context, [name for name in context.once(try_imports) if name != "torch"])


@_of_environment
def kernels(context: Context, environment: Environment) -> Outcome:
    """SOFT007: compiled operators hold kernels for this GPU, and were built with the CUDA of this torch."""
    if not is_foreign_run(context):
        return skipped("the bundled engine brings no compiled operators")
    with_kernels = {file: names for file, names in environment.kernels.items() if names}
    wheel = environment.packages.get("spconv", {}).get("cuda")
    if not with_kernels and wheel is None:
        return skipped("no compiled CUDA operators are installed")
    faults = [*_built_with_another_cuda(context, environment), *_lacking_card(context, with_kernels, wheel)]
    if faults:
        fix = (
            "Rebuild for this card and torch, for example TORCH_CUDA_ARCH_LIST='7.0;8.0;9.0' FORCE_CUDA=1 pip install …"
        )
        return failed("; ".join(faults), fix)
    return passed("; ".join(f"{file}: {' '.join(names)}" for file, names in with_kernels.items()) or f"CUDA {wheel}")


def _built_with_another_cuda(context: Context, environment: Environment) -> Iterator[str]:
    built = str(context.once(try_imports).get("mmcv._ext", {}).get("compiling_cuda") or "")
    cuda = environment.torch.get("cuda") or ""
    if built[:1].isdigit() and cuda and built.split(".")[0] != cuda.split(".")[0]:
        yield f"mmcv's operators were built with CUDA {built}, torch {environment.torch['version']} with {cuda}"


def _lacking_card(context: Context, with_kernels: Mapping[str, list[str]], wheel: str | None) -> Iterator[str]:
    newest = newest_capability(wheel) if wheel else None
    for gpu in context.once(gpus_in_use).used:
        if isinstance(gpu.capability, nvml.NotReported):
            continue
        major, minor = gpu.capability
        for file, architectures in with_kernels.items():
            if not runs_on(architectures, major, minor):
                yield f"{file} has kernels for {', '.join(architectures)}, {gpu.name} is sm_{major}{minor}"
        if newest is not None and (major, minor) > newest:
            known = ".".join(map(str, newest))
            yield f"spconv's wheel is for CUDA {wheel}, which compiles up to {known}; {gpu.name} has {major}.{minor}"


def runs_on(architectures: list[str], major: int, minor: int) -> bool:
    """Whether one of the kernels runs on capability major.minor.

    Machine code runs within its major version, upwards; PTX is compiled on any newer card.
    """
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        have = int(number) // 10, int(number) % 10
        if have <= (major, minor) and (kind == "compute" or have[0] == major):
            return True
    return False


@_of_environment
def data_packages(context: Context, environment: Environment) -> Outcome:
    """SOFT008: numpy and nuscenes-devkit are there; the scores come from the devkit."""
    missing = [name for name in ("numpy", "nuscenes-devkit") if name not in environment.packages]
    found = ", ".join(f"{n} {environment.versions[n]}" for n in ("numpy", "nuscenes-devkit") if n not in missing)
    if missing:
        fix = f"{environment.executable} -m pip install {' '.join(missing)}"
        required = not is_foreign_run(context) or "numpy" in missing
        return _at_level("fail" if required else "warn", f"{' and '.join(missing)} not installed", fix)
    return passed(found)


CHECKS: tuple[CheckSpec, ...] = (
    CheckSpec("SOFT001", "Python", interpreter, why="a program that cannot be run, or is too old, starts nothing"),
    CheckSpec(
        "SOFT002",
        "torch version",
        torch_version,
        why="mixed precision came with torch 1.6; the bundled engine uses what 2.4 has",
    ),
    CheckSpec("SOFT003", "torch imports", torch_imports, why="every process of the run dies at its first import"),
    CheckSpec(
        "SOFT004",
        "one mmcv",
        one_mmcv,
        required="one of mmcv, mmcv-full, with operators",
        why="they share one folder: two leave files of both in it, and mmcv-lite has no operators",
    ),
    CheckSpec(
        "SOFT005",
        "versions fit together",
        versions_fit,
        why="packages of other versions refuse each other on import, or fail hours later in a function that is gone",
    ),
    CheckSpec(
        "SOFT006",
        "compiled operators import",
        operators_import,
        why="an operator built for another torch stops the run with an undefined symbol",
        at_start=False,
    ),
    CheckSpec(
        "SOFT007",
        "operators have kernels for the GPU",
        kernels,
        required="machine code or PTX for the card, from the CUDA version of torch",
        why='the first use ends in "no kernel image is available for execution on the device"',
        at_start=False,
    ),
    CheckSpec("SOFT008", "numpy and nuscenes-devkit", data_packages, why="the first evaluation fails"),
)
