"""The `svdq.toml` nearest to a photo, over the flags."""

import os
from pathlib import Path

import pytest

from svdq.cli.watch import watch as watch_command
from svdq.pipeline.errors import InputError
from svdq.producer.job import PHOTO_KEYS, VIDEO_FIELDS
from svdq.producer.settings_loader import load_for_watching
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.watching.folder_config import FileFilter, FolderConfig

FLAGS = JobSpec(drafts=(Draft(frames=14, fps=6),), priority="low")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_the_nearest_file_wins_over_the_flags(tmp_path: Path) -> None:
    write(tmp_path / "svdq.toml", "frames = 3\nsteps = 9")
    write(tmp_path / "day" / "svdq.toml", 'frames = 5\nsize = "128x64"\nformat = ["gif", "mp4"]\npriority = "high"')
    config = FolderConfig(tmp_path, FLAGS)

    top = config.spec_for("a.jpg")
    assert top.drafts == (Draft(frames=3, steps=9, fps=6),)
    assert (top.priority, top.folder) == ("low", "")

    deep = config.spec_for("day/roll 1/a.jpg")
    assert deep.drafts == (Draft(frames=5, fps=6, width=128, height=64, formats=("gif", "mp4")),)
    assert (deep.priority, deep.folder) == ("high", "day/roll 1")


def test_output_is_a_template_for_folder_and_name(tmp_path: Path) -> None:
    write(tmp_path / "svdq.toml", 'output = "night/{photo}-{seed}"')
    write(tmp_path / "{b}" / "svdq.toml", 'output = "{folder}/{photo}"')
    config = FolderConfig(tmp_path, FLAGS.with_output("x/{seed}"))
    assert (config.spec_for("a.jpg").folder, config.spec_for("a.jpg").name) == ("night", "{photo}-{seed}")
    assert config.spec_for("day/a.jpg").folder == "night/day"
    assert (config.spec_for("{b}/a.jpg").folder, config.spec_for("{b}/a.jpg").name) == ("{folder}", "{photo}")
    for wrong in ("output = 3", 'output = "{colour}"', 'output = "../x"'):
        write(tmp_path / "svdq.toml", wrong)
        with pytest.raises(InputError, match=r"svdq\.toml"):
            config.spec_for("a.jpg")


def test_the_file_is_read_for_each_photo(tmp_path: Path) -> None:
    config = FolderConfig(tmp_path, FLAGS)
    assert config.spec_for("a.jpg").drafts[0].frames == 14
    write(tmp_path / "svdq.toml", "frames = 3")
    assert config.spec_for("a.jpg").drafts[0].frames == 3
    write(tmp_path / "svdq.toml", "frames = 25")
    assert config.spec_for("a.jpg").drafts[0].frames == 25
    (tmp_path / "svdq.toml").unlink()
    assert config.spec_for("a.jpg").drafts[0].frames == 14


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("framez = 3", "There is no key 'framez'; did you mean frames?"),
        ("colour = 3", "There is no key 'colour'; the keys are family, frames,"),
        ("owner = 3", "owner 3 is not allowed: it must be 1 to 64 characters"),
        ("format = []", "format () is not allowed: it must be at least one"),
        ("frames = 0", "frames 0 is not allowed"),
        ('frames = "many"', "frames 'many' is not allowed"),
        ('size = "100x100"', "size 100x100 is not allowed"),
        ('size = "big"', "size big is not a size"),
        ('format = "avi"', "format avi is not allowed"),
        ('priority = "highest"', "There is no priority 'highest'"),
        ("min-guidance-scale = 9", "min_guidance_scale 9"),
        ('model = "other"', "'model' is a setting"),
        ("frames = ", "cannot be read"),
        ("seed = 2027-01-31", "seed '2027-01-31' is not allowed"),
        ("frames = 2027-01-31T22:00:00Z", "frames '2027-01-31"),
        ("seed = [7]", "seed [7] is not allowed"),
        ("seed = {a = 1}", 'seed {"a": 1} is not allowed'),
        ("frames = true", "frames true is not allowed"),
        ("seed = nan", "seed 'nan' is not allowed"),
        ("noise-aug-strength = nan", "noise_aug_strength nan"),
        ("format = [1, [2]]", "format 1 is not allowed"),
        ("format = {a = 1}", 'format {"a": 1} is not allowed'),
        ("size = [1024, 576]", "size [1024, 576] is not allowed"),
        ("priority = ['high']", "There is no priority ['high']"),
        ("fit = 3", "fit 3 is not allowed"),
        (f"seed = {'[' * 9999}{']' * 9999}", "nested too deeply"),
        (f"seed{'.a' * 1999} = 1", "nested too deeply"),
        (f"seed = '{'x' * 9999}'", "x…' is not allowed"),
        (f"seed = '{'x' * 99999}'", "larger than"),
    ],
)
def test_errors_name_the_file(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "day" / "svdq.toml"
    write(file, text)
    config = FolderConfig(tmp_path, FLAGS)
    for _ in range(2):
        with pytest.raises(InputError) as raised:
            config.spec_for("day/a.jpg")
        assert str(file) in str(raised.value)
        assert reason in str(raised.value)
        assert "--" not in str(raised.value)
    assert config.spec_for("a.jpg").drafts == FLAGS.drafts


def test_the_flags_are_checked_at_once_and_a_file_stops_no_watcher(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--frames 0"):
        FolderConfig(tmp_path, JobSpec(drafts=(Draft(frames=0),)))
    write(tmp_path / "svdq.toml", "framez = 3")
    config = FolderConfig(tmp_path, FLAGS)
    with pytest.raises(InputError, match="framez"):
        config.spec_for("a.jpg")


@pytest.mark.parametrize("working_folder", [".", "day"])
def test_settings_are_not_read_from_a_watched_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, working_folder: str
) -> None:
    for name in [name for name in os.environ if name.startswith("SVDQ_")]:
        monkeypatch.delenv(name)
    (tmp_path / "inbox" / "day").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "inbox")
    monkeypatch.chdir(tmp_path / "inbox" / working_folder)
    Path("svdq.toml").write_text('frames = 3\nredis_url = "redis://elsewhere"')
    for folder in (tmp_path / "inbox", tmp_path / "link"):
        assert load_for_watching(folder).redis_url is None
    assert load_for_watching(tmp_path / "other").redis_url == "redis://elsewhere"
    with pytest.raises(InputError, match="'redis_url' is a setting"):
        FolderConfig(Path.cwd(), FLAGS).spec_for("a.jpg")


