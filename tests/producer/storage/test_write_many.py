"""Many files into a storage at once: whole, under their keys, and nothing left beside them."""

from pathlib import Path

import fsspec
import pytest

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer.storage.local import FLUSHED_TOGETHER
from svdq.producer.storage.storage import MARKER, Storage


def some(number: int, data: bytes = b"photo") -> dict[str, bytes]:
    return {f"inputs/{index % 2}/{index}.jpg": data + bytes([index]) for index in range(number)}


def there(folder: Path) -> dict[str, bytes]:
    """All files but the marker."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != MARKER]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("number", [0, FLUSHED_TOGETHER - 1, FLUSHED_TOGETHER, 100])
def test_a_folder(tmp_path: Path, number: int) -> None:
    storage = Storage(str(tmp_path / "storage"))
    storage.write_many(some(number, b"old"))
    storage.write_many(some(number))
    assert there(tmp_path / "storage") == some(number)
    assert number == 0 or list((tmp_path / "storage" / "tmp").iterdir()) == []


def test_a_folder_that_is_in_the_way(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    (tmp_path / "inputs" / "1").mkdir(parents=True)
    (tmp_path / "inputs" / "0").touch()
    with pytest.raises(UnavailableError, match="inputs/0"):
        storage.write_many(some(10))
    assert there(tmp_path).items() <= {"inputs/0": b"", **some(10)}.items()


def test_an_object_store() -> None:
    storage = Storage("memory://write-many/x")
    storage.write_many(some(10))
    assert all(storage.read(key) == data for key, data in some(10).items())
    fsspec.filesystem("memory").rm("/write-many", recursive=True)


def test_keys_are_checked_first(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a storage key"):
        Storage(str(tmp_path)).write_many({**some(10), "../x": b""})
    assert list(tmp_path.iterdir()) == []
