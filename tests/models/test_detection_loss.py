"""The fused losses against the plain ones: equal values and gradients, on whatever the head and the data bring."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bevctl.batch import Batch
from bevctl.models.box_coder import CODE_WEIGHTS, BevGrid, encode
from bevctl.models.detection_loss import DetectionLosses, detection_losses
from bevctl.ops.backend import forced
from tests.models.nano import nano_batch, nano_config
from tests.waits import host_never_waits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []  # without a GPU, Triton's interpreter
GRID = BevGrid(lower=(-8.0, -10.0), cell=(1.25, 1.0), shape=(12, 20))
QUERIES, CLASSES = 12, 3
WEIGHTS = torch.tensor(CODE_WEIGHTS, device=DEVICE)
NAMES = ("heatmap", "classes", "boxes", "mean_iou")
Head = tuple[Tensor, Tensor, Tensor]


def batch_of(counts: Sequence[int], seed: int = 0, annotated: Sequence[bool] | None = None) -> Batch:
    """`counts` objects, some of them outside the grid, every fifth without a velocity."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([18.0, 22.0, 2.0, 4.0, 2.0, 2.0, 6.0, 2.0, 2.0])
    centre = torch.tensor([0.0, 0.0, 0.0, 2.5, 1.5, 1.5, 0.0, 0.0, 0.0])
    boxes = [(torch.rand(n, 9, generator=generator) - 0.5) * spread + centre for n in counts]
    for rows in boxes:
        rows[::5, 7:] = math.nan
    plain = nano_batch(nano_config(), len(counts))
    known = [True] * len(counts) if annotated is None else list(annotated)
    return Batch(
        images=None,
        points=None,
        calibration=plain.calibration,
        boxes=boxes,
        labels=[torch.randint(0, CLASSES, (n,), generator=generator) for n in counts],
        bev_map=None,
        has_boxes=torch.tensor(known),
        has_map=torch.zeros(len(counts), dtype=torch.bool),
    ).to(DEVICE)


def head_of(batch: Batch, seed: int = 0) -> Head:
    """Heatmap, logits and codes; the first queries lie near the first objects."""
    generator = torch.Generator().manual_seed(seed)
    size = batch.size
    heatmap = 3 * torch.randn(size, CLASSES, *GRID.shape, generator=generator)
    logits = 2 * torch.randn(size, QUERIES, CLASSES, generator=generator)
    codes = torch.randn(size, QUERIES, 10, generator=generator) * torch.tensor([4.0, 8, 1, 0.3, 0.3, 0.3, 1, 1, 1, 1])
    codes = codes + torch.tensor([6.0, 10, 0, 1, 0.5, 0.5, 0, 0, 0, 0])
    for b, rows in enumerate(batch.boxes):
        near = encode(rows.cpu().nan_to_num(), GRID)[: QUERIES // 2]
        codes[b, : len(near)] = near + 0.1 * torch.randn(near.shape, generator=generator)
    return heatmap.to(DEVICE), logits.to(DEVICE), codes.to(DEVICE)


def _losses(head: Sequence[Tensor], batch: Batch) -> DetectionLosses:
    heatmap, logits, codes = head
    return detection_losses(heatmap, logits, codes, batch, GRID, WEIGHTS)


def evaluate(backend: str, head: Head, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
    """The four scalars, and the gradients of a weighted sum of the losses."""
    leaves = [value.clone().requires_grad_() for value in head]
    with forced(backend):
        losses = _losses(leaves, batch)
        (2 * losses.heatmap + 3 * losses.classes + 0.5 * losses.boxes).backward()
    return [getattr(losses, name).detach() for name in NAMES], [leaf.grad for leaf in leaves if leaf.grad is not None]


def assert_equal(head: Head, batch: Batch) -> None:
    plain, plain_grads = evaluate("torch", head, batch)
    fused, fused_grads = evaluate("triton", head, batch)
    for name, a, b in zip(NAMES, plain, fused, strict=True):
        assert float(b) == pytest.approx(float(a), rel=2e-5, abs=2e-6), name
    for a, b in zip(plain_grads, fused_grads, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("counts", "annotated"),
    [([5, 9], None), ([7], None), ([0, 4, 1], None), ([0, 0], None), ([20, 3], None), ([6, 0], [True, False])],
)
def test_both_ways_agree(counts: list[int], annotated: list[bool] | None) -> None:
    batch = batch_of(counts, annotated=annotated)
    assert_equal(head_of(batch), batch)


@settings(max_examples=8)
@given(st.integers(0, 10_000), st.lists(st.integers(0, 14), min_size=1, max_size=2))
def test_both_ways_agree_on_any_data(seed: int, counts: list[int]) -> None:
    batch = batch_of(counts, seed)
    head = head_of(batch, seed)
    assume(matching_is_clear(head, batch))
    assert_equal(head, batch)


def matching_is_clear(head: Head, batch: Batch) -> bool:
    """Whether no two matchings cost nearly the same: rounding would choose between them."""
    generator = torch.Generator().manual_seed(0)
    expected = evaluate("torch", head, batch)[0][2]
    for _ in range(8):
        moved = [value + 1e-4 * torch.randn(value.shape, generator=generator).to(DEVICE) for value in head]
        if not torch.allclose(evaluate("torch", (moved[0], moved[1], moved[2]), batch)[0][2], expected, rtol=1e-3):
            return False
    return True


def test_outputs_in_any_layout() -> None:
    batch = batch_of([4, 2])
    heatmap, logits, codes = head_of(batch)
    strided = (
        heatmap.contiguous(memory_format=torch.channels_last),
        logits.transpose(1, 2).contiguous().transpose(1, 2),
        codes.transpose(1, 2).contiguous().transpose(1, 2),
    )
    plain = evaluate("triton", (heatmap, logits, codes), batch)
    other = evaluate("triton", strided, batch)
    for a, b in zip([*plain[0], *plain[1]], [*other[0], *other[1]], strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in Triton's interpreter
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_output_shows_in_both(which: int, bad: float) -> None:
    batch = batch_of([3, 2])
    head = head_of(batch)
    head[which][0, -1].view(-1)[0] = bad
    plain, fused = (evaluate(backend, head, batch)[0] for backend in ("torch", "triton"))
    for a, b in zip(plain, fused, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, equal_nan=True)
    if math.isnan(bad) or which == 2:
        assert not torch.stack(fused).isfinite().all()


def test_equal_inputs_give_equal_bits() -> None:
    batch = batch_of([8, 11])
    head = head_of(batch)
    first, second = (evaluate("triton", head, batch) for _ in range(2))
    for a, b in zip([*first[0], *first[1]], [*second[0], *second[1]], strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_host_never_waits() -> None:
    batch = batch_of([30, 12])
    head = head_of(batch)
    evaluate("triton", head, batch)
    leaves = [value.clone().requires_grad_() for value in head]
    with host_never_waits(), forced("triton"):
        losses = _losses(leaves, batch)
        (losses.heatmap + losses.classes + losses.boxes).backward()
    assert torch.isfinite(losses.boxes)
