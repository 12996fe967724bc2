from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevctl.config.load import to_dict
from bevctl.engine.checkpoint import FORMAT, Checkpoint, load_state, write_checkpoint
from bevctl.engine.checkpoint_convert import Target, convert_checkpoint
from bevctl.engine.optim import build_optimizer, saved_parameter_states
from bevctl.errors import BevctlError
from bevctl.models.build import build_model
from bevctl.models.layouts import mmdet3d_name
from tests.models.nano import nano_config, with_value

CONFIG = nano_config()
DETECTION = nano_config(**{"model.map": None})
AS_THEIRS = nano_config(**{"model.map": None, "model.camera.view.truncate": True})


def weights(config: Any = DETECTION, seed: int = 1) -> dict[str, Tensor]:
    """A state in which no two values are equal by chance: also norms, statistics and counters."""
    torch.manual_seed(seed)
    state = build_model(config).state_dict()
    for key, value in state.items():
        if value.is_floating_point() and key.rpartition(".")[2] not in ("dx", "bx", "frustum"):
            value.uniform_(0.1, 1.0)
    return state


def own(state: dict[str, Tensor], config: Any = DETECTION, **content: Any) -> Checkpoint:
    meta = {"format": FORMAT, "version": "0", "epoch": 3, "iter": 30, "config": to_dict(config)}
    return Checkpoint(Path("own.pth"), {"state_dict": state, "meta": meta, **content})


def written(checkpoint: Checkpoint, **target: Any) -> Checkpoint:
    return Checkpoint(Path("out.pth"), convert_checkpoint(checkpoint, Target(**target)).content)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[key]) for key, value in a.items())


def loaded(checkpoint: Checkpoint, config: Any = DETECTION) -> dict[str, Tensor]:
    model = build_model(config)
    load_state(model, checkpoint).require(share_of_model=1.0)
    return model.state_dict()


@pytest.mark.parametrize("layout", ["mit", "mmdet3d"])
def test_there_and_back_gives_every_bit_again(layout: str) -> None:
    state = weights()
    away = written(own(state), layout=layout)
    assert same(loaded(away), state)
    back = written(away, layout="bevctl")
    assert same(back.state_dict, state)
    assert (back.origin, back.epoch, back.iteration) == ("bevctl", 3, 30)


def test_mit_and_mmdet3d_directly() -> None:
    state = weights()
    mit, mmdet3d = (written(own(state), layout=layout) for layout in ("mit", "mmdet3d"))
    assert same(written(mit, layout="mmdet3d").state_dict, mmdet3d.state_dict)
    assert same(written(mmdet3d, layout="mit").state_dict, mit.state_dict)


def test_what_their_programs_ask_for_is_there(tmp_path: Path) -> None:
    """mmcv reads epoch and iter of meta, mmengine the classes of dataset_meta; both load a plain dict of tensors."""
    for layout in ("mit", "mmdet3d"):
        checkpoint = written(own(weights()), layout=layout)
        write_checkpoint(tmp_path / "x.pth", checkpoint.content)
        content = torch.load(tmp_path / "x.pth", weights_only=True)
        assert content["meta"]["epoch"] == 3
        classes = content["meta"]["CLASSES"] if layout == "mit" else content["meta"]["dataset_meta"]["classes"]
        assert classes == list(DETECTION.data.classes)
        view = "encoders.camera.vtransform." if layout == "mit" else "view_transform."
        assert {f"{view}{name}" for name in ("dx", "bx", "nx", "frustum")} <= content["state_dict"].keys()
        assert {value.dtype for value in content["state_dict"].values()} == {torch.float32, torch.int64}


def test_half_precision_weights_are_written_in_single_precision() -> None:
    state = {key: value.half() if value.is_floating_point() else value for key, value in weights().items()}
    for value in written(own(state), layout="mit").state_dict.values():
        assert value.dtype in (torch.float32, torch.int64)


