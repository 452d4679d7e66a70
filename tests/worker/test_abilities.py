"""A job that a group cannot make is left to one that can, in its place; or fails, or waits, if there is none."""

import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from svdq.pipeline.models.families import published_model
from svdq.pipeline.models.wan.family import MODELS
from svdq.producer import job_control, keys
from svdq.producer.job import Job
from svdq.producer.queue import queues
from svdq.producer.status.estimates import NOT_ABLE
from svdq.producer.status.job_view import view
from svdq.producer.status.ranks import IntakeStatus
from svdq.producer.status.snapshot import estimate
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.enqueue import enqueue_many
from svdq.producer.submitting.entries import Entry
from svdq.producer.submitting.submission import submit
from svdq.worker.ability import READ, Ability
from svdq.worker.memory_plan import RankInfo
from svdq.worker.queue.group_worker import GroupWorker
from tests.conftest import Cli
from tests.faults.group import Group
from tests.pipeline.models.wan_files import write_model_file
from tests.pipeline.models.weights.test_job_loras import choices, save_loras
from tests.queued import WanJob, enqueue
from tests.ranks import rank, save
from tests.waiting import wait_until
from tests.worker.conftest import Site
from tests.worker.jobs import JOB, pop, put

GIB = 2**30
LARGE = JOB.model_copy(update={"width": 1024, "height": 576, "frames": 25, "decode_chunk_size": 8})
WAN = WanJob(image=JOB.image, name="photo", seed=1)
FITTING = LARGE.model_copy(update={"width": 512, "height": 320, "frames": 9})


def ability(family: str = "svd", gib: int = 80, **fields: object) -> Ability:
    """The ability of a GPU with so much memory."""
    ranks = (RankInfo(capacity=gib * GIB, weights=5 * GIB, device="A GPU", encodes=True, decodes=True),)
    facts = published_model(family).facts
    return Ability(**{"model": family, "family": family, "facts": facts, "dtype": "float16", "ranks": ranks} | fields)


def group(connection: redis.Redis, ability: Ability, **options: object) -> GroupWorker:
    worker = GroupWorker(connection, ability=ability, **options)
    worker.register_birth()
    worker.look_around()
    return worker


def forget(connection: redis.Redis, worker: GroupWorker) -> None:
    """Let the days pass after which a group is forgotten."""
    [member] = [name for name in connection.zrange(keys.ABILITIES, 0, -1) if worker.name.encode() in name]
    connection.zadd(keys.ABILITIES, {member: time.time() - keys.ABILITY_TTL_S - 60})


def take_all(worker: GroupWorker) -> list[str]:
    """The ids of what a group takes, in order."""
    worker.look_around()
    taken = []
    while (active := pop(worker)) is not None:
        taken.append(active.id)
    return taken


@pytest.mark.parametrize(
    ("able", "less", "job", "waits_for"),
    [
        (ability(), ability(gib=13), LARGE, "a GPU with "),
        (ability(), ability(upscales=False), JOB.model_copy(update={"upscale": "2"}), "an upscaler"),
        (ability("wan"), ability(), WAN, "a model of Wan"),
    ],
    ids=["memory", "upscaler", "family"],
)
def test_a_group_leaves_what_only_another_can_make(
    connection, svdq: Cli, able: Ability, less: Ability, job: Job, waits_for: str
) -> None:
    small, large = group(connection, less), group(connection, able)
    for job_id, asked in (("a", job), ("b", job), ("c", FITTING), ("d", job)):
        enqueue(connection, asked, job_id)
    assert take_all(small) == ["c"]
    assert connection.hlen(keys.POPPED) == 0
    shown = view(connection, "a")
    assert shown.status == "queued"
    assert shown.waits_for.startswith(waits_for)
    assert f"queued, waits for {waits_for}" in svdq("list", "a").stdout
    save(connection, rank(0, num_ranks=1, intake=IntakeStatus(worker="w", ability=less.id)))
    assert estimate(connection, [shown])["a"].reason == NOT_ABLE
    assert f"waits for {shown.waits_for} (no running worker can make it)" in svdq("status", "a").stdout
    assert take_all(large) == ["a", "b", "d"]
    assert view(connection, "a").waits_for == ""


