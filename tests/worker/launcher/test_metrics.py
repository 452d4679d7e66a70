"""Metrics of a live group and while Redis is unavailable; rules and dashboard use the same names."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import redis
import torch
from PIL import Image
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from redis.backoff import NoBackoff
from redis.retry import Retry

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.video_model import ModelInfo
from svdq.pipeline.transport.topology import Topology
from svdq.producer import keys
from svdq.producer.queue import SvdqQueue
from svdq.producer.status.ranks import Condition, IntakeStatus
from svdq.worker.health.rank_status import describe
from svdq.worker.launcher.metrics import FAMILIES, LauncherCollector, serve_metrics
from tests.faults.group import Group
from tests.queued import enqueue
from tests.waiting import wait_until
from tests.worker.conftest import Site
from tests.worker.jobs import JOB

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "deploy/prometheus"
DASHBOARD = ROOT / "deploy/grafana/svdq.json"
#: A metric of ours in an expression or in prose; not the name of a file or a label.
METRIC = re.compile(r"\bsvdq_[a-z0-9_]+\b")

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]  # samples by name and labels


class Ranks:
    """A group of the launcher whose rank 0 is this process."""

    num_ranks = 2
    is_running = True
    is_resting = False
    num_failed_gpus = 1

    def running_pids(self) -> dict[int, int]:
        return {0: os.getpid()}


TOPOLOGY = Topology(rank=0, num_ranks=2)
CPU = torch.device("cpu")
GROUP = (("group", "0"),)


def parse(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum of the samples of a name that have these labels; at least one has."""
    found = [value for (of, have), value in samples.items() if of == name and labels.items() <= dict(have).items()]
    assert found, (name, labels)
    return sum(found)


def scrape(url: str) -> Samples:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return parse(answer.read().decode())


def collected(connection: redis.Redis) -> Samples:
    registry = CollectorRegistry()
    registry.register(LauncherCollector(connection, [Ranks()]))
    return parse(generate_latest(registry).decode())


def url_of(group: Group) -> str:
    """Where a group's launcher says that its metrics are."""
    return str(wait_until(lambda: re.search(r"http://127\.0\.0\.1:\d+/metrics", group.text), lambda: group.text)[0])


# What the endpoint serves.


@pytest.mark.long
def test_a_live_group_adds_up(site: Site) -> None:
    options = ("--metrics-port", "0", "--log-format", "json")
    group = site.start(2, *options, model="simulated:step_ms=100", wait=False)
    url = url_of(group)
    # While torch is still being imported.
    before = wait_until(lambda: (found := scrape(url)) and ("svdq_group_ranks", GROUP) in found and found)
    assert total(before, "svdq_redis_up") == 1
    assert total(before, "svdq_group_ranks", group="0") == 2
    assert total(before, "svdq_jobs") == 0
    group.ready()

    site.connection.set(keys.SUSPENDED, 1)
    job_ids = [site.submit(steps=6) for _ in range(4)]
    good = set(Path(site.settings.storage).glob("inputs/*"))
    Image.new("RGB", (64, 64)).save(site.folder / "other.jpg")
    job_ids.append(site.submit(steps=6, photo=site.folder / "other.jpg"))
    (bad,) = set(Path(site.settings.storage).glob("inputs/*")) - good
    bad.write_bytes(b"no photo")
    waiting = wait_until(lambda: (found := scrape(url)) and ("svdq_jobs_in_flight", GROUP) in found and found)
    assert total(waiting, "svdq_jobs", state="queued") == 5
    assert total(waiting, "svdq_jobs_in_flight") == 0
    assert total(waiting, "svdq_pauses") == 1
    site.connection.delete(keys.SUSPENDED)
    assert [view.status for view in site.wait(job_ids)] == ["finished"] * 4 + ["failed"]
    after = wait_until(lambda: (found := scrape(url)) and _is_complete(found) and found, lambda: str(scrape(url)))

    assert total(after, "svdq_jobs", queue="svdq-default", state="finished") == 4
    assert total(after, "svdq_jobs", queue="svdq-default", state="failed") == 1
    # Every step of every video, on the rank that does it.
    assert total(after, "svdq_step_seconds_count") == 4 * 6
    assert {rank for rank in "01" if total(after, "svdq_step_seconds_count", rank=rank) > 0} == {"0", "1"}
    assert total(after, "svdq_step_seconds_sum") >= 4 * 6 * 0.08
    assert total(after, "svdq_jobs_in_flight", group="0") == 0
    assert total(after, "svdq_group_ranks_up", group="0") == 2
    assert total(after, "svdq_group_restarts_total") == 0
    assert {name for _, have in after for name, _ in have} == {
        *("queue", "state", "group", "rank"),
        *("svdq", "torch", "diffusers"),
    }
    assert not any(job_id in str(after) for job_id in job_ids)

    group.send_signal(signal.SIGINT)
    assert group.end() == 0
    assert "Traceback" not in group.text
    said = [json.loads(line) for line in group.text.splitlines() if line.startswith("{")]
    assert {line["job_id"] for line in said if "job_id" in line} == set(job_ids)
    with pytest.raises(OSError, match="refused"):
        scrape(url)


