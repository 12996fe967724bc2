"""Decoding near the size that is needed: which sizes, how exact, and only where training asks for it."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from bevctl.config.schema import CameraConfig, Config, DataConfig, ImageAugmentConfig, ModelConfig
from bevctl.data import files
from bevctl.data.files import ImageFile, image_is_whole, points_are_whole, read_image_file, read_points
from bevctl.data.transforms import ImageChange, build_transforms, change_image
from bevctl.errors import BevctlError
from tests.data.samples import random_sample

SIZE = (320, 180)


def _picture(seed: int = 0) -> np.ndarray:
    """A smooth background with sharp rectangles, as streets have."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(60, 200, (9, 16, 3), dtype=np.uint8))
    picture = np.array(small.resize(SIZE, Image.Resampling.BICUBIC))
    for _ in range(12):
        x, y = rng.integers(0, SIZE[0] - 20), rng.integers(0, SIZE[1] - 20)
        picture[y : y + rng.integers(3, 40), x : x + rng.integers(3, 40)] = rng.integers(0, 256, 3)
    return picture


def _file(pixels: np.ndarray, format: str = "JPEG") -> ImageFile:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format, **({"quality": 92} if format == "JPEG" else {}))
    return ImageFile(Path("a.jpg"), buffer.getvalue(), (pixels.shape[1], pixels.shape[0]))


@pytest.mark.parametrize(
    ("size", "at_least", "decoded"),
    [
        ((1600, 900), None, (1600, 900)),
        ((1600, 900), (801, 451), (1600, 900)),
        ((1600, 900), (800, 450), (800, 450)),
        ((1600, 900), (608, 342), (800, 450)),
        ((1600, 900), (400, 225), (400, 225)),
        ((1600, 900), (150, 84), (400, 225)),  # an eighth of 900 is not whole
        ((1600, 800), (200, 100), (200, 100)),
        ((801, 450), (300, 170), (801, 450)),
    ],
)
def test_the_smallest_size_that_is_whole_and_large_enough(
    size: tuple[int, int], at_least: tuple[int, int] | None, decoded: tuple[int, int]
) -> None:
    picture = _file(np.zeros((size[1], size[0], 3), np.uint8)).decode(at_least)
    assert (picture.size, picture.mode) == (decoded, "RGB")


def test_other_formats_and_modes_are_decoded_whole() -> None:
    assert _file(_picture(), "PNG").decode((20, 10)).size == SIZE
    grey = _file(_picture()[..., 0])
    assert (grey.decode((20, 10)).mode, grey.decode((160, 90)).size) == ("RGB", (160, 90))


@settings(max_examples=30)
@given(
    resize=st.floats(0.1, 0.5),
    crop=st.floats(0, 1),
    flip=st.booleans(),
    rotate=st.floats(-6, 6),
    seed=st.integers(0, 99),
)
def test_below_a_half_it_is_the_same_image_but_for_the_filter(
    resize: float, crop: float, flip: bool, rotate: float, seed: int
) -> None:
    source = _file(_picture(seed))
    change = ImageChange(resize * SIZE[0] / 1600, crop, flip, rotate)
    (whole, matrix), (near, again) = (change_image(source, change, (64, 128), draft) for draft in (False, True))
    np.testing.assert_array_equal(again, matrix)
    assert np.abs(whole.astype(int) - near).mean() < 3.0


def test_above_a_half_it_is_the_same_image() -> None:
    source = _file(_picture())
    change = ImageChange(0.51 * SIZE[0] / 1600)
    whole, near = (change_image(source, change, (64, 128), draft)[0] for draft in (False, True))
    np.testing.assert_array_equal(near, whole)


