"""`bevctl memory`: the GPU memory that training takes, predicted without a GPU, and the settings that fit."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bevctl.cli.options import ConfigCommand, ConfigRequest, config_option, config_options, json_option
from bevctl.console import Console, table
from bevctl.errors import BevctlError, ExitCode
from bevctl.sizes import format_gib, parse_size

if TYPE_CHECKING:
    from bevctl.config.schema import Config
    from bevctl.measure.memory import Need
    from bevctl.measure.memory_inputs import Sizes
    from bevctl.measure.memory_plans import Plan
    from bevctl.measure.parameters import ParameterCounts

_USABLE = 0.985
"""Share of the GiB on a card's label that programs can use: a V100 of "32 GB" has 31.7 GiB of the 32."""


class CardSize(click.ParamType):
    """`32GB` is what a card sold as that can use; `31GiB` is taken literally."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ARG002
        sold = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*G(B?)\s*", str(value))
        size = round(float(sold[1]) * 2**30 * _USABLE) if sold else parse_size(str(value))
        if size < 2**30:
            raise BevctlError(f"A GPU of {value} holds no model.", "Write for example --fit 32GB.")
        return size


@click.command("memory", cls=ConfigCommand)
@config_options
@config_option("--batch", key="train.batch", type=click.IntRange(1), metavar="N", help="Samples a step.")
@click.option("--fit", type=CardSize(), metavar="SIZE", help="Choose the plan for a card of this size, such as 32GB.")
@click.option(
    "--write",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With --fit: write the chosen plan, for train --set FILE.",
)
@json_option
@click.pass_obj
def command(console: Console, request: ConfigRequest, fit: int | None, write: Path | None) -> int:
    """Predict the GPU memory of training CONFIG by part, and of other precisions, batches and checkpointing.

    Needs no GPU. Sizes of point clouds are from the config's data set, or from streets made in memory without one.
    """
    if write is not None and fit is None:
        raise BevctlError(
            "--write needs to know which plan to write.", "Add --fit with the card's size, as --fit 32GB."
        )
    config = request.load().config

    from bevctl.measure.memory import BASIS, Predictor
    from bevctl.measure.memory_inputs import sample_sizes
    from bevctl.measure.memory_plans import best_fit, plans
    from bevctl.measure.parameters import count_parameters

    counts = count_parameters(config)
    console.info("Looking at samples, tracing steps of one and two of them")
    sizes = sample_sizes(config)
    precision = "fp16" if config.precision.dtype == "auto" else config.precision.dtype
    setting = (precision, config.train.batch, config.model.checkpointing)
    predictor = Predictor(config, sizes.typical)
    need = predictor.need(*setting)
    by_size = {"p50": need}
    if sizes.largest != sizes.typical:
        by_size |= {"p95": Predictor(config, sizes.p95).need(*setting)}
        by_size |= {"max": Predictor(config, sizes.largest).need(*setting)}
    candidates = plans(config, predictor)
    chosen = best_fit(candidates, fit) if fit is not None else None
    _show(console, config, precision, counts, need, by_size, candidates)
    console.info(f"{BASIS} Samples: {_describe(sizes)}.")
    console.document("memory", _document(counts, need, by_size, candidates, chosen, sizes, BASIS))
    return ExitCode.OK if fit is None else _choose(console, chosen, fit, write)


def _show(
    console: Console,
    config: Config,
    precision: str,
    counts: ParameterCounts,
    need: Need,
    by_size: dict[str, Need],
    candidates: list[Plan],
) -> None:
    rows = [*counts.by_part.items(), ("total", counts.trainable)]
    console.result(table(["part", "trainable parameters"], rows, title=config.name))
    title = f"GPU memory at the peak, {precision.upper()}, batch {config.train.batch}, predicted"
    console.result(table(["what", "memory"], [(k, format_gib(v)) for k, v in need.components.items()], title=title))
    columns = ["samples", "allocated (tensors, graphs)", "reserved (torch)", "device (nvidia-smi)"]
    peaks = [(name, *map(format_gib, (n.allocated, n.reserved, n.device))) for name, n in by_size.items()]
    console.result(table(columns, peaks))
    plan_rows = [
        (p.name, p.batch, format_gib(p.allocated), format_gib(p.device), f"{p.lr:g}", p.risk) for p in candidates
    ]
    console.result(table(["plan", "batch", "allocated", "nvidia-smi", "lr", "mind"], plan_rows, title="Plans"))


def _describe(sizes: Sizes) -> str:
    where = "made in memory" if sizes.source == "synthetic" else f"from {sizes.source}"
    voxels = f", {sizes.typical.sites[0]:,} voxels" if sizes.typical.sites else ""
    return f"{sizes.samples} {where}, typically {sizes.typical.points:,} points{voxels}"


def _document(
    counts: ParameterCounts,
    need: Need,
    by_size: dict[str, Need],
    candidates: list[Plan],
    chosen: Plan | None,
    sizes: Sizes,
    basis: str,
) -> dict[str, Any]:
    return {
        "source": "estimated",
        "basis": basis,
        "parameters": dataclasses.asdict(counts),
        "components": [{"name": name, "bytes": size} for name, size in need.components.items()],
        "peak": _peak(need),
        "by_size": {name: _peak(found) for name, found in by_size.items()},
        "samples": dataclasses.asdict(sizes),
        "plans": [plan.document() for plan in candidates],
        "fit": None if chosen is None else chosen.name,
    }


def _peak(need: Need) -> dict[str, int]:
    return {"allocated_bytes": need.allocated, "reserved_bytes": need.reserved, "device_bytes": need.device}


def _choose(console: Console, chosen: Plan | None, card: int, write: Path | None) -> int:
    """Says which plan fits, and writes it."""
    if chosen is None:
        console.warn(f"No plan fits into {format_gib(card)} with a tenth to spare: use a smaller model or image.")
        return ExitCode.FINDINGS
    console.result(
        f"For {format_gib(card)}: {chosen.name}, {format_gib(chosen.device)} on the device, lr {chosen.lr:g}"
    )
    if write is not None:
        from bevctl.files import atomic_write_text

        atomic_write_text(write, _yaml(chosen))
        console.info(f"Written: {write}, for `bevctl train --set {write}`")
    return ExitCode.OK


def _yaml(plan: Plan) -> str:
    import yaml

    return f"# {plan.name}, chosen by `bevctl memory --fit`\n" + yaml.safe_dump(plan.settings(), sort_keys=False)
