import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer.storage import Storage


@pytest.fixture(params=["local", "file", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    urls = {"local": str(tmp_path / "s"), "file": f"file://{tmp_path}/s", "memory": f"memory://{tmp_path.name}"}
    return Storage(urls[request.param])


def files_under(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_inputs_are_content_addressed(storage: Storage) -> None:
    key = storage.put_input(b"photo", "jpg")
    assert key.startswith("inputs/")
    assert key.endswith(".jpg")
    assert storage.put_input(b"photo", "jpg") == key
    assert storage.exists(key)
    assert storage.read(key) == b"photo"
    assert not storage.exists("inputs/none.jpg")


def test_publish_replaces_files_and_folders(storage: Storage) -> None:
    for content in (b"one", b"two"):
        with storage.staging() as folder:
            (folder / "a.mp4").write_bytes(content)
            (folder / "frames").mkdir()
            (folder / "frames" / f"{content.decode()}.png").write_bytes(content)
            storage.publish(folder / "a.mp4", "outputs/1/a.mp4")
            storage.publish(folder / "frames", "outputs/1/frames")
        assert not folder.exists()
        assert storage.read("outputs/1/a.mp4") == content
        assert storage.read(f"outputs/1/frames/{content.decode()}.png") == content
    assert not storage.exists("outputs/1/frames/one.png")
    storage.write_text("outputs/1/a.json", "é")
    assert storage.read("outputs/1/a.json").decode() == "é"


def test_local_storage_leaves_nothing_behind(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "s"))
    assert not (tmp_path / "s").exists(), "nothing is made before the first write"
    elsewhere = tmp_path / "x.mp4"
    elsewhere.write_bytes(b"x")
    storage.publish(elsewhere, "outputs/x.mp4")
    storage.write_text("outputs/x.json", "{}")
    assert [path.name for path in files_under(tmp_path / "s")] == ["x.json", "x.mp4"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "s/outputs/x.json").stat().st_mode) == 0o666 & ~umask
    assert storage.location("outputs/x.mp4") == str(tmp_path / "s/outputs/x.mp4")


def test_a_crash_before_the_rename_leaves_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(str(tmp_path / "s"))
    storage.write_text("a.json", "old")

    def crash(path: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        storage.write_text("a.json", "new")
    assert storage.read("a.json") == b"old"


@pytest.mark.parametrize("key", ["../x", "a/../x", "/etc/passwd", "a\\b", "s3://b/x", "", "a//b", "a/.", "a\0b", "a/"])
def test_bad_keys(storage: Storage, key: str) -> None:
    for method in (storage.read, storage.exists, storage.location):
        with pytest.raises(InputError, match="storage key"):
            method(key)
    with pytest.raises(InputError):
        storage.write_text(key, "")


def test_problems_are_sentences_without_secrets(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError) as caught:
        Storage("nosuch://u:secret@h/x?token=hidden")
    assert "secret" not in str(caught.value)
    assert "hidden" not in str(caught.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="SVDQ_STORAGE"):
        Storage(str(tmp_path / "file")).put_input(b"x", "jpg")
    with pytest.raises(UnavailableError):
        Storage(str(tmp_path)).read("inputs/none.jpg")


def test_location_of_a_url_has_no_secrets() -> None:
    assert Storage("memory://bucket/x/").location("a/b.mp4") == "memory://bucket/x/a/b.mp4"


def test_names_and_removal(storage: Storage) -> None:
    assert storage.names("checkpoints/job") == []
    storage.remove("checkpoints/job")
    for step in (3, 7):
        storage.write_bytes(f"checkpoints/job/{step}.safetensors", b"x")
    storage.write_bytes("checkpoints/other/1.safetensors", b"y")
    assert sorted(storage.names("checkpoints/job")) == ["3.safetensors", "7.safetensors"]
    storage.remove("checkpoints/job/3.safetensors")
    assert storage.names("checkpoints/job") == ["7.safetensors"]
    storage.remove("checkpoints/job")
    assert storage.names("checkpoints") == ["other"]
    with pytest.raises(InputError):
        storage.remove("../elsewhere")


def test_a_sweep_removes_what_killed_processes_left_and_nothing_else(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "s"))
    code = (
        "import os, signal, sys; from svdq.producer.storage import Storage\n"
        "with Storage(sys.argv[1]).staging() as folder:\n"
        "    (folder / 'half.mp4').write_bytes(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")]).returncode == -signal.SIGKILL
    left = list((tmp_path / "s/tmp").iterdir())
    assert [path.name for path in left[0].iterdir()] == ["half.mp4"]
    elsewhere = tmp_path / "s/tmp/another-host@1-aa"
    elsewhere.mkdir()
    old = tmp_path / "s/tmp/another-host@1-bb"
    old.write_bytes(b"")
    os.utime(old, (0, 0))
    with storage.staging() as ours:
        storage.sweep()
        assert sorted((tmp_path / "s/tmp").iterdir()) == sorted([ours, elsewhere])


def test_a_write_that_fails_leaves_nothing_on_a_full_disk(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "s"))
    storage.write_text("outputs/folder/x.json", "{}")
    with pytest.raises(UnavailableError):
        storage.write_text("outputs/folder", "{}")  # a folder is in the way of the rename
    assert list((tmp_path / "s/tmp").iterdir()) == []
