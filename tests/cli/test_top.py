"""`svdq top`: how it behaves on terminals and in pipes, and what is drawn of records in a real Redis."""

import itertools
import os
import re
import signal
import termios
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from rich.cells import cell_len
from rich.console import Console

from svdq.cli.formatting import describe, expected
from svdq.cli.serve.now import read_state
from svdq.cli.top import draw
from svdq.cli.view import lines_of, progress_of
from svdq.pipeline.planning.costs import ShapeCosts
from svdq.pipeline.planning.rounds import Outlook
from svdq.producer import keys
from svdq.producer.embedded_redis import ensure_server, stop_server
from svdq.producer.queue import SvdqQueue, fetch
from svdq.producer.status.estimates import UNMEASURED
from svdq.producer.status.job_view import view
from svdq.producer.status.ranks import Condition, IntakeStatus, RankStatus, Rest, read_groups
from svdq.producer.status.snapshot import Recent, Snapshot, take
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.enqueue import enqueue_many
from svdq.producer.submitting.entries import Entry
from tests import queued
from tests.conftest import Cli
from tests.producer.status.test_status import COPY, num_commands
from tests.queued import enqueue, finish
from tests.ranks import rank, save
from tests.terminal import terminal

ALTERNATE_SCREEN, LEFT_IT = "\x1b[?1049h", "\x1b[?1049l"
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7]m")


@pytest.fixture
def at_work(connection: redis.Redis) -> None:
    """Two ranks with a video in flight, and one that waits."""
    job_id = start(connection, 1, "a [photo]", rank=0, step=3, boundaries=[0, 4, 8], decoder=1)
    enqueue(connection, JOB, "b" * 20)
    intake = IntakeStatus(worker="w", in_flight=(job_id,))
    save(connection, rank(0, job_id=job_id, step=3, steps=8, step_range=(0, 4), intake=intake))
    save(connection, rank(1, step_range=(4, 8)))


def test_videos_in_flight_name_their_owners_where_there_are_several(connection: redis.Redis) -> None:
    for job_id, owner in (("a" * 20, "ana"), ("b" * 20, "ben")):
        enqueue_many(connection, [Entry(job=JOB, job_id=job_id, owner=owner)])
        if owner == "ana":
            queued.start(fetch(connection, job_id), rank=0, step=1, boundaries=[0, 4], decoder=0)
            intake = IntakeStatus(worker="w", in_flight=(job_id,))
            save(connection, rank(0, num_ranks=1, job_id=job_id, step=1, steps=4, step_range=(0, 4), intake=intake))
            assert "owner" not in "\n".join(lines_of(take(connection)))
    text = "\n".join(lines_of(take(connection)))
    assert re.search(r"in flight +owner ", text), text
    assert re.search(r"photo +ana ", text), text


@pytest.mark.usefixtures("at_work")
def test_output_in_a_pipe_has_no_escapes(svdq_process: Cli) -> None:
    done = svdq_process("top")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    lines = done.stdout.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    assert re.search(r"\d+ to do", lines[1])
    ranks = lines.index(next(line for line in lines if line.startswith("rank ")))
    assert [line.split()[:2] for line in lines[ranks + 1 : ranks + 3]] == [["0", "cpu"], ["1", "cpu"]]
    assert any("a [photo]  " in line and "━" in line for line in lines)


@pytest.mark.usefixtures("at_work")
def test_it_draws_on_a_terminal_and_q_leaves() -> None:
    with terminal("top") as screen:
        before = termios.tcgetattr(screen.theirs)
        screen.read_until("q quits")
        screen.text = ""
        screen.read_until("a [photo]")  # drawn once more
        assert screen.process.poll() is None
        os.write(screen.ours, b"xq")  # any other key only looks again
        assert screen.end() == 0
        assert termios.tcgetattr(screen.theirs) == before
    assert LEFT_IT in screen.text
    assert COLOUR.search(screen.text)


@pytest.mark.usefixtures("at_work")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_the_terminal_as_it_was(number: signal.Signals) -> None:
    with terminal("top", NO_COLOR="1") as screen:
        before = termios.tcgetattr(screen.theirs)
        screen.read_until("in flight")
        screen.process.send_signal(number)
        assert screen.end() == 130
        assert termios.tcgetattr(screen.theirs) == before
    assert ALTERNATE_SCREEN in screen.text
    assert screen.text.rindex(LEFT_IT) > screen.text.rindex("in flight")
    assert not COLOUR.search(screen.text)
    assert "Traceback" not in screen.text