def test_what_no_known_group_can_make_is_taken_and_fails_there(connection) -> None:
    small = group(connection, ability(gib=13))
    put(connection, "fits")
    enqueue(connection, LARGE, "too-large")
    assert take_all(small) == ["fits", "too-large"]


def test_it_waits_where_that_is_set_until_a_group_comes_that_can(connection) -> None:
    small = group(connection, ability(gib=13), wait_for_able=True)
    enqueue(connection, LARGE, "a")
    enqueue(connection, LARGE, "b")
    assert take_all(small) == []
    assert view(connection, "b").waits_for.startswith("a GPU with ")
    assert take_all(group(connection, ability("wan"), wait_for_able=True)) == []
    assert take_all(group(connection, ability())) == ["a", "b"]


def test_a_group_that_has_gone_is_waited_for_until_it_is_forgotten(connection) -> None:
    small, large = group(connection, ability(gib=13)), group(connection, ability())
    large.register_death()
    enqueue(connection, LARGE, "a")
    assert take_all(small) == []
    forget(connection, large)
    assert take_all(small) == ["a"]


def test_a_worker_that_starts_may_be_able(connection) -> None:
    connection.zadd(keys.STARTING, {"other:1 svd svd": time.time() + 60})
    small = group(connection, ability(gib=13))
    enqueue(connection, LARGE, "a")
    assert take_all(small) == []
    connection.delete(keys.STARTING)
    assert take_all(small) == ["a"]


def test_a_job_is_taken_at_most_once_by_each_group_that_cannot_make_it(connection) -> None:
    small, middle, large = (group(connection, ability(gib=gib)) for gib in (9, 13, 80))
    moderate = LARGE.model_copy(update={"frames": 14, "decode_chunk_size": 2})
    for job_id, job in (("a", LARGE), ("b", moderate), ("c", LARGE), ("d", moderate)):
        enqueue(connection, job, job_id)
    assert take_all(small) == []
    assert {view(connection, job_id).queue.count(".") for job_id in "ac"} == {1}, "two abilities in one step"
    assert take_all(middle) == ["b", "d"]
    assert take_all(middle) == take_all(small) == []
    assert take_all(large) == ["a", "c"]


def test_owners_take_turns_and_what_is_moved_to_the_front_stays_there(connection) -> None:
    small, large = group(connection, ability(gib=13)), group(connection, ability())
    for owner, job_ids in (("ana", "abc"), ("bob", "xyz")):
        enqueue_many(
            connection, [Entry(job=LARGE, job_id=job_id, priority="default", owner=owner) for job_id in job_ids]
        )
    job_control.move(connection, "y", front=True, priority=None)
    job_control.move(connection, "c", front=True, priority=None)
    assert take_all(small) == []
    job_control.move(connection, "z", front=True, priority=None)
    put(connection, "later")
    assert take_all(large) == ["z", "c", "y", "a", "x", "b", "later"]


def test_priorities_hold_between_what_is_left_and_what_is_not(connection) -> None:
    small, large = group(connection, ability(gib=13)), group(connection, ability())
    for priority in ("low", "default", "high"):
        enqueue(connection, LARGE, f"left-{priority}", priority)
    assert take_all(small) == []
    put(connection, "fits", priority="default")
    assert take_all(large) == ["left-high", "left-default", "fits", "left-low"]


def test_a_job_of_a_newer_version_waits_for_that(connection) -> None:
    newer = ability(reads={**READ, "svd": (*READ["svd"], "sharpness")})
    enqueue(connection, JOB, "a")
    kwargs = {"job": JOB.model_dump(mode="json") | {"sharpness": 0.5}}
    connection.hset("rq:job:a", "data", json.dumps(["svdq.producer.queue.render", None, [], kwargs]))
    small, large = group(connection, ability()), group(connection, newer)
    assert take_all(small) == []
    assert view(connection, "a").waits_for == "a newer svdq"
    forget(connection, large)
    assert take_all(small) == []
    assert view(connection, "a").status == "failed"
    assert "not those of a job of this version" in (view(connection, "a").error or "")


