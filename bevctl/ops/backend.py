"""Which implementation of an operation runs: a Triton kernel, or plain torch. Chosen here and nowhere else.

`BEVCTL_KERNELS` is auto (Triton on CUDA devices of capability 8.0 and newer where Triton 3.3 is installed, else torch),
torch or triton. Both give the same numbers within rounding; the torch path also runs on Volta and on CPUs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from bevctl.errors import BevctlError, did_you_mean

VARIABLE = "BEVCTL_KERNELS"
CHOICES = ("auto", "torch", "triton")
MINIMUM_CAPABILITY = (8, 0)
MINIMUM_TRITON = (3, 3)
"""What torch 2.7 brings; the language of older ones refuses some of what the kernels write."""
_forced: list[str] = []
_ASSUMED = "assumed"


def use_triton(tensor: Tensor) -> bool:
    """Whether an operation on `tensor` runs as a Triton kernel.

    Raises:
        BevctlError: triton is asked for and cannot run here, or the variable has an unknown value.
    """
    return _uses_triton(tensor.device)


@torch.compiler.assume_constant_result  # torch.compile asks once, and does not look inside
def _uses_triton(device: torch.device) -> bool:
    return _choose(_wanted(), device)[0]


def reason(device: torch.device) -> str:
    """One sentence: what runs on `device`, and why."""
    chosen, why = _choose(_wanted(), device)
    return f"{'Triton' if chosen else 'torch'} operations: {why}"


@contextlib.contextmanager
def forced(choice: str) -> Iterator[None]:
    """Runs the block with `choice` (one of CHOICES) whatever the environment says."""
    _forced.append(choice)
    try:
        yield
    finally:
        _forced.pop()


@contextlib.contextmanager
def assumed() -> Iterator[None]:
    """Runs the block, on fake tensors, as on a GPU that has Triton: kernels get their outputs but are not launched."""
    with forced(_ASSUMED):
        yield


def launches() -> bool:
    """Whether kernels run, rather than being assumed to."""
    return _ASSUMED not in _forced


def is_plain() -> bool:
    """Whether plain torch is asked for: by the environment, or by a block of `forced`."""
    return _wanted() == "torch"


def is_forced() -> bool:
    """Whether a block of `forced` runs."""
    return bool(_forced)


def _wanted() -> str:
    return _forced[-1] if _forced else os.environ.get(VARIABLE, "auto")


@functools.lru_cache(maxsize=64)
def _choose(wanted: str, device: torch.device) -> tuple[bool, str]:
    if wanted == _ASSUMED:
        return True, "assumed"
    if wanted not in CHOICES:
        raise BevctlError(f"{VARIABLE} is {wanted!r}.", did_you_mean(wanted, CHOICES))
    if wanted == "torch":
        return False, f"{VARIABLE}=torch"
    able, why = _triton_runs(device)
    if wanted == "triton" and not able:
        raise BevctlError(f"{VARIABLE}=triton, but {why}.", f"Use {VARIABLE}=auto or torch.")
    return able and (wanted == "triton" or device.type == "cuda"), why


def _triton_runs(device: torch.device) -> tuple[bool, str]:
    if importlib.util.find_spec("triton") is None:
        return False, "Triton is not installed"
    version = importlib.metadata.version("triton")
    if tuple(int(number) for number in version.split(".")[:2]) < MINIMUM_TRITON:
        return False, f"Triton {version} is older than {MINIMUM_TRITON[0]}.{MINIMUM_TRITON[1]}"
    if device.type != "cuda":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return interpreted, "Triton's interpreter" if interpreted else f"Triton has no kernels for {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < MINIMUM_CAPABILITY:
        return False, f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return True, f"compute capability {capability[0]}.{capability[1]}"
