"""Optimal one-to-one assignment of predictions to ground truth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from bevctl.ops.backend import use_triton
from bevctl.ops.transfer import to_device


def match(cost: Tensor, counts: Sequence[int]) -> Tensor:
    """Assignment of least total cost within each sample.

    `cost` is (B, P, M): P predictions against up to M objects, of which sample b has the first `counts[b]`. Each
    prediction gets at most one object and each object at most one prediction; min(P, counts[b]) pairs are made.
    Non-finite entries count as very expensive (-inf as very cheap), so that broken predictions still get a partner and
    show in the loss rather than as an exception.

    Returns (B, P) int64 on the device of `cost`: the object of each prediction, or -1. With Triton nothing waits for
    the device; the torch path copies the costs to the host.

    Raises:
        ValueError: `cost` is not (B, P, M) with a count of at most M for each of the B.
    """
    if cost.dim() != 3 or len(counts) != len(cost) or any(not 0 <= count <= cost.shape[2] for count in counts):
        raise ValueError(f"cost of shape {tuple(cost.shape)} does not fit counts {list(counts)}")
    cost = cost.detach().float()
    if use_triton(cost):
        from bevctl.ops.kernels.matching import match as match_on_device

        return match_on_device(cost, to_device(torch.tensor(counts, dtype=torch.int32), cost.device))
    return _match_on_host(cost, counts)


def _match_on_host(cost: Tensor, counts: Sequence[int]) -> Tensor:
    host = cost.cpu().nan_to_num(nan=1e9, posinf=1e9, neginf=-1e9).numpy()
    matched = torch.full(cost.shape[:2], -1, dtype=torch.int64)
    for sample, count in enumerate(counts):
        predictions, objects = linear_sum_assignment(host[sample, :, :count])
        matched[sample, torch.from_numpy(predictions)] = torch.from_numpy(objects)
    return matched.to(cost.device)
