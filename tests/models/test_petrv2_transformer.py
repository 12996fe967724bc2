"""The transformer against plain float64 computations, in half precision within a stated error."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevctl.config.schema import PetrConfig
from bevctl.models.petrv2_transformer import Attention, ImageMemory, PetrDecoderLayer, PetrTransformer

CONFIG = PetrConfig(hidden=16, layers=3, attention_heads=2, ffn=24, dropout=0.0)
HALF_ERROR = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Relative error (L2) of attention over 300 keys, and of its gradients, computed in half precision."""


def memory(batch: int = 2, length: int = 30, channels: int = 16, padded: bool = True) -> ImageMemory:
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, batch, length, channels, generator=generator, dtype=torch.float64)
    padding = torch.rand(batch, length, generator=generator) < 0.3 if padded else None
    return ImageMemory(keys, values, padding, None)


def loaded(attention: Attention, channels: int, heads: int) -> nn.MultiheadAttention:
    theirs = nn.MultiheadAttention(channels, heads, batch_first=True).double()
    theirs.load_state_dict(attention.state_dict())
    return theirs


@pytest.mark.parametrize("padded", [True, False])
def test_attention_is_torchs(padded: bool) -> None:
    torch.manual_seed(0)
    ours, seen = Attention(16, 4, 0.0).double(), memory(padded=padded)
    nn.init.normal_(ours.in_proj_bias)
    theirs = loaded(ours, 16, 4)
    query = torch.randn(2, 7, 16, dtype=torch.float64)
    found = ours(query, seen.keys, seen.values, seen.padding)
    expected = theirs(query, seen.keys, seen.values, key_padding_mask=seen.padding, need_weights=False)[0]
    torch.testing.assert_close(found, expected)
    placed = query + 1
    torch.testing.assert_close(ours(placed, placed, query), theirs(placed, placed, query, need_weights=False)[0])


def test_attention_has_the_right_gradients() -> None:
    torch.manual_seed(0)
    attention = Attention(4, 2, 0.0).double()
    inputs = [torch.randn(1, n, 4, dtype=torch.float64, requires_grad=True) for n in (2, 3, 3)]
    assert torch.autograd.gradcheck(attention, inputs)


def test_padding_is_not_looked_at() -> None:
    attention, seen = Attention(16, 2, 0.0).double(), memory()
    assert seen.padding is not None
    query = torch.randn(2, 5, 16, dtype=torch.float64)
    other = seen.values + 100 * seen.padding[..., None], seen.keys - 50 * seen.padding[..., None]
    found = attention(query, other[1], other[0], seen.padding)
    torch.testing.assert_close(found, attention(query, seen.keys, seen.values, seen.padding))


@pytest.mark.parametrize("dtype", list(HALF_ERROR))
def test_attention_in_half_precision_keeps_its_error(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    exact = Attention(32, 4, 0.0).double()
    narrow = Attention(32, 4, 0.0)
    narrow.load_state_dict(exact.state_dict())
    seen = memory(length=300, channels=32, padded=False)
    query = torch.randn(2, 20, 32, dtype=torch.float64)
    weights = torch.randn(2, 20, 32, dtype=torch.float64)
    results = []
    for attention, number_format in ((exact, torch.float64), (narrow, torch.float32)):
        leaf = query.to(number_format).requires_grad_()
        with torch.autocast("cpu", dtype, enabled=number_format == torch.float32):
            out = attention(leaf, seen.keys.to(number_format), seen.values.to(number_format))
        gradients = torch.autograd.grad(out, (leaf, attention.in_proj_weight), weights.to(out.dtype))
        results.append([t.detach().double() for t in (out, *gradients)])
    for found, expected in zip(results[1], results[0], strict=True):
        assert float((found - expected).norm() / expected.norm()) < HALF_ERROR[dtype]


def plain_layer(layer: PetrDecoderLayer, query: Tensor, position: Tensor, seen: ImageMemory) -> Tensor:
    """The layer in the order of the paper, with torch's attention."""

    def attend(attention: Attention, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
        theirs = loaded(attention, q.shape[-1], attention.heads)
        attended: Tensor = theirs(q, k, v, key_padding_mask=padding, need_weights=False)[0]
        return attended

    def norm(which: nn.LayerNorm, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], which.weight, which.bias)

    query = norm(layer.norm1, query + attend(layer.self_attn, query + position, query + position, query))
    query = norm(layer.norm2, query + attend(layer.cross_attn, query + position, seen.keys, seen.values, seen.padding))
    hidden = F.relu(query @ layer.linear1.weight.T + layer.linear1.bias)
    return norm(layer.norm3, query + hidden @ layer.linear2.weight.T + layer.linear2.bias)


def test_layers_follow_each_other_and_are_normalised_once_more() -> None:
    torch.manual_seed(0)
    transformer, seen = PetrTransformer(CONFIG).double(), memory()
    position = torch.randn(5, 16, dtype=torch.float64)
    found = transformer(position, seen)
    query = torch.zeros(2, 5, 16, dtype=torch.float64)
    assert len(found) == 3
    for layer, output in zip(transformer.layers, found, strict=True):
        assert isinstance(layer, PetrDecoderLayer)
        query = plain_layer(layer, query, position, seen)
        norm = transformer.post_norm
        torch.testing.assert_close(output, F.layer_norm(query, (16,), norm.weight, norm.bias))


def test_recomputed_layers_give_the_same_gradients() -> None:
    seen, position = memory(), torch.randn(5, 16, dtype=torch.float64)
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        transformer = PetrTransformer(dataclasses.replace(CONFIG, dropout=0.5), checkpointing).double().train()
        torch.stack(transformer(position, seen)).square().sum().backward()
        gradients.append([p.grad for p in transformer.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_matrices_start_xavier_uniform() -> None:
    torch.manual_seed(0)
    layer = PetrDecoderLayer(PetrConfig())
    for weight in (layer.self_attn.in_proj_weight, layer.cross_attn.out_proj.weight, layer.linear1.weight):
        bound = (6 / sum(weight.shape)) ** 0.5
        assert 0.98 * bound < float(weight.detach().abs().max()) <= bound
