import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer.files import sweep, temporary_name, write_file
from svdq.producer.storage import storage as storage_module
from svdq.producer.storage.local import publish
from svdq.producer.storage.storage import MARKER, Storage


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
    for content in (b"one", b"three"):
        with storage.staging() as folder:
            (folder / "a.mp4").write_bytes(content)
            (folder / "frames").mkdir()
            (folder / "frames" / f"frame_{len(content)}.png").write_bytes(content)
            storage.publish(folder / "a.mp4", "outputs/1/a.mp4")
            storage.publish(folder / "frames", "outputs/1/frames")
        assert not folder.exists()
        assert storage.read("outputs/1/a.mp4") == content
        assert storage.read(f"outputs/1/frames/frame_{len(content)}.png") == content
    assert not storage.exists("outputs/1/frames/frame_3.png")
    storage.write_text("outputs/1/a.json", "é")
    assert storage.read("outputs/1/a.json").decode() == "é"


def test_publish_keeps_the_files_of_others_in_a_folder_of_frames(storage: Storage) -> None:
    for number in (2, 1):
        with storage.staging() as folder:
            (folder / "frames").mkdir()
            for frame in range(number):
                (folder / "frames" / f"frame_{frame:04}.png").write_bytes(bytes([number]))
            storage.publish(folder / "frames", "outputs/v")
        if number == 2:
            storage.write_text("outputs/v/notes.txt", "a user's")
            storage.write_text("outputs/v/graded/frame_0001.png", "a user's")
    assert storage.read("outputs/v/notes.txt") == b"a user's"
    assert storage.read("outputs/v/frame_0000.png") == b"\x01"
    assert not storage.exists("outputs/v/frame_0001.png")
    assert storage.read("outputs/v/graded/frame_0001.png") == b"a user's"


def test_a_folder_that_is_published_by_several_at_once_is_whole(tmp_path: Path) -> None:
    def publish_some(number: int) -> None:
        for _ in range(50):
            source = tmp_path / temporary_name(".svdq-")
            source.mkdir()
            for name in ("frame_1.png", "frame_2.png"):
                (source / name).write_text(str(number))
            publish(source, tmp_path / "video")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(publish_some, range(4)))
    assert os.listdir(tmp_path) == ["video"]
    assert len({path.read_text() for path in (tmp_path / "video").iterdir()}) == 1
    assert len(os.listdir(tmp_path / "video")) == 2


def test_local_storage_leaves_nothing_behind(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "s"))
    assert not (tmp_path / "s").exists(), "nothing is made before the first write"
    elsewhere = tmp_path / "x.mp4"
    elsewhere.write_bytes(b"x")
    storage.publish(elsewhere, "outputs/x.mp4")
    storage.write_text("outputs/x.json", "{}")
    assert [path.name for path in files_under(tmp_path / "s")] == [MARKER, "x.json", "x.mp4"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "s/outputs/x.json").stat().st_mode) == 0o666 & ~umask
    assert storage.location("outputs/x.mp4") == str(tmp_path / "s/outputs/x.mp4")


def test_what_is_written_when_its_disk_goes_away_is_removed_when_it_is_back(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "s"))
    with storage.staging() as folder:
        (folder / "half.mp4").write_bytes(b"half")
        (tmp_path / "s").rename(tmp_path / "away")  # as when its disk is unmounted
    (tmp_path / "away").rename(tmp_path / "s")
    assert (folder / "half.mp4").exists()
    storage.write_text("outputs/a.json", "{}")
    assert list((tmp_path / "s/tmp").iterdir()) == []


def test_a_folder_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "s"))
    storage.write_text("outputs/a.json", "{}")
    (tmp_path / "s").rename(tmp_path / "away")  # as when its disk is unmounted
    for write in (storage.check_writable, lambda: storage.staging().__enter__()):
        with pytest.raises(UnavailableError, match=r"removed or not mounted: there is no file at '.*/s/\.svdq-"):
            write()
    assert not (tmp_path / "s").exists()
    (tmp_path / "away").rename(tmp_path / "s")
    storage.write_text("outputs/b.json", "{}")
    assert [path.name for path in files_under(tmp_path / "s")] == [MARKER, "a.json", "b.json"]


@pytest.mark.parametrize("key", ["../x", "a/../x", "/etc/passwd", "a\\b", "s3://b/x", "", "a//b", "a/.", "a\0b", "a/"])
def test_bad_keys(storage: Storage, key: str) -> None:
    for method in (storage.read, storage.exists, storage.location):
        with pytest.raises(InputError, match="storage key"):
            method(key)
    with pytest.raises(InputError):
        storage.write_text(key, "")


