"""`make demo`: makes a video of the photo in the repository, through the queue and seven ranks.

It runs the commands that a user would type, with its own home in demo-output/, so that it touches no other queue or
files.
"""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PHOTO = REPOSITORY / "docs/demo/photo.jpg"
OUTPUT = REPOSITORY / "demo-output"
#: The `svdq` of the environment that runs this script.
SVDQ = Path(sys.executable).parent / "svdq"

WANTED = ["--frames", "25", "--size", "576x320", "--format", "mp4", "--format", "gif", "--force"]
GROUP = ["--ranks", "7", "--device", "cpu", "--burst"]

NEXT = """
This was the preview (no diffusion model): the queue, the ranks and the denoising steps are real, the picture is a slow
camera move over the photo. For diffusion, on a machine with GPUs:

  source .venv/bin/activate
  svdq setup                           # chooses a model that fits, fetches it and renders a first video
  svdq submit photos/ --recursive
  svdq worker --burst                  # a rank for every GPU; ends when all is rendered
"""


def svdq(*arguments: str | Path) -> int:
    """Show a command, run it without the user's own settings, and return its exit code."""
    print("$ svdq", *(str(each).removeprefix(f"{REPOSITORY}/") for each in arguments), flush=True)  # noqa: T201
    ours = {"SVDQ_HOME": str(OUTPUT / "home"), "SVDQ_STORAGE": str(OUTPUT), "SVDQ_MODEL": "preview"}
    environment = {name: text for name, text in os.environ.items() if not name.startswith("SVDQ_")} | ours
    process = subprocess.Popen([SVDQ, *arguments], env=environment, cwd=OUTPUT)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # it got the signal, too, and ends in order
            continue


def main() -> int:
    """Run the demo in this repository; return its exit code."""
    OUTPUT.mkdir(exist_ok=True)
    code = svdq("submit", PHOTO, *WANTED) or svdq("worker", *GROUP)
    svdq("redis", "stop")
    if not code:
        print(NEXT)  # noqa: T201
    return code


if __name__ == "__main__":
    sys.exit(main())
