from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevctl.engine.compilation import CompiledForward, compile_parts
from bevctl.engine.precision import MatmulCounter, keep_fp32
from bevctl.models.build import build_model, static_parts
from tests.models.nano import nano_batch, nano_config

Graph = Callable[..., Sequence[Tensor]]


class Part(nn.Module):
    """A layer, BatchNorm and dropout, and a count of the calls that ran as they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.norm(self.linear(x)))
        return out


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def compiled(part: nn.Module, backend: Any) -> list[str]:
    """Reports of `part`, from here on compiled by `backend`."""
    reports: list[str] = []
    compile_parts(nn.ModuleDict({"part": part}), ["part"], reports.append, backend)
    return reports


def trained(part: nn.Module, steps: int = 3) -> list[Tensor]:
    """Outputs of some steps, then gradients and buffers."""
    torch.manual_seed(5)
    outputs = [part(torch.randn(6, 3)) for _ in range(steps)]
    sum(out.square().sum() for out in outputs).backward()
    return [*outputs, *(p.grad for p in part.parameters() if p.grad is not None), *part.buffers()]


def twins() -> tuple[Part, Part]:
    torch.manual_seed(0)
    first, second = Part(), Part()
    second.load_state_dict(first.state_dict())
    return first, second


def counting(calls: list[int]) -> Callable[[Any, Any], Graph]:
    """A backend that runs the graph and counts it."""

    def backend(graph: Any, inputs: Any) -> Graph:  # noqa: ARG001
        def run(*arguments: Tensor) -> Sequence[Tensor]:
            calls.append(1)
            result: Sequence[Tensor] = graph(*arguments)
            return result

        return run

    return backend


def test_numbers_statistics_and_random_draws_stay() -> None:
    plain, part = twins()
    reports = compiled(part, "aot_eager")
    for ours, expected in zip(trained(part), trained(plain), strict=True):
        torch.testing.assert_close(ours, expected)
    assert reports == []
    assert part.state_dict().keys() == plain.state_dict().keys()


def test_training_runs_compiled_and_evaluation_does_not() -> None:
    _, part = twins()
    calls: list[int] = []
    compiled(part, counting(calls))
    trained(part)
    assert len(calls) == 4, "one trial and three steps"
    part.eval()(torch.randn(6, 3))
    with torch.no_grad():
        part.train()(torch.randn(6, 3))
    with MatmulCounter() as counter:
        part(torch.randn(6, 3))
    assert len(calls) == 4
    assert counter.share(torch.float32) == 1


def test_a_compiler_that_fails_is_reported_once() -> None:
    def broken(graph: Any, inputs: Any) -> Graph:  # noqa: ARG001
        raise RuntimeError("no compiler here\nand a trace")

    plain, part = twins()
    reports = compiled(part, broken)
    for ours, expected in zip(trained(part), trained(plain), strict=True):
        assert torch.equal(ours, expected)
    assert len(reports) == 1
    assert reports[0].startswith("part runs without torch.compile: ")
    assert "no compiler here" in reports[0]
    assert "trace" not in reports[0]


def test_a_compiler_that_changes_numbers_is_not_believed() -> None:
    def wrong(graph: Any, inputs: Any) -> Graph:  # noqa: ARG001
        return lambda *arguments: tuple(1.1 * out for out in graph(*arguments))

    plain, part = twins()
    reports = compiled(part, wrong)
    for ours, expected in zip(trained(part), trained(plain), strict=True):
        assert torch.equal(ours, expected)
    assert len(reports) == 1
    assert "off by 10.0%" in reports[0]


def test_a_part_kept_in_fp32_stays_there() -> None:
    _, part = twins()
    model = nn.ModuleDict({"part": part})
    keep_fp32(model, ["part.linear"], "cpu")
    reports: list[str] = []
    compile_parts(model, ["part"], reports.append, "aot_eager")
    seen: list[torch.dtype] = []
    part.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        part(torch.randn(6, 3))
    assert reports == []
    assert set(seen) == {torch.float32}


def test_only_parts_that_the_model_has_are_compiled() -> None:
    model = nn.ModuleDict({"part": Part()})
    assert compile_parts(model, ["absent", "part"], print, "eager") == ["part"]
    assert isinstance(model["part"].forward, CompiledForward)


@pytest.mark.parametrize("checkpointing", [(), ("camera", "decoder")])
def test_a_compiled_model_learns_the_same(checkpointing: tuple[str, ...]) -> None:
    config = nano_config(**{"model.checkpointing": checkpointing})
    results = []
    for backend in (None, "aot_eager"):
        torch.manual_seed(0)
        model = build_model(config).train()
        reports: list[str] = []
        if backend is not None:
            found = compile_parts(model, static_parts(config.model, for_compiler=True), reports.append, backend)
            assert ("encoders.camera.backbone" in found) == (not checkpointing)
            assert {"encoders.camera.neck", "fuser"} <= set(found)
        torch.manual_seed(1)
        losses = model(nano_batch(config))
        torch.stack([value for name, value in losses.items() if name.startswith("loss/")]).sum().backward()
        results.append([*losses.values(), *(p.grad for p in model.parameters() if p.grad is not None)])
        assert reports == []
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-5)
