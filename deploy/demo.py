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
from types import FrameType
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

NEXT = """
This was the preview (no diffusion model): the queue, the ranks and the denoising steps are real, the picture is a slow
camera move over the photo. For diffusion, on a machine with GPUs:

  export SVDQ_MODEL=stabilityai/stable-video-diffusion-img2vid-xt   # or a folder with such a model
  .venv/bin/svdq model pull $SVDQ_MODEL                             # once, several gigabytes
  .venv/bin/svdq worker                                             # a rank for every GPU
  .venv/bin/svdq submit photo.jpg --wait                            # in a second terminal
"""


class DemoError(Exception):
    """The demo cannot continue; the text says why."""


class Demo:
    """One run: its commands, and whether a signal asked it to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None
        ours = {"SVDQ_HOME": str(HOME), "SVDQ_STORAGE": str(OUTPUT), "SVDQ_MODEL": "preview"}
        self._environment = {name: text for name, text in os.environ.items() if not name.startswith("SVDQ_")} | ours
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number

    def run(self) -> dict[str, Any]:
        """Submit the photo, render it, and return the final state of its job."""
        job = self.ask("submit", str(PHOTO), *WANTED, "--force")
        say(f"Submitted {shown(PHOTO)} as job {job['id']}.")
        with self.group() as group:
            say("Starting seven ranks on the CPU; each of them loads torch.")
            started = time.monotonic()
            while not self.ask("status")["workers"]:
                self.check(group)
                if time.monotonic() - started > START_S:
                    raise DemoError(f"The ranks did not start; see {shown(LOG)}.")
                time.sleep(POLL_S)
            say("Rendering 25 frames of 576x320 in 25 steps with the preview (no diffusion model).")
            self.wait_for(job["id"], group)
            with contextlib.suppress(subprocess.TimeoutExpired):
                group.wait(STOP_S)  # the queue is empty, so with --burst the group ends now
        return self.ask("status", job["id"])

    def ask(self, *arguments: str) -> dict[str, Any]:
        """Run a command of svdq and return the JSON object that it prints."""
        done = subprocess.run(
            [SVDQ, *arguments, "--json"], env=self._environment, cwd=OUTPUT, capture_output=True, text=True, check=False
        )
        self.check()
        if done.returncode != 0:
            raise DemoError(done.stderr.strip() or f"`svdq {arguments[0]}` ended with exit code {done.returncode}.")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def check(self, group: "subprocess.Popen[bytes] | None" = None) -> None:
        """Raise if a signal asked the demo to stop, or if the group has ended too early."""
        if self.signal is not None:
            raise DemoError("Stopped.")
        if group is not None and group.poll() is not None:
            raise DemoError(f"The ranks ended with exit code {group.returncode}; see {shown(LOG)}.")

    @contextlib.contextmanager
    def group(self) -> "Iterator[subprocess.Popen[bytes]]":
        """Start the ranks, and stop them at the end of the block."""
        # A separate session: Ctrl-C reaches only this process, which then stops the ranks in order.
        with LOG.open("wb") as log:
            group = subprocess.Popen(
                [SVDQ, "worker", *GROUP],
                env=self._environment,
                cwd=OUTPUT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield group
        finally:
            if group.poll() is None:
                say("Stopping the ranks.")
                group.terminate()
                try:
                    group.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    group.kill()
                    group.wait()

    def wait_for(self, job_id: str, group: "subprocess.Popen[bytes]") -> None:
        """Show the progress of the job until it has ended."""
        # The progress bar goes to stderr; the line on stdout is not needed, since `report` prints more.
        command = [str(SVDQ), "wait", job_id]
        waiting = subprocess.Popen(command, env=self._environment, cwd=OUTPUT, stdout=subprocess.DEVNULL)
        ended_at = None
        try:
            while waiting.poll() is None:
                self.check()
                if group.poll() is not None:
                    ended_at = ended_at or time.monotonic()
                    # `svdq wait` polls a few times a second; if it has seen no end by now, the job has not ended.
                    if time.monotonic() - ended_at > 5:
                        self.check(group)
                time.sleep(POLL_S)
        finally:
            if waiting.poll() is None:
                waiting.terminate()
                waiting.wait()

    def stop_redis(self) -> None:
        """Stop the embedded server of the demo's home, if it is running."""
        done = subprocess.run(
            [SVDQ, "redis", "stop"],
            env=self._environment,
            cwd=OUTPUT,
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,  # a second Ctrl-C must not keep it from stopping
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
        demo = Demo()
        demo.stop_redis()  # left over if the last demo was killed
        shutil.rmtree(HOME, ignore_errors=True)
        try:
            return report(demo.run())
        except DemoError as error:
            say(str(error))
            return 1 if demo.signal is None else 128 + demo.signal
        finally:
            demo.stop_redis()


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
