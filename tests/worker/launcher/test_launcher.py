"""Starting a group: what is checked before any rank starts, and what a user is told."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.pipeline.models.families import published_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.producer import keys
from svdq.producer.connection import server_url
from svdq.producer.settings_loader import load_settings
from svdq.producer.status.registries import read_workers
from svdq.producer.submitting.model_choice import expect
from svdq.producer.together import ask_one
from svdq.worker import run_folder
from svdq.worker.config import RankConfig, RunConfig
from svdq.worker.launcher.gpus import ranks_per_gpu, share_out, visible_gpus
from svdq.worker.launcher.launcher import default_ranks, starting_record
from svdq.worker.launcher.torchrun import KEEP_FREED_MEMORY, environment


@pytest.mark.parametrize(
    "file", ["vae/diffusion_pytorch_model.safetensors", "scheduler/scheduler_config.json", "model_index.json"]
)
def test_other_files_under_the_same_name_are_another_model(tiny_wan: Path, tmp_path: Path, file: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_wan, folder, copy_function=shutil.copyfile)
    original = resolve(str(tiny_wan), on_gpus=False, dtype="auto").fingerprint
    assert resolve(str(folder), on_gpus=False, dtype="auto").fingerprint == original
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content + b"\n" if file.endswith(".json") else content[:-1] + bytes([content[-1] ^ 1]))
    assert resolve(str(folder), on_gpus=False, dtype="auto").fingerprint != original


def test_weights_that_are_not_loaded_do_not_count(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "both"
    shutil.copytree(tiny_model, folder)
    half = folder / "unet" / "diffusion_pytorch_model.fp16.safetensors"
    shutil.copy(folder / "unet" / "diffusion_pytorch_model.safetensors", half)
    assert (
        resolve(str(folder), on_gpus=False, dtype="auto").fingerprint
        == resolve(str(tiny_model), on_gpus=False, dtype="auto").fingerprint
    )
    in_half = resolve(str(folder), on_gpus=True, dtype="auto").fingerprint
    assert in_half == resolve(str(folder), on_gpus=False, dtype="fp16").fingerprint
    assert in_half != resolve(str(folder), on_gpus=True, dtype="fp32").fingerprint


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("0,1,2", 3),
        ("GPU-8f2d, GPU-11ab", 2),
        ("0,,2", 1),
        ("0,-1,1", 1),
        ("1,1", 1),
        ("NoDevFiles", 0),  # of Slurm, for a job without GPUs
    ],
)
def test_gpus_are_counted_as_the_ranks_will_see_them(visible: str, expected: int, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert len(visible_gpus()) == expected


@pytest.mark.parametrize(
    ("visible", "groups", "ranks", "expected"),
    [
        ("2,3", 2, 1, [["2"], ["3"]]),
        ("4,5,6,7", 2, 2, [["4", "5"], ["6", "7"]]),
        # More ranks than GPUs: they take turns, and none is named twice.
        ("2,3", 2, 3, [["2", "3"], ["3", "2"]]),
        ("3", 2, 2, [["3"], ["3"]]),
        ("GPU-8f2d, MIG-11ab", 3, 1, [["GPU-8f2d"], ["MIG-11ab"], ["GPU-8f2d"]]),
    ],
)
def test_groups_get_gpus_among_those_that_the_user_left(
    visible: str, groups: int, ranks: int, expected: list[list[str]], monkeypatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert share_out(visible_gpus(), groups, ranks) == expected


@pytest.mark.parametrize(
    ("num_gpus", "groups", "ranks", "expected"),
    [(7, 1, 7, 1), (1, 1, 7, 7), (2, 2, 1, 1), (1, 2, 1, 2), (4, 2, 3, 2), (4, 2, 5, 3), (0, 2, 7, 1)],
)
def test_ranks_of_all_groups_that_share_a_gpu_are_counted(
    num_gpus: int, groups: int, ranks: int, expected: int
) -> None:
    assert ranks_per_gpu(num_gpus, groups * ranks) == expected
    if num_gpus:
        gpus = [str(number) for number in range(num_gpus)]
        # As `group.choose_device` has the ranks of a group take turns at what it sees.
        chosen = [share[rank % len(share)] for share in share_out(gpus, groups, ranks) for rank in range(ranks)]
        assert max(chosen.count(gpu) for gpu in gpus) == expected


def test_ranks_and_launcher_know_each_other_through_the_run_folder(tmp_path: Path) -> None:
    assert run_folder.running_pids(tmp_path) == {}
    assert run_folder.read_error(tmp_path) is None
    run_folder.write_pid(tmp_path, 0)
    code = (
        "import sys; from pathlib import Path; from svdq.worker import run_folder;"
        "run_folder.write_pid(Path(sys.argv[1]), 12)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) as other:
        other.wait()
    assert run_folder.running_pids(tmp_path) == {0: os.getpid()}
    (tmp_path / "rank12.pid").write_text(f"{os.getppid()} 1")  # its number has been given to another process
    assert run_folder.running_pids(tmp_path) == {0: os.getpid()}

    run_folder.write_error(tmp_path, InputError("The model is not there; größer."))
    run_folder.write_error(tmp_path, UnavailableError("From another rank; größer."))
    error = run_folder.read_error(tmp_path)
    assert (type(error), str(error)) == (UnavailableError, "From another rank; größer.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["error", "rank0.pid", "rank12.pid"]


@pytest.mark.parametrize(
    ("gpus", "groups", "cores", "expected"),
    [(7, 1, 2, 7), (4, 2, 64, 2), (1, 3, 64, 1), (0, 1, 4, 4), (0, 1, 64, 7), (0, 2, 8, 4), (0, 9, 2, 1)],
)
def test_the_default_number_of_ranks(gpus: int, groups: int, cores: int, expected: int, monkeypatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert default_ranks(gpus, groups) == expected


def test_ranks_on_processors_keep_the_memory_that_they_free(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEEP_FREED_MEMORY:
        monkeypatch.delenv(name, raising=False)
    config = RunConfig(rank=RankConfig(), settings=load_settings(), model=resolve("preview"))
    assert KEEP_FREED_MEMORY.items() <= environment(config, on_gpus=False).items()
    assert not KEEP_FREED_MEMORY.keys() & environment(config, on_gpus=True).keys()
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000")  # the user's own
    assert environment(config, on_gpus=False)["MALLOC_TRIM_THRESHOLD_"] == "1000"


def test_the_numbers_of_gpus_are_those_of_nvidias_tool(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's own begin with the fastest GPU."""
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    config = RunConfig(rank=RankConfig(), settings=load_settings(), model=resolve("preview"))
    assert environment(config, on_gpus=True)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert environment(config, on_gpus=True)["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


# `svdq worker` as a user types it.


def refused(finished: "subprocess.CompletedProcess[str]", exit_code: int = 2) -> str:
    """One sentence on stderr and the exit code for what was not done."""
    assert finished.returncode == exit_code, finished.stderr
    assert finished.stdout == ""
    assert finished.stderr.startswith("Error: ")
    assert finished.stderr.count("\n") == 1
    return finished.stderr


def test_an_unreachable_redis_is_refused(site) -> None:
    message = refused(
        site.run("svdq", "worker", "--ranks", 2, "--burst", "--redis-url", "redis://127.0.0.1:1/0"), exit_code=3
    )
    assert "redis://127.0.0.1:1 " in message


@pytest.mark.parametrize("options", [(), ("--burst",)])
def test_a_home_that_cannot_be_written_is_refused(site, tmp_path: Path, options: tuple[str, ...]) -> None:
    """As in a container with a read-only root, where Redis is elsewhere."""
    (tmp_path / "run").touch()  # a user without rights is hard to come by, as tests may run as root
    url = server_url(site.settings)
    command = ("worker", "--ranks", 2, "--device", "cpu", "--storage", tmp_path / "videos", "--redis-url", url)
    done = site.run("svdq", *command, *options, SVDQ_HOME=str(tmp_path))
    assert f"The folder {str(tmp_path)!r} cannot be written (" in refused(done, exit_code=3)


def test_a_home_on_a_full_disk_is_refused(site) -> None:
    """The message was about the output, and came from the first file that did not fit."""
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 0; exec "$@"', "-", sys.executable, "-m", "svdq.cli", "worker", "--ranks", "1"],
        capture_output=True,
        text=True,
        env=site.environment(SVDQ_REDIS_URL=server_url(site.settings)),
    )
    assert f"The folder {str(site.settings.home)!r} cannot be written (" in refused(done, exit_code=3)


