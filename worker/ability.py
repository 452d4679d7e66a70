"""The ability of a group: which jobs it can make. It is JSON that other groups read, and that outlives the group."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.families import DEFAULT_FAMILY, FAMILIES, PARAMETERS
from svdq.pipeline.models.known_model import KnownModel
from svdq.pipeline.models.model_name import model_stem
from svdq.pipeline.models.video_model import ModelInfo
from svdq.producer.job import JOBS, Job, JobArguments
from svdq.producer.records import Record
from svdq.worker.memory_plan import DoesNotFitError, MemoryPlan, RankInfo

NEWER = "a newer svdq"
#: The fields of a job that this version reads, by family; those of its arguments under "".
READ: Mapping[str, tuple[str, ...]] = {
    "": tuple(JobArguments.model_fields),
    **{name: tuple(job.model_fields) for name, job in JOBS.items()},
}


class Ability(Record):
    """What a group can make; each `lacks` says in words what it has not for a job, "" if it can make it."""

    model: str = ""  # the last part of its name, as jobs name it
    family: str = ""  # "" if it makes videos of any
    facts: Mapping[str, Any] = {}
    dtype: str = "float32"
    ranks: tuple[RankInfo, ...] = ()
    workspace: int = 0
    upscales: bool = True
    loras: tuple[str, ...] = ()  # digests
    reads: Mapping[str, tuple[str, ...]] = READ

    @classmethod
    def of(cls, info: ModelInfo, memory: MemoryPlan, *, upscales: bool) -> Self:
        """Describe a group by its model and its memory, without LoRAs."""
        return cls(
            model=model_stem(info.name),
            family=info.family.name if info.family is not None else "",
            facts=dict(info.facts),
            dtype=memory.dtype,
            ranks=tuple(rank.model_copy(update={"compute": {}, "gpu": ""}) for rank in memory.ranks),
            workspace=memory.workspace,
            upscales=upscales,
        )

    def with_loras(self, digests: Iterable[str]) -> Self:
        """Return it with these LoRAs."""
        return type(self)(**dict(self) | {"loras": tuple(sorted({*digests}))})  # a copy would keep the id

    @cached_property
    def id(self) -> str:
        """A hash of it: groups of the same ability share one."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:8]

    @cached_property
    def _known(self) -> KnownModel | None:
        family = next((each for each in FAMILIES if each.name == self.family), None)
        return None if family is None else KnownModel(name=self.model, family=family, facts=self.facts)

    def is_for(self, job: Job) -> bool:
        """Return whether its model is one that the job is for."""
        return job.model in (None, self.model) and self.family in ("", job.family)

    def lacks(self, job: Job) -> str:
        """Return what the group has not that a job needs; facts that are not a model's raise any error."""
        if not self.is_for(job):
            return f"the model {job.model}" if job.model else f"a model of {PARAMETERS[job.family].title}"
        if lora := self.lacks_lora(job):
            return lora
        if job.upscale and not self.upscales:
            return "an upscaler"
        if self._known is None:
            return ""
        try:
            completed = self._known.complete(job.parameters)
            if not job.finishes:
                MemoryPlan(self.ranks, self.dtype, self._known, workspace=self.workspace).admit(completed)
        except DoesNotFitError as error:
            return error.needed
        except InputError:
            return "another model"
        return ""

    def lacks_lora(self, job: Job) -> str:
        """Return the LoRA that the group has not."""
        missing = (each.name for each in job.loras if each.digest and each.digest not in self.loras)
        return next((f"the LoRA {name}" for name in missing), "")

    def lacks_fields(self, arguments: Mapping[str, Any]) -> str:
        """Return whether only a newer version reads the arguments of a job: a field of them is not known to this."""
        job = arguments.get("job")
        fields: Sequence[str] | None = (
            self.reads.get(str(job.get("family", DEFAULT_FAMILY))) if isinstance(job, dict) else ()
        )
        if fields is None or not {*arguments} <= {*self.reads.get("", ())} or not {*(job or ())} <= {*fields}:
            return NEWER
        return ""
