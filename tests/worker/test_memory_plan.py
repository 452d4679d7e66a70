"""Videos that do not fit into memory are refused with a sentence that names what fits; open chunk sizes are chosen."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.base import ModelInfo
from svdq.pipeline.models.memory import MeasuredMemory
from svdq.pipeline.models.svd.parameters import SvdParameters
from svdq.pipeline.protocols import Report
from svdq.pipeline.sample import Sample, sample_body
from svdq.pipeline.trace import Tracer
from svdq.producer.job import SvdJob
from svdq.producer.queue import server_url
from svdq.producer.storage.storage import Storage
from svdq.worker.checkpoint.checkpoints import Checkpoints
from svdq.worker.checkpoint.codec import Codec
from svdq.worker.checkpoint.store import open_checkpoint_store
from svdq.worker.intake.memory import DoesNotFitError, MemoryPlan, RankInfo, plan_of
from svdq.worker.intake.policy import IntakeOptions
from svdq.worker.intake.prefetcher import Prefetcher
from svdq.worker.intake.source import Intake
from svdq.worker.output.writer import ResultWriter
from svdq.worker.redis_client import connect

MODEL = ModelInfo(name="fake", notice="tiny", compute={"dtype": "float16"})
GB = 1_000_000_000
#: The published SVD-XT in float16.
XT = SvdParameters(seed=1, frames=25, width=1024, height=576, decode_chunk_size=25)


def ranks(*capacities_gb: float) -> list[RankInfo]:
    """Give each rank of a group a capacity, and the weights of SVD-XT that it holds."""
    last = len(capacities_gb) - 1
    return [
        RankInfo(
            capacity=int(capacity * GB),
            weights=int((3.05 + 1.33 * (rank == 0) + 0.13 * (rank == last)) * GB),
            device="NVIDIA RTX A5000",
        )
        for rank, capacity in enumerate(capacities_gb)
    ]


def plan(*capacities_gb: float) -> MemoryPlan:
    return MemoryPlan(ranks(*capacities_gb), "float16")


def refusal(memory: MemoryPlan, parameters: SvdParameters) -> str:
    with pytest.raises(DoesNotFitError) as caught:
        memory.admit(parameters)
    return str(caught.value)


def test_what_fits_is_left_alone() -> None:
    assert plan(48, 48, 48).admit(XT) == XT
    unlimited = [RankInfo(capacity=None, weights=9, device="cpu")] * 3
    assert MemoryPlan(unlimited, "float32").admit(XT) == XT


def test_ranks_with_the_decoder_and_enough_memory_decode() -> None:
    video = SvdParameters(seed=1, frames=25, decode_chunk_size=8)
    there = [rank.model_copy(update={"decodes": number != 1}) for number, rank in enumerate(ranks(24, 24, 24, 12, 24))]
    memory = MemoryPlan(there, "float16")
    assert memory.decoders(video) == (0, 2, 4)
    assert memory.need(3, video, decodes=True) > 12 * GB > memory.need(3, video)
    small = SvdParameters(seed=1, frames=2, width=64, height=64, decode_chunk_size=1)
    assert memory.decoders(small) == (0, 2, 3, 4)


def test_the_last_rank_decodes_in_any_case() -> None:
    assert plan(24, 24, 24).decoders(SvdParameters(seed=1, frames=25)) == (2,)


def test_a_refusal_says_where_how_much_and_what_would_fit() -> None:
    assert refusal(plan(24, 24, 24), XT) == (
        "1024x576 with 25 frames needs about 45.5 GB on the last rank of this group, which has 24.0 GB: "
        "--decode-chunk-size 7 would fit, or 12 frames, or 704x384."
    )
    # The step is what does not fit: smaller chunks would not help.
    assert refusal(plan(24, 8, 48), XT) == (
        "1024x576 with 25 frames needs about 11.4 GB on rank 1 of this group, which has 8.0 GB: "
        "14 frames would fit, or 768x448."
    )
    assert refusal(plan(12), XT.model_copy(update={"decode_chunk_size": 8})).startswith(
        "1024x576 with 25 frames, decoded 8 at a time, needs about 18.1 GB on this worker's only rank, "
    )
    assert "on the first rank of this group, which has 7.0 GB" in refusal(plan(7, 24, 48), XT)


def test_nothing_is_named_that_does_not_fit() -> None:
    assert refusal(plan(1, 1), XT).endswith(": no smaller video of this shape would fit either.")
    assert refusal(plan(24, 24, 5.0), XT.model_copy(update={"decode_chunk_size": 1})).endswith(
        ": 5 frames would fit, or 448x256."
    )


shapes = st.builds(
    lambda frames, chunk, width, height, guided: SvdParameters(
        seed=1,
        frames=frames,
        decode_chunk_size=chunk,
        width=64 * width,
        height=64 * height,
        max_guidance_scale=3.0 if guided else 1.0,
    ),
    st.integers(1, 40),
    st.none() | st.integers(1, 40),
    st.integers(1, 30),
    st.integers(1, 30),
    st.booleans(),
)
capacities = st.lists(st.floats(3, 60), min_size=1, max_size=3)


@settings(max_examples=300)
@given(parameters=shapes, capacities_gb=capacities)
def test_every_suggestion_fits_and_the_next_larger_one_does_not(
    parameters: SvdParameters, capacities_gb: list[float]
) -> None:
    memory = plan(*capacities_gb)

    def fits(**changes: int) -> bool:
        try:
            return memory.admit(parameters.model_copy(update=changes)) is not None
        except DoesNotFitError:
            return False

    if fits():
        return
    advice = refusal(memory, parameters).rpartition(": ")[2]
    also = {"decode_chunk_size": 1} if "with --decode-chunk-size 1" in advice else {}
    if found := re.match(r"--decode-chunk-size (\d+) would", advice):
        assert fits(decode_chunk_size=int(found[1]))
        assert not fits(decode_chunk_size=2 * int(found[1]))
    if found := re.search(r"(\d+) frames?", advice):
        assert fits(frames=int(found[1]), **also)
        assert not fits(frames=int(found[1]) + 1, **also)
    if found := re.search(r"(\d+)x(\d+)", advice):
        assert fits(width=int(found[1]), height=int(found[2]), **also)
        assert not fits(width=int(found[1]) + 64, height=parameters.height, **also)
    if "no smaller" in advice:
        assert not fits(frames=1, decode_chunk_size=1)


@settings(max_examples=200)
@given(parameters=shapes, capacities_gb=capacities)
def test_what_is_admitted_differs_in_an_open_chunk_size_alone_and_is_always_the_same(
    parameters: SvdParameters, capacities_gb: list[float]
) -> None:
    memory = plan(*capacities_gb)
    chunk = min(parameters.decode_chunk_size or parameters.num_frames, parameters.num_frames)
    try:
        admitted = memory.admit(parameters)
    except DoesNotFitError:
        with pytest.raises(DoesNotFitError):
            memory.admit(parameters.model_copy(update={"decode_chunk_size": chunk}))
        return
    assert admitted == memory.admit(admitted) == plan(*capacities_gb).admit(parameters)
    assert admitted == parameters.model_copy(update={"decode_chunk_size": admitted.decode_chunk_size})
    assert (admitted.decode_chunk_size or 0) <= chunk
    if parameters.decode_chunk_size is not None:
        assert admitted.decode_chunk_size == chunk


def test_a_video_that_leaves_its_chunks_open_gets_the_largest_that_fit() -> None:
    """A card of 24 GB cannot decode 25 frames at once, which is what nobody asked for in so many words."""
    is_open = XT.model_copy(update={"decode_chunk_size": None})
    assert plan(24, 24, 24).admit(is_open) == XT.model_copy(update={"decode_chunk_size": 7})
    assert plan(48, 48, 48).admit(is_open) == XT
    assert refusal(plan(24, 8, 24), is_open) == (
        "1024x576 with 25 frames, decoded 1 at a time, needs about 11.4 GB on rank 1 of this group, which has 8.0 GB: "
        "14 frames would fit, or 768x448."
    )


def body_of(parameters: SvdParameters, **more: object) -> dict[str, object]:
    return sample_body(Sample(job_id="id", parameters=parameters, boundaries=(0, 5), step=5, **more))  # type: ignore[arg-type]


def test_a_chunk_size_that_ran_out_of_memory_is_planned_no_more(tmp_path: Path) -> None:
    """Also in the next worker, and for larger videos; one that a job names is tried."""

    def start() -> MemoryPlan:
        return plan_of(tmp_path, MODEL, ranks(48, 48), None)

    is_open = XT.model_copy(update={"decode_chunk_size": None})
    seven = XT.model_copy(update={"decode_chunk_size": 7})
    first = start()
    assert first.admit(is_open) == XT
    first.learn(body_of(seven, ran_out=True, seconds={"decode": 9.0}))
    for memory in (first, start()):
        assert memory.admit(is_open) == seven
        assert memory.admit(is_open.model_copy(update={"frames": 30})).decode_chunk_size == 7
        assert memory.admit(is_open.model_copy(update={"frames": 14})).decode_chunk_size == 14
        assert memory.admit(XT) == XT
    # A job that ended before its decode, or was not even begun, says nothing about it.
    first.learn(body_of(XT))
    first.learn({})
    assert start().admit(is_open) == seven


def test_ranks_that_share_a_gpu_otherwise_or_have_a_limit_are_learnt_about_apart(tmp_path: Path) -> None:
    def start(limit: int | None = None, **more: int) -> MemoryPlan:
        return plan_of(tmp_path, MODEL, [rank.model_copy(update=more) for rank in ranks(48, 48)], limit)

    is_open = XT.model_copy(update={"decode_chunk_size": None})
    start(ranks_per_gpu=2).learn(body_of(XT.model_copy(update={"decode_chunk_size": 4}), ran_out=True))
    found = [start(ranks_per_gpu=2), start(), start(48 * GB, ranks_per_gpu=2)]
    assert [memory.admit(is_open).decode_chunk_size for memory in found] == [4, 25, 25]
    (tmp_path / "memory").rename(tmp_path / "forgotten")
    assert start(ranks_per_gpu=2).admit(is_open) == XT


def test_a_limit_that_the_weights_exceed_is_refused_at_the_start(tmp_path: Path) -> None:
    def start(*limits: int) -> MemoryPlan:
        return plan_of(tmp_path, MODEL, ranks(*(limit / GB for limit in limits)), limits[0])

    assert start(4_380_000_000, 3_050_000_000, 3_180_000_000) is not None
    with pytest.raises(
        InputError, match=r"weights alone need 4\.4 GB on the first rank .* grants 4\.0 GB: every video"
    ):
        start(4 * GB, 4 * GB, 4 * GB)
    with pytest.raises(InputError, match=r"need 4\.5 GB on this worker's only rank, .* grants 24 bytes"):
        start(24)


def test_gpus_that_are_left_must_hold_the_weights(tmp_path: Path) -> None:
    """After one has failed; else every video would be refused for the rest of the night."""
    assert plan_of(tmp_path, MODEL, ranks(5), None, must_fit=True) is not None
    with pytest.raises(InputError, match=r"need 4\.5 GB on this worker's only rank, and there are 4\.0 GB"):
        plan_of(tmp_path, MODEL, ranks(4), None, must_fit=True)


@pytest.mark.parametrize(
    ("model", "limit", "words"),
    [
        ("preview", 24 * GB, "--memory-limit (SVDQ_MEMORY_LIMIT) has no effect with the model preview"),
        ("simulated:step_ms=1", 1, "--memory-limit (SVDQ_MEMORY_LIMIT) has no effect with the model simulated:step_ms"),
        ("preview", None, ""),
        ("/models/svd-xt", None, ""),
    ],
)
def test_a_limit_that_does_nothing_is_said_to(
    tmp_path: Path, model: str, limit: int | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    rank = RankInfo(capacity=limit, weights=0, device="cpu", decodes=True)
    memory = plan_of(tmp_path, ModelInfo(name=model, notice=""), [rank], limit)
    assert memory.admit(XT) == XT
    assert len(caplog.records) == bool(words)
    assert words in caplog.text


def test_a_plan_learns_from_what_was_made() -> None:
    memory = MemoryPlan(ranks(24, 12), "float16", MeasuredMemory())

    def video(frames: int) -> SvdParameters:
        return XT.model_copy(update={"frames": frames, "decode_chunk_size": 1})

    memory.admit(video(25))
    memory.learn(body_of(video(20), memory={"step": int(8.5 * GB)}))
    with pytest.raises(DoesNotFitError, match=": 20 frames would fit"):
        memory.admit(video(25))
    memory.admit(video(20))


# On rank 0.


@pytest.fixture
def open_intake(house):
    opened = []

    def start(memory: MemoryPlan) -> Intake:
        link = connect(server_url(house.settings))
        intake = Intake(link, Storage(house.settings.storage), MODEL, IntakeOptions(memory=memory))
        opened.append((intake, link))
        intake.start()
        return intake

    yield start
    for intake, link in opened:
        intake.close(return_to_queue=True)
        link.connection_pool.disconnect()


def test_a_job_that_does_not_fit_fails_at_once_and_the_others_go_on(house, open_intake) -> None:
    large = [house.submit(width=1024, height=576, frames=25, seed=seed) for seed in range(4)]
    small = house.submit()
    intake = open_intake(plan(7, 40))
    request = intake.take()  # four in a row have failed in the same way, and taking goes on
    assert request is not None
    assert request.job_id == small
    for found in house.wait(large):
        assert found.status == "failed"
        assert "needs about 12.7 GB on the first rank of this group, which has 7.0 GB: " in found.error


def test_what_a_video_took_decides_about_the_next(house, open_intake) -> None:
    shape = {"width": 1024, "height": 576, "decode_chunk_size": 5}
    first = house.submit(**shape, frames=20)
    intake = open_intake(plan(24, 12.5))
    request = intake.take()
    assert request is not None
    assert request.job_id == first
    body = body_of(request.parameters, memory={"step": 8 * GB})
    intake.ended(Report(job_id=first, body=body, result={}, failure="its disk is full"))
    second, third = house.submit(**shape, frames=25), house.submit(**shape, frames=20, seed=3)
    again = intake.take()
    assert again is not None
    assert again.job_id == third, "what was made once is made again"
    (refused,) = house.wait([second])
    assert "needs about 12.8 GB on the last rank of this group, which has 12.5 GB: " in refused.error


def test_the_stage_is_told_whether_the_worker_chose_the_chunk_size(house, open_intake) -> None:
    house.submit(width=1024, height=576, frames=25)
    house.submit(width=1024, height=576, frames=25, decode_chunk_size=12)
    intake = open_intake(plan(24, 24))
    chosen, named = intake.take(), intake.take()
    assert chosen is not None
    assert named is not None
    assert (chosen.parameters.decode_chunk_size, chosen.chunk_chosen) == (7, True)
    assert (named.parameters.decode_chunk_size, named.chunk_chosen) == (12, False)


def write_video(folder: Path) -> Report:
    sample = Sample(
        job_id="id",
        parameters=SvdParameters(seed=1, steps=4, frames=2, width=64, height=64, decode_chunk_size=1),
        boundaries=(0, 4),
        step=4,
        metadata={"image": f"inputs/{'a' * 64}.png", "name": "video", "formats": ("mp4",), "fit": "crop"},
    )
    reports: list[Report] = []
    writer = ResultWriter(Storage(str(folder)), MODEL, Tracer())
    writer.deliver(sample, np.zeros((2, 64, 64, 3), np.uint8), reports.append)
    writer.close()
    return reports[0]


def test_what_is_finished_or_half_done_was_admitted_and_stays_as_it_is(tmp_path: Path) -> None:
    """Whatever is known by now of the memory that it takes."""
    storage = Storage(str(tmp_path))
    store = open_checkpoint_store("local", tmp_path, storage)
    codec = Codec(model=MODEL.name, device=torch.device("cpu"))
    checkpoints = Checkpoints(store, codec)
    prefetcher = Prefetcher(storage, MODEL, IntakeOptions(memory=plan(0.1, 0.1)), checkpoints)
    job = SvdJob(
        image=f"inputs/{'a' * 64}.png", name="video", seed=1, steps=4, frames=2, width=64, height=64, formats=("mp4",)
    )
    with pytest.raises(DoesNotFitError):
        prefetcher.prepare_ahead("id", job)

    begun = SvdParameters(seed=1, steps=4, frames=2, width=64, height=64, decode_chunk_size=1)
    half_done = Sample(
        job_id="id",
        parameters=begun,
        boundaries=(0, 4),
        step=2,
        tensors={"latents": torch.zeros(1, 2, 4, 8, 8)},
    )
    checkpoints.open("id")
    store.write("id", 2, codec.encode(half_done))
    found = prefetcher.prepare_ahead("id", job)
    assert found.resume is not None
    assert (found.resume.step, found.parameters) == (2, begun)
    assert write_video(tmp_path).result
    assert prefetcher.prepare_ahead("id", job).result is not None


# All of it.


@pytest.mark.long
def test_a_worker_with_little_memory(house, tiny_model: Path) -> None:
    """One job is refused, the others are decoded in the chunks that fit."""
    too_large = house.submit(frames=2, width=512, height=512, steps=1)
    chosen = house.submit(frames=8, steps=1, formats=("mp4",))
    named = house.submit(frames=8, decode_chunk_size=1, steps=1, formats=("mp4",))
    group = house.start(2, "--memory-limit", "100MB", "--burst", model=str(tiny_model), wait=False)
    refused, made, as_asked = house.wait([too_large, chosen, named])
    assert refused.status == "failed"
    assert re.match(
        r"512x512 with 2 frames, decoded 1 at a time, needs about \d+\.\d GB on the last rank of this group, "
        r"which has 100\.0 MB: ",
        refused.error,
    )
    assert made.status == as_asked.status == "finished", group.text
    assert (made.parameters["decode_chunk_size"], as_asked.parameters["decode_chunk_size"]) == (4, 1)
    account = json.loads(Path(made.outputs[0]).with_suffix(".json").read_text())
    assert account["job"]["decode_chunk_size"] == 4
    assert group.end() == 0
    assert "Ranks have at least 100.0 MB of memory; videos that need more are refused." in group.text


@pytest.mark.long
def test_a_chunk_size_that_ran_out_of_memory_is_remembered_by_the_next_worker_and_its_warm_up(house) -> None:
    model = "simulated:step_ms=1,decodable_frames=2"
    jobs = [house.submit(frames=8) for _ in range(3)]
    first = house.start(2, "--burst", model=model, wait=False)
    assert [found.parameters["decode_chunk_size"] for found in house.wait(jobs)] == [2, 2, 2]
    assert first.end() == 0
    line = r"^\[rank (\d)\] Out of memory in the decode of \w+; trying again with decode_chunk_size (\d)\.$"
    tried: dict[str, list[str]] = {}
    for rank, chunk in re.findall(line, first.text, re.MULTILINE):
        tried.setdefault(rank, []).append(chunk)
    assert {*map(tuple, tried.values())} == {("4", "2")}, first.text  # each rank that decodes learns it once
    job = house.submit(frames=8)
    second = house.start(2, "--burst", "--warmup", "64x64x8", model=model, wait=False)
    (found,) = house.wait([job])
    assert second.end() == 0
    assert found.parameters["decode_chunk_size"] == 2
    assert "Ready with" in second.text
    assert "ut of memory" not in second.text
    assert "Out of GPU memory" not in second.text


@pytest.mark.long
def test_a_worker_with_too_little_memory_for_its_weights_does_not_start(house, tiny_model: Path) -> None:
    job = house.submit()
    ended = house.run("svdq", "worker", "--ranks", 2, "--device", "cpu", "--model", tiny_model, "--memory-limit", 1)
    assert ended.returncode == 2, ended.stderr
    said = ended.stderr.splitlines()
    assert re.match(
        r"Error: The weights alone need \d+\.\d MB on the .* rank of this group, and --memory-limit ", said[-1]
    )
    assert ended.stderr.count("Error: ") == 1
    assert house.view(job).status == "queued"
