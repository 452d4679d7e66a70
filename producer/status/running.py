"""The models and LoRAs that workers have, by what they report."""

from typing import Any

import redis

from svdq.pipeline.models.families import PARAMETERS
from svdq.pipeline.models.known_model import KnownModel
from svdq.pipeline.models.model_name import model_stem
from svdq.pipeline.models.names.model_names import family_of_model
from svdq.producer import keys
from svdq.producer.status.ranks import read_groups
from svdq.producer.status.video_costs import known_of


def running_models(connection: redis.Redis) -> dict[str, str | None]:
    """Return the models that workers run or load, by name, with their families; None where that is any or unknown."""
    found = {
        rank.model: rank.family or family_of_model(rank.model)
        for group in read_groups(connection)
        for rank in group.ranks
    }
    now, _ = connection.time()
    starting: Any = connection.zrange(keys.STARTING, now, "+inf", byscore=True)
    for member in starting:
        _, _, described = member.decode(errors="backslashreplace").partition(" ")
        family, _, name = described.partition(" ")
        if name:
            found.setdefault(name, family if family in PARAMETERS else None)
    return found


def running_known(connection: redis.Redis, family: str, stem: str = "") -> KnownModel | None:
    """Return what is known of the model of a family that workers run, or of the one of a name; None if they differ.

    A worker that starts has not said what its model is like.
    """
    ranks = [group.ranks[0] for group in read_groups(connection)]
    found = [
        known
        for rank in ranks
        if stem in ("", model_stem(rank.model)) and (known := known_of(rank, family)) and rank.family == family
    ]
    starting = {*running_models(connection)} - {rank.model for rank in ranks}
    is_sure = found and not any(stem in ("", model_stem(name)) for name in starting)
    return found[0] if is_sure and all(each.facts == found[0].facts for each in found) else None


def running_loras(connection: redis.Redis) -> dict[str, str]:
    """Return the LoRAs that jobs may choose, by name, with their digests, of all workers."""
    intakes = [group.intake for group in read_groups(connection) if group.intake]
    return {name: digest for intake in intakes for name, digest in intake.loras.items()}
