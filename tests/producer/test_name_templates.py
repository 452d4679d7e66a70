"""Templates of names and folders, and the characters that file systems refuse."""

import pytest

from svdq.pipeline.errors import InputError
from svdq.producer.name_templates import read_folder, render_name, safe_name
from tests.queued import SvdJob

VALUES = {"stem": "a photo", "seed": 7, "frames": None, "noise_aug_strength": 0.02}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("cup", "cup"),
        ("{stem}-{seed}", "a photo-7"),
        ("{seed:04}", "0007"),
        ("{noise_aug_strength:.3f}", "0.020"),
        ("{{{stem}}}", "{a photo}"),
        ("{stem}: {seed}?", "a photo_ 7_"),
        (".{stem}", "a photo"),
        (". ..{stem}", "a photo"),  # such a file would be hidden
        ("{stem:>99}" * 4, "a photo"),  # spaces around a name go, and what is too long for a file
    ],
)
def test_names(template: str, name: str) -> None:
    assert render_name(template, VALUES).startswith(name)
    assert len(render_name(template, VALUES).encode()) <= 180


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{colour}", "{colour}.*frames, .*noise_aug_strength, .*seed, .*stem"),
        ("{}", "fields are"),
        ("{0}", "fields are"),
        ("{stem.__class__}", "fields are"),
        ("{stem[0]}", "fields are"),
        ("{stem", "not a template"),
        ("stem}", "not a template"),
        ("{stem!r}", "{stem:04}"),
        ("{seed:999999999}", "{seed:04}"),
        ("{seed:{stem}}", "{seed:04}"),
        ("{stem}/{seed}", "folder as output"),
        ("..\\x", "folder as output"),
        (" ", "empty"),
    ],
)
def test_invalid_templates(template: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        render_name(template, VALUES)
    assert "\n" not in str(caught.value)


def test_values_that_do_not_fit_a_template() -> None:
    with pytest.raises(InputError, match=r"frames.*left to the model"):
        render_name("{frames}", VALUES)
    with pytest.raises(InputError, match="cannot be made"):
        render_name("{stem:04d}", VALUES)
    with pytest.raises(InputError, match="cannot be made"):
        render_name("{seed:c}", {"seed": 2**32 - 1})


@pytest.mark.parametrize(
    ("text", "folder"),
    [("", ""), (".", ""), ("holiday", "holiday"), ("./a/b c/", "a/b c"), ("a//b", "a/b"), ("für Oma", "für Oma")],
)
def test_folders(text: str, folder: str) -> None:
    assert read_folder(text) == folder


@pytest.mark.parametrize("text", ["/videos", "../videos", "a/../../b", "~/videos", "s3://bucket/videos"])
def test_a_folder_outside_outputs(text: str) -> None:
    with pytest.raises(InputError, match=r"another storage.*svdq fetch"):
        read_folder(text)


@pytest.mark.parametrize("text", [".hidden", "a/.b", "a\\b", "a\nb", "x" * 256, "x/" * 600])
def test_a_folder_that_some_storages_refuse(text: str) -> None:
    with pytest.raises(InputError, match="every storage"):
        read_folder(text)


@pytest.mark.parametrize(
    "stem", ["a b", ".hidden", "..", "a/b\\c", "x\n\x1b[31m", "\udc80", "é" * 300, "写真" * 200, "", "  "]
)
def test_names_are_safe(stem: str) -> None:
    name = safe_name(stem)
    assert SvdJob(image=f"inputs/{'0' * 64}.jpg", name=name, seed=0).name == name
    assert len(name.encode()) <= 180


REFUSED = ("CON", "nul", "com1.x", "LPT9", "a:b", "a?b", "a*b", 'a"b', "a<b>|", "trip.", "end ", "...")


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_windows_refuses_are_replaced(name: str) -> None:
    found = render_name(name, VALUES)
    assert not set(found) & set('<>:"/\\|?*')
    assert found == found.rstrip(". ")
    assert found.partition(".")[0].upper() not in ("CON", "NUL", "COM1", "LPT9")
