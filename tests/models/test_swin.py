from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bevctl.config.schema import SwinConfig
from bevctl.models.swin import (
    DropPath,
    PatchMerging,
    ShiftedWindowAttention,
    SwinTransformer,
    relative_position_index,
)
from bevctl.ops.backend import use_triton
from bevctl.ops.window_attention import from_windows, to_windows

SMALL = SwinConfig(embed=8, depths=(1, 2, 2, 1), heads=(1, 2, 2, 4), window=3, drop_path=0.0)


def attention_by_hand(module: ShiftedWindowAttention, x: Tensor) -> Tensor:
    """(H, W, C) → the same: each pixel attends to the pixels of its window that lie on its side of the seam.

    Padding takes part as zeros that the projections see, and positions count in the padded, shifted map.
    """
    window, shift = module.w_msa.window, module.shift
    height, width, channels = x.shape
    padded_height, padded_width = height + -height % window, width + -width % window
    padded = torch.zeros(padded_height, padded_width, channels)
    padded[:height, :width] = x
    attention = module.w_msa
    heads = attention.relative_position_bias_table.shape[1]
    qkv = attention.qkv(padded).view(padded_height, padded_width, 3, heads, -1)
    result = torch.zeros_like(padded)

    def place(row: int, column: int) -> tuple[int, int]:
        return (row - shift) % padded_height, (column - shift) % padded_width

    for row in range(padded_height):
        for column in range(padded_width):
            here = place(row, column)
            members = [
                (r, c)
                for r in range(padded_height)
                for c in range(padded_width)
                if [v // window for v in place(r, c)] == [v // window for v in here]
                and ((r < shift) == (row < shift))
                and ((c < shift) == (column < shift))
            ]
            query = qkv[row, column, 0]
            logits = torch.stack(
                [
                    (query * qkv[r, c, 1]).sum(-1) * query.shape[-1] ** -0.5
                    + attention.relative_position_bias_table[
                        (here[0] - place(r, c)[0] + window - 1) * (2 * window - 1)
                        + (here[1] - place(r, c)[1] + window - 1)
                    ]
                    for r, c in members
                ]
            )
            weights = logits.softmax(0)
            result[row, column] = sum(
                w[:, None] * qkv[r, c, 2] for w, (r, c) in zip(weights, members, strict=True)
            ).flatten()
    return attention.proj(result)[:height, :width]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("size", [(6, 6), (4, 7), (2, 3)])
def test_attention_equals_the_pixel_by_pixel_definition(size: tuple[int, int], shifted: bool) -> None:
    torch.manual_seed(0)
    module = ShiftedWindowAttention(4, 2, 3, shifted)
    nn.init.normal_(module.w_msa.relative_position_bias_table)
    x = torch.randn(2, *size, 4)
    with torch.no_grad():
        out = module(x)
        expected = torch.stack([attention_by_hand(module, sample) for sample in x])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_windows_round_trip() -> None:
    x = torch.arange(2 * 6 * 9 * 2.0).view(2, 6, 9, 2)
    windows = to_windows(x, 3)
    assert windows.shape == (2, 6, 9, 2)
    assert torch.equal(windows[0, 1].view(3, 3, 2), x[0, :3, 3:6])
    assert torch.equal(from_windows(windows, 6, 9), x)


def test_relative_position_index_of_a_window_of_two() -> None:
    expected = [[4, 3, 1, 0], [5, 4, 2, 1], [7, 6, 4, 3], [8, 7, 5, 4]]
    assert relative_position_index(2).tolist() == expected


def test_patch_merging_orders_channels_first() -> None:
    merging = PatchMerging(2)
    seen: list[Tensor] = []
    merging.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    assert merging(torch.arange(8.0).view(1, 2, 2, 2)).shape == (1, 1, 1, 4)
    assert seen[0].flatten().tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_full_size_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = SwinTransformer(SwinConfig())
    assert sum(p.numel() for p in model.parameters()) == 27_520_506


@pytest.mark.parametrize(("height", "width"), [(32, 64), (37, 50), (64, 33)])
def test_any_image_size(height: int, width: int) -> None:
    outputs = SwinTransformer(SMALL).eval()(torch.randn(1, 3, height, width))
    for output, channels, stride in zip(outputs, (16, 32, 64), (8, 16, 32), strict=True):
        assert output.shape == (1, channels, -(-height // stride), -(-width // stride))


def test_checkpointing_changes_no_gradient() -> None:
    torch.manual_seed(0)
    plain = SwinTransformer(SwinConfig(embed=8, depths=(1, 2, 1, 1), heads=(1, 2, 2, 4), window=3, drop_path=0.5))
    images = torch.randn(3, 3, 32, 32)

    def gradients(checkpointing: bool) -> list[Tensor]:
        plain.checkpointing = checkpointing
        plain.zero_grad()
        torch.manual_seed(1)
        sum(output.square().mean() for output in plain(images)).backward()
        return [p.grad.clone() for p in plain.parameters() if p.grad is not None]

    for ours, expected in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(ours, expected)


def test_drop_path_keeps_the_mean_and_drops_whole_samples() -> None:
    torch.manual_seed(0)
    drop = DropPath(0.25)
    x, branch = torch.zeros(4000, 2, 3), torch.ones(4000, 2, 3)
    out = drop(x, branch, drop.draw(x))
    assert sorted(set(out.flatten(1).mean(1).tolist())) == pytest.approx([0, 4 / 3])
    assert float(out.mean()) == pytest.approx(1, abs=0.05)
    assert drop.eval().draw(x) is None
    assert torch.equal(drop(x, branch, None), branch)


def test_drop_path_grows_linearly() -> None:
    model = SwinTransformer(SwinConfig(embed=8, depths=(1, 2, 1, 1), heads=(1, 1, 1, 1), window=3, drop_path=0.4))
    rates = [module.rate for module in model.modules() if isinstance(module, DropPath)]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_the_cpus(checkpointing: bool) -> None:
    """On a GPU norms and GELU are computed again in the backward pass."""
    torch.manual_seed(0)
    model = SwinTransformer(SMALL, checkpointing)
    images = torch.randn(2, 3, 37, 50)

    def gradients(device: str) -> list[Tensor]:
        model.to(device).zero_grad()
        torch.stack([output.square().mean() for output in model(images.to(device))]).sum().backward()
        return [
            p.grad.cpu().clone() for p in model.parameters() if p.grad is not None
        ]  # model.to() moves p.grad itself

    pairs = list(zip(gradients("cpu"), gradients("cuda"), strict=True))
    largest = max(float(on_cpu.abs().max()) for on_cpu, _ in pairs)
    for on_cpu, on_gpu in pairs:
        # That of a key's bias is a sum that cancels: what is left of it is rounding of larger ones.
        allowed = max(1e-4 * float(on_cpu.abs().max()), 1e-6 * largest)
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-3, atol=allowed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_what_is_kept_for_the_backward_pass() -> None:
    """Per block and token: input and its sum with the attention, qkv, attended, hidden; recomputed, the input alone."""
    config = SwinConfig(embed=32, depths=(4, 1, 1, 1), heads=(2, 2, 2, 2), window=4, drop_path=0.0)
    images = torch.randn(4, 3, 256, 256, device="cuda")
    if not use_triton(images):
        pytest.skip("torch's own attention keeps more")
    block_bytes = 4 * 64 * 64 * 32 * 2  # of one half-precision map of the first stage
    kept = []
    for checkpointing in (False, True):
        model = SwinTransformer(config, checkpointing).to("cuda")
        with torch.autocast("cuda", torch.float16):
            before = torch.cuda.memory_allocated()
            outputs = model(images)
            kept.append((torch.cuda.memory_allocated() - before) / block_bytes)
        assert outputs
    assert kept[0] < 4 * (2 + 2 + 3 + 1 + 4) * 1.6, "four blocks, and the stages above"
    assert kept[1] < 4 * 2 + 16
