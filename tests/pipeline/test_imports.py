"""A package that does not fit the others is named, with what mends it; advice to fetch a model would cost 126 GB."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from svdq.pipeline.errors import InputError
from svdq.pipeline.imports import import_failure, plain_imports


@pytest.mark.parametrize(
    ("package", "error", "advice"),
    [
        ("torchvision", "RuntimeError('operator torchvision::nms does not exist')", "pip uninstall torchvision"),
        ("flash_attn", "ImportError('undefined symbol: _ZN3c10')", "pip install --force-reinstall flash_attn"),
        ("peft", "AttributeError('EncoderDecoderCache')", "pip install --force-reinstall peft"),
    ],
)
def test_a_broken_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, error: str, advice: str
) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"from {package} import inner")
    (tmp_path / package / "inner.py").write_text(f"raise {error}")
    library = "try:\n    import {0}\nexcept Exception as error:\n    raise RuntimeError('Failed to import') from error"
    (tmp_path / "a_library.py").write_text(library.format(package))
    monkeypatch.syspath_prepend(tmp_path)
    for name in (package, f"{package}.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(InputError, match=f"The package {package}.* cannot be imported") as raised, plain_imports():
        __import__("a_library")
    assert advice in str(raised.value)


def test_other_errors_stay(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no import"), plain_imports():
        raise ValueError("no import")
    assert import_failure(FileNotFoundError(2, "No such file")) is None


@pytest.mark.slow
def test_a_command_says_it_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    command = [sys.executable, "-m", "svdq.cli", "model", "tiny", str(tmp_path / "tiny")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: The package torchvision cannot be imported (operator torchvision::nms")
    assert done.stderr.count("\n") == 1
