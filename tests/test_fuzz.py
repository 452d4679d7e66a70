"""The fuzzing of every reader of foreign data in its short form; `python -m tests.fuzz` is the long one."""

from pathlib import Path

import pytest

from tests.fuzz.run import run
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_raises_what_is_not_documented(name: str, home: Path, tmp_path: Path) -> None:
    (saved := tmp_path / "saved").mkdir()
    (folder := tmp_path / "files").mkdir()
    outcome = run(name, TARGETS[name], folder, saved, seed=9, num_inputs=200)
    assert not outcome.findings, "\n".join(outcome.findings.values())
    assert outcome.num_inputs == 200
