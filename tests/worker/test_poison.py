"""A job that kills its rank, in each of its phases: set aside after few restarts, and no other job fails for it."""

import os
import signal
from pathlib import Path

import pytest
from PIL import Image

from tests.faults.arena import INJECTION

#: Has the processes that decode photos wait at a moment while there is a file of its name, and name the rank.
HOLD = """
import os, sys, time
from pathlib import Path

def hold(moment):
    folder, rank = Path(os.environ["HOLD"]), os.getppid()
    if (folder / moment).exists():
        (folder / f"{rank}.{moment}").touch()
    while (folder / moment).exists() and os.getppid() == rank:
        time.sleep(0.05)

if "svdq.producer.decoder_process" in sys.orig_argv:
    hold("start")
    from svdq.pipeline.media import image
    prepare_photo = image.prepare_photo
    image.prepare_photo = lambda *given: (hold("decode"), prepare_photo(*given))[1]
"""
POISON_FRAMES = 3  # frames of the poisoned video: what the injection recognizes it by where the photo is not at hand

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("phase", "where"),
    [
        ("prepare", "while it prepared the photo"),
        pytest.param("decode", "while it decoded the frames", marks=pytest.mark.nightly),
        pytest.param("encode", "while it encoded the photo", marks=pytest.mark.nightly),
        pytest.param("warm-up", "while it warmed up for this size", marks=pytest.mark.nightly),
        pytest.param("write", "while it wrote the files", marks=pytest.mark.nightly),
    ],
)
def test_a_job_that_kills_its_rank_is_set_aside_and_no_other_is(site, tmp_path: Path, phase: str, where: str) -> None:
    poison = tmp_path / "poison.jpg"
    Image.effect_noise((90, 60), 60).convert("RGB").save(poison)
    group = site.start(
        2,
        model="simulated:step_ms=30,decode_ms=60",
        PYTHONPATH=str(INJECTION),
        FAULTS_AT=f"poison-{phase}",
        FAULTS_FOLDER=str(tmp_path),
    )
    jobs = [site.submit(seed=seed, steps=9) for seed in (1, 2, 3)]
    jobs.insert(2, site.submit(photo=poison, seed=4, steps=9, frames=POISON_FRAMES))
    jobs += [site.submit(seed=seed, steps=9) for seed in (5, 6, 7)]
    views = site.wait(jobs)
    assert [view.status for view in views] == ["finished"] * 2 + ["failed"] + ["finished"] * 4, group.text
    assert "died 2 times" in views[2].error
    assert where in views[2].error
    assert group.text.count("Ready with") <= 3, "two restarts and no more"
    assert not site.connection.exists("svdq:crashes")


@pytest.mark.parametrize(("moment", "status"), [("start", "finished"), ("decode", "failed")])
def test_a_photo_is_blamed_only_once_it_is_read(site, tmp_path: Path, until, moment: str, status: str) -> None:
    """Kills that strike while the process for photos starts are not the photo's fault."""
    (tmp_path / "sitecustomize.py").write_text(HOLD)
    (tmp_path / moment).touch()
    group = site.start(1, model="simulated:step_ms=1", PYTHONPATH=str(tmp_path), HOLD=str(tmp_path))
    job = site.submit()
    for _ in range(2):
        [held] = until(lambda: [*tmp_path.glob(f"*.{moment}")], lambda: group.text)
        os.kill(int(held.stem), signal.SIGKILL)
        held.unlink()
    (tmp_path / moment).unlink()
    [view] = site.wait([job])
    assert view.status == status, view.error