def _is_complete(samples: Samples) -> bool:
    """Whether both ranks have written a record since the last job ended."""
    ended = [total(samples, f"svdq_videos_{how}_total") for how in ("finished", "failed")]
    return (ended, total(samples, "svdq_step_seconds_count")) == ([4, 1], 4 * 6)


def test_the_record_of_a_rank_is_served(connection: redis.Redis) -> None:
    now = time.time()
    conditions = tuple(
        Condition(effect="Videos wait", reason="Full.", since=now - age_s, attempts=2) for age_s in (60.0, 600.0)
    )
    rank = describe(TOPOLOGY, CPU, ModelInfo(name="fake", notice="")).model_copy(
        update={
            "at": now - 4,
            "conditions": conditions,
            "restart_count": 3,
            "rss_bytes": 2_000_000_000,
            "gpu_bytes": 8_000_000_000,
            "gpu_total_bytes": 24_000_000_000,
            "num_steps": 6,
            "steps_s": 1.5,
            "intake": IntakeStatus(worker="w", in_flight=("a", "b"), finished=9, failed=1),
        }
    )
    stranger = rank.model_copy(update={"group": "elsewhere", "host": "another", "rss_bytes": 1})
    before = rank.model_copy(update={"group": "ended", "pid": 1, "rss_bytes": 1})
    with connection.pipeline() as pipeline:
        for record in (rank, stranger, before):
            record.save(pipeline)
        pipeline.execute()
    samples = collected(connection)
    assert 600 <= total(samples, "svdq_rank_storage_wait_seconds") < 660
    assert total(samples, "svdq_group_restarts_total", group="0") == 3
    assert total(samples, "svdq_jobs_in_flight") == 2
    assert (total(samples, "svdq_videos_finished_total"), total(samples, "svdq_videos_failed_total")) == (9, 1)
    assert (total(samples, "svdq_step_seconds_count"), total(samples, "svdq_step_seconds_sum")) == (6, 1.5)
    memory = [total(samples, f"svdq_rank_{name}_bytes", rank="0") for name in ("resident", "gpu", "gpu_total")]
    assert memory == [2e9, 8e9, 24e9]
    assert total(samples, "svdq_build_info", svdq=version("svdq"), torch=version("torch")) == 1
    # Of the launcher's own ranks only, and only of the processes that it has now.
    assert len([name for name, _ in samples if name == "svdq_rank_busy_ratio"]) == 1
    assert total(samples, "svdq_group_ranks_up") == 1
    assert total(samples, "svdq_group_failed_gpus") == 1
    assert total(samples, "svdq_group_asleep") == 0


def test_the_wait_of_the_oldest_webhook_is_served(connection: redis.Redis) -> None:
    assert total(collected(connection), "svdq_webhook_wait_seconds") == 0
    for age_s in (600, 60):
        entry = f"{int((time.time() - age_s) * 1000)}-0"
        connection.xadd(keys.WEBHOOKS, {"type": "video.created", "id": "a"}, id=entry)
    assert 600 <= total(collected(connection), "svdq_webhook_wait_seconds") < 660