def test_problems_are_sentences_without_secrets(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^There is no kind of storage nosuch://") as caught:
        Storage("nosuch://u:secret@h/x?token=hidden")
    assert "secret" not in str(caught.value)
    assert "hidden" not in str(caught.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="SVDQ_STORAGE"):
        Storage(str(tmp_path / "file")).put_input(b"x", "jpg")
    with pytest.raises(UnavailableError):
        Storage(str(tmp_path)).read("inputs/none.jpg")


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("az://container/x", "adlfs", "azure"),
        ("s3://key:secret@bucket/x", "s3fs", "s3"),
    ],
)
@pytest.mark.usefixtures("home")
def test_the_error_names_a_missing_plugin(url: str, module: str, extra: str) -> None:
    code = (
        "import sys\n"
        f"sys.modules[{module!r}] = None  # as Python has it that a package is not there\n"
        "from svdq.cli.main import run\n"
        f"sys.exit(run(['report', '--storage', {url!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"pip install '.[{extra}]'` in " in done.stderr
    assert done.stderr.count("\n") == 1
    assert "secret" not in done.stderr


def test_submitting_a_photo_again_renews_its_time(storage: Storage) -> None:
    key = storage.put_input(b"photo", "jpg")
    assert storage.has_input(key)
    assert not storage.has_input("inputs/none.jpg")
    if storage.folder:
        os.utime(storage.folder / key, (0, 0))
        assert storage.has_input(key)
        entry = storage.entry(key)
        assert entry is not None
        assert datetime.now(UTC) - entry.modified_at < timedelta(minutes=5)


@pytest.mark.parametrize("data", [b"phot", b"PHOTO"])
def test_a_damaged_photo_is_refused_and_can_be_stored_again(storage: Storage, data: bytes) -> None:
    key = storage.put_input(b"photo", "jpg")
    assert storage.read_input(key) == b"photo"
    storage.write_bytes(key, data)
    with pytest.raises(InputError, match="damaged in the storage; submit it again"):
        storage.read_input(key)
    assert not storage.exists(key)
    storage.write_bytes(key, b"phot")
    assert storage.put_input(b"photo", "jpg") == key
    assert storage.read_input(key) == b"photo"


def test_entries_are_all_files_below(storage: Storage, tmp_path: Path) -> None:
    assert list(storage.entries("outputs")) == []
    assert storage.entry("outputs/a.json") is None
    for number, key in enumerate(("outputs/a.json", "outputs/b/c d/é.mp4", "outputs.txt", "inputs/x.jpg")):
        storage.write_bytes(key, b"x" * number)
    found = {entry.key: entry.size for entry in storage.entries("outputs")}
    assert found == {"outputs/a.json": 0, "outputs/b/c d/é.mp4": 1}
    assert all(abs(datetime.now(UTC) - entry.modified_at) < timedelta(minutes=5) for entry in storage.entries("inputs"))
    assert storage.entry("inputs/x.jpg") == next(iter(storage.entries("inputs")))
    assert dict(storage.read_many(["outputs/a.json", "outputs/none", "inputs/x.jpg"])) == {
        "outputs/a.json": b"",
        "inputs/x.jpg": b"xxx",
    }
    storage.copy_out("inputs/x.jpg", tmp_path / "copy.jpg")
    assert (tmp_path / "copy.jpg").read_bytes() == b"xxx"


def test_a_folder_of_the_storage_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "other disk").mkdir()
    (tmp_path / "s").mkdir()
    (tmp_path / "s/outputs").symlink_to(tmp_path / "other disk")
    storage = Storage(str(tmp_path / "s"))
    storage.write_bytes("outputs/a.mp4", b"video")
    assert storage.exists("outputs")
    assert storage.read("outputs/a.mp4") == b"video"
    assert [entry.key for entry in storage.entries("outputs")] == ["outputs/a.mp4"]


def test_links_below_the_folders_of_a_storage_are_not_followed(tmp_path: Path) -> None:
    """Whoever may write to a shared storage must not have others read their own files."""
    (tmp_path / "private").mkdir()
    (tmp_path / "private/a.mp4").write_bytes(b"secret")
    storage = Storage(str(tmp_path / "s"))
    storage.write_bytes("outputs/day/b.mp4", b"video")
    (tmp_path / "s/outputs/file.mp4").symlink_to(tmp_path / "private/a.mp4")
    (tmp_path / "s/outputs/day/folder").symlink_to(tmp_path / "private")
    for key in ("outputs/file.mp4", "outputs/day/folder/a.mp4"):
        for read in (storage.read, storage.open, lambda key: storage.copy_out(key, tmp_path / "copy")):
            with pytest.raises(UnavailableError, match="it is a link, or in one"):
                read(key)
        assert (storage.exists(key), storage.entry(key), list(storage.read_many([key]))) == (False, None, [])
    assert storage.names("outputs/day/folder") == list(storage.entries("outputs/day/folder")) == []
    assert [entry.key for entry in storage.entries("outputs")] == ["outputs/day/b.mp4"]
    for key in ("outputs/file.mp4", "outputs/day/folder/a.mp4", "outputs/day/folder"):
        storage.remove(key)
    assert (tmp_path / "private/a.mp4").read_bytes() == b"secret"


def test_folders_on_several_disks_are_a_sentence(tmp_path: Path) -> None:
    shared_memory = Path("/dev/shm")
    if not shared_memory.is_dir() or shared_memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system")
    (tmp_path / "s").mkdir()
    with tempfile.TemporaryDirectory(dir=shared_memory) as elsewhere:
        (tmp_path / "s/outputs").symlink_to(elsewhere)
        with pytest.raises(UnavailableError, match=r"\(its folders are on several disks at '.*/s/outputs'\)"):
            Storage(str(tmp_path / "s")).write_bytes("outputs/a.mp4", b"video")
        assert os.listdir(elsewhere) == os.listdir(tmp_path / "s/tmp") == []


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


def test_a_sweep_removes_only_files_of_killed_processes(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "s"))
    code = (
        "import os, signal, sys; from svdq.producer.storage.storage import Storage\n"
        "with Storage(sys.argv[1]).staging() as folder:\n"
        "    (folder / 'half.mp4').write_bytes(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")]).returncode == -signal.SIGKILL
    left = list((tmp_path / "s/tmp").iterdir())
    assert [path.name for path in left[0].iterdir()] == ["half.mp4"]
    elsewhere = tmp_path / f"s/tmp/{'0' * 12}@1.1-{'a' * 16}"
    elsewhere.mkdir()
    old = tmp_path / f"s/tmp/{'0' * 12}@1.1-{'b' * 16}"
    old.write_bytes(b"")
    os.utime(old, (0, 0))
    with storage.staging() as ours:
        os.utime(ours, (0, 0))
        storage.sweep()
        assert sorted((tmp_path / "s/tmp").iterdir()) == sorted([ours, elsewhere])


@pytest.mark.parametrize(
    "name", ["photo.jpg", "a-host@1-aa", ".hidden", "me@home-0123456789abcdef.txt", "0123456789ab@1.1-0123"]
)
def test_a_sweep_leaves_the_files_of_others_however_old(tmp_path: Path, name: str) -> None:
    """`SVDQ_STORAGE=~` makes `~/tmp` the folder for what is being written."""
    storage = Storage(str(tmp_path / "s"))
    storage.write_text("outputs/a.json", "{}")
    (tmp_path / "s/tmp" / name).mkdir()
    (tmp_path / "s/tmp" / name / "diary.txt").write_text("mine")
    os.utime(tmp_path / "s/tmp" / name, (0, 0))
    storage.sweep()
    assert (tmp_path / "s/tmp" / name / "diary.txt").exists()


def test_a_sweep_removes_nothing_where_svdq_has_never_written(tmp_path: Path) -> None:
    path = tmp_path / f"s/tmp/{'0' * 12}@1.1-{'a' * 16}"
    path.mkdir(parents=True)
    os.utime(path, (0, 0))
    Storage(str(tmp_path / "s")).sweep()
    assert path.exists()


def test_a_machine_of_the_same_name_is_another_machine(tmp_path: Path) -> None:
    """Files of a process here are not those of one with the same number, on a machine with the same name."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    machine, rest = temporary_name().split("@")
    name = f"{process.pid}.{rest.partition('.')[2]}"
    theirs, ours = tmp_path / f"{'0' * 12}@{name}", tmp_path / f"{machine}@{name}"
    again = tmp_path / f"{machine}@{os.getpid()}.1-{'c' * 16}"  # this process has the number of one that is gone
    named = tmp_path / f"{socket.gethostname()}.{os.stat('/proc/self/ns/pid').st_ino:x}@{process.pid}-{'d' * 16}"
    for path in (theirs, ours, again, named):
        path.touch()
    sweep(tmp_path.iterdir())
    assert sorted(tmp_path.iterdir()) == sorted([theirs, named])


def test_a_failed_write_leaves_nothing_on_a_full_disk(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "s"))
    storage.write_text("outputs/folder/x.json", "{}")
    with pytest.raises(UnavailableError):
        storage.write_text("outputs/folder", "{}")  # a folder is in the way of the rename
    assert list((tmp_path / "s/tmp").iterdir()) == []


def test_a_file_is_whole_at_any_moment_and_links_stay_links(tmp_path: Path) -> None:
    def broken() -> Iterator[str]:
        yield "new"
        raise RuntimeError

    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    write_file(link, ["old"])
    assert link.is_symlink()
    with pytest.raises(RuntimeError):
        write_file(target, broken())
    assert target.read_text() == "old"
    with pytest.raises(InputError, match=r"cannot be written \(No such file"):
        write_file(tmp_path / "nowhere" / "file.json", [])
    assert sorted(tmp_path.iterdir()) == [link, target]


def test_a_folder_that_hangs_ends_a_command_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "ANSWER_S", 0.1)
    never = threading.Event()

    class Hung(Storage):
        def exists(self, key: str) -> bool:
            return never.wait(60)

    with pytest.raises(UnavailableError, match="has not answered for"):
        Hung.open_for_command(str(tmp_path))
    never.set()
    assert Storage.open_for_command(str(tmp_path)).folder == tmp_path
    assert Storage.open_for_command(str(tmp_path / "new")).folder == tmp_path / "new"
