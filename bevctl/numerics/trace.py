"""Watches a training step and finds the first operation that turned finite numbers into something else."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from bevctl.numerics.classify import classify
from bevctl.numerics.culprit import GRADIENT, Outcome, find_culprit, inheritors_of
from bevctl.numerics.extent import Extent, measure
from bevctl.numerics.inputs import BatchLayout, InputFault, input_faults, named_tensors
from bevctl.numerics.ledger import Known, Ledger, address
from bevctl.numerics.masking import FinitenessTests
from bevctl.numerics.operation import Call, floating_tensors, traits_of, written_tensors
from bevctl.numerics.place import Place, Places
from bevctl.numerics.ranges import RangeCounter
from bevctl.numerics.recent import RecentCalls
from bevctl.numerics.record import Culprit, OpRecord, Phase, Source
from bevctl.numerics.verdict import judge
from bevctl.ops.backend import forced

MAX_RECORDS = 200_000
"""Operations kept; a training step of the full model has some ten thousand."""
MAX_ORIGINS = 64
"""Origins that are done again in a wider format."""
FOR_THE_LOG = "stats/"
"""Outputs of a model that are no loss."""


class Trace(TorchDispatchMode):
    """A context in which a model's forward and backward passes are watched, operation by operation.

    Works on any device, for any nn.Module, for code around modules, for autograd Functions and for activations that
    are computed again. The numbers are those of a step without it, except that our own kernels run as torch
    operations and compiled code runs uncompiled. It waits for the device after each operation, so that a step takes
    some ten times as long; beside the records it keeps at most `recent.BYTES` of numbers.

        with Trace(model) as trace:
            losses = model(batch)
            sum(losses.values()).backward()
        culprit = trace.first_bad()

    Args:
        model: what the names of modules refer to; inside a DDP wrapper, not the wrapper.
        ranges: collects, for each module, how large and how small the numbers are.
        keep: indices of records whose inputs stay in memory to the end: the `lineage` of a culprit that an earlier
            trace of the same step found.
    """

    def __init__(self, model: nn.Module, ranges: RangeCounter | None = None, keep: Iterable[int] = ()) -> None:
        super().__init__()
        self.records: list[OpRecord] = []
        self.faults: list[InputFault] = []
        """What is wrong with the data that the model was called with."""
        self._model = model
        self._count = 0
        self._origins = 0
        self._depth = 0
        self._in_backward = False
        self._failed = False
        self._gradients: set[int] = set()
        self._places = Places(model)
        weights = [*model.named_parameters(), *model.named_buffers()]
        self._ledger = Ledger({address(tensor): name for name, tensor in weights})
        self._recent = RecentCalls(keep)
        self._tests = FinitenessTests()
        self._ranges = ranges
        self._outcomes: list[Outcome] = []
        self._layout = BatchLayout(0)
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Trace:
        self._exits.enter_context(forced("torch"))
        self._exits.enter_context(_uncompiled())
        before = self._model.register_forward_pre_hook(self._enter_model, with_kwargs=True)
        after = self._model.register_forward_hook(self._leave_model)
        self._exits.callback(before.remove)
        self._exits.callback(after.remove)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._exits.close()
        self._recent.clear()
        self._failed = exception[0] is not None
        if not self._failed:
            self._end_backward()

    @property
    def sources(self) -> Sequence[Source]:
        """The tensors that no operation of the trace made."""
        return self._ledger.sources

    def first_bad(self) -> Culprit | None:
        """What first was not finite without an excuse: an operation, an input or a weight. None for a healthy step.

        What reached a loss or a gradient comes first, then what was hidden on the way (by nan_to_num, say). What did
        no harm, such as an infinity that a sigmoid swallowed, is none.
        """
        return find_culprit(self.records, self.sources, self._outcomes, self.faults, self._failed)

    def inheritors(self, culprit: Culprit) -> list[OpRecord]:
        """Later operations whose result is not finite because the culprit's was not."""
        return inheritors_of(self.records, self.sources, culprit)

    def _enter_model(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        values = [*args, *kwargs.values()]
        with _disable_current_modes(), torch.no_grad():
            for position, value in enumerate(values):
                name = "batch" if len(values) == 1 else f"input[{position}]"
                self.faults += input_faults(value, name)
                self._layout = BatchLayout.of(value) or self._layout
                for path, tensor in named_tensors(value, name):
                    for floating in floating_tensors(tensor):
                        self._ledger.add_input(path, floating, self._count)

    def _leave_model(self, _: nn.Module, __: Any, output: Any) -> None:
        self._depth -= 1
        with _disable_current_modes():
            named = [(name.lstrip("."), tensor) for name, tensor in named_tensors(output, "")]
            self._add_outcomes([(name or "output", t) for name, t in named if not name.startswith(FOR_THE_LOG)])

    def _end_backward(self) -> None:
        """Notes the gradients as the backward pass left them, before anything clips them."""
        if self._in_backward:
            self._in_backward = False
            gradients = [(f"{GRADIENT}{name}", p.grad) for name, p in self._model.named_parameters()]
            self._add_outcomes([(name, gradient) for name, gradient in gradients if gradient is not None])

    def _add_outcomes(self, named: Sequence[tuple[str, Tensor]]) -> None:
        floating = [(name, t) for name, tensor in named for t in floating_tensors(tensor)]
        with torch.no_grad():
            extents = measure([tensor for _, tensor in floating])
        for (name, tensor), extent in zip(floating, extents, strict=True):
            writer = self._ledger.writer(tensor)
            if extent.bad and writer is not None:
                self._outcomes.append(Outcome(name, writer))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        node: Node | None = torch._C._current_autograd_node()
        if traits_of(func).is_view:
            if node is None:
                self._places.of_forward(any(t.requires_grad for t in floating_tensors(args)))
            return func(*args, **kwargs)
        if node is None:
            self._end_backward()
        call = Call(func, traits_of(func), args, kwargs)
        read = call.read()
        known = self._ledger.read(read, self._count)
        record = self._record(call, node, read, known)
        call = call.kept()
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError) as error:
            self._keep(dataclasses.replace(record, status="raised", note=str(error).strip().split("\n")[0]))
            raise
        self._tests.note(call, result)
        outputs = written_tensors(call.traits, args, kwargs, result)
        if outputs:
            self._finish(record, call, known, outputs)
        return result

    def _record(self, call: Call, node: Node | None, read: Sequence[Tensor], known: Sequence[Known]) -> OpRecord:
        """The record of a call before it runs."""
        phase: Phase
        if node is None:
            place = self._places.of_forward(any(t.requires_grad for t in read))
            phase = "forward" if self._depth else "outside"
        else:
            place, again = self._places.of_backward(node)
            phase = "recompute" if again else "backward"
            self._in_backward = True
        parents = tuple(k.writer for k in known)
        is_gradient = phase == "backward" and not self._gradients.isdisjoint(parents)
        if is_gradient or _seeds_backward(call, place):
            self._gradients.add(self._count)
        return OpRecord(
            index=self._count,
            phase=phase,
            op=call.traits.name,
            node="" if node is None else node.name(),
            place=place,
            inputs=tuple(k.extent for k in known),
            parents=parents,
            is_gradient=is_gradient,
        )

    def _finish(self, record: OpRecord, call: Call, known: Sequence[Known], outputs: list[Tensor]) -> None:
        """Measures what a call made, classifies it, and remembers it."""
        traits = call.traits
        extents = [_unmeasured(t) for t in outputs] if traits.uninitialised else measure(outputs)
        status, note = classify(call, known, extents, self._tests.used_by(call))
        record = dataclasses.replace(record, outputs=tuple(extents), status=status, note=note)
        if status == "origin":
            record = self._judged(record, call, outputs)
        for tensor, extent in zip(outputs, extents, strict=True):
            declared = note if status == "declared" and (extent.bad or traits.uninitialised) else ""
            keep = not (traits.uninitialised or traits.constructor)
            self._ledger.wrote(record.index, tensor, extent, declared, into=bool(traits.written), keep=keep)
        self._recent.add(record.index, record.phase, call, record.parents, outputs)
        if self._ranges is not None and not traits.uninitialised:
            self._ranges.add(record, outputs)
        self._keep(record)

    def _judged(self, record: OpRecord, call: Call, outputs: list[Tensor]) -> OpRecord:
        """The record of an origin with its verdict, as far as there were not too many, and the rows that broke."""
        self._origins += 1
        if self._origins > MAX_ORIGINS:
            return record
        dtypes = {extent.dtype for extent in (*record.inputs, *record.outputs)}
        verdict = judge(call, record.parents, dtypes, self._recent)
        samples = None
        if record.phase != "backward":
            samples = self._layout.samples(next(t for t, e in zip(outputs, record.outputs, strict=True) if e.bad))
        return dataclasses.replace(record, verdict=verdict, samples=samples)

    def _keep(self, record: OpRecord) -> None:
        self._count += 1
        if len(self.records) < MAX_RECORDS:
            self.records.append(record)


def _seeds_backward(call: Call, place: Place) -> bool:
    """Whether an operation makes the gradient of the loss by itself, which torch does with no code of ours around."""
    return call.traits.name.startswith("aten.ones_like") and not place.file


def _unmeasured(tensor: Tensor) -> Extent:
    return Extent(tensor.dtype, tuple(tensor.shape), 0.0, 0.0)


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Compiled parts run as plain Python: inside a compiled region no operation can be seen. From torch 2.6 on."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    return contextlib.nullcontext() if set_stance is None else set_stance("force_eager")
