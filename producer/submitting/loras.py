"""Looks up the LoRAs that a submission names: in the folder of LoRAs on this machine, else among the workers'."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import redis

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.lora_folder import LoraFolder
from svdq.pipeline.video_parameters import Expert, LoraChoice
from svdq.producer.connection import session
from svdq.producer.settings import Settings
from svdq.producer.status.running import read_running
from svdq.producer.submitting.draft import choices_of
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.parameters import shorten

_HALVES: Mapping[str, Expert] = {"high": "high", "highnoise": "high", "low": "low", "lownoise": "low"}
_SUFFIX = ".safetensors"
_TAG = re.compile(r"<lora:([^<>]+)>", re.IGNORECASE)


class KnownLoras:
    """The LoRAs that can be named, by name, with their digests."""

    def __init__(self, settings: Settings, connection: redis.Redis | None) -> None:
        """Read nothing and connect to nothing yet; without a connection, connect when workers are asked."""
        self._settings = settings
        self._folder = settings.loras
        self._connection = connection

    @cached_property
    def _known(self) -> Mapping[str, str]:
        with session(self._settings, self._connection) as connection:
            # Of two with the same name, the one in the folder counts.
            return read_running(connection).loras | LoraFolder(self._folder).digests()

    def looked_up(self, spec: JobSpec) -> JobSpec:
        """Return a spec with the digests of its LoRAs, and those in its prompts; raises InputError if one is unknown.

        A prompt may have `<lora:NAME:STRENGTH>` in it, as in other programs; a further link then has its own LoRAs.
        """
        texts = [*(draft.prompt or "" for draft in spec.drafts), *spec.then]
        if not any(draft.loras for draft in spec.drafts) and not any(map(_TAG.search, texts)):
            return spec
        drafts = []
        for each in spec.drafts:
            prompt, loras = _without_tags(each.prompt or "")
            each = replace(each, prompt=prompt if loras else each.prompt)
            drafts.append(replace(each, loras=self._all([*choices_of(each.loras), *loras])))
        then = [_without_tags(prompt) for prompt in spec.then]
        return replace(
            spec,
            drafts=tuple(drafts),
            then=tuple(prompt for prompt, _ in then),
            then_loras=tuple(self._all(loras) if loras else None for _, loras in then),
        )

    def _all(self, loras: Sequence[LoraChoice]) -> tuple[LoraChoice, ...]:
        return tuple(found for each in loras for found in ([each] if each.digest else self._found(each)))

    def _found(self, choice: LoraChoice) -> list[LoraChoice]:
        name = self._name_of(choice.name)
        if name is not None:  # one half of two is for its expert
            halves = self._halves(name)
            expert = next((expert for expert, names in halves.items() if all(halves.values()) and name in names), None)
            return [self._chosen(choice, name, choice.expert or expert)]
        halves = self._halves(choice.name)
        wanted = {expert: names for expert, names in halves.items() if choice.expert in (expert, None)}
        if several := next((names for names in wanted.values() if len(names) > 1), None):
            raise InputError(
                f"There are several LoRAs for {choice.name!r}: {', '.join(several)}; give one of them.", field="loras"
            )
        if not all(wanted.values()):
            raise self._unknown(choice.name)
        return [self._chosen(choice, names[0], expert) for expert, names in wanted.items()]

    def _chosen(self, choice: LoraChoice, name: str, expert: Expert | None) -> LoraChoice:
        return choice.model_copy(update={"name": name, "expert": expert, "digest": self._known[name]})

    def _halves(self, name: str) -> dict[Expert, list[str]]:
        """Return the LoRAs for each of two experts that have a name but for what says which expert they are for."""
        halves: dict[Expert, list[str]] = {"high": [], "low": []}
        _, rest = _split(name)
        for known in self._known:
            expert, whole = _split(known)
            if expert is not None and rest in (whole, _split(known.rpartition("/")[2])[1]):
                halves[expert].append(known)
        return halves

    def _name_of(self, given: str) -> str | None:
        """Return the whole name of a LoRA, which may be given without its folders, or as a path in the folder."""
        if self._folder is not None and Path(given).is_absolute() and Path(given).is_relative_to(self._folder):
            given = Path(given).relative_to(self._folder).as_posix()
        if given in self._known:
            return given
        ends = [name for name in self._known if name.rpartition("/")[2] == given]
        if len(ends) > 1:
            raise InputError(
                f"There are several LoRAs {given}: {', '.join(ends)}; give one with its folder.", field="loras"
            )
        return ends[0] if ends else None

    def _unknown(self, name: str) -> InputError:
        near = difflib.get_close_matches(name, self._known, 1, 0.5)
        where = f"in {str(self._folder)!r}" if self._folder else "in the folders SVDQ_LORAS of running workers"
        meant = f"; did you mean {near[0]}?" if near else f"; put {name.rpartition('/')[2]}{_SUFFIX} there."
        if self._folder is None and not self._known:
            meant = "; set SVDQ_LORAS to the folder with your LoRAs."
        return InputError(f"There is no LoRA {name!r} {where}{meant}", field="loras")


def _without_tags(prompt: str) -> tuple[str, list[LoraChoice]]:
    """Split a prompt into its text and the LoRAs in it; raises InputError for one that cannot be read."""
    try:
        loras = [choice for tag in _TAG.findall(prompt) for choice in LoraChoice.parse(tag)]
    except ValueError as error:
        raise InputError(
            f"The prompt {shorten(prompt)!r} has a LoRA that cannot be read: write <lora:NAME:STRENGTH> with a "
            "strength from -10 to 10.",
            field="loras",
        ) from error
    return (" ".join(_TAG.sub(" ", prompt).split()) if loras else prompt), loras


def _split(name: str) -> tuple[Expert | None, str]:
    """Return the expert that the name of a LoRA says it is for, and the rest of the name, for comparison."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    place = next((place for place, word in enumerate(words) if word in _HALVES), None)
    if place is None:
        return None, " ".join(words)
    after = place + 1 + (words[place + 1 : place + 2] == ["noise"])
    return _HALVES[words[place]], " ".join(words[:place] + words[after:])
