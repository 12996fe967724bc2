"""Exit codes, errors and global options of the program."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import click
import pytest

import bevctl
from bevctl.cli.main import COMMANDS, ended_by_sigterm, program, run
from bevctl.cli.overrides import ConfigCommand
from bevctl.console import Console
from bevctl.errors import ExitCode
from tests.conftest import Outcome

Invoke = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def _with_test_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "raising", ("tests.cli.raising", "Raise."))
    monkeypatch.setitem(COMMANDS, "configured", ("tests.cli.configured", "Show values."))


def test_help_lists_every_command_and_exit_code(invoke: Invoke, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("--help").code == 0
    text = capsys.readouterr().out
    for name, (_, summary) in COMMANDS.items():
        assert name in text
        assert summary.split()[0] in text
    for code in ExitCode:
        assert f"{code.value} " in text
        assert code.meaning in text
    assert "_BEVCTL_COMPLETE=bash_source" in text


def test_version(invoke: Invoke) -> None:
    assert invoke("--version") == Outcome(0, f"bevctl {bevctl.__version__}\n", "")


def test_no_command_prints_the_help_and_is_a_usage_error(invoke: Invoke) -> None:
    outcome = invoke()
    assert outcome.code == ExitCode.USAGE
    assert "Usage: bevctl" in outcome.err + outcome.out


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("0", 0, ""),
        ("3", 3, ""),
        ("exit", 6, ""),
        ("bevctl", 4, "error: The run failed.\n  Look at it.\n"),
        ("nonfinite", 5, "error: The loss is NaN.\n"),
        ("interrupt", 130, "error: Interrupted.\n"),
        ("abort", 130, "error: Interrupted.\n"),
        ("usage", 2, "error: Not so.\n"),
        ("file", 2, "error: Could not open file 'a.txt': is odd\n"),
        ("pipe", 141, ""),
        ("memory", 4, "error: Out of memory.\n"),
        ("absent", 2, "error: No such file or directory: a\\x1b[31m.txt.\n"),
        ("full", 4, "error: No space left on device.\n  Free some space"),
        ("network", 4, "error: Connection refused.\n"),
        ("defect", 4, "error: RuntimeError: two lines\n  This is a defect in bevctl"),
    ],
)
def test_each_ending_has_its_code_and_sentence(invoke: Invoke, how: str, code: int, message: str) -> None:
    outcome = invoke("raising", how)
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.startswith(message)
    assert "Traceback" not in outcome.err
    assert invoke("raising", how, "--json").code == code


def test_a_traceback_only_with_debug(invoke: Invoke) -> None:
    for arguments in (("--debug", "raising", "defect"), ("raising", "defect", "--debug")):
        outcome = invoke(*arguments)
        assert outcome.code == 4
        assert "Traceback" in outcome.err
        assert "error: RuntimeError: two lines" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "command", "code", "message"),
    [
        (("raising", "bevctl"), "raising", 4, "The run failed."),
        (("raising", "--sett", "a"), "raising", 2, "No such option '--sett'"),
        (("raising",), "raising", 2, "Missing argument 'HOW'."),
        (("rasing",), "bevctl", 2, "No command 'rasing'."),
        (("config", "shw"), "config", 2, "No such command 'shw'"),
    ],
)
def test_errors_are_documents_in_json_mode(
    invoke: Invoke, arguments: tuple[str, ...], command: str, code: int, message: str
) -> None:
    outcome = invoke(*arguments, "--json")
    document = outcome.document
    assert outcome.code == code
    assert document["schema"] == f"bevctl.{command}/1"
    assert (document["version"], document["command"], document["status"]) == (bevctl.__version__, command, "error")
    assert document["error"].keys() == {"code", "message", "hint"}
    assert document["error"]["code"] == code
    assert document["error"]["message"].startswith(message)


def test_signals_are_documents_in_json_mode(invoke: Invoke) -> None:
    assert invoke("raising", "interrupt", "--json").document["error"]["code"] == ExitCode.INTERRUPTED
    before = signal.getsignal(signal.SIGTERM)
    with ended_by_sigterm():
        outcome = invoke("raising", "sigterm", "--json")
    assert signal.getsignal(signal.SIGTERM) is before
    assert (outcome.code, outcome.err) == (ExitCode.TERMINATED, "error: Terminated.\n")
    assert outcome.document["error"]["code"] == ExitCode.TERMINATED


def test_there_is_never_a_second_document(invoke: Invoke) -> None:
    outcome = invoke("raising", "bevctl", "--document", "--json")
    assert outcome.code == 4
    assert outcome.document["status"] == "ok"
    assert "The run failed." in outcome.err


def test_an_unknown_command_gets_a_suggestion(invoke: Invoke) -> None:
    outcome = invoke("confg")
    assert outcome == Outcome(2, "", "error: No command 'confg'.\n  Did you mean 'config'?\n")


def test_an_unknown_option_gets_a_suggestion(invoke: Invoke) -> None:
    outcome = invoke("config", "show", "--orign")
    assert outcome.code == 2
    assert "--origin" in outcome.err


def test_global_options_work_before_and_after_the_command(invoke: Invoke) -> None:
    note = "No CONFIG given: using the packaged config"
    assert note in invoke("config", "show").err
    for quiet in (("-q", "config", "show"), ("config", "-q", "show"), ("config", "show", "--quiet")):
        assert invoke(*quiet).err == ""


def test_global_options_set_the_console() -> None:
    console = Console(io.StringIO(), io.StringIO())
    assert run(["-vv", "--color", "never", "raising", "0"], console) == 0
    assert (console.verbose, console.color, console.quiet, console.debug) == (2, "never", False, False)


def test_errors_are_coloured_on_request(invoke: Invoke) -> None:
    assert "\x1b[" in invoke("--color", "always", "raising", "bevctl").err
    assert "\x1b[" not in invoke("raising", "bevctl").err


def commands_of(command: click.Command, path: str) -> list[tuple[str, click.Command]]:
    below = getattr(command, "commands", {})
    found = [] if below else [(path, command)]
    for name, inner in below.items():
        found.extend(commands_of(inner, f"{path} {name}"))
    return found


def every_command() -> list[tuple[str, click.Command]]:
    context = click.Context(program)
    found = []
    for name in COMMANDS:
        command = program.get_command(context, name)
        assert command is not None
        found.extend(commands_of(command, name))
    return found


def test_every_command_keeps_the_common_contract() -> None:
    for path, command in every_command():
        options = {name for parameter in command.params for name in parameter.opts}
        assert {"--color", "-q", "-v", "--debug", "--json"} <= options, path
        assert command.help, path
        if "--set" in options:
            assert isinstance(command, ConfigCommand), f"{path} takes --set but not --a.b.c"
            assert "--device" in options, path


def bevctl_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "COLUMNS": "100", **environment}
    return subprocess.run(
        [sys.executable, "-m", "bevctl", *arguments], capture_output=True, env=environment, check=False
    )


def test_as_a_process_it_survives_a_reader_that_leaves() -> None:
    script = f"{sys.executable} -m bevctl config show tiny --origin | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=False)
    assert done.returncode in (ExitCode.PIPE_CLOSED, ExitCode.OK)
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("redirection", "code"), [(">/dev/full", 4), ("--json >/dev/full", 4), (">&-", 0), (">&- 2>&-", 0)]
)
def test_as_a_process_it_survives_a_stdout_that_takes_nothing(redirection: str, code: int) -> None:
    script = f"{sys.executable} -m bevctl config show tiny {redirection}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert ("No space left on device" in done.stderr) is (code == 4)


def test_as_a_process_it_writes_to_an_ascii_terminal() -> None:
    done = bevctl_process("config", "show", "tiny", "--set", "name=größe", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0
    assert b"gr\\xf6\\xdfe" in done.stdout


def test_completion_knows_commands_and_options() -> None:
    done = bevctl_process(_BEVCTL_COMPLETE="bash_complete", COMP_WORDS="bevctl config sh", COMP_CWORD="2")
    assert done.stdout.split() == [b"plain,show"]
    assert b"complete" in bevctl_process(_BEVCTL_COMPLETE="zsh_source").stdout
