"""Optimal one-to-one assignment of predictions to ground truth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def match(cost: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Assignment of least total cost within each sample (Hungarian method).

    `cost` is (B, P, M): P predictions against up to M objects, of which sample b has the first `counts[b]`. It is
    copied to the host once. Non-finite entries count as very expensive, so that broken predictions still get a
    partner and show in the loss rather than as an exception.

    Returns int64 indices (sample, prediction, object) of the K pairs on the device of `cost`,
    K = Σ min(P, counts[b]).
    """
    host = cost.detach().float().cpu().nan_to_num(nan=1e9, posinf=1e9, neginf=-1e9).numpy()
    triples = []
    for sample, count in enumerate(counts):
        predictions, objects = linear_sum_assignment(host[sample, :, :count])
        triples += [(sample, prediction, obj) for prediction, obj in zip(predictions, objects, strict=True)]
    indices = torch.tensor(triples, dtype=torch.int64).reshape(-1, 3)
    sample_index, prediction_index, object_index = indices.to(cost.device).unbind(-1)
    return sample_index, prediction_index, object_index
