"""Videos that do not fit into memory are refused with a sentence; open chunk sizes are chosen."""

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from svdq.pipeline.errors import InputError
from svdq.pipeline.loop.sample import Sample
from svdq.pipeline.models.family import Family
from svdq.pipeline.models.svd.family import FAMILY, SvdParameters
from svdq.pipeline.models.video_model import ModelInfo
from svdq.producer.job import JobArguments
from svdq.producer.storage.storage import Storage
from svdq.worker.checkpoint.checkpoints import Checkpoints
from svdq.worker.checkpoint.store import Codec, open_checkpoint_store
from svdq.worker.intake.prefetcher import IntakeOptions, Prefetcher
from svdq.worker.memory_plan import DoesNotFitError, MemoryPlan, RankInfo, plan_of
from tests.queued import SvdJob

MODEL = ModelInfo(name="fake", notice="tiny", family=FAMILY, facts=FAMILY.published, compute={"dtype": "float16"})
GB = 1_000_000_000
XT = SvdParameters(seed=1, frames=25, width=1024, height=576, decode_chunk_size=25)  # the published SVD-XT in float16


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
    return MemoryPlan(ranks(*capacities_gb), "float16", MODEL.known)


def refusal(memory: MemoryPlan, parameters: SvdParameters) -> str:
    with pytest.raises(DoesNotFitError) as caught:
        memory.admit(parameters)
    return str(caught.value)


def test_a_video_that_fits_is_not_changed() -> None:
    assert plan(48, 48, 48).admit(XT) == XT
    unlimited = [RankInfo(capacity=None, weights=9, device="cpu")] * 3
    assert MemoryPlan(unlimited, "float32").admit(XT) == XT


def test_ranks_with_the_decoder_and_enough_memory_decode() -> None:
    video = SvdParameters(seed=1, frames=25, decode_chunk_size=8)
    there = [rank.model_copy(update={"decodes": number != 1}) for number, rank in enumerate(ranks(24, 24, 24, 12, 24))]
    memory = MemoryPlan(there, "float16", MODEL.known)
    assert memory.able("decode", video) == (0, 2, 4)
    assert memory.need(3, video, "decode") > 12 * GB > memory.need(3, video)
    small = SvdParameters(seed=1, frames=2, width=64, height=64, decode_chunk_size=1)
    assert memory.able("decode", small) == (0, 2, 3, 4)


def test_the_last_rank_decodes_in_any_case() -> None:
    assert plan(24, 24, 24).able("decode", SvdParameters(seed=1, frames=25)) == (2,)


def test_a_refusal_says_where_how_much_and_what_to_do() -> None:
    assert refusal(plan(24, 24, 24), XT) == (
        "1024x576 with 25 frames needs about 45.5 GB on rank 2 of 3, which has 24.0 GB: "
        "choose fewer frames, a smaller size, a smaller --decode-chunk-size, or grant more with --memory-limit."
    )
    assert refusal(plan(24, 8, 48), XT) == (
        "1024x576 with 25 frames needs about 11.4 GB on rank 1 of 3, which has 8.0 GB: choose fewer frames, a smaller "
        "size, a smaller --decode-chunk-size, or leave the NVIDIA RTX A5000 out with CUDA_VISIBLE_DEVICES."
    )
    assert refusal(plan(12), XT.model_copy(update={"decode_chunk_size": 8})).startswith(
        "1024x576 with 25 frames, decoded 8 at a time, needs about 18.1 GB on rank 0 of 1, "
    )
    assert "on rank 0 of 3, which has 7.0 GB" in refusal(plan(7, 24, 48), XT)


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


@settings(max_examples=200)
@given(parameters=shapes, capacities_gb=capacities)
def test_only_an_open_chunk_size_is_filled_in(parameters: SvdParameters, capacities_gb: list[float]) -> None:
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
        "1024x576 with 25 frames, decoded 1 at a time, needs about 11.4 GB on rank 1 of 3, which has 8.0 GB: "
        "choose fewer frames, a smaller size, or leave the NVIDIA RTX A5000 out with CUDA_VISIBLE_DEVICES."
    )


def test_a_limit_that_the_weights_exceed_is_refused_at_the_start(tmp_path: Path) -> None:
    def start(*limits: int) -> MemoryPlan:
        return plan_of(MODEL, ranks(*(limit / GB for limit in limits)), limits[0])

    assert start(4_380_000_000, 3_050_000_000, 3_180_000_000) is not None
    with pytest.raises(InputError, match=r"weights alone need 4\.4 GB on rank 0 .* grants 4\.0 GB: every video"):
        start(4 * GB, 4 * GB, 4 * GB)
    with pytest.raises(InputError, match=r"need 4\.5 GB on rank 0 of 1, .* grants 24 bytes"):
        start(24)


def test_gpus_that_are_left_must_hold_the_weights(tmp_path: Path) -> None:
    """After one has failed; else every video would be refused for the rest of the night."""
    assert plan_of(MODEL, ranks(5), None, must_fit=True) is not None
    with pytest.raises(InputError, match=r"need 4\.5 GB on rank 0 of 1, and there are 4\.0 GB"):
        plan_of(MODEL, ranks(4), None, must_fit=True)


