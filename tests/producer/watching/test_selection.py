"""Which names are taken."""

import pytest

from svdq.producer.watching.folder_config import Selection


@pytest.mark.parametrize(
    "name", ["a.jpg", "IMG_0001.JPG", "a b.jpeg", "x.png", "y.WebP", "scan.tif", "phone.heic", "ü.bmp"]
)
def test_suffixes_ignore_case(name: str) -> None:
    assert Selection().matches(name)


@pytest.mark.parametrize(
    "name",
    [
        ".IMG_1.jpg.Xq3Zt1",  # rsync
        ".hidden.jpg",
        "._IMG_1.jpg",
        "IMG_1.jpg.part",
        "Unconfirmed 4711.crdownload",
        "IMG_1.jpg.filepart",
        "~syncthing~IMG_1.jpg.tmp",
        "IMG_1.jpg~",
        "notes.txt",
        "film.mov",
        "svdq.toml",
        "@eaDir/IMG_1.jpg",
        ".thumbnails/IMG_1.jpg",
        "day/.~tmp~/IMG_1.jpg",
    ],
)
def test_hidden_and_temporary_files_are_not_photos(name: str) -> None:
    assert not Selection(recursive=True).matches(name)


def test_temporary_files_match_no_pattern() -> None:
    everything = Selection(globs=("*",))
    assert everything.matches("notes.txt")
    assert not everything.matches("a.jpg.part")
    assert not everything.matches(".a.jpg")
    assert not everything.matches("svdq.toml")


def test_subfolders_need_recursive() -> None:
    assert not Selection().matches("day/a.jpg")
    assert Selection(recursive=True).matches("day/a.jpg")
    assert Selection(recursive=True).matches("day/roll/a.jpg")


def test_globs_match_names_and_with_a_slash_paths() -> None:
    selection = Selection(recursive=True, globs=("*.jpg", "scans/*.TIF"))
    assert selection.matches("day/A.JPG")
    assert selection.matches("scans/a.tif")
    assert not selection.matches("other/a.tif")
    assert not selection.matches("a.png")


def test_other_files_are_reported_only_without_globs() -> None:
    for name in ("raw.NEF", "form.pdf", "a.jpg"):
        assert Selection().includes(name)
    for name in (".hidden.pdf", "form.pdf.part", "svdq.toml", "day/raw.NEF"):
        assert not Selection().includes(name)
    assert not Selection(globs=("*.jpg",)).includes("raw.NEF")
