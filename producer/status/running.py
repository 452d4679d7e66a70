"""The models and LoRAs that workers have, by what they report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import redis

from svdq.pipeline.models.families import PARAMETERS
from svdq.pipeline.models.known_model import KnownModel
from svdq.pipeline.models.model_name import model_stem
from svdq.pipeline.models.names.model_names import family_of_model
from svdq.producer import keys
from svdq.producer.status.ranks import GroupStatus, reading_groups
from svdq.producer.status.video_costs import known_of
from svdq.producer.together import Read, ask, checked


@dataclass(frozen=True)
class Running:
    """What workers have at one moment."""

    groups: Sequence[GroupStatus] = ()
    #: The models of workers that start, by name, with their families; None where that is any or unknown.
    starting: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def models(self) -> dict[str, str | None]:
        """The models that workers run or load, as those of `starting`."""
        ranks = [rank for group in self.groups for rank in group.ranks]
        found = {rank.model: rank.family or family_of_model(rank.model) for rank in ranks}
        return found | {name: family for name, family in self.starting.items() if name not in found}

    def known(self, family: str, stem: str = "") -> KnownModel | None:
        """Return what is known of the model of a family, or of the one of a name; None if workers differ in it.

        A worker that starts has not said what its model is like.
        """
        ranks = [group.ranks[0] for group in self.groups]
        found = [
            known
            for rank in ranks
            if stem in ("", model_stem(rank.model)) and (known := known_of(rank, family)) and rank.family == family
        ]
        starting = self.starting.keys() - {rank.model for rank in ranks}
        is_sure = found and not any(stem in ("", model_stem(name)) for name in starting)
        return found[0] if is_sure and all(each.facts == found[0].facts for each in found) else None

    @property
    def loras(self) -> dict[str, str]:
        """The LoRAs that jobs may choose, by name, with their digests, of all workers."""
        intakes = [group.intake for group in self.groups if group.intake]
        return {name: digest for intake in intakes for name, digest in intake.loras.items()}


def read_running(connection: redis.Redis) -> Running:
    """Read what workers have; two round trips."""
    return Running(*ask(connection, reading_groups(), _reading_starting()))


def _reading_starting() -> Read[dict[str, str | None]]:
    answers = yield lambda pipeline: [pipeline.time(), pipeline.zrange(keys.STARTING, 0, -1, withscores=True)]
    (now_s, _), members = checked(answers)
    found: dict[str, str | None] = {}
    for member, until in members:
        _, _, described = member.decode(errors="backslashreplace").partition(" ")
        family, _, name = described.partition(" ")
        if name and until >= now_s:
            found.setdefault(name, family if family in PARAMETERS else None)
    return found