@pytest.mark.parametrize(
    ("model", "family", "limit", "words"),
    [
        ("preview", None, 24 * GB, "--memory-limit (SVDQ_MEMORY_LIMIT) has no effect with the model preview"),
        ("simulated", None, 1, "--memory-limit (SVDQ_MEMORY_LIMIT) has no effect with the model simulated,"),
        ("preview", None, None, ""),
        ("/models/svd-xt", FAMILY, None, ""),
    ],
)
def test_a_limit_without_effect_is_a_warning(
    model: str, family: Family | None, limit: int | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    rank = RankInfo(capacity=limit, weights=0, device="cpu", decodes=True)
    memory = plan_of(ModelInfo(name=model, notice="", family=family), [rank], limit)
    assert memory.admit(XT) == XT
    assert len(caplog.records) == bool(words)
    assert words in caplog.text


# On rank 0.


def test_a_job_that_does_not_fit_fails_at_once_and_the_others_go_on(site, open_intake) -> None:
    large = [site.submit(width=1024, height=576, frames=25, seed=seed) for seed in range(4)]
    small = site.submit()
    intake = open_intake(model=MODEL, memory=plan(7, 40))
    request = intake.take()  # four in a row have failed in the same way, and taking goes on
    assert request is not None
    assert request.job_id == small
    for found in site.wait(large):
        assert found.status == "failed"
        assert "needs about 12.7 GB on rank 0 of 2, which has 7.0 GB: " in found.error


def test_the_stage_is_told_whether_the_worker_chose_the_chunk_size(site, open_intake) -> None:
    site.submit(width=1024, height=576, frames=25)
    site.submit(width=1024, height=576, frames=25, decode_chunk_size=12)
    intake = open_intake(model=MODEL, memory=plan(24, 24))
    chosen, named = intake.take(), intake.take()
    assert chosen is not None
    assert named is not None
    assert (chosen.parameters.decode_chunk_size, chosen.chunk_chosen) == (7, True)
    assert (named.parameters.decode_chunk_size, named.chunk_chosen) == (12, False)


JOB = SvdJob(image=f"inputs/{'a' * 64}.png", name="video", seed=1, steps=4, frames=2, width=64, height=64)


def test_a_half_done_video_goes_on_as_it_was_admitted(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    store = open_checkpoint_store("local", tmp_path, storage)
    codec = Codec(model=MODEL.name, device=torch.device("cpu"))
    checkpoints = Checkpoints(store, codec)
    prefetcher = Prefetcher(storage, MODEL, IntakeOptions(memory=plan(0.1, 0.1)), checkpoints)
    with pytest.raises(DoesNotFitError):
        prefetcher.prepare("id", JobArguments(job=JOB), once=True)

    begun = SvdParameters(seed=1, steps=4, frames=2, width=64, height=64, decode_chunk_size=1)
    half_done = Sample(
        job_id="id", parameters=begun, boundaries=(0, 6), step=2, tensors={"latents": torch.zeros(1, 2, 4, 8, 8)}
    )
    checkpoints.open("id")
    store.write("id", 2, codec.encode(half_done))
    found = prefetcher.prepare("id", JobArguments(job=JOB), once=True)
    assert found.resume is not None
    assert (found.resume.step, found.parameters) == (2, begun)


# All of it.


@pytest.mark.long
def test_a_worker_with_little_memory(site, tiny_model: Path) -> None:
    """One job is refused, the others are decoded in the chunks that fit."""
    too_large = site.submit(frames=2, width=512, height=512, steps=1)
    chosen = site.submit(frames=8, steps=1, formats=("mp4",))
    named = site.submit(frames=8, decode_chunk_size=1, steps=1, formats=("mp4",))
    group = site.start(2, "--memory-limit", "100MB", "--burst", model=str(tiny_model), wait=False)
    refused, made, as_asked = site.wait([too_large, chosen, named])
    assert refused.status == "failed"
    assert re.match(
        r"512x512 with 2 frames, decoded 1 at a time, needs about \d+\.\d GB on rank 1 of 2, "
        r"which has 100\.0 MB: ",
        refused.error,
    )
    assert made.status == as_asked.status == "finished", group.text
    assert (made.parameters["decode_chunk_size"], as_asked.parameters["decode_chunk_size"]) == (2, 1)
    account = json.loads(Path(made.outputs[0]).with_suffix(".json").read_text())
    assert account["job"]["decode_chunk_size"] == 2
    assert group.end() == 0
    assert "Ranks have at least 100.0 MB of memory; videos that need more are refused." in group.text
    assert "The usual video of this model will be refused: 1024x576 with " in group.text


@pytest.mark.long
def test_a_worker_with_too_little_memory_for_its_weights_does_not_start(site, tiny_model: Path) -> None:
    job = site.submit()
    ended = site.run("svdq", "worker", "--ranks", 2, "--device", "cpu", "--model", tiny_model, "--memory-limit", 1)
    assert ended.returncode == 2, ended.stderr
    said = ended.stderr.splitlines()
    assert re.match(r"Error: The weights alone need \d+\.\d MB on rank . of 2, and --memory-limit ", said[-1])
    assert ended.stderr.count("Error: ") == 1
    assert site.view(job).status == "queued"
