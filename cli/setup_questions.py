"""The questions of `svdq setup`, with the model that fits this machine as the default of the first."""

import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import click
import platformdirs

from svdq.cli.formatting import echo
from svdq.cli.units import (
    NIGHT,
    is_booted,
    units_folder,
)
from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute.memory import size_text
from svdq.pipeline.models.model_file import read_model_file
from svdq.pipeline.models.model_name import has_weights, is_model_file, preset_or_path, with_presets
from svdq.pipeline.models.names.model_names import split_id, timings_of
from svdq.pipeline.models.names.pull import cache_folder
from svdq.pipeline.models.names.sized_model import sized_model
from svdq.pipeline.models.needs import SizedModel
from svdq.producer.settings import Settings, absolute, local_folder, without_secrets
from svdq.producer.settings_loader import FILE_NAME
from svdq.producer.text import count, duration, printable
from svdq.worker.cards import Cards
from svdq.worker.choice import best_preset
from svdq.worker.fit import NUM_VIDEOS, Way, lack_of_disk, to_fetch, ways

T = TypeVar("T")

PREVIEW_SHAPE = "576x320x25"  # which takes a processor seconds
PREVIEW = "preview moves a camera over the photo, and is no diffusion model"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model, and how this machine runs it."""

    name: str
    known: SizedModel | None = None  # None: made in code, or of the hub and not fetched
    way: Way | None = None  # None: not known, or without GPUs
    shape: str | None = None  # of the largest videos that fit, such as 640x352x81; None: the model's usual ones

    def sentences(self) -> list[str]:
        """Say what its videos are, what is to be fetched, and how long videos take."""
        if self.known is None:
            return [f"{self.name} is to be fetched."] if has_weights(self.name) else []
        video = self.known.video(self.shape)
        size = f"{video.width}x{video.height}, {count(video.num_frames, 'frame')}, {count(video.steps, 'step')}"
        if fetch := to_fetch(self.known):
            free = f"{size_text(shutil.disk_usage(cache_folder()).free)} free"
            fetch = f"{fetch}, {lack_of_disk(self.known) or free}"
        time = "no time of a step on such a GPU is published"
        if self.way is None:
            time = "without a GPU, a video may take hours"
        elif self.way.time_s is not None:
            time = f"{NUM_VIDEOS} videos take {duration(self.way.time_s)} by published times"
        return [f"{self.name}: {size}; {fetch or 'its files are here'}; {time}."]

    @property
    def worker_options(self) -> str:
        """The options of `svdq worker`."""
        return "" if self.way is None else shlex.join(shlex.split(self.way.command)[2:])

    @property
    def video_options(self) -> str:
        """The options of `svdq submit`, with a space in front."""
        if self.shape is None:
            return ""
        size, _, frames = self.shape.rpartition("x")
        return f" --size {size} --frames {frames}"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The GPUs and the host memory of this machine."""

    cards: Cards | None
    host_bytes: int

    @classmethod
    def here(cls) -> "Machine":
        """Look at this machine."""
        import psutil  # only workers have it

        return cls(cards=Cards.here(), host_bytes=psutil.virtual_memory().total)

    def best(self) -> Candidate:
        """Return the best preset that fits, with its files on the disk if one does; preview if none does."""
        if self.cards is None:
            return Candidate(name="preview", shape=PREVIEW_SHAPE)
        free = shutil.disk_usage(cache_folder()).free
        found = best_preset(self.cards, self.host_bytes, free) or best_preset(self.cards, self.host_bytes)
        if found is None:
            return Candidate(name="preview", shape=PREVIEW_SHAPE)
        return Candidate(name=found.preset, known=found.model, way=found.way, shape=found.shape)

    def find(self, name: str) -> Candidate:
        """Look a model up by the name that a person gives; raises InputError if it is none, or does not fit."""
        path = with_presets(name)
        if not has_weights(path):
            timings_of(path)
            return Candidate(name=name, shape=PREVIEW_SHAPE)
        if is_model_file(path):
            read_model_file(Path(path))
        elif not Path(path).exists():
            split_id(path)
        try:
            known = sized_model(path)
        except InputError:
            if Path(path).is_dir():
                raise
            return Candidate(name=name)
        if self.cards is None:
            return Candidate(name=name, known=known)
        if (best := self.best()).name == name:
            return best
        step = self.cards.step_of(known.published)
        found = ways(known, known.video(), self.cards, NUM_VIDEOS, step.step_s if step else None)
        way = next((way for way in found if way.fits and way.host_bytes <= self.host_bytes), None)
        if way is None:
            raise InputError(
                f"The model {name} does not fit {self.cards}; `svdq plan --model {shlex.quote(name)}` says what would."
            )
        return Candidate(name=name, known=known, way=way)


