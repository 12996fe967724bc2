"""The GPU checks against simulated cards: each where it passes, and where it does not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from bevctl.finding import Check, CheckStatus
from bevctl.measure import memory, memory_inputs
from bevctl.ops import backend
from bevctl.preflight import gpu, gpu_compute, gpu_health, gpu_memory, gpu_probe, needs
from bevctl.preflight.checks import Context
from bevctl.preflight.gpu_compute import TorchBuild
from bevctl.preflight.needs import StepNeed
from bevctl.preflight.nvml import NotReported
from bevctl.preflight.run import Selection, run_checks
from tests.preflight import fake_nvml
from tests.preflight.conftest import MakeContext
from tests.preflight.fake_nvml import GIB, FakeCard, Refusal, a100_mig, h200, lost, silent, t4, v100s

MODERN = TorchBuild("2.14.1", "13.0", ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"))
CUDA_12 = TorchBuild("2.7.1", "12.6", ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"))
WORK = ("matrix product", "convolution", "bev_pool")

CheckAll = Callable[..., dict[str, Check]]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, make_context: MakeContext) -> CheckAll:
    """Runs all GPU checks on the given cards; `build` is the torch that is installed, `work` what its launches say."""

    def run(
        *cards: FakeCard,
        sets: tuple[str, ...] = (),
        build: TorchBuild = CUDA_12,
        work: dict[int, dict[str, str]] | None = None,
        init: int = 0,
        cuda: int = 12080,
        log: list[str] | None = None,
        need: tuple[int, int] = (4 * GIB, 5 * GIB),
        **options: Any,
    ) -> dict[str, Check]:
        fake_nvml.install(monkeypatch, *cards, init=init, cuda=cuda)

        def probe(context: Context) -> dict[str, Any]:
            count = context.gpus or 1
            devices = [(work or {}).get(i, dict.fromkeys(WORK, "")) for i in range(min(count, len(cards)))]
            return {"reason": "", "devices": devices}

        monkeypatch.setattr(gpu_compute, "probe", probe)
        monkeypatch.setattr(gpu_compute, "torch_build", lambda _: build)
        monkeypatch.setattr(gpu_health, "kernel_log", lambda: [] if log is None else log)
        monkeypatch.setattr(gpu_memory, "gpu_state_bytes", lambda _: 2 * GIB)
        monkeypatch.setattr(gpu_memory, "step_bytes", lambda _: StepNeed(*need))
        report = run_checks({"gpu": gpu.CHECKS}, make_context(*sets, **options), Selection())
        return {found.id: found for found in report.checks}

    return run


def statuses(checks: dict[str, Check]) -> set[str]:
    return {check.status.value for check in checks.values()}


def test_a_healthy_h200_passes_everything(check: CheckAll) -> None:
    checks = check(h200(), h200(), gpus=2)
    assert statuses(checks) == {"pass"}
    assert "GPU 0, 1: NVIDIA H200" in checks["GPU001"].found
    assert "139.5 GiB of 140.0 GiB free" in checks["GPU007"].found


def test_the_predicted_step_against_what_is_free(check: CheckAll) -> None:
    found = check(h200(), need=(100 * GIB, 120 * GIB))["GPU017"]
    assert (found.status.value, found.required) == (
        "pass",
        "100.0 GiB predicted for a step, 120.0 GiB with large samples",
    )
    large = check(h200(), need=(100 * GIB, 160 * GIB))["GPU017"]
    assert (large.status.value, "large samples may not fit" in large.found) == ("warn", True)
    assert check(h200(), need=(150 * GIB, 160 * GIB))["GPU017"].status.value == "fail"


def test_the_prediction_is_that_of_the_memory_command(make_context: MakeContext) -> None:
    context = make_context("model.camera=null", "model.map=null", "precision.dtype=fp16")
    need = needs.step_bytes(context)
    assert needs.CUDA_CONTEXT < need.typical <= need.large


@pytest.mark.parametrize(("capability", "plain"), [((7, 0), True), ((8, 0), False), (NotReported("no"), False)])
def test_the_prediction_for_a_card_without_kernels_is_that_of_plain_torch(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch, capability: object, plain: bool
) -> None:
    asked: list[bool] = []

    class Predictor:
        def __init__(self, *_: object) -> None:
            asked.append(backend.is_plain())

        def need(self, *_: object) -> SimpleNamespace:
            return SimpleNamespace(device=1)

    monkeypatch.setattr(memory, "Predictor", Predictor)
    monkeypatch.setattr(memory_inputs, "sample_sizes", lambda *_, **__: SimpleNamespace(typical=None, p99=None))
    monkeypatch.setattr(needs, "gpus_in_use", lambda _: SimpleNamespace(used=[SimpleNamespace(capability=capability)]))
    needs.step_bytes(make_context("model.camera=null", "model.map=null"))
    assert asked == [plain, plain]


@pytest.mark.parametrize("card", [v100s, t4])
def test_older_cards_pass_with_a_build_that_has_their_kernels(check: CheckAll, card: Callable[[], FakeCard]) -> None:
    checks = check(card(), sets=("precision.dtype=fp16",))
    assert statuses(checks) == {"pass", "skip"}
    assert checks["GPU011"].found == "GPU 0: no page waits to be retired"


def test_volta_with_the_default_build_gets_the_exact_install_line(check: CheckAll) -> None:
    found = check(v100s(), build=MODERN, cuda=13000)["GPU004"]
    assert found.status == CheckStatus.FAIL
    assert "no kernels for sm_70" in found.found
    assert "pip install 'torch>=2.4,<2.8'" in found.fix
    assert "pip install torch --index-url https://download.pytorch.org/whl/cu126" in found.fix


@pytest.mark.parametrize(
    ("capability", "arch_list", "status"),
    [
        ((8, 6), ("sm_80",), "pass"),  # the same major version, an older minor
        ((8, 0), ("sm_86",), "fail"),
        ((8, 9), ("sm_70", "sm_75", "sm_80", "sm_86"), "pass"),
        ((9, 0), ("sm_90a",), "pass"),
        ((10, 0), ("sm_90a",), "fail"),  # code for one card only
        ((12, 0), ("sm_80", "compute_80"), "warn"),  # PTX, compiled at the first start
        ((6, 1), ("sm_70", "compute_70"), "fail"),
        ((12, 0), ("sm_80", "sm_90"), "fail"),
    ],
)
def test_which_architectures_serve_a_card(
    check: CheckAll, capability: tuple[int, int], arch_list: tuple[str, ...], status: str
) -> None:
    card = h200(capability=capability)
    assert check(card, build=TorchBuild("2.8.0", "12.8", arch_list))["GPU004"].status == status


def test_a_torch_for_the_cpu_is_told(check: CheckAll) -> None:
    checks = check(h200(), build=TorchBuild("2.9.0+cpu", None, ()))
    assert checks["GPU004"].status == CheckStatus.FAIL
    assert "CPU only" in checks["GPU004"].found
    assert checks["GPU005"].status == CheckStatus.SKIP


def test_a_card_before_volta_fails(check: CheckAll) -> None:
    found = check(h200(name="Tesla P100", capability=(6, 0)))["GPU002"]
    assert found.status == CheckStatus.FAIL
    assert "Tesla P100, 6.0" in found.found


@pytest.mark.parametrize(
    ("card", "precision", "status", "words"),
    [
        (v100s, "bf16", "fail", "--fp16"),
        (t4, "bf16", "fail", "--fp16"),
        (h200, "bf16", "pass", ""),
        (v100s, "fp16", "pass", ""),
        (lambda: h200(capability=(6, 1)), "fp16", "fail", "--fp32"),
        (lambda: h200(capability=(6, 1)), "fp32", "pass", ""),
        (v100s, "auto", "pass", ""),
    ],
)
def test_precision_is_judged_by_capability(
    check: CheckAll, card: Callable[[], FakeCard], precision: str, status: str, words: str
) -> None:
    found = check(card(), sets=(f"precision.dtype={precision}",))["GPU003"]
    assert found.status == status
    assert words in found.fix


def test_automatic_precision_is_named(check: CheckAll) -> None:
    found = check(v100s(), h200(), sets=("precision.dtype=auto",), gpus=2)["GPU003"].found
    assert found == "GPU 0: auto is fp16 here; GPU 1: auto is bf16 here"


@pytest.mark.parametrize(
    ("cuda", "build", "status"),
    [(12080, CUDA_12, "pass"), (12020, CUDA_12, "pass"), (12080, MODERN, "fail"), (13000, CUDA_12, "pass")],
)
def test_the_driver_has_to_be_of_the_runtimes_major_version(
    check: CheckAll, cuda: int, build: TorchBuild, status: str
) -> None:
    found = check(h200(), cuda=cuda, build=build)["GPU005"]
    assert found.status == status
    assert build.cuda is not None
    assert f"CUDA {build.cuda.split('.')[0]}.0 or newer" in found.required


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("CUDA error: no kernel image is available", "GPU004"),
        ("CUDA out of memory. Tried to allocate", "GPU008"),
        ("CUDA-capable device(s) is/are busy or unavailable", "GPU015"),
        ("wrong result: off by 3", "dmesg"),
    ],
)
def test_a_launch_that_fails_says_where_to_look(check: CheckAll, error: str, words: str) -> None:
    found = check(h200(), h200(), gpus=2, work={1: {"matrix product": "", "convolution": error}})["GPU006"]
    assert found.status == CheckStatus.FAIL
    assert f"GPU 1: convolution: {error}" in found.found
    assert "GPU 0: matrix product, convolution, bev_pool: right results" in found.found
    assert words in found.fix


def test_a_gpu_that_torch_does_not_see_fails(check: CheckAll, monkeypatch: pytest.MonkeyPatch) -> None:
    none: dict[str, Any] = {"reason": "the driver is too old", "devices": []}
    checks = check(h200())
    monkeypatch.setattr(gpu_compute, "probe", lambda _: none)
    context = Context(None, Path(), timeout=5)
    found = gpu_compute.launch(context)
    assert checks["GPU006"].status == CheckStatus.PASS
    assert found.status == CheckStatus.FAIL
    assert "the driver is too old" in found.found


def test_too_little_free_memory_fails(check: CheckAll) -> None:
    found = check(t4(free=1 * GIB))["GPU007"]
    assert found.status == CheckStatus.FAIL
    assert "1.0 GiB of 15.0 GiB free" in found.found
    assert "at least 2.0 GiB" in found.required
    assert "activations come on top" in found.required


def test_one_bad_gpu_does_not_hide_the_others(check: CheckAll) -> None:
    checks = check(h200(), lost(), h200(ecc_uncorrected=3), gpus=3)
    assert checks["GPU001"].status == CheckStatus.FAIL
    assert "GPU 1: does not answer" in checks["GPU001"].found
    assert "GPU 0, 2: NVIDIA H200" in checks["GPU001"].found
    assert checks["GPU002"].status == CheckStatus.UNKNOWN
    assert "GPU 0, 2: NVIDIA H200, 9.0" in checks["GPU002"].found
    assert checks["GPU010"].status == CheckStatus.UNKNOWN
    assert not checks["GPU010"].advisory
    assert "GPU 2: 3 uncorrected errors" in checks["GPU010"].found


def test_a_card_that_reports_nothing_decides_nothing(check: CheckAll) -> None:
    checks = check(silent(), sets=("precision.dtype=fp16",))
    silent_ones = {id for id, found in checks.items() if found.status == CheckStatus.UNKNOWN}
    assert silent_ones == {"GPU008", "GPU010", "GPU011", "GPU013", "GPU015"}
    assert all(checks[id].advisory for id in silent_ones)
    assert {checks[id].status.value for id in checks.keys() - silent_ones} <= {"pass", "skip"}


@pytest.mark.parametrize(
    ("id", "card", "status", "words"),
    [
        ("GPU010", h200(ecc_uncorrected=1), "warn", "1 uncorrected error "),
        ("GPU011", h200(remapped=(0, 1, 0, 1)), "fail", "could not be remapped"),
        ("GPU011", h200(remapped=(0, 1, 1, 0)), "warn", "waits for a reset"),
        ("GPU011", v100s(retired_pending=1), "warn", "waits to be retired"),
        ("GPU013", h200(clock_events=0x40, temperature=91), "warn", "hardware thermal slowdown at 91 °C"),
        ("GPU013", h200(clock_events=0x88), "warn", "power brake"),
        ("GPU013", h200(clock_events=0x04), "pass", "software power cap"),
        ("GPU013", h200(clock_events=0x01), "pass", "not throttled at 41 °C"),
        ("GPU014", a100_mig(), "warn", "2 instances; the run gets one, with 20.0 GiB"),
        ("GPU014", a100_mig(instances=[]), "fail", "without an instance"),
        ("GPU014", h200(), "pass", "off"),
        ("GPU014", v100s(), "pass", "no MIG on this card"),
        ("GPU015", h200(compute_mode=2), "fail", "prohibited"),
        ("GPU015", h200(compute_mode=3), "pass", "exclusive, and free"),
        ("GPU015", h200(compute_mode=3, processes=[(999999999, GIB)]), "fail", "pid 999999999 has it"),
        ("GPU008", h200(processes=[(999999999, GIB)]), "warn", "pid 999999999 (of another container"),
    ],
)
def test_the_health_of_a_card(check: CheckAll, id: str, card: FakeCard, status: str, words: str) -> None:
    found = check(card)[id]
    assert (found.status.value, found.section) == (status, "gpu")
    assert words in found.found
    assert bool(found.fix) == (status != "pass")


def test_several_gpus_cannot_train_in_mig_mode(check: CheckAll) -> None:
    assert check(a100_mig(), a100_mig(), gpus=2)["GPU014"].status == CheckStatus.FAIL


def test_memory_in_mig_mode_is_that_of_the_instance(check: CheckAll, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "19.0 GiB of 20.0 GiB free" in check(a100_mig())["GPU007"].found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-bbbb")
    assert "9.0 GiB of 10.0 GiB free" in check(a100_mig())["GPU007"].found


def test_access_between_gpus(check: CheckAll) -> None:
    assert check(h200(), h200())["GPU016"].status == CheckStatus.SKIP
    found = check(h200(), h200(), gpus=2)["GPU016"]
    assert (found.status.value, found.found) == ("pass", "GPU 0, 1: direct access to all others; 18 NVLinks active")
    blocked = check(h200(peer=3, nvlinks=0), h200(peer=3, nvlinks=0), gpus=2)["GPU016"]
    assert blocked.status == CheckStatus.WARN
    assert "GPU 0: no direct access to GPU 1: topology not supported; 0 NVLinks active" in blocked.found
    unsupported = check(silent(), silent(), gpus=2)["GPU016"]
    assert (unsupported.status.value, unsupported.advisory) == ("unknown", True)


XID = "6,1,99,-;NVRM: Xid (PCI:0000:3b:00): {}, pid=1234, name=python"


@pytest.mark.parametrize(
    ("log", "status", "words"),
    [
        ([], "pass", "no Xid"),
        ([XID.format(79)], "warn", "Xid 79 (fell off the bus)"),
        ([XID.format(31)], "pass", "only Xids that programs cause: 31"),
        ([XID.replace("3b:00", "af:00").format(79)], "pass", "no Xid"),
        (["6,1,99,-;usb 1-1: new device"], "pass", "no Xid"),
    ],
)
def test_xids_of_the_kernel_log(check: CheckAll, log: list[str], status: str, words: str) -> None:
    found = check(h200(), log=log)["GPU012"]
    assert found.status == status
    assert words in found.found


def test_a_kernel_log_that_may_not_be_read_is_advisory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml.install(monkeypatch, h200())
    monkeypatch.setattr(gpu_health, "kernel_log", lambda: None)
    context = Context(None, Path(), timeout=5)
    (found,) = run_checks({"gpu": tuple(s for s in gpu.CHECKS if s.id == "GPU012")}, context, Selection()).checks
    assert (found.status.value, found.advisory) == ("unknown", True)


def test_the_kernel_log_is_found_in_a_file(tmp_path: Path) -> None:
    assert gpu_health.kernel_log(tmp_path) is None
    (tmp_path / "var/log").mkdir(parents=True)
    (tmp_path / "var/log/kern.log").write_text("first\nNVRM: Xid\n")
    assert gpu_health.kernel_log(tmp_path) == ["first", "NVRM: Xid"]


def test_the_run_uses_the_first_visible_gpus(check: CheckAll, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    found = check(h200(), lost(), t4(), gpus=1)["GPU001"]
    assert found.status == CheckStatus.PASS
    assert found.found.startswith("GPU 2: Tesla T4 (2 visible")


def test_gpus_of_different_models_are_mentioned(check: CheckAll) -> None:
    found = check(h200(), t4(), gpus=2)["GPU001"]
    assert found.status == CheckStatus.WARN
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in found.fix


def test_fewer_gpus_than_asked_for_fail(check: CheckAll) -> None:
    found = check(h200(), gpus=4)["GPU001"]
    assert found.status == CheckStatus.FAIL
    assert found.found.startswith("only 1:")
    assert found.required == "4 usable GPUs"


class TestWithoutGpu:
    """What is skipped and what fails where there is nothing to look at."""

    absent = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND

    def test_everything_is_skipped_where_nothing_is_there(self, check: CheckAll) -> None:
        checks = check(init=self.absent)
        assert statuses(checks) == {"skip"}
        assert "no NVIDIA driver" in checks["GPU001"].found

    def test_the_cpu_was_asked_for(self, check: CheckAll) -> None:
        checks = check(h200(), sets=("device=cpu",))
        assert statuses(checks) == {"skip"}
        assert "--device cpu" in checks["GPU001"].found

    @pytest.mark.parametrize("sets", [("device=cpu",), ()])
    def test_fp16_on_a_cpu_is_a_warning(self, check: CheckAll, sets: tuple[str, ...]) -> None:
        checks = check(sets=(*sets, "precision.dtype=fp16"), init=self.absent)
        assert checks["GPU003"].status == CheckStatus.WARN
        assert "emulates" in checks["GPU003"].found
        assert {found.status.value for id, found in checks.items() if id != "GPU003"} == {"skip"}

    def test_gpus_that_were_asked_for_and_are_absent_fail(self, check: CheckAll) -> None:
        assert check(init=self.absent, gpus=1)["GPU001"].status == CheckStatus.FAIL
        assert check(sets=("device=cuda",), init=self.absent)["GPU001"].status == CheckStatus.FAIL

    def test_a_driver_that_is_there_and_unusable_fails(self, check: CheckAll) -> None:
        checks = check(init=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, sets=("precision.dtype=fp16",))
        assert checks["GPU001"].status == CheckStatus.FAIL
        assert checks["GPU001"].fix
        assert {found.status.value for id, found in checks.items() if id != "GPU001"} == {"skip"}

    def test_a_driver_without_a_gpu_fails(self, check: CheckAll) -> None:
        assert check()["GPU001"].status == CheckStatus.FAIL

    def test_gpus_hidden_on_purpose_are_skipped(self, check: CheckAll, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        found = check(h200())["GPU001"]
        assert found.status == CheckStatus.SKIP
        assert "CUDA_VISIBLE_DEVICES='' hides every GPU" in found.found

    def test_a_count_that_fails_is_a_broken_driver(
        self, monkeypatch: pytest.MonkeyPatch, make_context: MakeContext
    ) -> None:
        fake_nvml.install(monkeypatch, h200())
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: fake_nvml.answer(Refusal(pynvml.NVML_ERROR_UNKNOWN)))
        assert gpu.presence(make_context()).status == CheckStatus.FAIL


class TestProbe:
    """The script that uses torch in a process of its own."""

    def test_it_tells_the_build_of_torch(self) -> None:
        import torch

        done = subprocess.run(
            [sys.executable, gpu_probe.__file__, "1", "float16"], capture_output=True, text=True, check=True
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith(gpu_probe.MARK)]
        build, launched = (json.loads(line.removeprefix(gpu_probe.MARK)) for line in lines)
        assert (build["version"], build["cuda"]) == (torch.__version__, torch.version.cuda)
        assert len(launched["devices"]) == min(1, torch.cuda.device_count())

    def test_a_launch_that_hangs_does_not_hide_how_torch_was_built(
        self, monkeypatch: pytest.MonkeyPatch, make_context: MakeContext, tmp_path: Path
    ) -> None:
        fake_nvml.install(monkeypatch, h200())
        build = {"version": "2.7.1", "cuda": "12.6", "arch_list": ["sm_90"], "reason": ""}
        exe = tmp_path / "python"
        exe.write_text(f"#!/bin/sh\necho '{gpu_probe.MARK}{json.dumps(build)}'\nexec sleep 60\n")
        exe.chmod(0o755)
        context = make_context(python=str(exe), timeout=1.0)
        found = run_checks({"gpu": gpu.CHECKS}, context, Selection(only=["GPU004", "GPU005", "GPU006"])).checks
        by_id = {check.id: check for check in found}
        assert [by_id[id].status.value for id in ("GPU004", "GPU005", "GPU006")] == ["pass", "pass", "unknown"]
        assert "did not come back" in by_id["GPU006"].found

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_every_piece_of_work_gives_the_result_of_the_cpu(self, dtype: str) -> None:
        import torch

        work = gpu_probe._launch_all(torch.device("cpu"), dtype, own=True)
        assert work == dict.fromkeys(("matrix product", "convolution", "bev_pool", "voxelize", "sparse_conv"), "")

    def test_a_wrong_result_is_told(self) -> None:
        import torch

        def piece(_: torch.device, dtype: torch.dtype) -> torch.Tensor:
            return torch.ones(3, dtype=dtype) * (1 if dtype == torch.float32 else 2)

        assert "off by 1 where values reach 1" in gpu_probe._launch(piece, torch.device("cpu"), "float16")

    def test_an_error_is_told_in_one_line(self) -> None:
        import torch

        def piece(*_: object) -> torch.Tensor:
            raise RuntimeError("CUDA error: no kernel image\nCompile with ...")

        assert gpu_probe._launch(piece, torch.device("cpu"), "float16") == "CUDA error: no kernel image"

    def test_an_interpreter_without_torch_is_unknown(
        self, monkeypatch: pytest.MonkeyPatch, make_context: MakeContext, tmp_path: Path
    ) -> None:
        fake_nvml.install(monkeypatch, h200())
        exe = tmp_path / "python"
        exe.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named torch' >&2\nexit 1\n")
        exe.chmod(0o755)
        checks = run_checks({"gpu": gpu.CHECKS}, make_context(python=str(exe)), Selection(only=["GPU004"])).checks
        found = next(check for check in checks if check.id == "GPU004")
        assert found.status == CheckStatus.UNKNOWN
        assert "No module named torch" in found.found
