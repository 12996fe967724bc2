"""What a config resolves to, where each value came from, and what a wrong one gets."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bevctl.config import document, foreign_python
from bevctl.config.load import DEFAULT, Given, Loaded, load
from bevctl.errors import BevctlError, ExitCode

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a config file below an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def call(text: str | bytes, name: str = "my.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return call


def refused(path: str | Path | None, sets: tuple[str, ...] = ()) -> BevctlError:
    with pytest.raises(BevctlError) as caught:
        load(path, sets=sets)
    assert caught.value.code == ExitCode.USAGE
    return caught.value


def origin(loaded: Loaded, key: str) -> str:
    return str(loaded.origins[key])


def test_values_and_their_lines(write: Write) -> None:
    loaded = load(write("# mine\ntrain:\n  batch: 3\noptim: {lr: 2e-4}\n"))
    assert loaded.config.train.batch == 3
    assert loaded.config.optim.lr == 2e-4
    assert origin(loaded, "train.batch") == "my.yaml:3"
    assert origin(loaded, "optim.lr") == "my.yaml:4"
    assert origin(loaded, "train.epochs") == "default"


def test_a_config_is_called_as_its_file(write: Write) -> None:
    assert load(write("seed: 1", "small.yaml")).config.name == "small"
    assert load(write("name: other", "small.yaml")).config.name == "other"


@pytest.mark.parametrize(
    ("text", "value"), [("2e-4", 2e-4), ("2E-4", 2e-4), ("1", 1.0), ("1_000", 1000.0), (".5", 0.5), ("1.0e-05", 1e-5)]
)
def test_numbers_as_people_write_them(write: Write, text: str, value: float) -> None:
    assert load(write(f"optim: {{lr: {text}}}")).config.optim.lr == value


def test_texts_that_yaml_would_turn_into_numbers_stay_texts(write: Write) -> None:
    config = load(write("name: 2026\nwork_dir: 1e3\nexpect: {loss: 2:30, mAP: '0.5:'}")).config
    assert config.name == "2026"
    assert config.work_dir == "1e3"
    assert config.expect == {"loss": "2:30", "mAP": "0.5:"}


def test_an_expected_range_may_be_a_list(write: Write) -> None:
    config = load(write("expect: {memory_gib: [18, 20], mAP: [0.5, null]}"), sets=["expect.grad_norm=10,20"]).config
    assert config.expect == {"memory_gib": "18:20", "mAP": "0.5:", "grad_norm": "10:20"}


def test_lists_become_tuples(write: Write) -> None:
    config = load(write("data:\n  classes:\n    - car\n    - bus\n  image: {resize: [1, 2e0]}")).config
    assert config.data.classes == ("car", "bus")
    assert config.data.image.resize == (1.0, 2.0)


def test_groups_are_read_as_dataclasses(write: Write) -> None:
    groups = load(write("optim: {groups: [{match: backbone, lr: 0.1}, {match: bias, decay: 0}]}")).config.optim.groups
    assert [(g.match, g.lr, g.decay) for g in groups] == [("backbone", 0.1, 1.0), ("bias", 1.0, 0.0)]


def test_the_loss_scale_is_a_number_or_dynamic(write: Write) -> None:
    assert load(write("precision: {loss_scale: 512}")).config.precision.loss_scale == 512.0
    assert load(write("precision: {loss_scale: dynamic}")).config.precision.loss_scale == "dynamic"
    for wrong in ("-1", "0", "fast"):
        error = refused(write(f"precision: {{loss_scale: {wrong}}}"))
        assert error.message.endswith(f"precision.loss_scale must be dynamic or a number above zero, not '{wrong}'.")


def test_a_section_is_closed_by_null_and_opened_by_a_mapping(write: Write) -> None:
    closed = load(write("model: {lidar: null, camera: {view: {kind: lss}}}"))
    assert closed.config.model.lidar is None
    assert origin(closed, "model.lidar") == "my.yaml:1"
    opened = load(write("model: {map: {}}"))
    assert opened.config.model.map is not None
    assert opened.config.model.map.loss == "focal"


def test_a_section_that_opens_again_starts_from_the_defaults(write: Write) -> None:
    write("model: {map: {loss: xent}}", "a.yaml")
    write("base: a\nmodel: {map: null}", "b.yaml")
    config = load("b.yaml", sets=["model.map.loss_weight=2"]).config
    assert config.model.map is not None
    assert (config.model.map.loss, config.model.map.loss_weight) == ("focal", 2.0)


class TestBase:
    def test_values_come_from_the_base_unless_given(self, write: Write) -> None:
        write("name: parent\ntrain: {batch: 3, workers: 1}", "sub/parent.yaml")
        loaded = load(write("base: parent.yaml\ntrain:\n  batch: 5", "sub/child.yaml"))
        assert (loaded.config.train.batch, loaded.config.train.workers) == (5, 1)
        assert origin(loaded, "train.batch") == "sub/child.yaml:3"
        assert origin(loaded, "train.workers") == "sub/parent.yaml:2"
        assert loaded.config.name == "child"

    def test_a_packaged_config_is_a_base_by_name(self, write: Write) -> None:
        assert load(write("base: bevfusion_det")).config.optim.lr == 2e-4

    def test_a_base_has_no_base(self, write: Write) -> None:
        write("seed: 1", "a.yaml")
        write("base: a", "b.yaml")
        assert "b.yaml: a base has no base of its own" in refused(write("base: b.yaml", "c.yaml")).message

    def test_a_config_is_not_its_own_base(self, write: Write) -> None:
        assert "a base has no base" in refused(write("base: a.yaml", "a.yaml")).message

    def test_a_missing_base_is_named_with_its_line(self, write: Write) -> None:
        error = refused(write("seed: 1\nbase: bevfusion_dat"))
        assert error.message == "my.yaml:2: base 'bevfusion_dat' was not found."
        assert error.hint == "Did you mean 'bevfusion_det'?"

    def test_errors_in_a_base_name_the_base(self, write: Write) -> None:
        write("\ntrain: {batch: 0}", "a.yaml")
        assert refused(write("base: a", "b.yaml")).message.startswith("a.yaml:2: train.batch must be at least 1")


class TestUnknownKeys:
    @pytest.mark.parametrize(
        ("text", "message", "hint"),
        [
            ("train:\n  bacth: 4", "my.yaml:2: unknown key 'train.bacth'.", "Did you mean 'train.batch'?"),
            ("\ntrian: {}", "my.yaml:2: unknown key 'trian'.", "Did you mean 'train'?"),
            ("lr: 1", "my.yaml:1: unknown key 'lr'.", "Did you mean 'optim.lr'?"),
            ("optim: {groups: [{mtch: a}]}", "my.yaml:1: unknown key 'mtch'.", "Did you mean 'match'?"),
            ("train: {<<: {batch: 1}}", "my.yaml:1: unknown key 'train.<<'.", None),
        ],
    )
    def test_each_is_named_with_line_and_suggestion(
        self, write: Write, text: str, message: str, hint: str | None
    ) -> None:
        error = refused(write(text))
        assert error.message == message
        assert hint is None or error.hint == hint

    def test_a_key_that_comes_twice(self, write: Write) -> None:
        error = refused(write("train:\n  batch: 1\n  workers: 2\n  batch: 2"))
        assert error.message == "my.yaml:4: key 'batch' comes twice (first in line 2)."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {batch: four}", "train.batch must be a whole number, not 'four'."),
        ("train: {batch: 4.5}", "train.batch must be a whole number, not '4.5'."),
        ("train: {batch: '4'}", "train.batch must be a whole number, not '4'."),
        ("train: {batch: true}", "train.batch must be a whole number, not 'true'."),
        ("train: {batch: null}", "train.batch must be a whole number, not null."),
        ("train: {batch: [1]}", "train.batch must be a whole number, not ['1']."),
        ("train: {batch: {a: 1}}", "train.batch must be a whole number, not a mapping."),
        ("train: {batch: 0}", "train.batch must be at least 1, not '0'."),
        ("data: {sweeps: 21}", "data.sweeps must be at most 20, not '21'."),
        ("optim: {lr: 0}", "optim.lr must be more than 0, not '0'."),
        ("optim: {lr: .nan}", "optim.lr must be a number, not '.nan'."),
        ("optim: {lr: nan}", "optim.lr must be a finite number, not 'nan'."),
        ("optim: {lr: 1e999}", "optim.lr must be a finite number, not '1e999'."),
        ("optim: {clip: no}", "optim.clip must be a number or null, not 'no'."),
        ("data: {augment: 1}", "data.augment must be true or false, not '1'."),
        ("device: gpu", "device must be one of auto, cpu, cuda, not 'gpu'."),
        ("data: {root: null}", "data.root must be text, not null."),
        ("data: {root: [a]}", "data.root must be text, not ['a']."),
        ("data: {root: !!python/name:os.system ''}", "data.root must be text, not ''."),
        ("data: {root: !thing x}", "data.root must be text, not 'x'."),
        ("data: {classes: car}", "data.classes must be a list, not 'car'."),
        ("data: {image: {resize: [1]}}", "data.image.resize must be a list of 2 values, not ['1']."),
        (
            "data: {image: {resize: [1, x]}}",
            "data.image.resize must be a list in which each value is a number, not ['1', 'x'].",
        ),
        ("optim: {groups: [a]}", "optim.groups must be a list in which each value is a mapping of match, lr, decay"),
        ("train: 4", "train is a section, not a value."),
        ("train: null", "train is a section, not a value."),
        ("model: {camera: swin}", "model.camera is a section, not a value."),
        ("expect: 3", "expect must be a mapping, not a value."),
    ],
)
def test_a_value_of_the_wrong_kind_is_shown_with_its_line(write: Write, text: str, message: str) -> None:
    assert refused(write("\n" + text)).message.startswith(f"my.yaml:2: {message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "my.yaml is empty."),
        (b"# only a comment\n", "my.yaml is empty."),
        (b"- 1\n- 2\n", "my.yaml holds no mapping."),
        (b"train: [1\n", "my.yaml:2: not valid YAML"),
        (b"a: b: c\n", "my.yaml:1: not valid YAML"),
        (b"a: 1\n--- \nb: 2\n", "my.yaml:2: not valid YAML"),
        (b"\x00\x01\x02", "my.yaml is not text that YAML allows."),
        (b"a: \xff\xfe\n", "my.yaml is not text that YAML allows."),
        (b"[" * 20_000, "my.yaml cannot be parsed as YAML."),
        (b"a: &x [*x]\n", "my.yaml:1: unknown key 'a'."),
        (b"train: &x {batch: *x}\n", "my.yaml:1: train.batch must be a whole number, not a mapping."),
        (b"data: {classes: &x [*x]}\n", "my.yaml:1: data.classes must be a list in which each value is text"),
        (b"? [a]\n: 1\n", "my.yaml:1: a key must be a word."),
        (b"#" * (document.MAX_BYTES + 1), "my.yaml is larger than 256 KiB."),
    ],
)
def test_a_file_that_is_no_config_gets_one_sentence(write: Write, content: bytes, message: str) -> None:
    assert refused(write(content)).message.startswith(message)


@pytest.mark.parametrize("read", [load, foreign_python.read_text])
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(BevctlError, match="is a pipe or a device, not a config file"):
            read(path)


def test_a_stream_that_is_open_already_is_a_config() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"train: {batch: 3}\n")
    os.close(writing)
    try:
        assert load(f"/dev/fd/{reading}").config.train.batch == 3
    finally:
        os.close(reading)


def attempt(path: Path) -> None:
    """Load a config that may be wrong; anything but a config or a BevctlError fails the test."""
    with suppress(BevctlError):
        load(path)


@settings(max_examples=60)
@given(data=st.binary(max_size=60))
def test_any_bytes_are_a_config_or_an_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "my.yaml"
    path.write_bytes(data)
    attempt(path)


words = st.sampled_from(
    ["null", "-1", "0", "1e-320", "9" * 5000, "[]", "{}", "[1, 2, 3]", "x", "'", "&a *a", "true", ".inf"]
)


@settings(max_examples=150)
@given(choice=st.integers(0, 10**6), word=words)
def test_any_value_replaced_is_a_config_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, choice: int, word: str
) -> None:
    text = document.packaged_folder().joinpath("tiny.yaml").read_text()
    spots = list(re.finditer(r"[\w.-]+(?=[,\]}\n])", text))
    spot = spots[choice % len(spots)]
    path = tmp_path_factory.mktemp("fuzz") / "my.yaml"
    path.write_text(text[: spot.start()] + word + text[spot.end() :])
    attempt(path)


def test_paths_that_cannot_be_read(write: Write, tmp_path: Path) -> None:
    write("seed: 1")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "folder: Is a directory" in refused(tmp_path / "folder").message
    assert "symbolic links" in refused(tmp_path / "loop").message
    assert refused("folder/absent.yaml").message == "Config file folder/absent.yaml does not exist."
    assert "name too long" in refused("x" * 5000).message
    assert "null byte" in refused("a\0b").message


def test_a_misspelt_name_gets_a_suggestion(write: Write) -> None:
    write("seed: 1")
    error = refused("bevfusion_multitask_fp61")
    assert "neither a file nor a packaged config" in error.message
    assert error.hint == "Did you mean 'bevfusion_multitask_fp16'?"


class TestPrecedence:
    def test_each_layer_beats_the_ones_below(self, write: Write) -> None:
        path = write("train: {batch: 2, workers: 2, epochs: 2, keep: 2}")
        loaded = load(
            path,
            environment={"train.workers": 3, "train.epochs": 3, "train.keep": Given(3, "BEVCTL_TRAIN_KEEP")},
            sets=["train.epochs=4", "train.log_interval=4"],
            options={"train.log_interval": Given(5, "--log-interval")},
        )
        train = loaded.config.train
        assert (train.batch, train.workers, train.epochs, train.log_interval, train.keep) == (2, 3, 4, 5, 3)
        assert origin(loaded, "train.keep") == "BEVCTL_TRAIN_KEEP"
        assert origin(loaded, "train.epochs") == "--set train.epochs=4"
        assert origin(loaded, "train.log_interval") == "--log-interval"

    def test_an_option_that_overrides_a_set_is_said(self, write: Write) -> None:
        options = {"train.batch": Given(3, "--batch"), "train.workers": Given(3, "--workers")}
        notes = load(write("train: {workers: 2}"), sets=["train.batch=2"], options=options).notes
        assert notes == ["--batch overrides --set train.batch=2."]

    def test_a_later_set_wins(self, write: Write) -> None:
        path = write("seed: 0")
        write("train: {batch: 7}\noptim: {lr: 3e-4}", "fix.yaml")
        assert load(path, sets=["train.batch=2", "fix.yaml"]).config.train.batch == 7
        loaded = load(path, sets=["fix.yaml", "train.batch=2"])
        assert loaded.config.train.batch == 2
        assert origin(loaded, "optim.lr") == "fix.yaml:2"

    @pytest.mark.parametrize(
        ("assignment", "key", "value"),
        [
            ("optim.lr=2e-4", "optim.lr", 2e-4),
            ("optim.clip=null", "optim.clip", None),
            ("optim.clip=", "optim.clip", None),
            ("data.classes=[car, bus]", "data.classes", ("car", "bus")),
            ("optim.clip=None", "optim.clip", None),
            ("train.deterministic=True", "train.deterministic", True),
            ("data.image.resize=0.3,0.5", "data.image.resize", (0.3, 0.5)),
            ("data.image.resize=(0.3, 0.5)", "data.image.resize", (0.3, 0.5)),
            ("data.classes=car,bus", "data.classes", ("car", "bus")),
            ("work_dir=a,b", "work_dir", "a,b"),
            ("work_dir=runs/a=b", "work_dir", "runs/a=b"),
            ("work_dir=@home", "work_dir", "@home"),
            ("expect.loss/object/heatmap=0:2", "expect", {"loss/object/heatmap": "0:2"}),
            ("data.image={flip: false}", "data.image.flip", False),
        ],
    )
    def test_forms_of_set(self, write: Write, assignment: str, key: str, value: object) -> None:
        found: object = load(write("seed: 0"), sets=[assignment]).config
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("train.bacth=1", "--set train.bacth=1: unknown key 'train.bacth'."),
            ("train.batch.size=1", "--set train.batch.size=1: train.batch must be a whole number, not a mapping."),
            ("train.batch=x", "--set train.batch=x: train.batch must be a whole number, not 'x'."),
            ("train", "--set train: neither key=value nor a YAML file."),
            ("absent.yaml", "Cannot read config absent.yaml: No such file or directory."),
            ("=3", "--set =3: neither key=value nor a YAML file."),
        ],
    )
    def test_a_wrong_set_is_named(self, write: Write, text: str, message: str) -> None:
        assert refused(write("seed: 0"), (text,)).message == message


class TestWithoutConfig:
    def test_the_local_file_comes_first(self, write: Write) -> None:
        write("seed: 5", "bevctl.yaml")
        loaded = load(None, fallback=lambda: "tiny")
        assert loaded.config.seed == 5
        assert loaded.notes == ["No CONFIG given: using bevctl.yaml of this folder."]

    def test_then_the_config_of_the_resumed_run(self, write: Write) -> None:
        write("seed: 6", "old/config.yaml")
        assert load(None, fallback=lambda: "old/config.yaml").config.seed == 6
        loaded = load(None, fallback=lambda: {"seed": 7, "name": "old"}, sets=["train.batch=9"])
        assert (loaded.config.seed, loaded.config.name, loaded.config.train.batch) == (7, "old", 9)
        assert loaded.path is None
        assert origin(loaded, "seed") == "the resumed run"

    def test_then_the_default_which_is_said(self, write: Write, tmp_path: Path) -> None:
        write("seed: 1", "unrelated.yaml")
        loaded = load(None, fallback=lambda: None)
        assert loaded.config.name == DEFAULT
        assert loaded.notes == [f"No CONFIG given: using the packaged config {DEFAULT}."]
        assert tmp_path not in (loaded.path or tmp_path).parents

    def test_a_given_config_asks_nobody(self, write: Write) -> None:
        write("seed: 5", "bevctl.yaml")
        assert load("tiny").config.name == "tiny"
        assert load("tiny").notes == []
