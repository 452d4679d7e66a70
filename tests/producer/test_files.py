"""New files are written whole, and only once."""

import errno
import os
from pathlib import Path

import pytest

from svdq.producer.files import create_file


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