@pytest.mark.parametrize("text", ["", "[]", '{"family": 7}', ability("wan", facts={"vae": "x"}).model_dump_json()])
def test_what_others_write_as_an_ability_stops_no_group(connection, text: str) -> None:
    connection.set(f"{keys.ABILITY}0bad", text)
    connection.zadd(keys.ABILITIES, {"0bad svdq-there-1-x.1.a ": time.time()})
    small = group(connection, ability("wan", gib=6))
    enqueue(connection, WAN, "a")
    assert take_all(small) == ["a"]
    assert all(not queue.unable for queue in queues(connection))


def test_an_error_in_judging_is_no_other_model(connection, caplog) -> None:
    broken = ability("wan", facts={"vae": "x"})
    with pytest.raises(KeyError):
        broken.lacks(WAN)
    assert broken.lacks(JOB) == "a model of Stable Video Diffusion"
    one_expert = ability("wan", facts=dict(MODELS["Wan-AI/Wan2.2-TI2V-5B-Diffusers"].facts))
    assert one_expert.lacks(WAN) == ""
    assert one_expert.lacks(WAN.model_copy(update={"loop": True})) == "another model"
    for other in (ability(), ability("wan")):
        group(connection, other)
    for job_id, job in (("a", WAN), ("b", JOB), ("c", WAN)):
        enqueue(connection, job, job_id)
    assert take_all(group(connection, broken)) == ["a", "c"]
    assert "Whether this group can make a job cannot be told" in caplog.text


@pytest.mark.slow
def test_a_burst_leaves_what_only_another_worker_can_make_and_says_so(site: Site, upscaler: dict[str, str]) -> None:
    able = site.start(1, **upscaler)
    wait_until(lambda: site.connection.zcard(keys.ABILITIES) == 1)
    able.kill_all()
    plain, upscaled = site.submit(), site.submit(upscale="2")
    ended = site.run("svdq", "worker", "--ranks", 1, "--device", "cpu", "--burst")
    assert ended.returncode == 1, ended.stderr
    assert "It ended because the queued jobs wait for other workers: 1 job for an upscaler." in ended.stdout
    assert site.states([plain, upscaled]) == ["finished", "queued"]

    site.start(1, **upscaler)
    [done] = site.wait([upscaled])
    assert done.status == "finished"


#: Has a rank die when its group is ready, before it has said what it can make, and the next one load for 10 s.
KILL_FIRST = """
import os, sys, time
from pathlib import Path

def after_fork():
    folder = Path(os.environ["KILLED"])
    from svdq.worker import startup
    from svdq.worker.queue.abilities import Abilities
    if (folder / "killed").exists():
        open_model = startup.open_model
        startup.open_model = lambda *given, **named: (time.sleep(10), open_model(*given, **named))[1]
        return
    def look(_):
        while len([*folder.glob("home/**/ready")]) < 2:
            time.sleep(0.05)
        (folder / "killed").touch()
        os.kill(os.getpid(), 9)
    Abilities.look = look

if "svdq.worker.agent" in sys.orig_argv:
    os.register_at_fork(after_in_child=after_fork)
"""


@pytest.mark.long
def test_a_worker_whose_rank_is_killed_in_its_first_second_is_waited_for(
    site: Site, tiny_model: Path, tmp_path: Path
) -> None:
    small = site.start(1, model=str(tiny_model))
    (tmp_path / "sitecustomize.py").write_text(KILL_FIRST)
    able = site.start(1, wait=False, PYTHONPATH=str(tmp_path), KILLED=str(tmp_path))
    wait_until(lambda: (tmp_path / "killed").exists(), lambda: able.text)
    job = site.submit(family="wan", prompt="x", frames=5)
    wait_until(lambda: site.view(job).waits_for == "a model of Wan", lambda: small.text)
    [done] = site.wait([job])
    assert done.status == "finished", done.error


