"""The runner: what a check does never gets out, every check is listed, and the worst decides."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import pytest

from bevctl.errors import BevctlError, ExitCode
from bevctl.finding import Check, CheckStatus
from bevctl.preflight.checks import (
    SECTIONS,
    CheckSpec,
    Context,
    Outcome,
    Unfinished,
    all_checks,
    failed,
    passed,
    skipped,
    unknown,
    warned,
)
from bevctl.preflight.run import Report, Selection, run_checks, run_one
from bevctl.preflight.text import report_lines, summary
from tests.preflight.conftest import MakeContext


def spec(function: Callable[[Context], Outcome], id: str = "TEST001", **fields: bool) -> CheckSpec:
    return CheckSpec(id, "a test", function, why="it matters", required="the usual", **fields)


def report(*statuses: str, advisory: bool = False) -> Report:
    return Report(
        tuple(
            Check(f"TEST{number:03d}", "a test", "gpu", CheckStatus(status), "found", advisory=advisory)
            for number, status in enumerate(statuses)
        )
    )


def test_the_table_has_every_section_and_no_id_twice() -> None:
    table = all_checks()
    assert tuple(table) == SECTIONS
    ids = [spec.id for specs in table.values() for spec in specs]
    assert len(set(ids)) == len(ids) > 20


def test_every_check_says_what_it_is_for() -> None:
    for check in itertools.chain.from_iterable(all_checks().values()):
        assert check.name
        assert check.why, check.id
        assert check.function.__doc__, check.id


def test_an_outcome_becomes_a_check_with_what_the_spec_knows(make_context: MakeContext) -> None:
    table = {"gpu": (spec(lambda _: failed("two", "Add one.", required="three")),)}
    (check,) = run_checks(table, make_context(), Selection()).checks
    assert check == Check("TEST001", "a test", "gpu", CheckStatus.FAIL, "two", "three", "it matters", "Add one.")


def test_what_a_check_requires_stands_in_its_spec_unless_the_outcome_says_more(make_context: MakeContext) -> None:
    (check,) = run_checks({"gpu": (spec(lambda _: passed("fine")),)}, make_context(), Selection()).checks
    assert check.required == "the usual"


def test_a_check_that_raises_is_unknown_with_its_sentence(make_context: MakeContext) -> None:
    def broken(_: Context) -> Outcome:
        raise OSError(5, "Input/output error\non two lines")

    outcome = run_one(spec(broken), make_context())
    assert outcome.status == CheckStatus.UNKNOWN
    assert "OSError" in outcome.found
    assert "\n" not in outcome.found


def test_a_check_that_hangs_is_cut_off_and_keeps_nothing_waiting(make_context: MakeContext) -> None:
    release = threading.Event()

    def hang(_: Context) -> Outcome:
        release.wait(60)
        return passed("too late")

    started = time.monotonic()
    table = {"gpu": (spec(hang), spec(lambda _: passed("next"), "TEST002"))}
    first, second = run_checks(table, make_context(timeout=0.1), Selection()).checks
    release.set()
    assert time.monotonic() - started < 5
    assert (first.status, second.status) == (CheckStatus.UNKNOWN, CheckStatus.PASS)
    assert "0.1 s" in first.found
    assert "--timeout" in first.fix


def test_shared_work_is_done_once_and_its_error_is_shared(make_context: MakeContext) -> None:
    calls = []

    def work(_: Context) -> int:
        calls.append(1)
        return 7

    def broken(_: Context) -> int:
        calls.append(1)
        raise BevctlError("It broke.")

    context = make_context()
    assert (context.once(work), context.once(work)) == (7, 7)
    for _ in range(2):
        with pytest.raises(BevctlError, match="It broke"):
            context.once(broken)
    assert len(calls) == 2


def test_shared_work_that_hangs_hangs_one_check_only(make_context: MakeContext) -> None:
    release = threading.Event()

    def work(_: Context) -> bool:
        return release.wait(60)

    def use(context: Context) -> Outcome:
        return passed(str(context.once(work)))

    context = make_context(timeout=0.1)
    first, second = run_one(spec(use), context), run_one(spec(use), context)
    release.set()
    assert "no answer" in first.found
    assert Unfinished.__name__ in second.found


@pytest.mark.parametrize(
    ("statuses", "status", "code", "code_on_warn"),
    [
        ((), "pass", 0, 0),
        (("pass", "skip"), "pass", 0, 0),
        (("skip",), "pass", 0, 0),
        (("pass", "warn"), "warn", 0, 1),
        (("warn", "unknown"), "unknown", 3, 3),
        (("unknown", "fail", "warn"), "fail", 1, 1),
    ],
)
def test_the_worst_decides(statuses: tuple[str, ...], status: str, code: int, code_on_warn: int) -> None:
    found = report(*statuses)
    assert found.status == status
    assert found.exit_code("fail") == code
    assert found.exit_code("warn") == code_on_warn


@pytest.mark.parametrize(("status", "expected"), [("unknown", "pass"), ("warn", "warn"), ("fail", "fail")])
def test_an_advisory_check_decides_nothing_when_unknown(status: str, expected: str) -> None:
    assert report("pass", status, advisory=True).status == expected


def test_checks_left_out_are_listed_with_the_reason(make_context: MakeContext) -> None:
    def never(_: Context) -> Outcome:
        raise AssertionError("it was not to run")

    table = {
        "gpu": (spec(never, "GPU900"), spec(lambda _: passed("ran"), "GPU901")),
        "system": (spec(never, "SYS900"), spec(never, "SYS901", deep=True)),
    }
    only = run_checks(table, make_context(), Selection(only=["gpu901"]))
    assert [(c.id, c.status.value) for c in only.checks] == [
        ("GPU900", "skip"),
        ("GPU901", "pass"),
        ("SYS900", "skip"),
        ("SYS901", "skip"),
    ]
    assert "--only" in only.checks[0].found
    skip = run_checks(table, make_context(), Selection(skip=["GPU900", "sys900"]))
    assert [check.status.value for check in skip.checks] == ["skip", "pass", "skip", "skip"]
    assert "--deep" in skip.checks[3].found


def test_at_the_start_of_a_run_the_slow_ones_are_left_out(make_context: MakeContext) -> None:
    table = {"gpu": (spec(lambda _: passed("ran"), at_start=False),)}
    (check,) = run_checks(table, make_context(), Selection(at_start=True)).checks
    assert check.status == CheckStatus.SKIP


def test_a_deep_check_runs_with_deep(make_context: MakeContext) -> None:
    table = {"gpu": (spec(lambda _: passed("ran"), deep=True),)}
    assert run_checks(table, make_context(deep=True), Selection()).checks[0].status == CheckStatus.PASS


def test_sections_and_ids_can_be_named_and_a_typo_is_answered() -> None:
    table = {"gpu": (spec(lambda _: passed("")),)}
    Selection(only=["GPU", "test001"], skip=["gpu"]).validate(table)
    with pytest.raises(BevctlError) as caught:
        Selection(only=["TEST010"]).validate(table)
    assert "'TEST001'" in caught.value.hint
    assert caught.value.code == ExitCode.USAGE


def test_the_text_explains_what_is_wrong_and_ends_with_the_verdict(make_context: MakeContext) -> None:
    table = {
        "gpu": (
            spec(lambda _: failed("bad", "Do this."), "GPU900"),
            spec(lambda _: skipped("no GPU"), "GPU901"),
            spec(lambda _: skipped("no GPU"), "GPU902"),
        ),
        "system": (spec(lambda _: unknown("dark", advisory=True), "SYS900"), spec(lambda _: passed("fine"), "SYS901")),
    }
    lines = list(report_lines(run_checks(table, make_context(), Selection())))
    assert [line.split()[0] for line in lines] == [
        "gpu", "FAIL", "needed", "why", "fix", "-", "system", "?", "ok", "FAIL:",
    ]  # fmt: skip
    assert lines[4].endswith("Do this.")
    assert "GPU901 to GPU902: no GPU" in lines[5]
    assert "1 failed, 1 unknown, 1 passed, 2 skipped" in lines[-1]
    assert "GPU900" in lines[-1]


def test_a_report_without_trouble_is_one_line_of_counts() -> None:
    assert summary(report("pass", "pass", "skip")) == "PASS: 2 passed, 1 skipped"


def test_a_warning_is_explained(make_context: MakeContext) -> None:
    table = {"gpu": (spec(lambda _: warned("odd", "Look.")),)}
    assert any("Look." in line for line in report_lines(run_checks(table, make_context(), Selection())))
