"""What was measured to be the fastest exact way is how workers compute on such GPUs, unless they are told."""

import json
import os
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from svdq.cli.main import run
from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute import DEFAULTS, VARIANTS, ComputeOptions
from svdq.producer.settings import Settings
from svdq.worker.__main__ import _checked
from svdq.worker.launching import kept_options
from svdq.worker.launching.compute_options import compute_options, read_said
from svdq.worker.launching.kept_options import best_of, keep, kept_for, kept_way

A5000 = "NVIDIA RTX A5000"


def figures(**speedups: float) -> list[dict]:
    """What `svdq bench unet` says of options, in the dtype of workers."""
    names = {name.replace("_", "-"): speedup for name, speedup in speedups.items()}
    return [{"option": name, "failure": "", "speedup": speedup, "difference": 1e-3} for name, speedup in names.items()]


def kept_in(home: Path, **speedups: float) -> None:
    keep(home, best_of(A5000, figures(**speedups)))


def test_the_fastest_exact_way_is_kept_for_gpus_like_this_one(tmp_path: Path) -> None:
    home = tmp_path / "home"
    kept_in(home, eager=1, channels_last=1.2, compiled_blocks=1.4, int8=2.0)
    kept = kept_for(home, [A5000] * 7)
    assert kept is not None
    assert kept.options == ComputeOptions(compiled="blocks")
    assert kept_for(home, [A5000, "NVIDIA H200"]) is None
    assert kept_for(home, []) is None
    assert kept_for(tmp_path, [A5000]) is None


def test_what_fails_strays_or_gains_little_is_not_kept(tmp_path: Path) -> None:
    kept_in(tmp_path, compiled=1.5)
    found = figures(eager=1, channels_last=1.02, compiled=1.5, flash=1.3, cudnn=1.3, compiled_blocks=1.09)
    found[2]["failure"] = "no compiler"
    found[3]["difference"] = 0.02
    found[4]["difference"] = None  # it was no number
    found.append({"option": "math", "failure": "", "speedup": None, "difference": None})  # eager could not be run
    assert best_of(A5000, found) is None
    keep(tmp_path, None)
    assert kept_for(tmp_path, [A5000]) is None


def test_other_libraries_or_a_damaged_file_keep_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_in(tmp_path, compiled=1.5)
    path = tmp_path / kept_options.FILE
    written = json.loads(path.read_text())
    changes = ({"option": "magic"}, {"option": "int8"}, {"option": ["compiled"]}, {"device": [A5000]}, {"speedup": "?"})
    for damaged in ("", "[]", *(json.dumps({**written, **change}) for change in changes)):
        path.write_text(damaged)
        assert kept_for(tmp_path, [A5000]) is None, damaged
    path.write_text(json.dumps(written))
    assert kept_for(tmp_path, [A5000]) is not None
    monkeypatch.setattr(kept_options, "version", lambda name: "9.9")
    assert kept_for(tmp_path, [A5000]) is None


def test_a_group_computes_in_the_way_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "nvidia-smi"
    listed = f"GPU 0: {A5000} (UUID: GPU-1)\\nGPU 1: Quadro P400 (UUID: GPU-2)\\n"
    program.write_text(f"#!/bin/sh\nprintf '{listed}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    settings = Settings(home=tmp_path, model="/models/svd")
    assert kept_way(settings, ["0"], 1) is None
    kept_in(tmp_path, together=1.58)
    with caplog.at_level("INFO"):
        assert kept_way(settings, ["0"], 1) == VARIANTS["together"]
    assert "1.58 times as fast as diffusers' own way on this NVIDIA RTX A5000" in caplog.text
    # Not where a group has other GPUs as well,
    assert kept_way(settings, ["0", "1"], 1) is None
    # not on processors, not for models without a UNet, and not where another host may not have it.
    assert kept_way(settings, [], 1) is None
    assert kept_way(Settings(home=tmp_path, model="preview"), ["0"], 1) is None
    assert kept_way(settings, ["0"], 2) is None


def test_a_kept_way_that_does_not_work_any_more_keeps_no_worker_from_starting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cudnn = ComputeOptions(attention="cudnn")  # which no processor has
    with pytest.raises(InputError, match="--attention cudnn does not work"):
        _checked(cudnn, torch.device("cpu"), is_kept=False)
    assert _checked(cudnn, torch.device("cpu"), is_kept=True) == DEFAULTS
    assert "Computing as diffusers does" in caplog.text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], None),
        (["--compile", "off"], DEFAULTS),
        (["--no-channels-last"], DEFAULTS),
        (["--approximate", "reuse3"], ComputeOptions(approximate=("reuse3",))),
    ],
)
def test_whoever_says_anything_has_said_how(words: list[str], expected: ComputeOptions | None) -> None:
    said = []

    @click.command()
    @compute_options
    def command(**options) -> None:
        said.append(read_said(options))
        assert options == {}

    assert CliRunner().invoke(command, words).exit_code == 0
    assert said == [expected]


def test_processors_keep_the_bits_of_diffusers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "unet", "--device", "cpu", "--keep"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--keep is for GPUs" in printed.err