# While Redis is away.


@pytest.mark.usefixtures("own_server")
def test_a_terminal_keeps_what_was_known_while_redis_is_away(home: Path, connection: redis.Redis) -> None:
    enqueue(connection, JOB, "a" * 20)
    with terminal("top") as screen:
        screen.read_until("1 to do")
        stop_server(home)
        screen.read_until("Redis has not answered")
        screen.text = ""
        screen.read_until("1 to do")
        ensure_server(home)
        enqueue(connection, JOB, "b" * 20)
        screen.read_until("2 to do")
        os.write(screen.ours, b"q")
        assert screen.end() == 0


# What is drawn, of records in a real Redis.

JOB = queued.JOB.model_copy(update={"name": "a photo", "steps": 8})


def start(connection: redis.Redis, number: int, name: str, **meta: object) -> str:
    job = enqueue(connection, JOB.model_copy(update={"name": name}), f"{number:020x}")
    queued.start(job, **meta)
    return str(job.id)


WHOLE = {"boundaries": [0, 2, 4, 6, 8], "decoder": 3}  # the plan of JOB on four ranks
#: Of JOB on four ranks.
COSTS = ShapeCosts(frames=25, width=1024, height=576, guided=True, step_s=(1.0,) * 4, encode_s=0.0, decode_s=4.0)


def working(number: int, num_ranks: int, **values: Any) -> RankStatus:
    """A rank of a group that does two steps of each video."""
    own: dict[str, Any] = {"num_ranks": num_ranks, "step_range": (2 * number, 2 * number + 2), "steps": 8}
    return rank(number, **{**own, **values})


def drawn(snapshot: Snapshot, width: int, outage: str = "") -> list[str]:
    console = Console(width=width, height=99, color_system=None)
    with console.capture() as captured:
        console.print(draw(snapshot, console.options, outage=outage))
    return captured.get().splitlines()


@pytest.fixture
def snapshot(connection: redis.Redis) -> Snapshot:
    """Four ranks with a sample each, one of which has a name that fills lines; and another group, of one rank."""
    names = ["beach", "[red]cup", "灯台" * 40, "x" * 200]
    ids = [start(connection, each, names[each], rank=3 - each, step=7 - 2 * each, **WHOLE) for each in range(4)]
    ranks = [working(number, 4, job_id=ids[3 - number], step=2 * number + 1) for number in range(4)]
    intake = IntakeStatus(worker="w", in_flight=tuple(ids), finished=3, pace_s=2.0, costs=(COSTS,))
    other = IntakeStatus(worker="v", draining=True)
    save(connection, ranks[0].model_copy(update={"intake": intake}), *ranks[1:])
    save(connection, rank(0, "there-2", host="there", num_ranks=1, model="svd-xt", intake=other))
    for number in range(9, 12):
        enqueue(connection, JOB, f"{number:020x}")
    return take(connection)


def test_a_model_file_is_drawn_with_all_its_loras(connection: redis.Redis) -> None:
    loras = tuple(f"wan2.2_i2v_{expert}_noise_lora_rank64.safetensors x 0.8" for expert in ("high", "low"))
    save(connection, rank(0, "here-1", host="here", num_ranks=1, model="wan-4step", notice="tiny", loras=loras))
    text = " ".join(lines_of(take(connection)))
    assert f"model wan-4step with {', '.join(loras)}" in text


def test_everything_is_drawn(snapshot: Snapshot) -> None:
    lines = lines_of(snapshot)
    text = "\n".join(lines)
    assert "1,800 videos an hour" in lines[0]
    assert "7 to do, done in about 17 s" in lines[1]
    assert "here:7  4 ranks  4 in flight  one every 2.0 s  3 finished  preview" in text
    assert "there:7  1 rank  0 in flight  0 finished  takes no more jobs  svd-xt" in text
    assert re.search(r"3 +cpu +6-7 +beach +7/8 ", text)
    assert "[red]cup" in text
    tracks = [len(re.findall("━", line)) for line in lines if re.search("step . of 8", line)]
    assert len(tracks) == 4
    assert tracks == sorted(tracks, reverse=True), "the one that is furthest has the longest track"
    assert all(longer - shorter == tracks[0] - tracks[1] for longer, shorter in itertools.pairwise(tracks))


