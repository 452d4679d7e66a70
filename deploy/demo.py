"""`make demo`: makes a video of the photo in the repository, through the queue and seven ranks.

It runs the commands that a user would type, with its own home in demo-output/, so that it touches no other queue or
files.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PHOTO = REPOSITORY / "docs/demo/photo.jpg"
OUTPUT = REPOSITORY / "demo-output"
HOME = OUTPUT / "home"
LOG = OUTPUT / "worker.log"
#: The `svdq` of the environment that runs this script.
SVDQ = Path(sys.executable).parent / "svdq"

WANTED = ["--frames", "25", "--size", "576x320", "--format", "mp4", "--format", "gif"]
GROUP = ["--ranks", "7", "--device", "cpu", "--burst"]

#: Timeout in seconds for seven processes to load torch: ten on two cores, much longer on a cold and busy machine.
START_S = 600.0
#: Timeout in seconds for the group to end on request; it kills its ranks after 20.
STOP_S = 40.0
POLL_S = 0.2
#: What ends the demo.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

NEXT = """
This was the preview (no diffusion model): the queue, the ranks and the denoising steps are real, the picture is a slow
camera move over the photo. For diffusion, on a machine with GPUs:

  export SVDQ_MODEL=stabilityai/stable-video-diffusion-img2vid-xt   # or a folder with such a model
  .venv/bin/svdq model pull $SVDQ_MODEL                             # once, several gigabytes
  .venv/bin/svdq worker                                             # a rank for every GPU
  .venv/bin/svdq submit photo.jpg --wait                            # in a second terminal

Wan follows a prompt, too, and needs more memory (docs/gpus.md):
  export SVDQ_MODEL=Wan-AI/Wan2.2-I2V-A14B-Diffusers                # then as above
  .venv/bin/svdq submit photo.jpg --prompt "The waves roll in." --wait

LTX-2 makes sound with the video: SVDQ_MODEL=diffusers/LTX-2.3-Distilled-Diffusers (docs/models.md).
"""


class DemoError(Exception):
    """The demo cannot continue; the text says why."""


def make_video() -> dict[str, Any]:
    """Submit the photo, render it, and return the final state of its job."""
    job = ask("submit", str(PHOTO), *WANTED, "--force")
    say(f"Submitted {shown(PHOTO)} as job {job['id']}.")
    with group() as ranks:
        say("Starting seven ranks on the CPU; each of them loads torch.")
        started = time.monotonic()
        while not ask("status")["workers"]:
            if ranks.poll() is not None or time.monotonic() - started > START_S:
                raise DemoError(f"The ranks did not start; see {shown(LOG)}.")
            time.sleep(POLL_S)
        say("Rendering 25 frames of 576x320 in 25 steps with the preview (no diffusion model).")
        wait_for(job["id"], ranks)
        with contextlib.suppress(subprocess.TimeoutExpired):
            ranks.wait(STOP_S)  # the queue is empty, so with --burst the group ends now
    return ask("status", job["id"])


def ask(*arguments: str) -> dict[str, Any]:
    """Run a command of svdq and return the JSON object that it prints."""
    done = subprocess.run(
        [SVDQ, *arguments, "--json"], env=environment(), cwd=OUTPUT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise DemoError(done.stderr.strip() or f"`svdq {arguments[0]}` ended with exit code {done.returncode}.")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def environment() -> dict[str, str]:
    """Return the environment of all commands, without the user's own settings."""
    ours = {"SVDQ_HOME": str(HOME), "SVDQ_STORAGE": str(OUTPUT), "SVDQ_MODEL": "preview"}
    return {name: text for name, text in os.environ.items() if not name.startswith("SVDQ_")} | ours


@contextlib.contextmanager
def group() -> "Iterator[subprocess.Popen[bytes]]":
    """Start the ranks, and stop them at the end of the block."""
    with LOG.open("wb") as log:
        ranks = subprocess.Popen(
            [SVDQ, "worker", *GROUP],
            env=environment(),
            cwd=OUTPUT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches only this process, which then stops the ranks in order
        )
    try:
        yield ranks
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must leave no rank behind
        if ranks.poll() is None:
            say("Stopping the ranks.")
            ranks.terminate()
            try:
                ranks.wait(STOP_S)
            except subprocess.TimeoutExpired:
                ranks.kill()
                ranks.wait()


def wait_for(job_id: str, ranks: "subprocess.Popen[bytes]") -> None:
    """Show the progress of the job until it has ended."""
    # The progress bar goes to stderr; the line on stdout is not needed, since `report` prints more.
    waiting = subprocess.Popen([SVDQ, "wait", job_id], env=environment(), cwd=OUTPUT, stdout=subprocess.DEVNULL)
    try:
        while waiting.poll() is None and ranks.poll() is None:
            time.sleep(POLL_S)
        if waiting.poll() is None:
            # `svdq wait` polls a few times a second; if it sees no end by now, the job has not ended.
            waiting.wait(5)
    except subprocess.TimeoutExpired:
        raise DemoError(f"The ranks ended with exit code {ranks.returncode}; see {shown(LOG)}.") from None
    finally:
        waiting.terminate()
        waiting.wait()


def stop_redis() -> None:
    """Stop the embedded server of the demo's home, if it is running."""
    done = subprocess.run(
        [SVDQ, "redis", "stop"], env=environment(), cwd=OUTPUT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        say(done.stderr.strip())


def main() -> int:
    """Run the demo in this repository; return its exit code."""
    OUTPUT.mkdir(exist_ok=True)
    with (OUTPUT / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another demo is running in this folder; wait for it to end.")
            return 1
        stop_redis()  # left over if the last demo was killed
        shutil.rmtree(HOME, ignore_errors=True)
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler)
        try:
            return report(make_video())
        except DemoError as error:
            say(str(error))
            return 1
        except KeyboardInterrupt:
            say("Stopped.")
            return 130
        finally:
            stop_redis()


def report(job: dict[str, Any]) -> int:
    """Print the outcome of the job; return the exit code."""
    if job["status"] != "finished":
        say(f"The video {job['status']}: {job['error']} The log of the ranks is {shown(LOG)}.")
        return 1
    say("\nFinished:\n")
    for path in map(Path, job["outputs"]):
        say(f"  {path.suffix[1:]}  {shown(path)}")
    say(NEXT)
    return 0


def shown(path: Path) -> str:
    """Shorten a path relative to the repository."""
    return str(path.relative_to(REPOSITORY))


def say(text: str) -> None:
    """Print and flush, also into a pipe."""
    print(text, flush=True)  # noqa: T201 - a script


if __name__ == "__main__":
    sys.exit(main())
