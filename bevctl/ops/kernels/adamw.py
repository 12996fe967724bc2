"""Triton kernels over all parameters of an optimizer at once, which they find by address.

`table` is (5, N) int64: the addresses of each parameter, its gradient (0 where it has none), AdamW's two averages and
its step count. Parameters are worked on in chunks: chunk c is of parameter `owner[c]` and starts at `start[c]`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bevctl.ops.kernels.launch import sized

CHUNK = 4096


@triton.jit
def _place(table, row: tl.constexpr, parameters, parameter):
    address = tl.load(table + row * parameters + parameter)
    return address, address.to(tl.pointer_type(tl.float32))


@sized("parameters")
def square_sums_kernel(table, owner, start, sizes, inverse_scale, sums, parameters, CHUNK: tl.constexpr):
    """Sum of the squares of a chunk of a gradient times `inverse_scale`."""
    chunk = tl.program_id(0)
    parameter = tl.load(owner + chunk)
    offset = tl.load(start + chunk) + tl.arange(0, CHUNK)
    address, gradient = _place(table, 1, parameters, parameter)
    mask = (offset < tl.load(sizes + parameter)) & (address != 0)
    values = tl.load(gradient + offset, mask=mask, other=0.0) * tl.load(inverse_scale)
    tl.store(sums + chunk, tl.sum(values * values, axis=0))


@sized()
def norms_kernel(sums, first, norms, BLOCK: tl.constexpr):
    """Norm of each gradient from the sums of its chunks, `first[p]` to `first[p + 1]`."""
    parameter = tl.program_id(0)
    begin, end = tl.load(first + parameter), tl.load(first + parameter + 1)
    total = tl.zeros([BLOCK], tl.float32)
    for chunk in range(begin, end, BLOCK):
        place = chunk + tl.arange(0, BLOCK)
        total += tl.load(sums + place, mask=place < end, other=0.0)
    tl.store(norms + parameter, tl.sqrt(tl.sum(total, axis=0)))


@sized("parameters")
def advance_kernel(table, found_inf, beta1, beta2, corrections, parameters, BLOCK: tl.constexpr):
    """Counts the step where it is one, and writes both bias corrections of each parameter."""
    parameter = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = parameter < parameters
    gradient = tl.load(table + parameters + parameter, mask=inside, other=0)
    address = tl.load(table + 4 * parameters + parameter, mask=inside, other=0)
    count = address.to(tl.pointer_type(tl.float32))
    wanted = tl.where(tl.load(found_inf) == 0.0, 1, 0)
    taken = inside & (gradient != 0) & (wanted != 0)
    step = tl.load(count, mask=taken, other=0.0) + 1.0
    tl.store(count, step, mask=taken)
    exact = step.to(tl.float64)  # 1 - 0.999^1 has three digits less
    first = 1.0 - tl.exp(exact * tl.load(beta1))
    second = 1.0 - tl.exp(exact * tl.load(beta2))
    tl.store(corrections + parameter, first.to(tl.float32), mask=inside)
    tl.store(corrections + parameters + parameter, tl.sqrt(second).to(tl.float32), mask=inside)


@sized("parameters")
def adamw_kernel(
    table, owner, start, sizes, rates, settings, corrections, factor, found_inf, parameters, CHUNK: tl.constexpr
):
    """AdamW (Loshchilov & Hutter, ICLR 2019) on a chunk; gradients are multiplied by `factor` on the way.

    `rates` (2, N): learning rate and weight decay; `settings`: beta1, 1 - beta1, beta2, 1 - beta2, epsilon.
    """
    chunk = tl.program_id(0)
    parameter = tl.load(owner + chunk)
    offset = tl.load(start + chunk) + tl.arange(0, CHUNK)
    _, weight = _place(table, 0, parameters, parameter)
    address, gradient = _place(table, 1, parameters, parameter)
    _, average = _place(table, 2, parameters, parameter)
    _, square = _place(table, 3, parameters, parameter)
    wanted = tl.where(tl.load(found_inf) == 0.0, 1, 0)
    mask = (offset < tl.load(sizes + parameter)) & (address != 0) & (wanted != 0)
    rate, decay = tl.load(rates + parameter), tl.load(rates + parameters + parameter)
    beta1, rest1, beta2, rest2 = tl.load(settings), tl.load(settings + 1), tl.load(settings + 2), tl.load(settings + 3)

    g = tl.load(gradient + offset, mask=mask, other=0.0) * tl.load(factor)
    m = beta1 * tl.load(average + offset, mask=mask, other=0.0) + rest1 * g
    v = beta2 * tl.load(square + offset, mask=mask, other=0.0) + rest2 * g * g
    w = tl.load(weight + offset, mask=mask, other=0.0)
    w -= rate * decay * w
    denominator = tl.sqrt(v) / tl.load(corrections + parameters + parameter) + tl.load(settings + 4)
    w -= rate / tl.load(corrections + parameter) * m / denominator
    tl.store(average + offset, m, mask=mask)
    tl.store(square + offset, v, mask=mask)
    tl.store(weight + offset, w, mask=mask)
