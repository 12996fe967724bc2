"""Is the GPU memory there: what is free, who holds the rest, and who of them was left behind."""

from __future__ import annotations

from bevctl.preflight.checks import Context, Outcome, failed, passed, skipped, unknown, warned
from bevctl.preflight.gpu_selection import each_gpu, gpus_in_use, usable_memory
from bevctl.preflight.needs import NotKnown, gpu_state_bytes, step_bytes
from bevctl.preflight.nvml import Gpu, NotReported
from bevctl.preflight.processes import Holder, holders


def free_memory(context: Context) -> Outcome:
    """Free memory against the least that the run needs."""
    if not context.once(gpus_in_use).used:
        return skipped("no GPU to look at, see GPU001")
    try:
        need = context.once(gpu_state_bytes)
    except NotKnown as error:
        reason = str(error)
        return each_gpu(context, lambda gpu: unknown(f"{_free(gpu)}; the need is not known: {reason}", advisory=True))
    what = "weights, gradients, optimizer state and CUDA; activations come on top, see `bevctl memory`"
    required = f"at least {_gib(need)}: {what}"

    def judge(gpu: Gpu) -> Outcome:
        memory = usable_memory(gpu)
        if isinstance(memory, NotReported):
            return unknown(f"memory not reported ({memory.reason})")
        if memory.free < need:
            return failed(_free(gpu), "End what holds it (GPU008, GPU009), or use another GPU.", required=required)
        return passed(_free(gpu), required=required)

    return each_gpu(context, judge)


def step_memory(context: Context) -> Outcome:
    """Free memory against what `bevctl memory` predicts for a step."""
    if not context.once(gpus_in_use).used:
        return skipped("no GPU to look at, see GPU001")
    try:
        need = context.once(step_bytes)
    except NotKnown as error:
        return unknown(str(error), advisory=True)
    required = f"{_gib(need.typical)} predicted for a step, {_gib(need.large)} with large samples"
    fix = "Lower --batch, or see `bevctl memory --fit` for settings that fit."

    def judge(gpu: Gpu) -> Outcome:
        memory = usable_memory(gpu)
        if isinstance(memory, NotReported):
            return unknown(f"memory not reported ({memory.reason})")
        if memory.free < need.typical:
            return failed(_free(gpu), fix, required=required)
        if memory.free < need.large:
            return warned(f"{_free(gpu)}: large samples may not fit", fix, required=required)
        return passed(_free(gpu), required=required)

    return each_gpu(context, judge)


def memory_holders(context: Context) -> Outcome:
    """Other processes on the GPUs of the run."""
    gpus = context.once(gpus_in_use).used
    if not gpus:
        return skipped("no GPU to look at, see GPU001")
    silent = [gpu for gpu in gpus if isinstance(gpu.processes, NotReported)]
    held = context.once(holders_in_use)
    if not held and silent:
        return unknown(f"{', '.join(map(str, silent))}: the driver does not list processes", advisory=True)
    if not held:
        return passed("nobody else")
    found = "; ".join(map(str, held))
    return warned(found, "Wait for them, end them, or choose other GPUs with CUDA_VISIBLE_DEVICES.")


def orphans(context: Context) -> Outcome:
    """Training processes whose parent died: they keep memory and no one waits for them."""
    if not context.once(gpus_in_use).used:
        return skipped("no GPU to look at, see GPU001")
    left = [holder for holder in context.once(holders_in_use) if holder.is_orphan]
    if not left:
        return passed("none")
    return warned("; ".join(map(str, left)), " ".join(dict.fromkeys(map(_how_to_end, left))))


def holders_in_use(context: Context) -> list[Holder]:
    """Everybody else on the GPUs of the run."""
    return holders(context.once(gpus_in_use).used)


def _how_to_end(holder: Holder) -> str:
    process = holder.process
    if process is None or not process.mine:
        return f"Ask its user, or as root: kill {holder.pid}."
    if process.zombie:
        return f"Pid {holder.pid} is dead already; end its parent: kill {process.parent}."
    return f"bevctl preflight --reap --yes, or by hand: kill {holder.pid} (then kill -9 {holder.pid})."


def _free(gpu: Gpu) -> str:
    memory = usable_memory(gpu)
    if isinstance(memory, NotReported):
        return f"memory not reported ({memory.reason})"
    return f"{_gib(memory.free)} of {_gib(memory.total)} free"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
