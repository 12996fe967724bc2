"""Triton kernels over all parameters of an optimizer at once, which they find by address.

`table` is (4, N) int64: the addresses of each parameter, AdamW's two averages and its step count; `gradients` (N,)
int64 those of the gradients, 0 where a parameter has none. Parameters are worked on in chunks: chunk c is of parameter
`owner[c]` and starts at `start[c]`. `settings` is float64: see `bevctl.engine.one_pass_adamw`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bevctl.ops.kernels.launch import sized

CHUNK = 4096


@triton.jit
def _tensor(addresses):
    """Pointers to the float32 values that lie at `addresses`."""
    return addresses.to(tl.pointer_type(tl.float32))


@triton.jit
def _setting(settings, place):
    return tl.load(settings + place).to(tl.float32)


@sized()
def square_sums_kernel(gradients, owner, start, sizes, inverse_scale, sums, CHUNK: tl.constexpr):
    """Sum of the squares of a chunk of a gradient times `inverse_scale`."""
    chunk = tl.program_id(0)
    parameter = tl.load(owner + chunk)
    offset = tl.load(start + chunk) + tl.arange(0, CHUNK)
    address = tl.load(gradients + parameter)
    mask = (offset < tl.load(sizes + parameter)) & (address != 0)
    values = tl.load(_tensor(address) + offset, mask=mask, other=0.0) * tl.load(inverse_scale)
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
def advance_kernel(table, gradients, found_inf, settings, corrections, parameters, BLOCK: tl.constexpr):
    """Counts the step where it is one, and writes both bias corrections of each parameter."""
    parameter = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = parameter < parameters
    gradient = tl.load(gradients + parameter, mask=inside, other=0)
    count = _tensor(tl.load(table + 3 * parameters + parameter, mask=inside, other=0))
    wanted = tl.where(tl.load(found_inf) == 0.0, 1, 0)
    taken = inside & (gradient != 0) & (wanted != 0)
    step = tl.load(count, mask=taken, other=0.0) + 1.0
    tl.store(count, step, mask=taken)
    exact = step.to(tl.float64)  # 1 - 0.999^1 has three digits less
    first = 1.0 - tl.exp(exact * tl.load(settings))
    second = 1.0 - tl.exp(exact * tl.load(settings + 1))
    tl.store(corrections + parameter, first.to(tl.float32), mask=inside)
    tl.store(corrections + parameters + parameter, tl.sqrt(second).to(tl.float32), mask=inside)


@sized("parameters")
def adamw_kernel(
    table, gradients, owner, start, sizes, groups, settings, corrections, factor, found_inf, parameters,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """AdamW (Loshchilov & Hutter, ICLR 2019) on a chunk; gradients are multiplied by `factor` on the way."""
    chunk = tl.program_id(0)
    parameter = tl.load(owner + chunk)
    offset = tl.load(start + chunk) + tl.arange(0, CHUNK)
    address = tl.load(gradients + parameter)
    weight = _tensor(tl.load(table + parameter)) + offset
    average = _tensor(tl.load(table + parameters + parameter)) + offset
    square = _tensor(tl.load(table + 2 * parameters + parameter)) + offset
    wanted = tl.where(tl.load(found_inf) == 0.0, 1, 0)
    mask = (offset < tl.load(sizes + parameter)) & (address != 0) & (wanted != 0)
    group = 7 + 2 * tl.load(groups + parameter)
    rate, decay = _setting(settings, group), _setting(settings, group + 1)

    g = tl.load(_tensor(address) + offset, mask=mask, other=0.0) * tl.load(factor)
    m = _setting(settings, 2) * tl.load(average, mask=mask, other=0.0) + _setting(settings, 3) * g
    v = _setting(settings, 4) * tl.load(square, mask=mask, other=0.0) + _setting(settings, 5) * g * g
    w = tl.load(weight, mask=mask, other=0.0)
    w -= rate * decay * w
    denominator = tl.sqrt(v) / tl.load(corrections + parameters + parameter) + _setting(settings, 6)
    w -= rate / tl.load(corrections + parameter) * m / denominator
    tl.store(average, m, mask=mask)
    tl.store(square, v, mask=mask)
    tl.store(weight, w, mask=mask)
