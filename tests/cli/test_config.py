"""`bevctl config show`, and how options, --set and the environment reach a config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bevctl.cli.main import COMMANDS
from bevctl.cli.overrides import spell_out_overrides
from bevctl.config.load import from_dict, load, to_dict
from bevctl.errors import BevctlError
from tests.conftest import Outcome

Invoke = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def _with_test_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "configured", ("tests.cli.configured", "Show values."))


def test_show_prints_the_resolved_config(invoke: Invoke) -> None:
    outcome = invoke("config", "show", "tiny", "--set", "train.batch=7")
    assert (outcome.code, outcome.err) == (0, "")
    assert from_dict(yaml.safe_load(outcome.out)) == load("tiny", sets=["train.batch=7"]).config


def test_show_says_where_values_come_from(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("base: tiny\ntrain:\n  batch: 7\n")
    out = invoke("config", "show", "my.yaml", "--origin", "--device", "cpu").out
    lines = {line.split(":")[0].strip(): line for line in out.splitlines()}
    assert lines["batch"].endswith("# my.yaml:3")
    assert "tiny.yaml:" in lines["info_train"]
    assert lines["device"].endswith("# --device")
    assert lines["ema"].endswith("# default")


def test_show_as_json(invoke: Invoke) -> None:
    document = invoke("config", "show", "tiny", "--json").document
    assert document["schema"] == "bevctl.config/1"
    assert document["status"] == "ok"
    assert document["config"] == to_dict(load("tiny").config)
    assert document["origins"]["train.ema"] == "default"


def test_without_config_the_default_is_said_on_stderr(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = invoke("config", "show")
    assert outcome.err == "No CONFIG given: using the packaged config bevfusion_multitask_fp16.\n"
    Path("bevctl.yaml").write_text("seed: 77")
    outcome = invoke("config", "show")
    assert outcome.err == "No CONFIG given: using bevctl.yaml of this folder.\n"
    assert "seed: 77" in outcome.out


def test_a_wrong_config_is_a_usage_error_with_line(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("train:\n  bacth: 7\n")
    expected = "error: my.yaml:2: unknown key 'train.bacth'.\n  Did you mean 'train.batch'?\n"
    assert invoke("config", "show", "my.yaml") == Outcome(2, "", expected)
    assert invoke("config", "show", "my.yaml", "--json").document["error"]["code"] == 2


class TestPrecedence:
    """`configured` prints batch, dtype, log_interval, warmup, device and lr."""

    def test_the_config_alone(self, invoke: Invoke) -> None:
        assert invoke("configured", "tiny").out == "2 auto 10 20 auto 0.001\n"

    def test_options(self, invoke: Invoke) -> None:
        outcome = invoke("configured", "tiny", "--batch", "3", "--fp16", "--warmup", "5", "--device", "cpu")
        assert outcome.out == "3 fp16 10 5 cpu 0.001\n"

    def test_environment_below_set_below_option(self, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BEVCTL_CONFIGURED_BATCH", "11")
        monkeypatch.setenv("BEVCTL_CONFIGURED_LOG_INTERVAL", "12")
        monkeypatch.setenv("BEVCTL_CONFIGURED_DEVICE", "cuda")
        outcome = invoke("configured", "tiny", "--set", "train.batch=13", "--device", "cpu")
        assert outcome.out == "13 auto 12 20 cpu 0.001\n"
        assert outcome.err == ""
        outcome = invoke("configured", "tiny", "--set", "train.batch=13", "--batch", "14")
        assert outcome.out.startswith("14 ")
        assert outcome.err == "--batch overrides --set train.batch=13.\n"

    def test_a_wrong_variable_is_named(self, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BEVCTL_CONFIGURED_LOG_INTERVAL", "0")
        outcome = invoke("configured", "tiny")
        assert outcome.code == 2
        assert outcome.err.startswith("error: BEVCTL_CONFIGURED_LOG_INTERVAL: train.log_interval must be at least 1")

    def test_options_that_contradict_each_other(self, invoke: Invoke) -> None:
        outcome = invoke("configured", "tiny", "--fp16", "--fp32")
        assert outcome.code == 2
        assert outcome.err.startswith("error: --fp16 and --fp32 contradict each other.")

    def test_an_option_beats_a_contradicting_variable(self, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BEVCTL_CONFIGURED_FP16", "1")
        assert invoke("configured", "tiny").out.startswith("2 fp16 ")
        assert invoke("configured", "tiny", "--fp32").out.startswith("2 fp32 ")

    def test_what_an_option_brings_along_ranks_as_the_option_does(
        self, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rule = ("--set", "optim.lr_scaling=sqrt", "--set", "optim.base_lr=2e-5", "--set", "optim.base_batch=8")
        monkeypatch.setenv("BEVCTL_CONFIGURED_LR", "0.5")
        assert invoke("configured", "tiny", "-v").err.startswith("none ")
        assert invoke("configured", "tiny", "-v", *rule, "--set", "optim.lr=0.25").err.startswith("sqrt ")
        outcome = invoke("configured", "tiny", "-v", *rule, "--lr", "0.125")
        assert outcome.out == "2 auto 10 20 auto 0.125\n"
        assert outcome.err.splitlines() == ["--lr overrides --set optim.lr_scaling=sqrt.", "none 1"]

    def test_what_an_option_brings_along_may_contradict_another(self, invoke: Invoke) -> None:
        assert invoke("configured", "tiny", "--lr", "1", "--lr-scaling", "none").code == 0
        outcome = invoke("configured", "tiny", "--lr", "1", "--lr-scaling", "sqrt")
        assert outcome.code == 2
        assert outcome.err.startswith("error: --lr and --lr-scaling contradict each other.")

    def test_an_option_may_mean_another_value_than_it_has(self, invoke: Invoke) -> None:
        assert invoke("configured", "tiny", "-v", "--twice", "2").err == "none 4\n"

    def test_a_wrong_option_value_is_named(self, invoke: Invoke) -> None:
        outcome = invoke("configured", "tiny", "--batch", "0")
        assert outcome.code == 2
        assert outcome.err.startswith("error: --batch: train.batch must be at least 1, not '0'.")


class TestOverrides:
    @pytest.mark.parametrize(
        "arguments",
        [
            ("--optim.lr", "3e-4"),
            ("--optim.lr=3e-4",),
            ("--cfg-options", "optim.lr=3e-4"),
            ("--cfg-options", "train.batch=2", "optim.lr=3e-4"),
            ("--cfg-options=optim.lr=3e-4",),
            ("--set", "optim.lr=1", "--optim.lr", "3e-4"),
            ("--optim.lr", "1", "--set", "optim.lr=3e-4"),
        ],
    )
    def test_forms_of_other_launchers(self, invoke: Invoke, arguments: tuple[str, ...]) -> None:
        for order in (("tiny", *arguments), (*arguments, "--warmup", "20", "tiny")):
            outcome = invoke("configured", *order)
            assert outcome.err == ""
            assert outcome.out == "2 auto 10 20 auto 0.0003\n"

    def test_a_name_without_a_dot_is_a_misspelt_option(self, invoke: Invoke) -> None:
        outcome = invoke("configured", "tiny", "--bacth", "3")
        assert outcome.code == 2
        assert "No such option '--bacth'" in outcome.err
        assert "--batch" in outcome.err

    def test_an_unknown_key_is_an_error(self, invoke: Invoke) -> None:
        outcome = invoke("configured", "tiny", "--model.encoders.camera", "3")
        assert outcome.code == 2
        assert "unknown key 'model.encoders'" in outcome.err

    def test_a_missing_value_is_an_error(self, invoke: Invoke) -> None:
        outcome = invoke("configured", "tiny", "--optim.lr")
        assert (outcome.code, outcome.err.splitlines()[0]) == (2, "error: --optim.lr has no value.")

    @pytest.mark.parametrize(
        ("arguments", "spelled"),
        [
            (["a", "--x.y", "-1"], ["a", "--set", "x.y=-1"]),
            (["--x.y="], ["--set", "x.y="]),
            (["--x.y=a=b"], ["--set", "x.y=a=b"]),
            (["--", "--x.y", "1"], ["--", "--x.y", "1"]),
            (["--cfg-options", "a.b=1", "c=2", "tiny"], ["--set", "a.b=1", "--set", "c=2", "tiny"]),
            (["--cfg-options"], ["--cfg-options"]),
            (["--html", "a.html", "-x.y"], ["--html", "a.html", "-x.y"]),
        ],
    )
    def test_spelling_out(self, arguments: list[str], spelled: list[str]) -> None:
        assert spell_out_overrides(arguments) == spelled

    @given(st.lists(st.sampled_from(["tiny", "--batch", "3", "--set", "a.b=1", "--x", "-q", "a.yaml", "--a.=1"])))
    def test_what_is_no_override_is_left_alone(self, arguments: list[str]) -> None:
        before = list(arguments)
        assert spell_out_overrides(arguments) == before
        assert arguments == before

    def test_spelling_out_refuses_a_missing_value(self) -> None:
        with pytest.raises(BevctlError, match=r"--x\.y has no value"):
            spell_out_overrides(["--x.y"])


def test_show_says_what_a_config_of_another_project_asks_for(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.py").write_text("fp16 = dict(loss_scale=512.)\n")
    Path("petr_8xb1.py").write_text(
        "_base_ = 'base.py'\nimport os\nmodel = dict(type='A', bbox_head=dict(type='PETRHead'))\n"
        "data = dict(samples_per_gpu=1, workers_per_gpu=4, train=dict(ann_file='d/train.pkl'))\n"
        "optimizer = dict(lr=2e-4)\nlr_config = dict(policy='CosineAnnealing')\nload_from = 'ckpts/a.pth'\n"
        "if os.environ.get('X'):\n    y = 1\n"
    )
    outcome = invoke("config", "show", "petr_8xb1.py", "--set", "runner.max_epochs=3", "--json")
    assert outcome.code == 0
    assert "petr_8xb1.py:8: not worked out" in outcome.err
    document = outcome.document
    assert document["config"] == {
        "kind": "mmcv",
        "precision": "FP16 is on: fp16 is set, loss scale fixed at 512",
        "batch_per_gpu": 1,
        "workers_per_gpu": 4,
        "lr": 2e-4,
        "lr_made_for_batch": 8,
        "schedule": "CosineAnnealing",
        "epochs": 3,
        "heads": {"bbox_head": "PETRHead"},
        "data": ".",
        "info_files": {"train": "d/train.pkl"},
        "load_from": "ckpts/a.pth",
    }
    assert document["origins"]["precision"] == "base.py:1"
    assert document["origins"]["epochs"] == "as asked for"
    text = invoke("config", "show", "petr_8xb1.py").out
    assert "precision: FP16 is on: fp16 is set, loss scale fixed at 512  (base.py:1)\n" in text
    assert "info_files: train d/train.pkl\n" in text