@pytest.mark.parametrize("width", [10, 40, 80, 200])
def test_every_terminal_is_wide_enough(snapshot: Snapshot, width: int) -> None:
    lines = drawn(snapshot, width, outage="Redis has not answered since 12:00; it is asked again.")
    assert max(map(cell_len, lines)) <= width


@pytest.mark.parametrize("width", [90, 120, 200])
def test_status_prints_what_top_draws(snapshot: Snapshot, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    printed = [line for line in lines_of(snapshot) if line]
    # rich puts the half of a wide letter that it cuts as a space before the ellipsis.
    live = [line.rstrip().removesuffix("  q quits").replace(" …", "… ") for line in drawn(snapshot, width)]
    assert printed == list(filter(None, live))


def test_reasons_why_jobs_wait_are_shown(connection: redis.Redis) -> None:
    job_id = start(connection, 1, "stuck", rank=1, step=8)
    condition = Condition(effect="Videos wait", reason="Disk full.", since=1.0, attempts=2, job_ids=(job_id,))
    save(connection, rank(1, conditions=(condition,), activity="waiting"))
    enqueue(connection, JOB, "b" * 20)
    connection.set(keys.SUSPENDED, 1)
    lines = lines_of(take(connection))
    text = "\n".join(lines)
    assert "Paused: no jobs are taken" in text
    assert "On here, rank 1: Videos wait: Disk full. (since" in text
    assert "the end is unknown: The storage is unavailable." in lines[1]
    assert re.search(r"^ +0 +no recent report", text, re.MULTILINE)
    assert f"{job_id}  stuck  started, waiting for storage: Disk full." in text


def test_a_failed_gpu_is_shown(connection: redis.Redis) -> None:
    intake = IntakeStatus(worker="w", failed_gpus={"GPU 3 (GPU-8f2d)": "it is lost"})
    save(connection, rank(0, intake=intake))
    text = "\n".join(lines_of(take(connection)))
    assert "GPU 3 (GPU-8f2d) of here has failed (it is lost); `svdq worker` tries it again at its next start." in text


def test_an_empty_queue_without_workers(connection: redis.Redis) -> None:
    text = "\n".join(lines_of(take(connection)))
    assert "No job is waiting or in flight." in text
    assert "svdq worker" in text


def test_progress_of_a_sample_by_rank(connection: redis.Redis) -> None:
    meta = {
        "new": {},
        "half": {"rank": 1, "step": 3} | WHOLE,
        "through": {"rank": 1, "step": 3} | WHOLE,
        "decoded": {"rank": 3, "step": 8} | WHOLE,
        "written": {"rank": 3, "step": 8} | WHOLE,
        # Ranks 0 and 3 have nothing to do.
        "skips": {"rank": 2, "step": 6, "boundaries": [0, 0, 4, 8, 8], "decoder": 2},
        "early": {"rank": 1, "step": 8, "boundaries": [0, 4, 8, 8, 8], "decoder": 1},
        # Rank 3 only decodes.
        "apart": {"rank": 2, "step": 7, "boundaries": [0, 2, 4, 8, 8], "decoder": 3},
        "cached": {"rank": 1, "step": 2, "computed": 5} | WHOLE,
    }
    ids = {name: start(connection, number, name, **of_job) for number, (name, of_job) in enumerate(meta.items())}
    save(connection, working(1, 4, job_id=ids["half"], activity="denoising"))
    save(connection, working(2, 4, job_id=ids["skips"], activity="denoising"))
    save(connection, working(3, 4, job_id=ids["decoded"], activity="decoding"))
    (group,) = read_groups(connection)
    assert {name: progress_of(view(connection, job_id), group) for name, job_id in ids.items()} == {
        "new": ([0.0, 0.0, 0.0, 0.0], "begins"),
        "half": ([1.0, 0.5, 0.0, 0.0], "step 3 of 8"),
        "through": ([1.0, 1.0, 0.0, 0.0], "step 3 of 8"),
        "decoded": ([1.0, 1.0, 1.0, 1.0], "decoding"),
        "written": ([1.0, 1.0, 1.0, 1.0], "being written"),
        "skips": ([None, 1.0, 0.5, None], "step 6 of 8"),
        "early": ([1.0, 1.0, None, None], "being written"),
        "apart": ([1.0, 1.0, 1.0, 0.0], "step 7 of 8"),
        "cached": ([1.0, 0.0, 0.0, 0.0], "step 2 of 8 (5 computed)"),
    }
    assert "started, step 2 of 8 (5 computed)" in describe(view(connection, ids["cached"]))


def test_a_rank_in_rounds_says_what_it_loads_and_its_jobs_what_they_wait_for(
    connection: redis.Redis, tmp_path: Path
) -> None:
    """In `svdq top`, `svdq status` and on the page."""
    meta = {"waits": {"rank": 0, "step": 4, "boundaries": [0, 8], "decoder": 0}, "new": {}}
    ids = {name: start(connection, number, name, **of_job) for number, (name, of_job) in enumerate(meta.items())}
    places = {
        ids["waits"]: Outlook(components="transformer_2", num_before=12, eta_s=9.0),
        ids["new"]: Outlook(components="encoders", num_before=0, eta_s=99.0),
    }
    intake = IntakeStatus(worker="w", in_flight=tuple(places), places=places, round_size=13)
    loading = {"activity": "loading", "loading": "transformer_2", "loading_s": 6.2}
    save(connection, working(0, 1, intake=intake, **loading))
    (group,) = read_groups(connection)
    assert progress_of(view(connection, ids["waits"]), group) == ([0.5], "waits for transformer_2, 12 before it")
    assert progress_of(view(connection, ids["new"]), group)[1] == "waits for encoders, next"
    snapshot = take(connection)
    assert "loading transformer_2, about 6 s" in "\n".join(lines_of(snapshot))
    estimate = snapshot.estimates[ids["waits"]]
    assert expected(estimate) == ", waits for transformer_2, 12 before it, done in about 9 s"
    state = read_state(connection, Storage(str(tmp_path)), snapshot, "preview", Recent())
    assert {row["state"] for row in state["rows"]} == {
        "waits for transformer_2, 12 before it",
        "waits for encoders, next",
    }
    assert state["groups"][0]["ranks"][0]["job"] == "loading transformer_2, about 6 s"


@pytest.mark.parametrize(
    ("activity", "reason", "words"),
    [("asleep", "idle", "asleep until there is a job"), ("starting", "starting", "starts")],
)
def test_a_group_that_sleeps_or_wakes_is_no_missing_worker(
    connection: redis.Redis, tmp_path: Path, activity: str, reason: str, words: str
) -> None:
    """In `svdq top`, `svdq status` and on the page."""
    enqueue(connection, JOB, "b" * 20)
    rest = Rest(reason=reason, since=1.0, start_s=20.0)
    for number in range(2):
        intake = IntakeStatus(worker="w") if number == 0 else None
        save(connection, rank(number, activity=activity, rest=rest, intake=intake))
    snapshot = take(connection)
    text = "\n".join(lines_of(snapshot))
    assert words in text
    assert "No worker" not in text.replace(UNMEASURED, "")
    state = read_state(connection, Storage(str(tmp_path)), snapshot, "preview", Recent())
    assert [each["job"] for each in state["groups"][0]["ranks"]] == [activity] * 2
    assert not any("No worker" in warning for warning in state["warnings"])


def test_jobs_that_ended_are_counted_for_an_hour(connection: redis.Redis) -> None:
    registry = SvdqQueue("svdq-low", connection=connection).finished_job_registry
    for minutes_ago in (1, 59, 61):
        ended_at = time.time() - 60 * minutes_ago
        connection.zadd(registry.key, {f"{minutes_ago:020x}": ended_at + keys.RESULT_TTL_S})
    assert take(connection).finished_last_hour == 2


def test_kept_jobs_cost_a_snapshot_nothing(connection: redis.Redis) -> None:
    job = enqueue(connection, JOB, "f" * 20)
    finish(job, {"outputs": ["/x.mp4"]})
    registry = SvdqQueue("svdq-default", connection=connection).finished_job_registry.key
    names = (job.key, f"rq:results:{job.id}", registry)
    few, _ = num_commands(connection, lambda: take(connection))
    connection.eval(COPY, len(names), *names, 5000)
    many, _ = num_commands(connection, lambda: take(connection))
    assert many == few
    assert not {"cmdstat_keys", "cmdstat_scan"} & set(connection.info("commandstats"))