def test_boxes_change_with_the_layout_unless_told() -> None:
    prefix = "heads.object.prediction_heads.0."
    state = weights()
    mit = written(own(state), layout="mit").state_dict
    assert torch.equal(mit[prefix + "dim.1.bias"], state[prefix + "dim.1.bias"][[1, 0, 2]])
    assert torch.equal(mit[prefix + "rot.1.weight"], -state[prefix + "rot.1.weight"][[1, 0]])
    foreign = Checkpoint(Path("x.pth"), {"state_dict": state})
    for boxes, expected in (("auto", mit), ("wlh", mit), ("lwh", state)):
        found = written(foreign, layout="bevctl", boxes=boxes).state_dict
        assert torch.equal(found[prefix + "rot.1.weight"], expected[prefix + "rot.1.weight"]), boxes
    theirs = {mmdet3d_name(key): value for key, value in state.items()}
    kept = written(Checkpoint(Path("x.pth"), {"state_dict": theirs}), layout="bevctl").state_dict
    assert torch.equal(kept[prefix + "rot.1.weight"], state[prefix + "rot.1.weight"])


def test_the_config_checks_the_weights_and_stays_in_the_file() -> None:
    foreign = Checkpoint(Path("x.pth"), {"state_dict": weights(CONFIG)})
    done = convert_checkpoint(foreign, Target("bevctl", config=CONFIG))
    assert done.content["meta"]["config"] == to_dict(CONFIG)
    assert done.report is not None
    assert done.report.share_of_model == 1
    with pytest.raises(BevctlError, match="Only"):
        convert_checkpoint(Checkpoint(Path("x.pth"), {"state_dict": weights()}), Target("bevctl", config=CONFIG))
    part = convert_checkpoint(
        Checkpoint(Path("x.pth"), {"state_dict": weights()}), Target("bevctl", config=CONFIG, min_loaded=0.5)
    )
    assert any("14 missing: heads.map.classifier (14)" in note for note in part.notes)


def test_what_follows_from_the_config_is_that_of_the_config() -> None:
    state = weights()
    del state["encoders.camera.vtransform.frustum"]
    state["encoders.camera.vtransform.dx"] = torch.full((3,), 7.0)
    done = convert_checkpoint(Checkpoint(Path("x.pth"), {"state_dict": state}), Target("mit", config=DETECTION))
    expected = build_model(DETECTION).state_dict()
    for name in ("dx", "frustum"):
        key = f"encoders.camera.vtransform.{name}"
        assert torch.equal(done.content["state_dict"][key], expected[key])
    assert next(iter(done.content["state_dict"])).startswith("encoders.camera.backbone.patch_embed")


def test_mmdet3d_gets_the_detection_alone() -> None:
    done = convert_checkpoint(own(weights(CONFIG), CONFIG), Target("mmdet3d"))
    assert not any("classifier" in key for key in done.content["state_dict"])
    assert done.parts["heads.map"] == {"written": 0, "reshaped": 0, "left out": 14}
    assert done.parts["heads.object"]["left out"] == 0
    segmentation = own(weights(nano_config(**{"model.object": None})))
    with pytest.raises(BevctlError, match=r"no head for the task 'object'; its heads: map"):
        convert_checkpoint(segmentation, Target("mmdet3d"))


def test_two_decoders_are_written_task_by_task() -> None:
    separate = nano_config(**{"model.shared_decoder": False})
    state = weights(separate)
    with pytest.raises(BevctlError, match="decoder for each task") as caught:
        convert_checkpoint(own(state, separate), Target("mit"))
    assert "--task object" in caught.value.hint
    for task in ("object", "map"):
        found = written(own(state, separate), layout="mit", task=task).state_dict
        key = "backbone.blocks.0.0.weight"
        assert torch.equal(found[f"decoder.{key}"], state[f"decoder.{task}.{key}"])
        assert {name.split(".")[1] for name in found if name.startswith("heads.")} == {task}


def test_what_bevctl_has_no_model_for_is_refused() -> None:
    foreign = Checkpoint(Path("x.pth"), {"state_dict": {"layer1.0.weight": torch.ones(1)}})
    with pytest.raises(BevctlError, match="no model for"):
        convert_checkpoint(foreign, Target("mit"))


def test_averaged_weights_are_the_ones_written() -> None:
    state = weights()
    average = {key: value + 1 for key, value in state.items() if key.startswith("fuser.") and value.is_floating_point()}
    done = convert_checkpoint(own(state, ema=average), Target("mmdet3d"))
    assert torch.equal(done.content["state_dict"]["fusion_layer.0.weight"], average["fuser.0.weight"])
    assert done.parts["fuser"]["reshaped"] == 0
    assert any("EMA" in note for note in done.notes)


def notes_of(checkpoint: Checkpoint, layout: str) -> str:
    return " | ".join(convert_checkpoint(checkpoint, Target(layout)).notes)


def test_a_height_that_another_program_takes_for_something_else_is_told() -> None:
    top = own(weights(), with_value(AS_THEIRS, "model.object.box_z", "top"))
    assert "mmdet3d takes for its centre: half a height too high" in notes_of(top, "mmdet3d")
    assert "raises" not in notes_of(top, "mit")
    assert "raises it by half a height when it trains on" in notes_of(own(weights(), AS_THEIRS), "mit")
    assert notes_of(own(weights(), AS_THEIRS), "mmdet3d") == ""


@pytest.mark.parametrize(
    ("box_z", "said"), [("top", ""), ("centre", "This config takes the head's height"), (None, "If the")]
)
def test_whether_the_height_is_taken_for_what_mit_means_by_it(box_z: str | None, said: str) -> None:
    config = with_value(DETECTION, "model.object.box_z", box_z) if box_z else None
    theirs = Checkpoint(Path("x.pth"), {"state_dict": weights()})
    about = [note for note in convert_checkpoint(theirs, Target("bevctl", config=config)).notes if "box_z=top" in note]
    assert [note.startswith(said) for note in about] == ([True] if said else [])


def test_weights_of_mit_are_taken_for_tops_where_no_config_says() -> None:
    theirs = Checkpoint(Path("x.pth"), {"state_dict": weights()})
    assert "mmdet3d takes for its centre" in notes_of(theirs, "mmdet3d")
    assert "mmdet3d takes for its centre" not in notes_of(theirs, "bevctl")
    back = {mmdet3d_name(key): value for key, value in weights().items()}
    assert notes_of(Checkpoint(Path("x.pth"), {"state_dict": back}), "mmdet3d") == ""


@pytest.mark.parametrize("layout", ["mit", "mmdet3d"])
def test_a_view_that_leaves_out_what_they_put_into_the_first_cells_is_told(layout: str) -> None:
    assert "model.camera.view.truncate=true" in notes_of(own(weights()), layout)
    assert "truncate" not in notes_of(own(weights(), AS_THEIRS), layout)
    assert "truncate" not in notes_of(own(weights()), "bevctl")


def adam_states(model: nn.Module, optim: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An optimizer's state after two steps as mmcv stores it, and the averages by name."""
    optimizer = build_optimizer(model, optim, 1e-3)
    for _ in range(2):
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
        optimizer.step()
    averages = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
    plain = optimizer.state_dict()
    return {"state": plain["state"], "param_groups": [{"params": g["params"]} for g in plain["param_groups"]]}, averages


def test_a_foreign_run_can_be_continued_from_the_converted_file() -> None:
    model = build_model(DETECTION)
    optimizer, averages = adam_states(model, DETECTION.optim)
    scaler = {"scale": 1024.0, "_growth_tracker": 3}
    foreign = Checkpoint(
        Path("x.pth"),
        {
            "state_dict": model.state_dict(),
            "optimizer": optimizer,
            "meta": {"epoch": 2, "iter": 20, "fp16": {"loss_scaler": scaler}},
        },
    )
    found = written(foreign, layout="bevctl")
    assert (found.epoch, found.iteration, found.loss_scaler) == (2, 20, scaler)
    states = saved_parameter_states(found.content["optimizer"])
    assert states.keys() == averages.keys()
    rotation = "heads.object.prediction_heads.0.rot.1.weight"
    assert torch.equal(states[rotation]["exp_avg"], -averages[rotation][[1, 0]])
    assert torch.equal(states["fuser.0.weight"]["exp_avg"], averages["fuser.0.weight"])