class Questions:
    """Asks on the terminal, or takes the defaults; what a variable or another file sets is not to be changed here."""

    def __init__(self, settings: Settings, sources: Mapping[str, str], *, is_asked: bool) -> None:
        self._settings = settings
        self._sources = sources
        self._is_asked = is_asked

    def model(self, given: str | None) -> Candidate:
        """Ask which model is to be used."""
        machine, now, said = Machine.here(), self._settings.model, set[str]()

        def read(name: str) -> Candidate:
            self._check_source("model", is_same=with_presets(name) == now)
            if (found := machine.find(name)).name not in said:
                echo(*found.sentences())
            said.add(name)
            return found

        if machine.cards is None:
            echo(f"No GPU is visible here, and diffusion models need one; {PREVIEW}.")
        else:
            echo(f"{machine.cards}, {size_text(machine.host_bytes)} of host memory.")
        default = preset_or_path(Path(now)) if is_model_file(now) else now
        if given is None and self._sources["model"] == "default":
            default = machine.best().name
            if machine.cards is not None and default == "preview":
                echo(f"No preset fits; {PREVIEW}.")
        elif given is not None:
            default = given
        found = read(default)
        if given is None:
            found = self._ask("Model (`svdq model list` shows others)", default, read)
        return found

    def storage(self, given: str | None) -> str | None:
        """Ask where photos and videos go; None: where they go now."""
        now, source = self._settings.storage, self._sources["storage"]
        shown = without_secrets(now)
        if source == "default" and not Path(now).exists():
            shown = str(platformdirs.user_videos_path() / "svdq")

        def read(text: str) -> str | None:
            folder = local_folder(text)
            url = text if folder is None else str(absolute(folder))
            if url == now or text == without_secrets(now):
                return None
            self._check_source("storage", is_same=False)
            if without_secrets(url) != url:
                raise InputError("A password does not go into svdq.toml; set SVDQ_STORAGE in the environment.")
            if folder is not None:
                # What is in a folder that others may not enter does not exist for `os.path`.
                there = next(each for each in (url, *map(str, Path(url).parents)) if os.path.exists(each))
                if not (os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)):
                    raise InputError(f"There can be no folder {url!r}, since {there!r} cannot be written to.")
            return url

        if given is not None:
            return read(given)
        return self._ask("Folder or URL for photos and videos", shown, read)

    def night(self, given: bool | None) -> bool:
        """Ask whether a timer renders at night."""
        if not is_booted():
            if given:
                raise InputError("--night needs systemd; without it, cron does the same (docs/overnight.md).")
            return False
        if given is not None:
            return given
        default = units_folder("user").joinpath(NIGHT).is_file()
        if not self._is_asked:
            return default
        return click.confirm("Render what is queued each night, from ten to six, by a timer?", default=default)

    def _ask(self, question: str, default: str, read: Callable[[str], T]) -> T:
        """Return an answer as `read` returns it; what it raises InputError for is asked again."""

        def checked(answer: str) -> T:
            try:
                return read(answer.strip())
            except InputError as error:
                raise click.UsageError(printable(str(error))) from error

        if not self._is_asked:
            return read(default)
        answer: T = click.prompt(question, default=default, value_proc=checked)
        return answer

    def _check_source(self, name: str, *, is_same: bool) -> None:
        source = self._sources[name]
        if not is_same and source not in ("default", str(self._settings.home / FILE_NAME)):
            raise InputError(
                f"{source} sets the {name}, and comes before svdq.toml in {str(self._settings.home)!r}; unset it first."
            )