# Workers whose memory, files, models and versions differ.

ROOT = Path(__file__).parent.parent.parent
SMALL = ("--memory-limit", "200MB")  # tiny Wan makes 64x64 with it, and not 416x288
#: What a small worker of Wan says that a job of each kind waits for.
LEFT = {
    "too large": r"[\d.]+ MB of memory",
    "upscaled": "an upscaler",
    "lora": "the LoRA both",
    "newer": "a newer svdq",
    "ltx": "a model of LTX-2",
}


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import a newer svdq from, in which videos of Wan have one parameter more."""
    folder = tmp_path_factory.mktemp("newer")
    for name in ("cli", "pipeline", "producer", "worker"):
        shutil.copytree(ROOT / name, folder / "svdq" / name, ignore=shutil.ignore_patterns("__pycache__"))
    family = folder / "svdq" / "pipeline" / "models" / "wan" / "family.py"
    before, seed, after = family.read_text().partition("    seed: Seed\n")
    field = 'Field(default=0.0, exclude_if=not_, title="Sharpness", description="Sharpness")'
    family.write_text(f"{before}{seed}    sharpness: float = {field}\n{after}")
    return folder


@dataclass
class Kinds:
    """Jobs that a small worker of Wan cannot make, and the workers that can."""

    site: Site
    gguf: Path  # a model file with transformers in GGUF
    ltx: Path
    loras: Path
    environment: dict[str, str]  # of the newer version, with an upscaler

    def submit(self, kind: str, owner: str = "") -> str:
        """Submit a job of a kind, for an owner; return its id."""
        if kind == "newer":
            flags = "--family wan --frames 5 --steps 4 --size 64x64 --format png --sharpness 0.5 --force --json"
            environment = self.environment | {"SVDQ_OWNER": owner}
            made = self.site.run("svdq", "submit", self.site.photo, *flags.split(), **environment)
            assert made.returncode == 0, made.stderr
            return str(json.loads(made.stdout)["id"])
        asked = {
            "fits": {},
            "too large": {"width": 416, "height": 288},
            "upscaled": {"upscale": "2"},
            "lora": {"loras": choices("both:0.5", self.loras)},
            "gguf": {"model": "mine"},
            "ltx": {"family": "ltx", "frames": 9, "steps": None},
        }
        wan = {"family": "wan", "prompt": "x", "frames": 5, "steps": 4, "width": 64, "height": 64, "formats": ("png",)}
        settings = self.site.settings.model_copy(update={"owner": owner})
        return submit(settings, [self.site.photo], Draft(**wan | asked[kind]), force=True)[0].id

    def wait_until_left(self, kind: str, job_id: str, small: Group) -> None:
        """Wait until a job says what it waits for by the word of a small worker; LTX-2's may have left it before."""
        wait_until(lambda: re.fullmatch(LEFT[kind], self.site.view(job_id).waits_for), lambda: small.text)

    def start_newer(self) -> Group:
        """Start a worker of the newer version, which makes all kinds but LTX-2."""
        return self.site.start(1, model=str(self.gguf), SVDQ_LORAS=str(self.loras), **self.environment)


@pytest.fixture
def kinds(site: Site, wide_wan: Path, tiny_ltx: Path, newer: Path, upscaler: dict[str, str], tmp_path: Path) -> Kinds:
    gguf, loras = tmp_path / "gguf", tmp_path / "loras"
    gguf.mkdir()
    loras.mkdir()
    save_loras(loras, wide_wan)
    file = write_model_file(gguf, wide_wan, "Q4_K.gguf", lora=False)
    environment = upscaler | {"PYTHONPATH": f"{newer}{os.pathsep}{upscaler['PYTHONPATH']}"}
    return Kinds(site=site, gguf=file, ltx=tiny_ltx, loras=loras, environment=environment)