def test_unusual_folder_names_become_names_that_all_storages_accept(tmp_path: Path) -> None:
    spec = FolderConfig(tmp_path, FLAGS).spec_for('what: "this"?/.x/a.jpg')
    assert spec.folder == "what_ _this__/x"
    spec.check()


def test_keys_are_those_of_the_flags() -> None:
    flags = {parameter.opts[0].removeprefix("--").replace("-", "_") for parameter in watch_command.params}
    options = {*VIDEO_FIELDS} - {"width", "height", "formats", "loras", "model"}  # the last one is a setting there
    assert set(PHOTO_KEYS) == options | {"size", "format", "lora", "priority", "then"}
    assert set(PHOTO_KEYS) <= flags


@pytest.mark.parametrize(
    "name", ["a.jpg", "IMG_0001.JPG", "a b.jpeg", "x.png", "y.WebP", "scan.tif", "phone.heic", "ü.bmp"]
)
def test_suffixes_ignore_case(name: str) -> None:
    assert FileFilter().matches(name)


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
    assert not FileFilter(recursive=True).matches(name)


def test_temporary_files_match_no_pattern() -> None:
    everything = FileFilter(globs=("*",))
    assert everything.matches("notes.txt")
    assert not everything.matches("a.jpg.part")
    assert not everything.matches(".a.jpg")
    assert not everything.matches("svdq.toml")


def test_subfolders_need_recursive() -> None:
    assert not FileFilter().matches("day/a.jpg")
    assert FileFilter(recursive=True).matches("day/a.jpg")
    assert FileFilter(recursive=True).matches("day/roll/a.jpg")


def test_globs_match_names_and_with_a_slash_paths() -> None:
    selection = FileFilter(recursive=True, globs=("*.jpg", "scans/*.TIF"))
    assert selection.matches("day/A.JPG")
    assert selection.matches("scans/a.tif")
    assert not selection.matches("other/a.tif")
    assert not selection.matches("a.png")


def test_other_files_are_reported_only_without_globs() -> None:
    for name in ("raw.NEF", "form.pdf", "a.jpg"):
        assert FileFilter().includes(name)
    for name in (".hidden.pdf", "form.pdf.part", "svdq.toml", "day/raw.NEF"):
        assert not FileFilter().includes(name)
    assert not FileFilter(globs=("*.jpg",)).includes("raw.NEF")


def test_a_file_may_name_the_owner(tmp_path: Path) -> None:
    config = FolderConfig(tmp_path, FLAGS)
    (tmp_path / "svdq.toml").write_text('owner = "anna"\n')
    assert config.spec_for("a.jpg").owner == "anna"
    for text in ('"a/b"', '""', "3"):
        (tmp_path / "svdq.toml").write_text(f"owner = {text}\n")
        with pytest.raises(InputError, match=r"owner .* is not allowed"):
            config.spec_for("a.jpg")
