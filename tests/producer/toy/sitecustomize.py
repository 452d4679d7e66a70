"""Registers the toy family, as a line of `families.py` would, in every process with this folder on its PYTHONPATH."""

from toy.family import FAMILY

from svdq.pipeline.models import families

families.FAMILIES = (*families.FAMILIES, FAMILY)
families.PARAMETERS = {**families.PARAMETERS, FAMILY.name: FAMILY.parameters}