@pytest.mark.long
@pytest.mark.timeout(900)  # five workers start, three of them one after the other
def test_six_kinds_of_jobs_end_on_workers_that_can_make_them_though_these_are_killed(
    kinds: Kinds, tiny_wan: Path
) -> None:
    site = kinds.site
    ltx = site.start(1, model=str(kinds.ltx), wait=False)
    newer = kinds.start_newer()
    wait_until(lambda: site.connection.zcard(keys.ABILITIES) == 2, lambda: newer.text + ltx.text)
    newer.kill_all()
    jobs = {owner: {kind: kinds.submit(kind, owner) for kind in (*LEFT, "gguf", "fits")} for owner in ("ana", "ben")}
    small = site.start(1, *SMALL, model=str(tiny_wan))
    fitting = [of_owner.pop("fits") for of_owner in jobs.values()]
    site.wait(fitting)
    for of_owner in jobs.values():
        site.wait([of_owner["ltx"]])
        for kind in LEFT.keys() - {"ltx"}:
            kinds.wait_until_left(kind, of_owner[kind], small)

    killed = kinds.start_newer()
    in_turn = [of_owner[kind] for kind in LEFT if kind != "ltx" for of_owner in jobs.values()]
    wait_until(lambda: any(site.view(job_id).step for job_id in in_turn), lambda: killed.text)
    killed.kill_all()
    assert set(site.states(in_turn)) & {"queued", "started"}
    able = kinds.start_newer()
    for job_id in (*in_turn, *(of_owner["gguf"] for of_owner in jobs.values())):
        [done] = site.wait([job_id])
        assert done.status == "finished", able.text

    logs = {"small": small.text, "newer": killed.text + able.text, "ltx": ltx.text}
    for of_owner in jobs.values():
        makers = {
            kind: [name for name, text in logs.items() if f"Job {job_id} finished" in text]
            for kind, job_id in of_owner.items()
        }
        assert makers == {kind: ["ltx" if kind == "ltx" else "newer"] for kind in of_owner}
        assert site.frames(of_owner["too large"]).shape == (5, 288, 416, 3)
        assert site.frames(of_owner["upscaled"]).shape == (5, 128, 128, 3)
        assert site.sidecars(of_owner["newer"])[0]["job"]["sharpness"] == 0.5
        assert site.sidecars(of_owner["gguf"])[0]["job"]["model"] == "mine"
        assert [each["name"] for each in site.sidecars(of_owner["lora"])[0]["job"]["loras"]] == ["both"]
    begun = {job_id: site.connection.hget(f"rq:job:{job_id}", "started_at") for job_id in in_turn}
    assert sorted(in_turn, key=lambda job_id: begun[job_id]) == in_turn


@pytest.mark.long
@pytest.mark.parametrize("waits", [False, True])
def test_what_no_worker_can_make_fails_with_a_reason_or_waits_as_is_set(
    kinds: Kinds, tiny_wan: Path, waits: bool
) -> None:
    site = kinds.site
    jobs = {kind: kinds.submit(kind) for kind in (*LEFT, "gguf", "fits")}
    small = site.start(1, *SMALL, *(["--wait-for-able"] if waits else []), model=str(tiny_wan))
    site.wait([jobs["fits"]])
    reasons = {
        "too large": "416x288 with 5 frames, decoded 1 at a time, needs about ",
        "upscaled": "The job asks for upscale 2, and this worker has no upscaler",
        "newer": "Refused: Its parameters are not those of a job of this version of svdq",
        "ltx": f"The model {tiny_wan} makes videos of Wan, and this one is for LTX-2: start a worker ",
    }
    for kind in LEFT:
        if waits or kind == "lora":
            kinds.wait_until_left(kind, jobs[kind], small)
        else:
            [view] = site.wait([jobs[kind]])
            assert view.status == "failed"
            assert (view.error or "").startswith(reasons[kind]), view.error
    assert site.states([jobs["gguf"]]) == ["queued"]