@pytest.mark.parametrize("resize", [0.5, 0.45, 0.26, 0.24, 0.13])
def test_nothing_moves(resize: float) -> None:
    """The centroid of a disc, to a twentieth of a pixel."""
    rows, columns = np.mgrid[0 : SIZE[1], 0 : SIZE[0]] + 0.5
    disc = (columns - 150) ** 2 + (rows - 100) ** 2 < 40**2
    source = _file(np.repeat((disc * 255).astype(np.uint8)[..., None], 3, axis=2))
    size = round(SIZE[1] * resize), round(SIZE[0] * resize)
    image, matrix = change_image(source, ImageChange(resize * SIZE[0] / 1600), size, draft=True)
    weights = image[..., 0].astype(float)
    v, u = np.mgrid[0 : size[0], 0 : size[1]] + 0.5
    centroid = np.array([(u * weights).sum(), (v * weights).sum()]) / weights.sum()
    expected = matrix[:2, :2] @ [150, 100] + matrix[:2, 3]
    np.testing.assert_allclose(centroid, expected, atol=0.05)


@pytest.mark.parametrize(
    ("train", "draft", "reduced"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_evaluation_decodes_fully(train: bool, draft: bool, reduced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int] | None] = []
    decode = ImageFile.decode

    def watched(self: ImageFile, at_least: tuple[int, int] | None = None) -> Image.Image:
        asked.append(at_least)
        return decode(self, at_least)

    monkeypatch.setattr(ImageFile, "decode", watched)
    config = Config(
        data=DataConfig(image=ImageAugmentConfig(draft=draft)),
        model=ModelConfig(camera=CameraConfig(image_size=(32, 64))),
    )
    sample = dataclasses.replace(random_sample(cameras=1), images=None, encoded=(_file(_picture()),))
    step = build_transforms(config, train)["decode and augment images"]
    done = step(sample, np.random.default_rng(0))
    assert done.images is not None
    assert done.encoded == ()
    assert [size is not None for size in asked] == [reduced]


def test_a_truncated_file_is_found_when_it_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "cut.jpg"
    path.write_bytes(_file(_picture()).data[:3000])
    source = read_image_file(path)
    assert source.size == SIZE
    for draft in (False, True):
        with pytest.raises(BevctlError, match=r"cut\.jpg cannot be read"):
            change_image(source, ImageChange(0.05), (32, 64), draft)


def test_whole_images_are_told_from_cut_ones_without_decoding_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _file(_picture()).data
    decoded: list[Path] = []
    read = files.read_image

    def watched(path: Path) -> np.ndarray:
        decoded.append(path)
        return read(path)

    monkeypatch.setattr(files, "read_image", watched)
    cases = {
        "whole.jpg": (whole, True),
        "cut.jpg": (whole[:3000], False),
        "followed.jpg": (whole + b"\0\0 by something else", True),
        "empty.jpg": (b"", False),
        "text.jpg": (b"not found", False),
        "whole.png": (_file(_picture(), "PNG").data, True),
        "cut.png": (_file(_picture(), "PNG").data[:3000], False),
    }
    for name, (data, expected) in cases.items():
        (tmp_path / name).write_bytes(data)
        assert image_is_whole(tmp_path / name) is expected, name
    assert tmp_path / "whole.jpg" not in decoded
    assert not image_is_whole(tmp_path / "nowhere.jpg")


@pytest.mark.parametrize(("size", "whole"), [(0, False), (20, True), (21, False), (4000, True), (3999, False)])
def test_point_files_are_judged_by_their_length_as_in_reading(tmp_path: Path, size: int, whole: bool) -> None:
    path = tmp_path / "cloud.bin"
    path.write_bytes(bytes(size))
    assert points_are_whole(path) is whole
    if whole:
        assert len(read_points(path)) == size // 20
    else:
        with pytest.raises(BevctlError, match=f"{size} bytes are not a whole number of points"):
            read_points(path)


def test_real_images_differ_by_less_than_one_level(shared: Path) -> None:
    for path in sorted((shared / "nuscenes_frame").rglob("*.jpg")):
        source = read_image_file(path)
        whole, near = (change_image(source, ImageChange(0.48), (256, 704), draft)[0] for draft in (False, True))
        difference = np.abs(whole.astype(int) - near)
        assert difference.mean() < 1.0
        assert np.percentile(difference, 99) <= 5
