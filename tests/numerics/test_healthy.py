"""Layers and idioms of everyday models, with the infinities and NaN that belong there: a trace has nothing to say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevctl.numerics.trace import Trace


class Uses(nn.Module):
    """Some layers, and how they are used."""

    def __init__(self, use: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.use = use
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, *self.layers)


CAUSAL = torch.full((6, 6), -torch.inf).triu(1)
PADDED = torch.tensor([[0, 0, 0, 0, 1, 1]] * 2, dtype=torch.bool)


def _on_vectors(use: Callable[[Tensor], Tensor]) -> tuple[nn.Module, tuple[int, ...]]:
    return Uses(lambda x, linear: use(linear(x)), nn.Linear(8, 8)), (4, 8)


def _on_words(use: Callable[..., Tensor], *layers: nn.Module) -> tuple[nn.Module, tuple[int, ...]]:
    return Uses(use, *layers), (2, 6, 8)


def _on_images(use: Callable[..., Tensor], *layers: nn.Module) -> tuple[nn.Module, tuple[int, ...]]:
    return Uses(use, *layers), (2, 4, 6, 6)


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "causal transformer": lambda: _on_words(
        lambda x, encoder: encoder(x, mask=CAUSAL),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
    ),
    "padded attention": lambda: _on_words(
        lambda x, attention: attention(x, x, x, key_padding_mask=PADDED, need_weights=False)[0],
        nn.MultiheadAttention(8, 2, batch_first=True),
    ),
    "attention with weights": lambda: _on_words(
        lambda x, attention: attention(x, x, x, attn_mask=CAUSAL)[0], nn.MultiheadAttention(8, 2, 0.2, batch_first=True)
    ),
    "recurrent": lambda: _on_words(lambda x, lstm, gru: gru(lstm(x)[0])[0], nn.LSTM(8, 8), nn.GRU(8, 8)),
    "ctc": lambda: _on_words(
        lambda x: F.ctc_loss(
            x.transpose(0, 1).log_softmax(2), torch.tensor([[1, 2], [3, 3]]), torch.tensor([6, 6]), torch.tensor([2, 2])
        )
    ),
    "norms": lambda: _on_images(
        lambda x, group, instance, batch: batch(instance(group(x))),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4),
        nn.BatchNorm2d(4),
    ),
    "pooling": lambda: _on_images(
        lambda x, conv: F.max_pool2d(conv(x), 3, 2, 1) + F.adaptive_max_pool2d(conv(x), 3), nn.Conv2d(4, 4, 1)
    ),
    "sampling beyond the border": lambda: _on_images(
        lambda x, conv: F.grid_sample(conv(x), torch.linspace(-2, 2, 100).view(2, 5, 5, 2), align_corners=False),
        nn.Conv2d(4, 4, 1),
    ),
    "transposed convolution": lambda: _on_images(
        lambda x, up: F.interpolate(up(x), scale_factor=2.0, mode="bilinear"), nn.ConvTranspose2d(4, 2, 2, stride=2)
    ),
    "spectral norm": lambda: (nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), (4, 8)),
    "cross-entropy that ignores": lambda: _on_vectors(lambda x: F.cross_entropy(x, torch.tensor([1, -100, 2, -100]))),
    "certain probabilities": lambda: _on_vectors(lambda x: F.binary_cross_entropy(0 * x + 1, torch.ones_like(x))),
    "norm of zeros": lambda: _on_vectors(lambda x: F.normalize(0 * x) + F.cosine_similarity(x, 0 * x)[:, None]),
    "inverse sigmoid": lambda: _on_vectors(lambda x: torch.logit((1e3 * x).sigmoid(), eps=1e-5)),
    "saturated activations": lambda: _on_vectors(
        lambda x: F.logsigmoid(1e4 * x) + F.softplus(1e4 * x) + F.gelu(1e4 * x) + F.silu(1e4 * x)
    ),
    "log-sum-exp of masked rows": lambda: _on_vectors(
        lambda x: x.masked_fill(torch.ones(4, 8).bool(), -torch.inf).logsumexp(-1).clamp(min=-9.0)
    ),
    "softmax over rows": lambda: _on_vectors(
        lambda x: x.masked_fill(torch.eye(4, 8, dtype=torch.bool), -torch.inf).softmax(0)
    ),
    "largest of a scatter": lambda: _on_vectors(
        lambda x: torch.full((4, 8), -torch.inf).scatter_reduce(1, torch.zeros(4, 8).long(), x, "amax").clamp(min=-1)
    ),
    "mean of what is known": lambda: _on_vectors(
        lambda x: torch.where(torch.arange(8) > 3, x, torch.nan).nanmean(dim=1)
    ),
    "ranking": lambda: _on_vectors(lambda x: x.topk(3).values.sort().values.cumsum(-1)),
    "Fourier transform": lambda: _on_vectors(lambda x: torch.fft.irfft(torch.fft.rfft(x))),
    "Gumbel softmax": lambda: _on_vectors(lambda x: F.gumbel_softmax(x, hard=True)),
    "vmap": lambda: _on_vectors(lambda x: torch.vmap(lambda row: row.square())(x)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_healthy_layer_is_silent(name: str) -> None:
    torch.manual_seed(0)
    model, shape = CASES[name]()
    with Trace(model) as trace:
        model(torch.randn(shape, requires_grad=True)).sum().backward()
    assert trace.first_bad() is None
    assert any(record.phase == "backward" for record in trace.records)
