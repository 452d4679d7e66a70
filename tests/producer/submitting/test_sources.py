import io
import os
import unicodedata
from datetime import datetime
from pathlib import Path

import pytest
from PIL import Image

from svdq.pipeline.errors import InputError
from svdq.producer.submitting.photo_requests import read_batch
from svdq.producer.submitting.sources import PhotoRequest, find_photos


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Photos by their names, which is all that is looked at."""
    folder = tmp_path / "tree"
    for name in (
        "b.JPG",
        "a.png",
        "notes.txt",
        ".hidden.jpg",
        "sub/c.webp",
        "sub/deep/d.jpeg",
        ".dot/e.jpg",
        "@eaDir/a.png/SYNOPHOTO_THUMB_XL.jpg",
        "sub/lost+found/f.jpg",
        "x[1].jpg",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "empty").mkdir()
    monkeypatch.chdir(folder)
    return folder


def found(*words: str, recursive: bool = False, stdin: bytes = b"", storage: Path | None = None) -> list[str]:
    sources = find_photos(words, recursive=recursive, stdin=io.BytesIO(stdin), storage=storage)
    return [str(photo.path) for photo in sources.photos]


def test_named_files_are_included(tree: Path) -> None:
    for words in (["notes.txt", "x[1].jpg", "missing.jpg"], ["x" * 300]):
        assert found(*words) == words


def test_folders(tree: Path) -> None:
    assert found(".") == ["a.png", "b.JPG", "x[1].jpg"]
    assert found(".", recursive=True) == ["a.png", "b.JPG", "x[1].jpg", "sub/c.webp", "sub/deep/d.jpeg"]
    assert found("sub", "a.png") == ["sub/c.webp", "a.png"]
    assert found(".", recursive=True, storage=tree / "sub") == ["a.png", "b.JPG", "x[1].jpg"]
    assert find_photos(["."], recursive=True).num_others == 1
    assert [find_photos(["."], recursive=recursive).num_below for recursive in (False, True)] == [2, 0]


def test_photos_in_subfolders_have_their_folder(tree: Path) -> None:
    (tree / "sub" / "what?").mkdir()
    (tree / "sub" / "what?" / "f.jpg").touch()
    sources = find_photos(["sub", "a.png"], recursive=True)
    assert [photo.below for photo in sources.photos] == ["", "deep", "what_", ""]


def test_the_source_of_a_photo_begins_with_the_given_folder(tree: Path) -> None:
    for words in (["sub", "a.png"], ["sub/../sub/.", "./a.png"]):
        sources = find_photos(words, recursive=True)
        assert [photo.source for photo in sources.photos] == ["sub/c.webp", "sub/deep/d.jpeg", "tree/a.png"]


def test_a_link_to_a_folder_above_ends(tree: Path) -> None:
    (tree / "sub" / "loop").symlink_to(tree)
    assert found("sub", recursive=True) == ["sub/c.webp", "sub/deep/d.jpeg"]


def test_patterns(tree: Path) -> None:
    assert found("*.*") == ["a.png", "b.JPG", "x[1].jpg"]
    assert found("*") == ["a.png", "b.JPG", "x[1].jpg"]
    assert found("**/*.jpeg", "[ab].*") == ["sub/deep/d.jpeg", "a.png", "b.JPG"]
    assert found("**/?.jp*g", "**/lost+found/*.jpg") == ["sub/deep/d.jpeg", "sub/lost+found/f.jpg"]


def test_patterns_skip_the_storage(tree: Path) -> None:
    assert found("**/*.*", storage=tree / "sub") == ["a.png", "b.JPG", "x[1].jpg"]
    assert found(f"../{tree.name}/**/*.jp*", storage=tree / "sub" / "deep") == [f"../{tree.name}/x[1].jpg"]
    assert len(found(f"../{tree.name}", recursive=True, storage=tree / "sub")) == 3
    with pytest.raises(InputError, match="outside of svdq's storage"):
        found("sub/*.webp", storage=tree / "sub")


def test_standard_input(tree: Path) -> None:
    assert found("-", stdin=b"b.JPG\n\nsub\r\nx[1].jpg") == ["b.JPG", "sub/c.webp", "x[1].jpg"]
    assert found("a.png", "-", stdin=b"a\nb.jpg\0x[1].jpg\0") == ["a.png", "a\nb.jpg", "x[1].jpg"]
    assert found("-", stdin=b"\xff.jpg") == [os.fsdecode(b"\xff.jpg")]
    assert found("-", stdin=b"\xef\xbb\xbfb.JPG\r\n") == ["b.JPG"]
    photo = io.BytesIO()
    Image.new("RGB", (8, 8)).save(photo, "JPEG")
    with pytest.raises(InputError, match="is a photo, and takes a list of paths"):
        found("-", stdin=photo.getvalue())


@pytest.mark.parametrize(
    "name", ["@Recycle", "#snapshot", "RECYCLER", "Photos Library.photoslibrary", "Previews.lrdata"]
)
def test_folders_of_devices_and_programs_are_left_out(tree: Path, name: str) -> None:
    (tree / "sub" / name).mkdir()
    (tree / "sub" / name / "x.jpg").touch()
    assert found("sub", recursive=True) == found("sub/**/*.*") == ["sub/c.webp", "sub/deep/d.jpeg"]


def test_a_pattern_below_a_folder_with_brackets(tree: Path) -> None:
    (tree / "trip [2024]").mkdir()
    (tree / "trip [2024]" / "a.jpg").touch()
    assert found("trip [2024]/*.jpg") == found(f"{tree}/trip [2024]/*.jpg", "trip [2024]/a.jpg")[1:]
    assert found("trip [[]2024]/*.jpg") == ["trip [2024]/a.jpg"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["empty"], "no photos in the folder 'empty'; .*--recursive"),
        (["*.tiff"], "no photo like '\\*.tiff'"),
        (["-"], "standard input"),
        ([""], "empty path"),
    ],
)
def test_nothing_found(tree: Path, words: list[str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        found(*words)
    with pytest.raises(InputError, match=r"no photos in the folder 'empty'\.$"):
        found("empty", recursive=True)


@pytest.mark.parametrize(("listed", "stored"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_list_may_have_accents_in_the_other_form(tmp_path: Path, listed: str, stored: str) -> None:
    folder = tmp_path / unicodedata.normalize(stored, "Müller")
    folder.mkdir()
    photo = folder / unicodedata.normalize(stored, "café.jpg")
    photo.touch()
    named = unicodedata.normalize(listed, str(photo))
    found = find_photos(["-"], stdin=io.BytesIO(f"{named}\n".encode()))
    assert [each.path for each in found.photos] == [photo]
    (tmp_path / "list.csv").write_text(f"photo\n{unicodedata.normalize(listed, 'Müller/café.jpg')}\n")
    [request] = read_batch(tmp_path / "list.csv", datetime.now)
    assert isinstance(request, PhotoRequest)
    assert request.path == photo


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_list_in_utf_16_is_refused(encoding: str) -> None:
    with pytest.raises(InputError, match="UTF-16"):
        find_photos(["-"], recursive=True, stdin=io.BytesIO("/photos/a.jpg\r\n".encode(encoding)))


@pytest.mark.parametrize(
    "name",
    [
        *("FOUND.000", "iPod Photo Cache", "Trash"),
        *("a.photolibrary", "b.migratedphotolibrary", "c.lrlibrary", "d.cocatalog"),
    ],
)
def test_folders_that_programs_make_are_left_out(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "a.jpg").touch()
    (tmp_path / "b.jpg").touch()
    assert [each.path.name for each in find_photos([str(tmp_path)], recursive=True).photos] == ["b.jpg"]
