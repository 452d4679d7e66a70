"""Two hosts whose links to Redis, and to a bucket, are slow, silent, cut or forgotten while jobs are in flight."""

import time
from functools import partial
from itertools import chain

from svdq.producer.queue import ENDED
from svdq.producer.records import Sidecar
from svdq.producer.storage.storage import Storage
from tests.faults.arena import Arena
from tests.faults.group import Group
from tests.proxy import Proxy
from tests.waiting import wait_until

STEPS = 24
JOBS_A_FAULT = 10
ROUND_TRIP_S = 0.3  # of a slow link
SLOW_S = 20.0  # seconds that it is slow: longer than a lease
LEAST_AWAY_S, MOST_AWAY_S = 2.0, 6.0  # seconds for which a link is silent or cut, so short that leases last
GONE_S = 30.0  # seconds for which it is cut longer than leases last, or the bucket silent


def network(arena: Arena) -> None:
    """Disturb one link after the other: no group loses jobs but one that Redis has not heard of for a lease."""
    if not arena.may_name_hosts():
        return
    links, hosts = [], []
    for number in range(2):
        link = Proxy(arena.redis.url)
        links.append([link])
        environment = {"SVDQ_REDIS_URL": link.url}
        if arena.bucket is not None:
            links[number].append(Proxy(arena.bucket.endpoint))
            environment["AWS_ENDPOINT_URL"] = links[number][1].url
        hosts.append(arena.start(host=f"host{number}", **environment))
    held: dict[str, str] = {}  # the jobs of hosts whose links were not away for a lease
    kinds = [(link, kind) for link in range(len(links[0])) for kind in (_slow, _silent, _cut, _forgotten, _gone)]
    for number in range(max(1, arena.size.num_jobs // JOBS_A_FAULT)):
        if number % len(kinds) == 0:
            arena.rng.shuffle(kinds)
        which, strike = kinds[number % len(kinds)]
        host = arena.rng.randrange(2)
        for _ in range(JOBS_A_FAULT):
            arena.submit(steps=STEPS)
        jobs = wait_until(partial(_keep_busy, arena, hosts[host]), "the host has jobs")
        if which == 0 and strike is _gone:
            held = {job_id: holder for job_id, holder in held.items() if job_id not in jobs}
        else:
            held |= dict.fromkeys(jobs, f"host{host}")
        strike(arena, links[host][which])
        arena.tally.num_faults += 1
        over_at = time.monotonic()
        wait_until(lambda jobs=jobs: any(arena.states()[job_id][0] in ENDED for job_id in jobs), "a video is finished")
        arena.tally.recoveries_s.append(time.monotonic() - over_at)
    wait_until(arena.all_ended, "all have ended")
    storage = Storage(arena.settings.storage)
    for job_id, holder in held.items():
        sidecar = Sidecar.parse(storage.read(arena.job_of(job_id).sidecar_key(job_id)))
        if sidecar.group["host"] != holder:
            arena.tally.duplicated.append(f"{job_id} was taken from {holder}, which lived")
    for group in hosts:
        arena.stop(group)
    for link in chain(*links):
        link.shutdown()
        link.server_close()


def _slow(arena: Arena, link: Proxy) -> None:
    link.delay_s = ROUND_TRIP_S
    time.sleep(SLOW_S)
    link.delay_s = 0.0


def _silent(arena: Arena, link: Proxy) -> None:
    link.silent.set()
    time.sleep(arena.rng.uniform(LEAST_AWAY_S, MOST_AWAY_S))
    link.silent.clear()


def _cut(arena: Arena, link: Proxy) -> None:
    link.cut.set()
    time.sleep(arena.rng.uniform(LEAST_AWAY_S, MOST_AWAY_S))
    link.cut.clear()


def _forgotten(arena: Arena, link: Proxy) -> None:
    link.forget()


def _gone(arena: Arena, link: Proxy) -> None:
    link.silent.set()
    time.sleep(arena.size.hold_s or GONE_S)
    link.silent.clear()


def _keep_busy(arena: Arena, group: Group) -> list[str]:
    """Return the jobs of a host; the other one may have rendered all while this one waited for a forgotten link."""
    if arena.all_ended():
        arena.submit(steps=STEPS)
    return _in_flight(arena, group)


def _in_flight(arena: Arena, group: Group) -> list[str]:
    pid = group.ranks()[0].pid
    states = arena.states().items()
    return [job_id for job_id, (status, worker) in states if status == "started" and f"-{pid}-" in worker]