def test_the_memory_of_redis_is_served(own_server: Path, connection: redis.Redis) -> None:
    assert "svdq_redis_memory_ratio" not in {name for name, _ in collected(connection)}
    connection.config_set("maxmemory", 2 * connection.info("memory")["used_memory"])
    assert 0.4 < total(collected(connection), "svdq_redis_memory_ratio") < 0.7


def test_while_redis_is_away_the_launcher_answers() -> None:
    away = redis.Redis(port=1, retry=Retry(NoBackoff(), 0))
    samples = collected(away)
    assert total(samples, "svdq_redis_up") == 0
    of_group = {f"svdq_group_{name}" for name in ("ranks", "ranks_up", "asleep", "failed_gpus")}
    assert {name for name, _ in samples} == {"svdq_redis_up", "svdq_build_info"} | of_group


def test_the_endpoint_answers_whatever_redis_holds(connection: redis.Redis) -> None:
    queue = SvdqQueue(connection=connection)
    enqueue(connection, JOB, "f" * 20)
    connection.lpush(queue.key, "no job", b"\xff", "a:b")
    connection.set("rq:job:no job", "a string")
    connection.set(describe(TOPOLOGY, CPU, ModelInfo(name="fake", notice="")).key, "{}")
    connection.zadd(keys.RANKS, {"x:0": 1.0})
    samples = collected(connection)
    assert (total(samples, "svdq_redis_up"), total(samples, "svdq_jobs", state="queued")) == (1, 4)
    connection.set(queue.finished_job_registry.key, "not what RQ has there")
    assert total(collected(connection), "svdq_redis_up") == 0


def test_a_scrape_asks_no_more_when_many_jobs_are_kept(connection: redis.Redis) -> None:
    def asked() -> int:
        connection.config_resetstat()
        collected(connection)
        return sum(command["calls"] for command in connection.info("commandstats").values())

    few = asked()
    registry = SvdqQueue(connection=connection).finished_job_registry.key
    for start in range(0, 100_000, 10_000):
        connection.zadd(registry, {f"{number:020x}": number for number in range(start, start + 10_000)})
    assert asked() == few
    assert total(collected(connection), "svdq_jobs", state="finished") == 100_000


def test_a_port_that_is_taken_is_said_before_any_rank_starts(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = site.run("svdq", "worker", "--ranks", 2, "--device", "cpu", "--metrics-port", port)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Error: Metrics cannot be served at port {port} of '127.0.0.1' (")
    assert done.stderr.count("\n") == 1


def test_an_address_that_cannot_be_a_name_is_one_sentence(connection: redis.Redis) -> None:
    with (
        pytest.raises(InputError, match=r"cannot be served at port 0 of 'a\.\.b'"),
        serve_metrics("a..b", 0, "redis://127.0.0.1:1", []),
    ):
        pass


# Who names metrics.


def served() -> set[str]:
    """Every name that an expression may use."""
    ends = {"summary": ("_sum", "_count")}
    return {f"{family.name}{end}" for family in FAMILIES for end in ends.get(family.kind, ("",))}


def expressions() -> Iterator[tuple[str, str]]:
    """The queries of the dashboard by the titles of their panels."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def test_dashboard_and_alerts_name_only_metrics_that_are_served() -> None:
    rules = (PROMETHEUS / "alerts.yml").read_text()
    asked = [
        {name for _, expression in expressions() for name in METRIC.findall(expression)},
        set(METRIC.findall("\n".join(line for line in rules.splitlines() if "svdq_" in line))),
    ]
    assert set.union(*asked) <= served()
    assert min(map(len, asked)) > 8
    assert all(any(name.startswith(spec.name) for name in set.union(*asked)) for spec in FAMILIES), "each is used"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool here")
@pytest.mark.parametrize(
    "arguments",
    [("check", "config", "prometheus.yml"), ("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")],
    ids=" ".join,
)
def test_promtool_takes_the_files(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, cwd=PROMETHEUS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout
