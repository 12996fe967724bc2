"""Watches one training step and finds the first operation that turned finite numbers into something else."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode

from bevctl.numerics.culprit import Outcome, find_culprit, inheritors_of
from bevctl.numerics.expected import expected
from bevctl.numerics.extent import Extent, measure
from bevctl.numerics.inputs import InputFault, allowed_columns, bad_samples, input_faults, named_tensors
from bevctl.numerics.operation import (
    Traits,
    bound_arguments,
    floating_tensors,
    has_nonfinite_constant,
    traits_of,
)
from bevctl.numerics.place import Places
from bevctl.numerics.record import Culprit, OpRecord, Source
from bevctl.numerics.rerun import Call, judge
from bevctl.ops.backend import forced

MAX_RECORDS = 200_000
"""Operations kept; a training step of the full model has some ten thousand."""
MAX_VERDICTS = 64
"""Origins that are done again in a wider format."""


class _Memory:
    """What is known of one piece of memory: who wrote it last, and what was measured in it."""

    __slots__ = ("declared", "measured", "writer")

    def __init__(self, writer: int, declared: str = "") -> None:
        self.writer = writer
        self.declared = declared
        self.measured: dict[tuple[Any, ...], tuple[int, Extent]] = {}


class Trace(TorchDispatchMode):
    """A context in which a model's forward and backward passes are watched, operation by operation.

    Works on any device, for any nn.Module, for code outside modules and for autograd Functions. Our own kernels run
    as torch operations meanwhile. The numbers of the step are those of a step without the trace, on the same backend.

        with Trace(model) as trace:
            losses = model(batch)
            sum(losses.values()).backward()
        culprit = trace.first_bad()

    Args:
        model: what module names refer to; not a DDP wrapper around it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.records: list[OpRecord] = []
        self.sources: list[Source] = []
        self.faults: list[InputFault] = []
        """What is wrong with the data that the model was called with."""
        self.dropped = 0
        """Records beyond MAX_RECORDS."""
        self._model = model
        self._places = Places(model)
        self._memory: dict[int, _Memory] = {}
        self._weights = {
            _address(tensor): name
            for named in (model.named_parameters(), model.named_buffers())
            for name, tensor in named
        }
        self._outcomes: list[Outcome] = []
        self._depth = 0
        self._verdicts = 0
        self._batch_size = 0
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Trace:
        self._exits.enter_context(forced("torch"))
        before = self._model.register_forward_pre_hook(self._enter_model, with_kwargs=True)
        after = self._model.register_forward_hook(self._leave_model, always_call=True)
        self._exits.callback(before.remove)
        self._exits.callback(after.remove)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._exits.close()
        self._collect_gradients()

    def first_bad(self) -> Culprit | None:
        """The operation, input or weight that first was not finite without an excuse, or None.

        What reached a loss or a gradient comes first; something hidden by nan_to_num or the like comes next. What
        did no harm (an infinity that a sigmoid swallowed) is none.
        """
        return find_culprit(self.records, self.sources, self._outcomes, self.faults)

    def inheritors(self, culprit: Culprit) -> list[OpRecord]:
        """Later operations whose result is not finite because the culprit's was not."""
        return inheritors_of(self.records, culprit)

    # Around the model

    def _enter_model(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        with torch.utils._python_dispatch._disable_current_modes():
            values = [*args, *kwargs.values()]
            sizes = [size for value in values if isinstance(size := getattr(value, "size", None), int)]
            self._batch_size = max(sizes, default=0)
            for position, value in enumerate(values):
                name = "batch" if len(values) == 1 else f"input[{position}]"
                self.faults += input_faults(value, name)
                for path, tensor in named_tensors(value, name):
                    if tensor.is_floating_point():
                        self._register_input(path, tensor)

    def _register_input(self, name: str, tensor: Tensor) -> None:
        (extent,) = measure([tensor])
        declared = ""
        allowed = allowed_columns(name, expected())
        samples: tuple[int, ...] = ()
        if extent.bad:
            bad = ~tensor.isfinite()
            samples = bad_samples(name, bad)
            excused = bad.clone()
            if allowed:
                excused[..., [c for c in allowed if c < bad.shape[-1]]] = False
            if allowed is not None and not (excused.any() and allowed):
                declared = next(rule.reason for rule in expected().inputs if rule.matches(name))
        self.sources.append(Source(name, "data", extent, declared, len(self.records), samples))
        self._memory[_address(tensor)] = _Memory(-len(self.sources), declared)

    def _leave_model(self, _: nn.Module, __: Any, output: Any) -> None:
        self._depth -= 1
        with torch.utils._python_dispatch._disable_current_modes():
            for name, tensor in named_tensors(output, ""):
                if tensor.is_floating_point():
                    self._add_outcome(name.lstrip("."), tensor)

    def _collect_gradients(self) -> None:
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                self._add_outcome(f"gradient of {name}", parameter.grad)

    def _add_outcome(self, name: str, tensor: Tensor) -> None:
        memory = self._memory.get(_address(tensor))
        if memory is None:
            return
        (extent,) = measure([tensor.detach()])
        if extent.bad:
            self._outcomes.append(Outcome(name, memory.writer))

    # Each operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        traits = traits_of(func)
        node: Node | None = torch._C._current_autograd_node()
        if traits.is_view:
            if node is None:
                self._places.of_forward(any(t.requires_grad for t in floating_tensors(args)))
            return func(*args, **kwargs)
        bound = list(bound_arguments(traits, args, kwargs))
        read = [t for name, value in bound if name not in traits.replaced for t in floating_tensors(value)]
        if node is None:
            place, again = self._places.of_forward(any(t.requires_grad for t in read)), False
        else:
            place, again = self._places.of_backward(node)
        phase = "recompute" if again else "backward" if node is not None else "forward" if self._depth else "outside"
        extents = self._extents(read)
        memories = [self._memory[_address(t)] for t in read]
        call = _call_before(func, traits, args, kwargs)
        record = OpRecord(
            index=len(self.records) + self.dropped,
            phase=phase,
            op=traits.name,
            node=node.name() if node is not None else "",
            place=place,
            inputs=tuple(extents),
            outputs=(),
            parents=tuple(m.writer for m in memories),
        )
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            self._keep(dataclasses.replace(record, status="raised", note=str(error).split("\n")[0]))
            raise
        written = [t for name, value in bound if name in traits.written for t in floating_tensors(value)]
        outputs = {id(t): t for t in (*floating_tensors(result), *written)}
        if outputs:
            self._finish(record, call, memories, list(outputs.values()), written)
        return result

    def _finish(
        self, record: OpRecord, call: Call, memories: list[_Memory], outputs: list[Tensor], written: list[Tensor]
    ) -> None:
        traits = call.traits
        results = [Extent(t.dtype, tuple(t.shape), 0.0, 0.0) for t in outputs]
        if not traits.uninitialised:
            results = measure(outputs)
        record = dataclasses.replace(record, outputs=tuple(results))
        inputs = list(zip(record.inputs, memories, strict=True))
        excuse = self._excuse(record, call, memories)
        culpable = [extent for extent, memory in inputs if extent.bad and not memory.declared]
        bad = [i for i, extent in enumerate(results) if extent.bad]
        if traits.uninitialised:
            record = dataclasses.replace(record, status="declared", note="memory that nothing was written to yet")
        elif bad and culpable:
            record = dataclasses.replace(record, status="inherits")
        elif bad and excuse:
            record = dataclasses.replace(record, status="declared", note=excuse)
        elif bad:
            record = self._origin(record, call, outputs[bad[0]], results)
        elif culpable and traits.masking is not None:
            record = dataclasses.replace(record, status="masks", note=traits.masking.reason)
        self._remember(record, traits, outputs, results, written)
        self._keep(record)

    def _excuse(self, record: OpRecord, call: Call, memories: list[_Memory]) -> str:
        """Why the record's outputs may be not finite."""
        bad = [i for i, extent in enumerate(record.outputs) if extent.bad]
        if bad and all(any(not r.outputs or i in r.outputs for r in call.traits.output_rules) for i in bad):
            return call.traits.output_rules[0].reason
        declared = [
            (extent, memory.declared) for extent, memory in zip(record.inputs, memories, strict=True) if extent.bad
        ]
        constant = any(has_nonfinite_constant(v) for v in (*call.args, *call.kwargs.values()))
        if any(extent.nan for extent in record.outputs) and not any(extent.nan for extent, _ in declared):
            return ""
        return declared[0][1] if declared else "a constant of the code" if constant else ""

    def _origin(self, record: OpRecord, call: Call, output: Tensor, results: list[Extent]) -> OpRecord:
        verdict = None
        if self._verdicts < MAX_VERDICTS:
            self._verdicts += 1
            verdict = judge(call, record.inputs, results)
        bad = ~output.isfinite()
        rows = bad.flatten(1).any(1) if bad.dim() > 1 else bad.flatten()
        return dataclasses.replace(
            record, status="origin", verdict=verdict, rows=tuple(rows.nonzero()[:64, 0].tolist())
        )

    def _remember(
        self, record: OpRecord, traits: Traits, outputs: list[Tensor], results: list[Extent], written: list[Tensor]
    ) -> None:
        reused = {_address(t) for t in written}
        for tensor, extent in zip(outputs, results, strict=True):
            address = _address(tensor)
            declared = record.note if record.status == "declared" else ""
            memory = _Memory(record.index, declared)
            previous = self._memory.get(address)
            if address in reused and previous is not None and not extent.bad and _is_part(tensor):
                memory = previous  # the rest of it may still be what it was
            if not (traits.uninitialised or traits.constructor or written):
                memory.measured[_layout(tensor)] = (tensor._version, extent)
            self._memory[address] = memory

    def _extents(self, read: Sequence[Tensor]) -> list[Extent]:
        known: list[Extent | None] = []
        missing: list[Tensor] = []
        for tensor in read:
            memory = self._memory.get(_address(tensor))
            if memory is None:
                memory = self._memory[_address(tensor)] = self._new_source(tensor)
            version, extent = memory.measured.get(_layout(tensor), (-1, None))
            known.append(extent if version == tensor._version else None)
            if known[-1] is None:
                missing.append(tensor)
        fresh = iter(measure(missing))
        extents = [extent or next(fresh) for extent in known]
        for tensor, extent in zip(read, extents, strict=True):
            memory = self._memory[_address(tensor)]
            memory.measured[_layout(tensor)] = (tensor._version, extent)
            if memory.writer < 0:
                self._note_source(-1 - memory.writer, extent)
        return extents

    def _new_source(self, tensor: Tensor) -> _Memory:
        name = self._weights.get(_address(tensor), "")
        empty = Extent(tensor.dtype, tuple(tensor.shape), 0.0, 0.0)
        self.sources.append(Source(name, "weight" if name else "unseen", empty, first_use=len(self.records)))
        return _Memory(-len(self.sources))

    def _note_source(self, index: int, extent: Extent) -> None:
        source = self.sources[index]
        if extent.bad and not source.extent.bad:
            source.extent = extent

    def _keep(self, record: OpRecord) -> None:
        if len(self.records) < MAX_RECORDS:
            self.records.append(record)
        else:
            self.dropped += 1


def _call_before(func: Any, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call, with copies of the tensors that it both reads and overwrites."""

    def kept(name: str, value: Any) -> Any:
        overwritten = name in traits.written and name not in traits.replaced and isinstance(value, Tensor)
        return value.clone() if overwritten else value

    names = zip(traits.arguments, args, strict=False)
    return Call(func, traits, tuple(kept(n, v) for n, v in names), {n: kept(n, v) for n, v in kwargs.items()})


def _first(flags: Tensor, count: int = 64) -> tuple[int, ...]:
    """Positions of the first `count` set flags."""
    return tuple(flags.nonzero()[:count, 0].tolist())


def _address(tensor: Tensor) -> int:
    """Identity of the tensor's memory while it is alive."""
    return tensor.untyped_storage()._cdata


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())


def _is_part(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()
