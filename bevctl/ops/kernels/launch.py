"""Launches of Triton kernels at a small part of the usual cost on the host.

Triton looks at every argument of every launch to find the variant to run: 80 µs for a kernel of 19 arguments on the
host of an H200, where the kernel itself takes 40. Here sizes are never specialised (name them with `sized`), so that a
variant depends only on types, alignment and constants; it is looked up by these and launched directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton

from bevctl.ops.backend import launches

_DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)
"""Compiled kernels take all arguments in the order of their signature; older versions launch in the ordinary way."""
_NUMBERS = (int, float)
_variants: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def sized(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit` for a kernel whose integer arguments `names`, all below 2^31, never lead to another variant."""
    jit: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=list(names))
    return jit


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """`kernel[grid](*arguments, **constants)` for a kernel made by `sized`.

    Args:
        kernel: its arguments first, then its constants.
        grid: one to three numbers of programs.
        arguments: tensors on the current device, the first one of them, sizes and floats.
        constants: the kernel's constants, and num_warps and num_stages.
    """
    if not launches():
        return
    if not _DIRECT or not isinstance(kernel, triton.JITFunction):
        kernel[grid](*arguments, **constants)
        return
    kinds = [None if isinstance(a, _NUMBERS) else (a.dtype, a.data_ptr() % 16) for a in arguments]
    key = (kernel, arguments[0].get_device(), *kinds, *constants.values())
    known = _variants.get(key)
    if known is None:
        names = kernel.arg_names[len(arguments) :]
        _variants[key] = kernel[grid](*arguments, **constants), tuple(constants[name] for name in names)
        return
    compiled, values = known
    compiled[(*grid, 1, 1)[:3]](*arguments, *values)


def launch_specialised(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """`kernel[grid](*arguments, **constants)` for any kernel, in Triton's own way."""
    if launches():
        kernel[grid](*arguments, **constants)


def blocks(elements: int, size: int) -> int:
    """Blocks of `size` that hold `elements`; Triton's own `cdiv` costs the host some µs."""
    return -(-elements // size)


def power_of_two(number: int) -> int:
    """The next one, at least 1."""
    return 1 << max(0, number - 1).bit_length()
