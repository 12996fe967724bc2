"""Options that several commands share.

A command that reads a config is written so; `config_option` is a click option that fills a config key:

    @click.command("train", cls=ConfigCommand)
    @config_options
    @config_option("--batch", key="train.batch", type=int, help="Samples per GPU.")
    @json_option
    @click.pass_obj
    def command(console: Console, request: ConfigRequest) -> None:
        config = request.load().config
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from bevctl.console import Console
from bevctl.errors import BevctlError

if TYPE_CHECKING:
    from bevctl.config.load import Loaded, Read

Handler = TypeVar("Handler", bound=Callable[..., Any])

_GIVEN = "bevctl.cli.options.given"
_ENGINE = "bevctl.cli.options.engine"
_SET = ("--set", "--cfg-options")


@dataclass(frozen=True)
class _Value:
    """What one config option was given, and how."""

    value: object
    name: str
    from_environment: bool


@dataclass(frozen=True)
class ConfigRequest:
    """CONFIG and everything on the command line, or in the environment, that changes it."""

    source: str | None
    sets: tuple[str, ...]
    given: Mapping[str, _Value]
    console: Console
    engine: str | None = None
    """--engine; None for a command without that option."""

    def without(self, *keys: str) -> ConfigRequest:
        """The request without what options and environment say of some keys."""
        return replace(self, given={key: value for key, value in self.given.items() if key not in keys})

    def load(self, fallback: Callable[[], str | Path | Mapping[str, Any] | None] | None = None) -> Loaded:
        """Resolve the config and say its notes on stderr.

        `fallback`: see `bevctl.config.load.load`. Raises BevctlError, also for an engine that CONFIG is not for.
        """
        from bevctl.config.load import Given, load

        environment = {k: Given(v.value, v.name) for k, v in self.given.items() if v.from_environment}
        options = {k: Given(v.value, v.name) for k, v in self.given.items() if not v.from_environment}
        loaded = load(
            self.source,
            sets=self.sets,
            options=options,
            environment=environment,
            fallback=fallback,
            read=self._reader(),
        )
        self._check_engine(loaded)
        for note in loaded.notes if _is_first_process() else ():
            self.console.info(note)
        return loaded

    def resumed(self, checkpoint: str | None) -> Path | Mapping[str, Any] | None:
        """The config of the run that a checkpoint continues, for `load` to fall back on; None without a checkpoint.

        Raises BevctlError where the checkpoint is missing or broken.
        """
        if checkpoint is None:
            return None
        from bevctl.engine.workdir import resumed_config

        work_dir = self.given.get("work_dir")
        return resumed_config(checkpoint, str(work_dir.value) if work_dir else None)

    def _reader(self) -> Read:
        from bevctl.config.load import read_yaml

        if self.source is None or not self.source.endswith(".py") or self.engine is None:
            return read_yaml
        if self.engine != "mmdet3d":
            raise BevctlError(
                f"{self.source} is Python, a config of another project.",
                "If it is one of mmdet3d (1.1 or newer) and you trust its code, add --engine mmdet3d; "
                "bevctl train --engine external has the project's own program train it.",
            )
        from bevctl.config.mmdet3d import read_mmdet3d

        return read_mmdet3d

    def _check_engine(self, loaded: Loaded) -> None:
        foreign = loaded.config.model.mmdet3d
        if self.engine == "mmdet3d" and foreign is None:
            raise BevctlError(
                f"--engine mmdet3d, but {self.source or 'the config'} describes a model of bevctl's own.",
                "Give a config of mmdet3d (Python), or leave --engine out.",
            )
        if self.engine == "bevctl" and foreign is not None:
            raise BevctlError(
                f"This run's model is mmdet3d's, from {foreign.config}, whose code runs then.",
                "If you trust it, add --engine mmdet3d.",
            )


def _is_first_process() -> bool:
    """Whether this process speaks for the others of a run."""
    if "RANK" not in os.environ:
        return True
    from bevctl.preflight.start import is_first_process

    return is_first_process()


def config_options(function: Handler) -> Handler:
    """Add CONFIG, --set, --cfg-options and --device; the handler gets `request: ConfigRequest`.

    Trailing `--a.b.c value` overrides need the command's class to be `bevctl.cli.overrides.ConfigCommand`.
    """

    @click.argument("config", required=False, metavar="[CONFIG]")
    @click.option(
        *_SET,
        "sets",
        multiple=True,
        metavar="KEY=VALUE|FILE",
        help="Override config values, by key or from a YAML file; repeatable, later wins. Also: --a.b.c VALUE.",
    )
    @config_option(
        "--device", key="device", type=click.Choice(["auto", "cpu", "cuda"]), help="Where to compute; default: auto."
    )
    @functools.wraps(function)
    def handler(*arguments: Any, config: str | None, sets: tuple[str, ...], **options: Any) -> Any:
        context = click.get_current_context()
        given = context.meta.get(_GIVEN, {})
        console = context.find_object(Console) or Console()
        request = ConfigRequest(config, sets, given, console, context.meta.get(_ENGINE))
        return function(*arguments, request=request, **options)

    return handler  # type: ignore[return-value]


def config_option(
    *names: str,
    key: str,
    meaning: Callable[[Any], object] | None = None,
    along: Mapping[str, object] | None = None,
    **attributes: Any,
) -> Callable[[Handler], Handler]:
    """A click option whose value goes to config key `key`; the handler does not see it.

    Given on the command line it ranks above --set, from its environment variable below. Two different options for one
    key on the same command line are an error.

    Args:
        meaning: the key's value of the option's; None: it is the same.
        along: values of other keys that come with the option.
    """

    def remember(context: click.Context, parameter: click.Parameter, value: object) -> None:
        source = context.get_parameter_source(parameter.name or "")
        if source not in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT):
            return
        from_environment = source is ParameterSource.ENVIRONMENT
        name = _variable(context, parameter) if from_environment else max(parameter.opts, key=len)
        given: dict[str, _Value] = context.meta.setdefault(_GIVEN, {})
        for each, its in {key: meaning(value) if meaning else value, **(along or {})}.items():
            other = given.get(each)
            if other and other.from_environment == from_environment and other.value != its:
                raise click.UsageError(f"{other.name} and {name} contradict each other.", context)
            if other is None or not from_environment:
                given[each] = _Value(its, name, from_environment)

    return click.option(*names, callback=remember, expose_value=False, **attributes)


def precision_flags(function: Handler) -> Handler:
    """Add --fp16, --bf16 and --fp32."""
    helps = {
        "fp16": "Mixed precision in FP16 with a loss scale.",
        "bf16": "Mixed precision in BF16.",
        "fp32": "Single precision.",
    }
    for name, text in reversed(helps.items()):
        function = config_option(f"--{name}", key="precision.dtype", flag_value=name, help=text)(function)
    return function


def grad_checkpoint_option(function: Handler) -> Handler:
    """Add --grad-checkpoint, which recomputes every part that can be."""

    def parts(wanted: bool) -> list[str]:
        from bevctl.config.rules import PARTS

        return list(PARTS) if wanted else []

    return config_option(
        "--grad-checkpoint",
        key="model.checkpointing",
        meaning=parts,
        is_flag=True,
        help="Recompute activations instead of keeping them: less memory.",
    )(function)


def engine_option(*engines: str) -> Callable[[Handler], Handler]:
    """Add --engine, whose first choice is the default; mmdet3d allows this process to run that project's configs."""

    def remember(context: click.Context, _: click.Parameter, value: str) -> None:
        context.meta[_ENGINE] = value
        if value == "mmdet3d":
            from bevctl.config.mmdet3d import allow

            allow()

    return click.option(
        "--engine",
        type=click.Choice(engines),
        default=engines[0],
        callback=remember,
        expose_value=False,
        help="mmdet3d: CONFIG is a Python config of mmdet3d (1.1 or newer); its code is run. "
        + ("external: the program of another project trains. " if "external" in engines else "")
        + "Default: bevctl.",
    )


