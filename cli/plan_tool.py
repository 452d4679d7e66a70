"""The tool of agents that `svdq plan` is: it imports the worker, as the server does not."""

import asyncio

from pydantic import BaseModel, Field

from svdq.cli.plan import GPUS, make_plan
from svdq.cli.serve.agent_tools import Arguments, Caller, Schema
from svdq.worker.fit import NUM_VIDEOS


class WayResult(Schema):
    """A way to run a model."""

    command: str
    need_bytes: int = Field(description="of GPU memory, of the process that needs most")
    host_bytes: int = Field(description="of host memory from which blocks are streamed")
    fits: bool
    time_s: float | None = Field(None, description="seconds for all videos, by published times of steps")


class PlanResult(Schema):
    """The ways to run a model."""

    download_bytes: int
    ways: list[WayResult] = Field(description="the first that fits is the best")


class Plan(Arguments):
    """Say what a model needs of some GPUs, which ways of running it fit, and how long videos take there."""

    result = PlanResult

    model: str | None = Field(None, description="also one that is not fetched; the configured one if left out")
    gpus: str | None = Field(None, description=f"{GPUS}; this machine's if left out")
    num_videos: int = Field(NUM_VIDEOS, ge=1, le=1_000_000)
    shape: str | None = Field(None, description="of the videos, such as 832x480x81; the model's own if left out")
    steps: int | None = Field(None, ge=1, le=1000)

    async def run(self, caller: Caller) -> BaseModel:
        """Do it; raises InputError."""

        def plan() -> BaseModel:
            found = make_plan(self.model, self.gpus, self.num_videos, shape=self.shape, steps=self.steps)
            return PlanResult.model_validate(found.as_json())

        return await asyncio.to_thread(plan)
