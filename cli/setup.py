"""`svdq setup`: choose a model, fetch it, write svdq.toml and render one video, by what other commands know and do."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from svdq.cli.formatting import describe, echo, table
from svdq.cli.main import EXIT_FAILED
from svdq.cli.model import fetch_model, variant_here
from svdq.cli.setup_questions import Candidate, Questions
from svdq.cli.units import (
    LINGER,
    NIGHT,
    install_files,
    run_program,
    run_systemctl,
    units_folder,
    units_for,
)
from svdq.cli.worker_process import worker_process
from svdq.pipeline.errors import InputError, SvdqError, require_torch
from svdq.pipeline.models.model_name import with_presets
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.names.pull import cache_folder
from svdq.producer.connection import session
from svdq.producer.settings import Settings
from svdq.producer.settings_loader import FILE_NAME, absolute_model, change_file, load_settings, origins
from svdq.producer.status.job_view import JobView, job_status
from svdq.producer.status.registries import counts, read_workers
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.draft import SubmitOptions
from svdq.producer.submitting.submission import submit
from svdq.producer.text import count
from svdq.producer.together import ask_one
from svdq.worker.launcher.gpus import visible_gpus

Change = tuple[str, str]  # what was changed, and how to undo it

#: A photo, with a prompt beside it for models that take one.
EXAMPLE = Path(__file__).with_name("example") / "cup.jpg"


@click.command()
@click.option("--model", metavar="MODEL", help="Model [default: the best preset that fits GPUs and host memory].")
@click.option("--storage", metavar="URL", help="Folder for photos and videos [default: svdq in your folder of videos].")
@click.option("--night/--no-night", default=None, help="Render what is queued each night, by a timer of systemd.")
@click.option("--yes", "-y", is_flag=True, help="Ask nothing, and take the defaults.")
def setup(model: str | None, storage: str | None, night: bool | None, yes: bool) -> int:
    """Choose a model, fetch it, write svdq.toml and render one video.

    It asks which model to use (by default the best preset that fits the GPUs and the host memory), where videos go, and
    whether a timer renders at night, and says what is to be fetched. An option answers its question. What is right
    already stays as it is, so the same command continues after an interruption. At the end it says what it has changed,
    and how to undo that.

    \b
    Examples:
      svdq setup
      svdq setup --yes
      svdq setup --model wan2.2-5b --storage /data/svdq --night
    """
    require_torch("a worker")
    if not yes and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InputError("svdq setup asks up to three questions, and there is no terminal; --yes takes the defaults.")
    settings, sources = load_settings(), origins()
    questions = Questions(settings, sources, is_asked=not yes)
    chosen, place, by_night = questions.model(model), questions.storage(storage), questions.night(night)
    words = ["svdq", "setup", "--model", chosen.name, *(["--storage", place] if place is not None else [])]
    command = shlex.join([*words, "--night" if by_night else "--no-night", "--yes"])
    changes: list[Change] = []
    try:
        view = _set_up(settings, sources["model"], chosen, place, changes, by_night=by_night)
    except (KeyboardInterrupt, SvdqError):
        echo("", *_shown(changes), f"To go on from here: {command}", err=True)
        raise
    echo("", *_shown(changes))
    echo("", "Next:", f"  svdq submit photos/ --recursive{chosen.video_options}", "  svdq worker --burst")
    return EXIT_FAILED if view is not None and view.status != "finished" else 0


def _shown(changes: Sequence[Change]) -> list[str]:
    return table([("changed", "to undo it"), *changes]) if changes else ["Nothing was changed."]


def _set_up(
    settings: Settings, source: str, chosen: Candidate, place: str | None, changes: list[Change], *, by_night: bool
) -> JobView | None:
    """Do what was answered, and list the changes; return the job of the first video if it was rendered now."""
    Storage.open_for_command(place or settings.storage).check_writable()
    if _fetch(chosen.name):
        changes.append((f"model files in {cache_folder()}", "hf cache ls, and hf cache rm"))
    file = settings.home / FILE_NAME
    values: dict[str, str | None] = {} if place is None else {"storage": place}
    if settings.model != with_presets(chosen.name) or source not in ("default", str(file)):
        values |= {"model": absolute_model(chosen.name), "worker_options": chosen.worker_options or None}
    for name, before in change_file(file, values).items():
        changes.append((f"{name} in {file}", "remove the line" if before is None else f"it was {before}"))
    if by_night:
        _start_timer(changes)
    settings = load_settings()
    view = _render_example(settings, chosen)
    if view is not None and view.outputs:
        changes.append((view.outputs[0], f"svdq remove {view.id}"))
    return view


def _fetch(name: str) -> bool:
    """Fetch a model unless it is here; return whether it was fetched."""
    path = with_presets(name)
    try:
        resolve(path, on_gpus=bool(visible_gpus()))
        return False
    except InputError:
        if Path(path).is_dir():
            raise
    fetch_model(name, variant_here(), echo)
    resolve(path, on_gpus=bool(visible_gpus()))
    return True


def _start_timer(changes: list[Change]) -> None:
    """Install the units unless they are there, and start the timer."""
    units = units_for("user")
    if not (folder := units_folder("user")).joinpath(NIGHT).is_file():
        install_files(units.contents, force=False)
        changes.append((f"units in {folder}", "svdq deploy systemd --user --remove"))
        run_systemctl("user", "daemon-reload")
    run_systemctl("user", "enable", "--now", *units.services, NIGHT)
    try:
        run_program(LINGER.split())
    except InputError as error:
        echo(f"The timer ends when you log out: {error}", err=True)


def _render_example(settings: Settings, chosen: Candidate) -> JobView | None:
    """Render a video of `EXAMPLE` with a worker; return its job, or None if it was there, or is left to a worker."""
    width, height, frames = map(int, chosen.shape.split("x")) if chosen.shape else (None, None, None)
    draft = SubmitOptions(width=width, height=height, frames=frames, seed=1)
    [job] = submit(settings, EXAMPLE, draft, priority="high")
    if job.status == "finished":
        echo(f"The first video is there: {job_status(settings, job.id).outputs[0]}")
        return None
    with session(settings) as connection:
        waiting = sum(of["queued"] + of["started"] for of in counts(connection).values()) - 1
        state = ask_one(connection, read_workers())[1]
    if state != "none":
        echo(f"A worker runs; if it runs another model, start it again. `svdq wait {job.id}` waits for the example.")
        return None
    if waiting > 0:
        echo(f"The example waits with {count(waiting, 'other job')}, as job {job.id}; the next worker renders it.")
        return None
    with worker_process(settings, ["--burst"]) as worker:
        worker.wait()
    view = job_status(settings, job.id)
    echo("", f"The first video: {view.outputs[0] if view.outputs else describe(view)}")
    return view
