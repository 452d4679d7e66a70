"""Videos that do not fit into memory: refused with a sentence that names what fits, or changed and marked."""

import json
import re
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.pipeline.models.compute import DEFAULTS
from svdq.pipeline.models.memory_plan import Admitted, DoesNotFitError, MemoryPlan, Room
from svdq.pipeline.models.memory_room import RESERVE_BYTES, rooms_of
from svdq.pipeline.models.model import ModelInfo
from svdq.pipeline.models.tiny import write_tiny_model
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.sample import Sample
from svdq.pipeline.trace import Tracer
from svdq.pipeline.transport.ports import Report
from svdq.producer.embedded_redis.server import ensure_server
from svdq.producer.job import Job
from svdq.producer.results.provenance import read_provenance
from svdq.producer.storage.storage import Storage
from svdq.worker.intake.feeder import IntakeOptions
from svdq.worker.intake.intake import Intake
from svdq.worker.intake.memory import plan_of, start_estimates
from svdq.worker.intake.preparing import Preparer
from svdq.worker.output.outlet import Outlet
from svdq.worker.recovery.checkpoint_codec import Codec
from svdq.worker.recovery.checkpoints import Archive
from svdq.worker.recovery.shelf import open_shelf
from svdq.worker.redis_link import connect

MODEL = ModelInfo(name="fake", notice="tiny", default_frames=9)
GB = 1_000_000_000
#: The published SVD-XT in float16, nearly.
XT = VideoParameters(seed=1, frames=25, width=1024, height=576, decode_chunk_size=25)


class LikeXt:
    """Estimates that are in proportion to what SVD-XT takes, and of how many steps."""

    def __init__(self) -> None:
        self.steps: set[tuple[int, ...]] = set()

    def weights(self, encoder: bool, decoder: bool) -> int:
        return int((3.05 + 1.33 * encoder + 0.13 * decoder) * GB)

    def encode(self, decoder: bool, width: int, height: int) -> int:
        return int((1.6 + 0.25 * decoder) * GB * width * height / (1024 * 576))

    def step(self, width: int, height: int, frames: int, guided: bool, chunked: bool = False) -> int:
        self.steps.add((width, height, frames, guided, chunked))
        return int(
            (4.8 if chunked else 8.3) * GB * width * height / (1024 * 576) * frames / 25 * (1 if guided else 0.5)
        )

    def decode(self, width: int, height: int, frames: int, decode_chunk_size: int) -> int:
        return int(GB * width * height / (1024 * 576) * (1.2 * min(decode_chunk_size, frames) + 0.01 * frames))


def plan(*capacities_gb: float, fit: bool = False) -> MemoryPlan:
    rooms = [Room(capacity=int(capacity * GB), ranks=(rank,)) for rank, capacity in enumerate(capacities_gb)]
    return MemoryPlan(len(rooms), rooms, LikeXt(), fit=fit)


def refusal(memory: MemoryPlan, parameters: VideoParameters) -> str:
    with pytest.raises(DoesNotFitError) as caught:
        memory.admit(parameters)
    return str(caught.value)


def test_what_fits_is_left_alone() -> None:
    assert plan(36, 36, 36, fit=True).admit(XT) == Admitted(parameters=XT)
    assert MemoryPlan(3, [], LikeXt(), fit=True).admit(XT) == Admitted(parameters=XT)


def test_a_refusal_says_where_how_much_and_what_would_fit() -> None:
    assert refusal(plan(24, 24, 24), XT) == (
        "1024x576 with 25 frames needs about 33.4 GB on the last rank of this group, which has 24.0 GB: "
        "--decode-chunk-size 13 would fit, or 17 frames, or 832x448."
    )
    # The step is what does not fit: smaller chunks would not help.
    assert refusal(plan(24, 8, 40), XT) == (
        "1024x576 with 25 frames needs about 11.3 GB on rank 1 of this group, which has 8.0 GB: "
        "14 frames would fit, or 768x448, or all of it with `svdq worker --forward-chunking`."
    )
    assert refusal(plan(12), XT.model_copy(update={"decode_chunk_size": 8})).startswith(
        "1024x576 with 25 frames, decoded 8 at a time, needs about 14.4 GB on this worker's only rank, "
    )
    assert "on the first rank of this group, which has 7.0 GB" in refusal(plan(7, 24, 40), XT)


