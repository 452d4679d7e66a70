"""Sizes for the shapes of photos, and what a crop removes."""

import io
from dataclasses import replace
from math import log
from pathlib import Path

import pillow_heif
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.known_model import Expected
from svdq.pipeline.models.names.model_names import known_model
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.new_job import known_for
from svdq.producer.submitting.photos import Photo, check_data, crop_warning, nearest_size
from svdq.producer.watching.folder_config import FolderConfig

PHOTO = Photo(path=Path("a/cup.jpg"), sha256="0" * 64, extension="jpg", num_bytes=1, name="cup", size=(3000, 4000))


@pytest.mark.parametrize(
    ("photo", "size"),
    [
        ((16, 9), (1024, 576)),
        ((9, 16), (576, 1024)),
        ((1, 1), (768, 768)),
        ((4032, 3024), (896, 640)),
        ((3024, 4032), (640, 896)),
        ((1, 100_000), (64, 4096)),
        ((100_000, 1), (4096, 64)),
    ],
)
def test_sizes_of_usual_photos(photo: tuple[int, int], size: tuple[int, int]) -> None:
    assert nearest_size(photo, 1024 * 576, 64) == size


@given(
    st.tuples(st.integers(1, 20_000), st.integers(1, 20_000)),
    st.tuples(st.integers(1, 64), st.integers(1, 64)),
    st.sampled_from([16, 64]),
)
@example((1, 1), (1, 1), 64)
def test_no_allowed_size_is_nearer(photo: tuple[int, int], blocks: tuple[int, int], multiple: int) -> None:
    area = blocks[0] * blocks[1] * multiple**2
    width, height = nearest_size(photo, area, multiple)
    assert width % multiple == height % multiple == 0
    assert multiple <= width <= 4096
    assert multiple <= height <= 4096
    assert width * height <= area

    def badness(width: int, height: int) -> float:
        return 2 * abs(log(width * photo[1] / (height * photo[0]))) + log(area / (width * height))

    sides = range(multiple, 4097, 64)
    best = min(badness(w, h) for w in sides for h in sides if w * h <= area)
    assert badness(width, height) <= best + 1e-9


def test_the_id_is_that_of_the_explicit_size() -> None:
    def job_of(**options: object) -> tuple[object, str]:
        [entry] = JobSpec(drafts=(Draft(seed=1, **options),)).entries(PHOTO, 1)  # type: ignore[arg-type]
        return entry.job, entry.job_id

    auto, explicit = job_of(auto_size=True), job_of(width=640, height=896)
    assert auto == explicit
    assert job_of(auto_size=True, width=576, height=320) == job_of(width=384, height=448)
    wan = job_of(auto_size=True, prompt="a cup")[0]
    assert (wan.width, wan.height) == (544, 704)  # type: ignore[attr-defined]  # multiples of 32: TI2V-5B takes no others
    assert job_of(auto_size=True, prompt="a cup", width=16, height=16)[0].width == 32  # type: ignore[attr-defined]
    assert job_of(auto_size=True, prompt="a cup", width=832, height=480) == job_of(auto_size=True, prompt="a cup")


def test_a_size_for_the_area_must_be_allowed() -> None:
    with pytest.raises(InputError, match="--size 1000x500 is not allowed"):
        JobSpec(drafts=(Draft(auto_size=True, width=1000, height=500),)).check()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP", "AVIF", "HEIF"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_the_shape_of_a_photo_is_upright(tmp_path: Path, kind: str, orientation: int) -> None:
    image = Image.effect_noise((96, 64), 50).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = orientation
    if kind == "HEIF":
        pillow_heif.from_pillow(image).save(buffer := io.BytesIO(), exif=exif.tobytes())
    else:
        image.save(buffer := io.BytesIO(), kind, exif=exif)
    path = tmp_path / "photo"
    path.write_bytes(buffer.getvalue())
    assert check_data(path.read_bytes(), path, 10**6).size == ((64, 96) if orientation in (6, 8) else (96, 64))


@pytest.mark.parametrize(
    ("photo", "fit", "warning"),
    [
        ((3000, 4000), "crop", "crop removes 58% of the photo's height"),
        ((4000, 1000), "crop", "crop removes 56% of the photo's width"),
        ((3000, 2000), "crop", ""),
        ((16, 9), "crop", ""),
        ((3000, 4000), "pad", ""),
        ((3000, 4000), "stretch", ""),
        (None, "crop", ""),
    ],
)
def test_a_crop_that_removes_much_is_warned_of(photo: tuple[int, int] | None, fit: str, warning: str) -> None:
    [entry] = JobSpec(drafts=(Draft(fit=fit),)).entries(PHOTO, 1)
    assert crop_warning(photo, entry.job, (1, 1)) == warning
    [entry] = JobSpec(drafts=(Draft(fit=fit, family="wan"),)).entries(PHOTO, 1)
    assert crop_warning(photo, entry.job, (1024, 576)) == warning  # the size is left to the model


@pytest.mark.parametrize(
    ("defaults", "base", "usual", "auto"),
    [
        ("", "Wan2.2-I2V-A14B", (832, 480), (704, 544)),
        ("[defaults]\nwidth = 1280\nheight = 720\n", "Wan2.2-I2V-A14B", (1280, 720), (1088, 832)),
        ("", "Wan2.2-TI2V-5B", (1280, 704), (1088, 800)),
    ],
)
def test_a_size_left_to_the_model_has_as_many_pixels_as_its_own(
    tmp_path: Path, defaults: str, base: str, usual: tuple[int, int], auto: tuple[int, int]
) -> None:
    """A photo of 4:3 got 832x480's pixels of any model of Wan: 42% of those of 1280x720."""
    path = tmp_path / "mine.toml"
    path.write_text(f'base = "Wan-AI/{base}-Diffusers"\n{defaults}')
    photo = replace(PHOTO, size=(4000, 3000))
    spec = JobSpec(drafts=(Draft(seed=1, auto_size=True),), expected=Expected(model=known_model(str(path))))
    [entry] = spec.entries(photo, 1)
    assert (entry.job.width, entry.job.height) == auto
    [plain] = replace(spec, drafts=(Draft(seed=1),)).entries(photo, 1)
    assert (plain.job.width, plain.job.height) == (None, None)
    of_model = known_for(spec.expected.model, "wan").usual
    assert (of_model.width, of_model.height) == usual


def test_the_file_of_a_folder_chooses_between_auto_and_a_size(tmp_path: Path) -> None:
    def size_with(options: Draft, text: str) -> tuple[int, int]:
        (tmp_path / "svdq.toml").write_text(text)
        spec = FolderConfig(tmp_path, JobSpec(drafts=(options,))).spec_for("a.jpg")
        [entry] = spec.entries(replace(PHOTO, size=(1, 1)), 1)
        return entry.job.width, entry.job.height

    assert size_with(Draft(), 'size = "auto"') == (768, 768)
    assert size_with(Draft(auto_size=True), "frames = 3") == (768, 768)
    assert size_with(Draft(auto_size=True), 'size = "576x320"') == (576, 320)
    assert size_with(Draft(width=576, height=320), 'size = "auto"') == (384, 384)
