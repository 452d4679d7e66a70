"""Chooses the family of models that new videos are for.

In this order: `--family` or a parameter that only one family has, the configured model, the models that workers run, a
prompt beside a photo, the default.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import combinations

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.family_parameters import PARAMETERS
from svdq.producer.job import JOBS

#: The fields of each family's jobs.
_FIELDS: Mapping[str, Collection[str]] = {name: job.model_fields for name, job in JOBS.items()}
#: The families that have prompts.
WITH_PROMPTS = frozenset(name for name, fields in _FIELDS.items() if "prompt" in fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedModel:
    """The model that is expected to make the videos, where its family is known; `submit.expected_model` finds it."""

    name: str
    family: str
    #: Whether it is in the settings; parameters of another family are then refused.
    is_configured: bool = True


def choose_family(
    fields: Collection[str], family: str | None, model: ExpectedModel | None, spell: Callable[[str], str]
) -> str | None:
    """Return the family that all given fields apply to; None if nothing decides.

    `spell` returns the name of a field for errors.

    Raises:
        InputError: a field does not apply to that family, or two fields apply to two families.
    """
    if family is not None and (not isinstance(family, str) or family not in JOBS):  # a file may have anything
        raise InputError(f"{spell('family')} {family} is not allowed: it must be one of {', '.join(JOBS)}.")
    chosen = family or (model.family if model is not None else None)
    wrong = next((field for field in fields if chosen is not None and field not in _FIELDS[chosen]), None)
    if wrong is not None and family is not None:
        raise InputError(
            f"{spell(wrong)} does not apply to {PARAMETERS[family].title} ({spell('family')} {family}), only to "
            f"{_titles(wrong)}; leave out one of the two."
        )
    if wrong is not None and model is not None and model.is_configured:
        there = next(name for name, has in _FIELDS.items() if wrong in has)
        raise InputError(
            f"{spell(wrong)} does not apply to the configured model {model.name}, which is "
            f"{PARAMETERS[model.family].title}; leave it out, or give {spell('family')} {there} if the workers have "
            "such a model."
        )
    fitting = [name for name, has in _FIELDS.items() if all(field in has for field in fields)]
    if not fitting:
        one, other = next(
            pair
            for pair in combinations(fields, 2)
            if not any(pair[0] in has and pair[1] in has for has in _FIELDS.values())
        )
        raise InputError(
            f"{spell(one)} applies only to {_titles(one)} and {spell(other)} only to {_titles(other)}; "
            "leave out one of the two."
        )
    if chosen in fitting:
        return chosen
    return None if len(fitting) == len(JOBS) else fitting[0]


def _titles(field: str) -> str:
    """Name the families that have a field."""
    return " and ".join(PARAMETERS[name].title for name, has in _FIELDS.items() if field in has)
