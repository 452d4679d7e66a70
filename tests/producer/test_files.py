"""New files are written whole, and only once; errors say whose a folder is."""

import errno
import os
import pwd
from pathlib import Path

import pytest

from svdq.producer.files import create_file, unusable


@pytest.mark.parametrize("has_hard_links", [True, False])
def test_a_file_that_is_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_hard_links: bool) -> None:
    def refuse(source: Path, target: Path) -> None:  # as exFAT does
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), source, None, target)

    if not has_hard_links:
        monkeypatch.setattr(os, "link", refuse)
    path, dangling = tmp_path / "a.txt", tmp_path / "b.txt"
    dangling.symlink_to(tmp_path / "nowhere")
    assert create_file(path, "first")
    assert not create_file(path, "second")
    assert not create_file(dangling, "through the link")
    assert path.read_text() == "first"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.txt", "b.txt"]


def test_a_folder_of_another_user_is_said_to_be_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    denied = PermissionError(errno.EACCES, "Permission denied")
    assert unusable(tmp_path / "home", denied) == "Permission denied"
    owner = pwd.getpwuid(os.getuid()).pw_name
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert unusable(tmp_path / "home", denied) == f"Permission denied; {str(tmp_path)!r} belongs to {owner}"