def test_forward_chunking_is_named_where_it_would_do() -> None:
    """Not where it would not be enough, nor where a decode is what does not fit."""
    assert "--forward-chunking" in refusal(plan(24, 7.9, 40), XT)
    assert "--forward-chunking" not in refusal(plan(24, 7.8, 40), XT)
    assert "--forward-chunking" not in refusal(plan(24, 24, 24), XT)
    # Nobody insists on chunks that are too large.
    assert "--forward-chunking" in refusal(plan(24, 24, 8), XT.model_copy(update={"decode_chunk_size": None}))


def test_nothing_is_named_that_does_not_fit() -> None:
    assert refusal(plan(1, 1), XT).endswith(": no smaller video of this shape would fit either.")
    assert refusal(plan(24, 24, 4.5), XT.model_copy(update={"decode_chunk_size": 1})).endswith(
        ": 3 frames would fit, or 384x192."
    )


shapes = st.builds(
    lambda frames, chunk, width, height, guided: VideoParameters(
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
    parameters: VideoParameters, capacities_gb: list[float]
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
def test_what_is_changed_fits_is_said_and_is_always_the_same(
    parameters: VideoParameters, capacities_gb: list[float]
) -> None:
    memory = plan(*capacities_gb, fit=True)
    try:
        admitted = memory.admit(parameters)
    except DoesNotFitError:
        with pytest.raises(DoesNotFitError):
            memory.admit(parameters.model_copy(update={"frames": 1}))
        return
    after = admitted.parameters
    chunk = min(parameters.decode_chunk_size or parameters.num_frames, parameters.num_frames)
    assert plan(*capacities_gb, fit=True).admit(parameters) == admitted
    assert memory.admit(after) == Admitted(parameters=after)
    assert (after.width, after.height, after.seed) == (parameters.width, parameters.height, parameters.seed)
    assert bool(admitted.adjusted) == (after != parameters.model_copy(update={"decode_chunk_size": chunk}))
    if after.frames != parameters.frames:
        # Frames are the last resort.
        with pytest.raises(DoesNotFitError):
            plan(*capacities_gb).admit(parameters.model_copy(update={"decode_chunk_size": 1}))


def test_chunks_are_made_smaller_before_frames_are_left_out() -> None:
    chunked = plan(24, 24, 24, fit=True).admit(XT)
    assert chunked.parameters == XT.model_copy(update={"decode_chunk_size": 13})
    assert chunked.adjusted == "adjusted to memory: decode_chunk_size 13 in place of 25"
    fewer = plan(24, 8, 9, fit=True).admit(XT)
    assert (fewer.parameters.frames, fewer.parameters.decode_chunk_size) == (14, 4)
    assert fewer.adjusted == "adjusted to memory: 14 frames in place of 25, decode_chunk_size 4 in place of 25"


def test_a_video_that_leaves_its_chunks_open_gets_the_largest_that_fit() -> None:
    """A card of 24 GB cannot decode 25 frames at once, which is what nobody asked for in so many words."""
    is_open = XT.model_copy(update={"decode_chunk_size": None})
    admitted = plan(24, 24, 24).admit(is_open)
    assert admitted.parameters == XT.model_copy(update={"decode_chunk_size": 13})
    assert admitted.adjusted == "adjusted to memory: decode_chunk_size 13 in place of 25"
    assert plan(36, 36, 36).admit(is_open) == Admitted(parameters=XT)
    assert refusal(plan(24, 8, 24), is_open) == (
        "1024x576 with 25 frames, decoded 1 at a time, needs about 11.3 GB on rank 1 of this group, which has 8.0 GB: "
        "14 frames would fit, or 768x448, or all of it with `svdq worker --forward-chunking`."
    )


def test_finding_what_fits_takes_few_estimates() -> None:
    """Each is seconds of a processor, and the next job waits for them."""

    def num_steps(capacity_gb: int, parameters: VideoParameters) -> int:
        estimates = LikeXt()
        refusal(MemoryPlan(1, [Room(capacity=capacity_gb * GB, ranks=(0,))], estimates, fit=False), parameters)
        return len(estimates.steps)

    # The decode alone is too large: that a step of fewer frames fits need not be estimated.
    assert num_steps(24, XT) == 1
    assert num_steps(20, VideoParameters(seed=1, frames=200, width=4096, height=4096)) < 20


def test_ranks_that_share_a_gpu_share_its_memory() -> None:
    facts = [
        {"gpu": "host/a", "free": 20 * GB, "held": 5 * GB},
        {"gpu": "host/b", "free": 30 * GB, "held": 3 * GB},
        # Looked later than rank 0: what is free here is less by what that one holds.
        {"gpu": "host/a", "free": 12 * GB, "held": 3 * GB},
    ]
    rooms = rooms_of(facts)
    assert rooms == [
        Room(capacity=20 * GB - 2 * RESERVE_BYTES, ranks=(0, 2)),
        Room(capacity=33 * GB - RESERVE_BYTES, ranks=(1,)),
    ]
    sentence = refusal(MemoryPlan(3, rooms, LikeXt(), fit=False), XT)
    assert "on the GPU that ranks 0, 2 share, which has 19.0 GB" in sentence


def test_a_limit_counts_for_each_rank_and_processors_have_none() -> None:
    assert rooms_of([{"limit": 5}, {"limit": 7}]) == [Room(capacity=5, ranks=(0,)), Room(capacity=7, ranks=(1,))]
    assert rooms_of([{}, {}]) == []


def test_a_limit_that_the_weights_exceed_is_refused_at_the_start(tmp_path: Path) -> None:
    def start(*limits: int, estimates: LikeXt | None = None) -> MemoryPlan | None:
        facts = [json.dumps({"limit": limit, "device": "cpu"}) for limit in limits]
        return plan_of(tmp_path, MODEL, facts, estimates or LikeXt(), fit=True)

    assert start(4_380_000_000, 3_050_000_000, 3_180_000_000) is not None
    with pytest.raises(
        InputError, match=r"weights alone need 4\.4 GB on the first rank .* grants 4\.0 GB: every video"
    ):
        start(4 * GB, 4 * GB, 4 * GB)
    with pytest.raises(InputError, match=r"need 4\.5 GB on this worker's only rank, .* grants 24 bytes"):
        start(24)
    # Nothing is refused that nobody could look at.
    assert start(1, estimates=NoEstimates()) is not None


@pytest.mark.parametrize(
    ("model", "limit", "fit", "words"),
    [
        ("preview", 24 * GB, False, "--memory-limit (SVDQ_MEMORY_LIMIT): of no effect with the model preview"),
        ("simulated:step_ms=1", None, True, "--fit-memory: of no effect with the model simulated:step_ms=1"),
        ("preview", 1, True, "--memory-limit (SVDQ_MEMORY_LIMIT) and --fit-memory: of no effect with"),
        ("/models/svd-xt", None, True, "--fit-memory: of no effect on a processor without --memory-limit"),
        ("preview", None, False, ""),
        ("/models/svd-xt", None, False, ""),
    ],
)
def test_options_that_do_nothing_are_said_to(
    model: str, limit: int | None, fit: bool, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    cpu = torch.device("cpu")
    assert start_estimates(model, torch.float32, cpu, DEFAULTS, limit, fit=fit) is None
    assert len(caplog.records) == bool(words)
    assert words in caplog.text


# On rank 0.


@pytest.fixture
def open_intake(house):
    opened = []

    def start(memory: MemoryPlan) -> Intake:
        link = connect(ensure_server(house.settings.home))
        intake = Intake(link, Storage(house.settings.storage), MODEL, IntakeOptions(memory=memory))
        opened.append((intake, link))
        intake.start()
        return intake

    yield start
    for intake, link in opened:
        intake.close(put_back=True)
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


def test_a_job_is_made_to_fit_and_marked(house, open_intake) -> None:
    house.submit(width=1024, height=576, frames=25, decode_chunk_size=20)
    house.submit()
    intake = open_intake(plan(24, 24, fit=True))
    request, untouched = intake.take(), intake.take()
    assert request is not None
    assert untouched is not None
    assert (request.parameters.frames, request.parameters.decode_chunk_size) == (25, 10)
    assert request.ticket["adjusted"] == "adjusted to memory: decode_chunk_size 10 in place of 20"
    assert "adjusted" not in untouched.ticket


def test_what_a_video_took_decides_about_the_next(house, open_intake) -> None:
    shape = {"width": 1024, "height": 576, "decode_chunk_size": 5}
    first = house.submit(**shape, frames=20)
    intake = open_intake(plan(24, 12.5))
    request = intake.take()
    assert request is not None
    assert request.job_id == first
    body = {"parameters": request.parameters.model_dump(mode="json"), "memory": {"step": 8 * GB}, "ticket": {}}
    intake.ended(Report(job_id=first, body=body, result={}, failure="its disk is full"))
    second, third = house.submit(**shape, frames=25), house.submit(**shape, frames=20, seed=3)
    again = intake.take()
    assert again is not None
    assert again.job_id == third, "what was made once is made again"
    (refused,) = house.wait([second])
    assert "needs about 12.8 GB on the last rank of this group, which has 12.5 GB: " in refused.error


class NoEstimates(LikeXt):
    def weights(self, encoder: bool, decoder: bool) -> int:
        raise UnavailableError("The process that estimates memory has failed: it has ended.")


def test_without_estimates_jobs_are_taken_as_they_are(house, open_intake, caplog: pytest.LogCaptureFixture) -> None:
    house.submit()
    house.submit()
    intake = open_intake(MemoryPlan(1, [Room(capacity=1, ranks=(0,))], NoEstimates(), fit=False))
    assert intake.take() is not None
    assert intake.take() is not None
    assert caplog.text.count("nobody looks whether videos fit into memory") == 1


def write_video(folder: Path, **ticket: str) -> Report:
    sample = Sample(
        job_id="id",
        parameters=VideoParameters(seed=1, steps=4, frames=2, width=64, height=64, decode_chunk_size=1),
        boundaries=(0, 4),
        step=4,
        ticket={"image": f"inputs/{'a' * 64}.png", "name": "video", "formats": ("mp4",), "fit": "crop", **ticket},
    )
    reports: list[Report] = []
    outlet = Outlet(Storage(str(folder)), MODEL, Tracer(0, on=False))
    outlet.deliver(sample, np.zeros((2, 64, 64, 3), np.uint8), reports.append)
    outlet.close()
    return reports[0]


def test_what_is_finished_or_half_done_was_admitted_and_stays_as_it_is(tmp_path: Path) -> None:
    """Whatever is known by now of the memory that it takes."""
    storage = Storage(str(tmp_path))
    shelf = open_shelf("local", tmp_path, storage)
    codec = Codec(model=MODEL.name, device=torch.device("cpu"))
    archive = Archive(shelf=shelf, codec=codec)
    preparer = Preparer(storage, MODEL, 10**6, archive, plan(0.1, 0.1, fit=True))
    job = Job(image=f"inputs/{'a' * 64}.png", name="video", seed=1, steps=4, width=64, height=64, formats=("mp4",))
    with pytest.raises(DoesNotFitError):
        preparer.prepare_ahead("id", job)

    # Made to fit with fewer frames than the model's 9, one at a time.
    begun = VideoParameters(seed=1, steps=4, frames=2, width=64, height=64, decode_chunk_size=1)
    half_done = Sample(
        job_id="id",
        parameters=begun,
        boundaries=(0, 4),
        step=2,
        tensors={"latents": torch.zeros(1, 2, 4, 8, 8)},
        ticket={"adjusted": "adjusted to memory: it"},
    )
    archive.open("id")
    shelf.write("id", 2, codec.encode(half_done))
    found = preparer.prepare_ahead("id", job)
    assert found.resume is not None
    assert (found.resume.step, found.parameters, found.adjusted) == (2, begun, "adjusted to memory: it")

    assert write_video(tmp_path, adjusted="adjusted to memory: it").result
    assert preparer.prepare_ahead("id", job).result is not None
    (tmp_path / "outputs" / "video-id.json").unlink()
    shelf.clear("id")
    assert write_video(tmp_path).result
    with pytest.raises(DoesNotFitError):  # another video than was asked for, and nobody says why
        preparer.prepare_ahead("id", job)


def test_what_was_changed_stands_in_the_video_and_in_its_notice(tmp_path: Path) -> None:
    changed = write_video(tmp_path / "changed", adjusted="adjusted to memory: it")
    assert changed.result["notice"] == "tiny, adjusted to memory: it"
    video = Path(changed.result["outputs"][0])
    assert read_provenance(video)["adjusted"] == "adjusted to memory: it"
    assert read_provenance(video.with_suffix(".json"))["adjusted"] == "adjusted to memory: it"
    as_asked = write_video(tmp_path / "as asked")
    assert as_asked.result["notice"] == "tiny"
    assert "adjusted" not in read_provenance(Path(as_asked.result["outputs"][0]))


# All of it.


@pytest.mark.slow
def test_a_worker_with_little_memory(house, until) -> None:
    """One job is refused, the next is changed, rendered and marked."""
    write_tiny_model(house.folder / "model")
    options = ("--memory-limit", "25MB", "--fit-memory", "--burst")
    too_large = house.submit(frames=2, width=512, height=512, steps=1)
    changed = house.submit(frames=8, decode_chunk_size=8, steps=1, formats=("mp4",))
    fitting = house.submit(frames=1, steps=1, formats=("mp4",))
    group = house.start(2, *options, model=str(house.folder / "model"), wait=False)

    def estimating() -> list[str]:
        commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
        return [command for command in commands if "memory_process" in command and str(house.folder) in command]

    until(estimating, lambda: group.text)
    refused, made, untouched = house.wait([too_large, changed, fitting])
    assert refused.status == "failed"
    assert re.match(
        r"512x512 with 2 frames, decoded 1 at a time, needs about \d+\.\d MB on the last rank of this group, "
        r"which has 25\.0 MB: ",
        refused.error,
    )
    assert made.status == untouched.status == "finished", group.text
    assert made.parameters["decode_chunk_size"] < 8
    account = json.loads(Path(made.outputs[0]).with_suffix(".json").read_text())
    assert account["job"]["decode_chunk_size"] == made.parameters["decode_chunk_size"]
    assert re.fullmatch(r"adjusted to memory: decode_chunk_size \d in place of 8", account["adjusted"])
    assert made.notice.endswith(account["adjusted"])
    assert "adjusted" not in untouched.notice
    assert group.end() == 0
    assert estimating() == []
    assert "Ranks have at least 25.0 MB of memory; videos that need more are changed to fit." in group.text


@pytest.mark.slow
def test_a_worker_with_too_little_memory_for_its_weights_does_not_start(house) -> None:
    write_tiny_model(house.folder / "model")
    job = house.submit()
    ended = house.run(
        "svdq", "worker", "--ranks", 2, "--device", "cpu", "--model", house.folder / "model", "--memory-limit", 1
    )
    assert ended.returncode == 2, ended.stderr
    said = ended.stderr.splitlines()
    assert re.match(
        r"Error: The weights alone need \d+\.\d MB on the .* rank of this group, and --memory-limit ", said[-1]
    )
    assert ended.stderr.count("Error: ") == 1
    assert house.view(job).status == "queued"
