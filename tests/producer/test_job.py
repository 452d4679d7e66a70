from hypothesis import given
from hypothesis import strategies as st

from svdq.producer.job import Job

sides = st.integers(1, 64).map(lambda n: n * 64)
guidance = st.tuples(st.floats(0, 100), st.floats(0, 100)).map(sorted)
names = st.text(st.characters(categories=("L", "N", "P", "S"), exclude_characters="/\\"), min_size=1, max_size=50)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    low, high = draw(guidance)
    return Job(
        image=f"inputs/{draw(st.text('0123456789abcdef', min_size=64, max_size=64))}.jpg",
        name="x" + draw(names),
        frames=draw(st.none() | st.integers(1, 1024)),
        steps=draw(st.integers(1, 1000)),
        width=draw(sides),
        height=draw(sides),
        fps=draw(st.integers(1, 120)),
        motion_bucket_id=draw(st.integers(0, 1023)),
        noise_aug_strength=draw(st.floats(0, 10)),
        min_guidance_scale=low,
        max_guidance_scale=high,
        decode_chunk_size=draw(st.none() | st.integers(1, 1024)),
        seed=draw(st.integers(0, 2**63 - 1)),
        formats=tuple(draw(st.lists(st.sampled_from(["mp4", "gif", "webp", "png"]), min_size=1, max_size=4))),
        fit=draw(st.sampled_from(["crop", "pad", "stretch"])),
    )


@given(jobs())
def test_json_round_trip(job: Job) -> None:
    assert Job.model_validate_json(job.model_dump_json()) == job
    again = Job.model_validate(job.model_dump(mode="json"))
    assert again == job
    assert again.digest(seed_was_drawn=True) == job.digest(seed_was_drawn=True)


@given(jobs(), st.integers(0, 2**32))
def test_digest(job: Job, seed: int) -> None:
    other = job.model_copy(update={"seed": seed, "name": "other"})
    assert other.digest(seed_was_drawn=True) == job.digest(seed_was_drawn=True)
    assert (other.digest(seed_was_drawn=False) == job.digest(seed_was_drawn=False)) == (seed == job.seed)
    assert job.digest(seed_was_drawn=True, nonce="1") != job.digest(seed_was_drawn=True)
