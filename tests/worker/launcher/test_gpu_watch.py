"""Waiting for memory of GPUs that other programs hold, with a stub of nvidia-smi on PATH."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from svdq.pipeline.errors import InputError
from svdq.producer import keys
from svdq.worker.launcher.gpu_watch import lack_of_memory
from tests.faults.arena import INJECTION
from tests.worker.launcher.nvidia_smi import PutNvidiaSmi, nvidia_smi_of

GB = 10**9
FREE = (24564, 24000, {})


@pytest.mark.parametrize(
    ("total", "free", "held", "ranks", "waits"),
    [
        (24564, 10000, 14336, 1, True),
        (24564, 20000, 4000, 1, False),  # enough is left
        (24564, 20000, 4000, 2, False),  # two ranks do not fit it even when it is empty
        (49140, 30000, 19000, 2, True),
        (16376, 1000, 14336, 1, False),  # it is too small even when it is empty
        (24564, 10000, 700, 1, False),  # what is listed is not worth waiting for
    ],
)
def test_ranks_wait_only_for_memory_that_another_program_can_give_back(
    put_nvidia_smi: PutNvidiaSmi, started: Callable[..., int], total: int, free: int, held: int, ranks: int, waits: bool
) -> None:
    pid = started("games", "game.py")
    put_nvidia_smi(nvidia_smi_of(FREE, (total, free, {pid: (held, "python")})))
    said = lack_of_memory(["0", "GPU-b"], 18 * GB, ranks)
    assert bool(said) == waits
    assert lack_of_memory(["GPU-a"], 18 * GB, 1) == lack_of_memory(["1"], 0, 1) == ""
    if waits and ranks == 1:
        holder = f"{Path(sys.executable).name} game.py (process {pid}) holds 15.0 GB"
        assert said == f"GPU 1 has 10.5 GB of 25.8 GB free, of 18.0 GB that the model needs: {holder}"


def test_memory_of_ranks_of_svdq_comes_back_by_itself(
    put_nvidia_smi: PutNvidiaSmi, started: Callable[..., int]
) -> None:
    own, other = started("svdq", "svdq-rank.py"), started("games", "game.py")

    def lack(processes: Mapping[int, tuple[object, str]], ranks: int = 1) -> str:
        put_nvidia_smi(nvidia_smi_of((24564, 2000, processes)))
        return lack_of_memory(["0"], 10 * GB, ranks)

    assert lack({own: (22000, "python")}) == ""
    assert lack({own: (20000, "python"), other: (2000, "python")}) == ""
    assert lack({own: (2000, "python"), other: (20000, "python")}).endswith(f"(process {other}) holds 21.0 GB")
    # A container shows no process of another one.
    assert lack({}).endswith(": another program holds the rest")
    assert lack({}, ranks=2) == ""
    put_nvidia_smi("exit 9")
    assert lack_of_memory(["0"], 10 * GB, 1) == ""


@pytest.fixture
def card(put_nvidia_smi: PutNvidiaSmi, started: Callable[..., int], tmp_path: Path) -> Path:
    """A folder: while there is a file `taken`, a game holds most of the only GPU, by nvidia-smi's word."""
    game = started("games", "game.py")
    taken = nvidia_smi_of((24564, 1000, {game: (23000, "python")}))
    put_nvidia_smi(f"if [ -e {tmp_path / 'taken'} ]; then\n{taken}\nelse\n{nvidia_smi_of(FREE)}\nfi")
    return tmp_path


def start(site, card: Path, model: str, *options: str, ranks: int = 1, wait: bool = True):
    faults = {"PYTHONPATH": str(INJECTION), "FAULTS_AT": "memory", "FAULTS_FOLDER": str(card)}
    gpus = ",".join(map(str, range(ranks)))
    return site.start(ranks, "--device", "cuda", *options, model=model, wait=wait, CUDA_VISIBLE_DEVICES=gpus, **faults)


@pytest.mark.slow
def test_a_worker_starts_when_another_program_has_given_the_memory_back(
    site, card: Path, tiny_model: Path, until
) -> None:
    (card / "taken").touch()
    group = start(site, card, str(tiny_model), wait=False)
    until(lambda: "Waiting for memory: GPU 0 has 1.0 GB of 25.8 GB free" in group.text, lambda: group.text)
    holder = f"{Path(sys.executable).name} game.py (process "
    job = site.submit(frames=2, steps=2)
    until(lambda: f"needs: {holder}" in site.run("svdq", "status").stdout, lambda: site.run("svdq", "status").stdout)
    shown = site.run("svdq", "status", "--json").stdout
    assert "Another program holds the GPU." in shown
    assert [rank["device"] for rank in json.loads(shown)["ranks"]] == ["cuda:0"], "the page names it GPU 1"
    assert group.ranks() == []
    (card / "taken").unlink()
    assert [view.status for view in site.wait([job])] == ["finished"], group.text
    assert group.text.count("Waiting for memory") == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_job_whose_memory_a_game_takes_goes_back_and_goes_on_later(site, card: Path, until, ranks: int) -> None:
    group = start(site, card, "simulated:step_ms=50", ranks=ranks)
    jobs = [site.submit(seed=seed, steps=40) for seed in range(2)]
    until(lambda: site.view(jobs[0]).step > 3, lambda: group.text)
    (card / "taken").touch()
    until(lambda: "Waiting for memory: GPU 0 has 1.0 GB of 25.8 GB free" in group.text, lambda: group.text)
    assert "Another program has taken 20.0 GB of this GPU" in group.text
    assert group.ranks() == []
    assert site.queued() == jobs
    (card / "taken").unlink()
    assert [view.status for view in site.wait(jobs)] == ["finished"] * 2, group.text
    assert {site.connection.hget(f"rq:job:{job_id}", "retries_left") for job_id in jobs} == {b"3"}
    assert site.sidecars(jobs[0])[0]["resumed"], "it went on from its checkpoint"
    assert site.connection.hlen(keys.CRASHES) == 0


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False])
def test_a_load_that_a_game_leaves_no_room_for_waits(site, card: Path, tiny_model: Path, until, waits: bool) -> None:
    """It began between the look for memory and the load."""
    (card / "load").touch()
    job = site.submit(frames=2, steps=2)
    group = start(site, card, str(tiny_model), *([] if waits else ["--no-wait-for-gpu"]), wait=False)
    if not waits:
        assert group.end() == InputError.exit_code
        assert "Error: The model cannot be loaded: memory ran out." in group.text
        return
    until(lambda: "Waiting for memory: GPU 0 has 1.0 GB" in group.text, lambda: group.text)
    assert group.ranks() == []
    (card / "taken").unlink()
    assert [view.status for view in site.wait([job])] == ["finished"], group.text


@pytest.mark.slow
def test_ranks_that_have_died_are_not_started_again_into_a_game(site, card: Path, tiny_model: Path, until) -> None:
    group = start(site, card, str(tiny_model))
    (card / "taken").touch()
    [rank] = group.ranks()
    rank.kill()
    until(lambda: "Waiting for memory: GPU 0 has 1.0 GB" in group.text, lambda: group.text)
    until(lambda: group.ranks() == [])
    job = site.submit(frames=2, steps=2)
    (card / "taken").unlink()
    assert [view.status for view in site.wait([job])] == ["finished"], group.text