def test_cuda_without_a_gpu_is_refused(site) -> None:
    message = refused(site.run("svdq", "worker", "--ranks", 2, "--device", "cuda", CUDA_VISIBLE_DEVICES=""))
    assert "no NVIDIA GPU is visible" in message


@pytest.mark.parametrize("ranks", ["0", "-3", "many", "70000"])
def test_a_senseless_number_of_ranks_is_refused(site, ranks: str) -> None:
    assert "--ranks" in refused(site.run("svdq", "worker", "--ranks", ranks))


@pytest.mark.long
def test_an_error_found_while_loading_is_printed_once(site, tiny_model: Path, tmp_path: Path) -> None:
    """A rank finds it out; the user reads one sentence, nothing is tried again, and no rank is left."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = folder / "image_encoder" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": "two"}))
    done = site.run("svdq", "worker", "--ranks", 2, "--device", "cpu", "--model", folder)
    assert (done.returncode, done.stdout) == (2, "")
    # The other rank may have loaded its own parts by then.
    starting, *before, message = done.stderr.splitlines()
    assert starting == f"Starting 2 ranks on the processors with the model {folder}; this takes some seconds."
    assert all("Loaded" in line for line in before), done.stderr
    assert message.startswith(f"Error: The image_encoder of the model {folder} cannot be loaded")
    assert "expected int, got str" in message


# The record of a worker that starts.


def test_a_record_lasts_until_the_groups_are_ready_and_have_said_what_they_can_make(site, until) -> None:
    group = SimpleNamespace(is_resting=False, is_starting=False)
    with starting_record(site.settings, ResolvedModel(name="preview"), [group]):
        until(lambda: ask_one(site.connection, read_workers())[1] == "starting")
        until(lambda: ask_one(site.connection, read_workers())[1] == "none")
    group.is_starting = True
    with starting_record(site.settings, ResolvedModel(name="preview"), [group]):
        until(lambda: ask_one(site.connection, read_workers())[1] == "starting")
        assert 0 < site.connection.ttl(keys.STARTING) <= keys.STARTING_TTL_S
        group.is_starting = False
        until(lambda: ask_one(site.connection, read_workers())[1] == "none")
    with starting_record(site.settings, ResolvedModel(name="preview"), []):
        until(lambda: ask_one(site.connection, read_workers())[1] == "starting")
    assert ask_one(site.connection, read_workers())[1] == "none"


@pytest.mark.long
def test_a_worker_counts_as_starting_while_it_asks_for_its_gpus(site, until, tiny_model: Path, tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: A GPU (UUID: GPU-1)" || { touch "$0.asked"; sleep 60; }')
    tool.chmod(0o755)
    path = f"{tool.parent}{os.pathsep}{os.environ['PATH']}"
    group = site.start(1, "--device", "auto", model=str(tiny_model), wait=False, PATH=path)
    until(lambda: tool.with_name("nvidia-smi.asked").exists(), lambda: group.text)
    until(lambda: ask_one(site.connection, read_workers())[1] == "starting", lambda: group.text, patience_s=5)


def test_the_record_of_a_killed_launcher_expires(site) -> None:
    now, _ = site.connection.time()
    site.connection.zadd(keys.STARTING, {"host:1": now - 1})
    assert ask_one(site.connection, read_workers())[1] == "none"


def test_the_model_that_a_worker_loads_decides_what_photos_are_for(site, until) -> None:
    loading = ResolvedModel(name="Wan-AI/Wan2.2-I2V-A14B-Diffusers", family="wan")
    with starting_record(site.settings, loading, []):
        until(lambda: expect(site.settings).model == replace(published_model("wan"), name=loading.name))
    assert expect(site.settings).model is None


@pytest.mark.long
def test_wait_knows_that_a_worker_is_starting(site, until) -> None:
    job = site.submit()
    group = site.start(2, "--burst", wait=False)
    until(lambda: "Starting 2 ranks on the processors with the model preview" in group.text, lambda: group.text)
    assert "Ready" not in group.text
    until(lambda: ask_one(site.connection, read_workers())[1] == "starting", lambda: group.text)
    done = site.run("svdq", "wait", job)
    assert done.returncode == 0
    assert "No worker is running" not in done.stdout + done.stderr
    assert group.end() == 0
    assert not site.connection.exists(keys.STARTING)