def _variable(context: click.Context, parameter: click.Parameter) -> str:
    return f"{context.auto_envvar_prefix}_{parameter.name}".upper()


class CommandGroup(click.Group):
    """Commands in the order in which they were added, each with the whole first sentence of its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(limit=1000)) for name, each in self.commands.items()])


def json_option(function: Handler) -> Handler:
    """Add --json: one JSON document on stdout instead of text."""

    def switch(context: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            console_of(context).json = True

    option = click.option(
        "--json", is_flag=True, is_eager=True, expose_value=False, callback=switch, help="Print one JSON document."
    )
    return option(function)


def common_options(command: click.Command) -> click.Command:
    """The command, and those below it, with --color, -q, -v and --debug, which work before and after its name."""
    command.params.extend(_common())
    for below in getattr(command, "commands", {}).values():
        common_options(below)
    return command


def _common() -> list[click.Parameter]:
    def setting(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
        def store(context: click.Context, _: click.Parameter, value: Any) -> None:
            if value:
                setattr(console_of(context), name, value)

        return store

    def option(*names: str, target: str, **attributes: Any) -> click.Option:
        return click.Option(names, callback=setting(target), expose_value=False, is_eager=True, **attributes)

    colors = click.Choice(["auto", "always", "never"])
    return [
        option("--color", target="color", type=colors, help="When to use colour; default: auto."),
        option("-q", "--quiet", target="quiet", is_flag=True, help="Only results, warnings and errors."),
        option("-v", "--verbose", target="verbose", count=True, help="Say more."),
        option("--debug", target="debug", is_flag=True, help="Show the traceback of an error."),
    ]


def console_of(context: click.Context) -> Console:
    """The console of this run."""
    console = context.find_object(Console)
    assert console is not None
    return console
