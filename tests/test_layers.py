"""The tests of the light packages need no torch: a contributor runs them in seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

COLLECT = """
import sys, pytest
code = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "tests/cli", "tests/producer"])
sys.exit(code or " ".join({"torch", "diffusers", "transformers"} & sys.modules.keys()) or 0)
"""


@pytest.mark.slow
def test_tests_of_producer_and_cli_import_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COLLECT], capture_output=True, text=True, cwd=Path(__file__).parent.parent, timeout=250
    )
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
