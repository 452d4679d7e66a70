"""When jobs will be done, worked out by hand for small cases, and why that is unknown."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from svdq.pipeline.models.model_name import PRESETS
from svdq.pipeline.models.names.sized_model import sized_model
from svdq.pipeline.models.wan.family import FAMILY, PUBLISHED, WanParameters
from svdq.pipeline.planning.costs import ShapeCosts, UpscaleCosts
from svdq.pipeline.planning.rounds import Outlook
from svdq.producer.pauses import SUSPENDED, Pause
from svdq.producer.status import estimates
from svdq.producer.status.estimates import Backlog, Estimate, estimate_all, estimate_jobs, with_more
from svdq.producer.status.job_view import JobView
from svdq.producer.status.ranks import (
    NO_CHECKPOINTS,
    SILENT_S,
    Condition,
    GroupStatus,
    IntakeStatus,
    RankStatus,
    Rest,
)
from svdq.worker.cards import Cards
from svdq.worker.fit import ways
from tests.ranks import COSTS, rank

PARAMETERS = {"seed": 1, "steps": 8, "frames": 2, "width": 64, "height": 64, "max_guidance_scale": 3.0}
#: Of COSTS: the harmonic mean of a step on the two ranks, and the seconds between two videos.
STEP_S = 2 / (1 / 0.5 + 1 / 0.25)
INTERVAL_S = (8 * STEP_S + 0.1 + 2.0) / 2
ALONE_S = 0.1 + 8 * STEP_S + 2.0
CONDITION = Condition(effect="Videos wait", reason="Full.", since=1.0, attempts=2, job_ids=("a", "b"))


def group(
    *, in_flight: tuple[str, ...] = (), measured: bool = True, draining: bool = False, silent_s: float = 0.0, **rank_1
) -> GroupStatus:
    intake = IntakeStatus(
        worker="w", in_flight=in_flight, pace_s=99.0, costs=(COSTS,) if measured else (), draining=draining
    )
    ranks: tuple[RankStatus, ...] = (rank(0, intake=intake), rank(1, **rank_1))
    return GroupStatus(name="here-1", ranks=ranks, silent_s=silent_s)


def started(job_id: str, step: int, **parameters: object) -> JobView:
    return JobView(id=job_id, status="started", step=step, steps=8, parameters=PARAMETERS | parameters)


def waiting(number: int, **parameters: object) -> Backlog:
    return Backlog(num_jobs=number, sample=[PARAMETERS | parameters] * min(number, 3), num_ahead={"q": number})


def eta(view: JobView, *groups: GroupStatus, before: Backlog | None = None) -> Estimate:
    return estimate_jobs([view], before or Backlog(), groups, ()).get(view.id, Estimate())


def test_a_job_in_flight_has_its_steps_and_the_decode_before_it() -> None:
    assert eta(started("a", 3), group(in_flight=("a",))).eta_s == pytest.approx(5 * STEP_S + 2.0)
    assert eta(started("a", 8), group(in_flight=("a",))).eta_s == pytest.approx(2.0)


def test_a_job_that_has_ended_since_those_in_flight_were_read_has_no_estimate() -> None:
    before = started("a", 8)
    flying = Backlog(started=[before])
    assert eta(before, group(in_flight=("a",)), before=flying).eta_s is not None
    assert eta(replace(before, status="finished"), group(in_flight=("a",)), before=flying) == Estimate()


def test_a_group_that_is_asleep_starts_first() -> None:
    awake = group()
    rest = Rest(reason="idle", since=1.0, start_s=30.0)
    asleep = replace(awake, ranks=tuple(each.model_copy(update={"rest": rest}) for each in awake.ranks))
    view = JobView(id="q", status="queued", steps=8, parameters=PARAMETERS)
    awake_s, asleep_s = (eta(view, each, before=waiting(1)).eta_s for each in (awake, asleep))
    assert awake_s is not None
    assert asleep_s == pytest.approx(awake_s + 30.0)
    whole_s, later_s = (estimate_all([], waiting(2), [each], ()).eta_s for each in (awake, asleep))
    assert whole_s is not None
    assert later_s == pytest.approx(whole_s + 30.0)


#: A group of two ranks with a model file of Wan in 4 steps without guidance, which its jobs leave open.
FOUR_STEPS = {**PUBLISHED, "sigmas": [1.0, 0.94, 0.83, 0.62], "defaults": {"guidance_scale": 1.0}}
WAN = {"family": "wan", "seed": 1}
WAN_COSTS = ShapeCosts(
    frames=81,
    width=832,
    height=480,
    guided=False,
    step_s=(3.0, 3.0),
    encode_s=1.0,
    decode_s=3.0,
    relative=((0.5, 0.6),),
)


def wan_group(facts: Mapping[str, Any] = FOUR_STEPS, **intake: Any) -> GroupStatus:
    found = IntakeStatus(**{"worker": "w", "costs": (WAN_COSTS,), **intake})
    who = {"family": "wan", "model": "wan2.2-4step"}
    return GroupStatus(name="here-1", ranks=(rank(0, intake=found, facts=dict(facts), **who), rank(1, **who)))


def test_what_a_job_leaves_open_is_what_its_group_fills_in() -> None:
    """Steps and guidance were the published model's: 40 guided steps in place of 4 unguided ones."""
    queue = Backlog(num_jobs=300, sample=[WAN] * 200)
    video_s = 4 * 3.0 + 1.0 + 3.0
    assert estimate_all([], queue, [wan_group()], ()).eta_s == pytest.approx(300 * video_s / 2)
    begun = JobView(id="a", status="started", step=1, steps=4, parameters=WAN)
    assert eta(begun, wan_group(in_flight=("a",))).eta_s == pytest.approx(3 * 3.0 + 3.0)
    # A record of an earlier version has no facts.
    old = wan_group({})
    assert estimate_all([], queue, [old], ()).eta_s == pytest.approx(300 * (40 * 3.0 * 2 + 4.0) / 2)


def rounds_on_4090(**intake: Any) -> GroupStatus:
    """A group on one GPU that works in rounds with Wan in 4 steps, and has finished no video."""
    found = IntakeStatus(worker="w", round_size=2, **intake)
    facts = {**FOUR_STEPS, "sigmas": [1.0, 0.75, 0.5, 0.25]}
    who = {"family": "wan", "model": "wan2.2-4step", "num_ranks": 1, "published_step_s": 30.5}
    return GroupStatus(name="here-1", ranks=(rank(0, intake=found, facts=facts, **who),))


def test_before_the_first_video_the_end_is_that_of_svdq_plan_by_published_times() -> None:
    known = sized_model(PRESETS["wan2.2-4step"])
    cards = Cards.parse("4090")
    assert cards is not None
    in_rounds = next(way for way in ways(known, known.video(), cards, 300, 30.5) if "rounds" in way.command)
    found = estimate_all([], Backlog(num_jobs=300, sample=[WAN]), [rounds_on_4090()], ())
    assert found.eta_s == pytest.approx(in_rounds.time_s)
    assert (found.reason, found.by) == (estimates.PUBLISHED, " by published times")
    queued = JobView(id="q", status="queued", parameters=WAN)
    before = Backlog(num_jobs=1, sample=[WAN], num_ahead={"q": 0})
    assert eta(queued, rounds_on_4090(), before=before).by
    # The two of the first round end together.
    places = dict.fromkeys(("a", "b"), Outlook(components="transformer", num_before=0, eta_s=None))
    begun = JobView(id="a", status="started", step=1, steps=4, parameters=WAN)
    first = eta(begun, rounds_on_4090(in_flight=("a", "b"), places=places))
    assert first.eta_s == pytest.approx(2 * in_rounds.time_s / 300)
    assert first.by
    # What was measured counts before what was published.
    measured = rounds_on_4090(costs=(WAN_COSTS,))
    found = estimate_all([], Backlog(num_jobs=300, sample=[WAN]), [measured], ())
    assert found.eta_s == pytest.approx(300 * 16.0 * 1.05)
    assert found.by == ""


def test_steps_that_cost_less_count_by_what_they_cost_and_change_no_other_video() -> None:
    halved = WAN | {"guidance_scale": 3.0, "guidance_scale_2": 1.0}
    guided_s = [(4 * 6.0 + 4.0), ((2 + 2 * 0.6) * 6.0 + 4.0)]
    facts = FOUR_STEPS | {"switch_at": 2}
    for parameters, video_s in zip((WAN | {"guidance_scale": 3.0}, halved), guided_s, strict=True):
        found = estimate_all([], Backlog(num_jobs=10, sample=[parameters]), [wan_group(facts)], ())
        assert found.eta_s == pytest.approx(10 * video_s / 2)
    skipping = WAN | {"step_cache": 0.06, "guidance_scale": 1.0}
    computed = sum(FAMILY.unit_costs(FAMILY.complete(WanParameters(**skipping), PUBLISHED), PUBLISHED).steps)
    found = estimate_all([], Backlog(num_jobs=10, sample=[skipping]), [wan_group(PUBLISHED)], ())
    assert found.eta_s == pytest.approx(10 * (computed * 3.0 + 4.0) / 2)
    assert computed < 30


def test_a_job_that_only_upscales_is_estimated_by_what_upscaling_takes() -> None:
    """Only whole renders with the upscaler were measured, and above a tenth of a queue nothing was said."""
    upscaled = WAN | {"upscale": "2"}
    finishing = upscaled | {"finishes": "cup-0123456789abcdef0123"}
    queue = Backlog(num_jobs=300, sample=[WAN, WAN, finishing])
    assert estimate_all([], queue, [wan_group()], ()).reason == estimates.UNUPSCALED
    assert estimate_all([], queue, [wan_group(costs=())], ()).reason == estimates.UNMEASURED
    costs = UpscaleCosts(frames=81, width=832, height=480, seconds=20.0)
    group = wan_group(upscales=(costs,))
    assert estimate_all([], queue, [group], ()).eta_s == pytest.approx(300 * (2 * 16.0 + 20.0) / 3 / 2)
    only = Backlog(num_jobs=300, sample=[finishing])
    assert estimate_all([], only, [wan_group(costs=(), upscales=(costs,))], ()).eta_s == pytest.approx(300 * 20.0 / 2)
    keeping = wan_group(upscales=(costs,), keeps_latents=True)  # which are decoded again
    assert estimate_all([], queue, [keeping], ()).eta_s == pytest.approx(300 * (2 * 16.0 + 23.0) / 3 / 2)
    whole = estimate_all([], Backlog(num_jobs=10, sample=[upscaled]), [group], ())
    assert whole.eta_s == pytest.approx(10 * (16.0 + 20.0) / 2)


def test_more_jobs_of_several_kinds_count_in_their_proportions() -> None:
    """A list was estimated by its first row."""
    long = WAN | {"steps": 8, "guidance_scale": 1.0}
    facts = {**PUBLISHED, "defaults": {"steps": 4, "guidance_scale": 1.0}}
    group = wan_group(facts)
    for before, number in ((Backlog(), 0), (Backlog(num_jobs=100, sample=[WAN] * 50), 100)):
        found = estimate_all([], with_more(before, [WAN, long], 300), [group], ())
        assert found.eta_s == pytest.approx((number * 16.0 + 150 * 16.0 + 150 * 28.0) / 2)


def test_a_job_behind_one_that_is_upscaled_waits_for_it() -> None:
    """It was said to be done in 3 s for five minutes."""
    upscaled = JobView(id="a", status="started", step=4, steps=4, parameters=WAN | {"upscale": "2"})
    costs = UpscaleCosts(frames=81, width=832, height=480, seconds=300.0)
    group = wan_group(upscales=(costs,), in_flight=("a",))
    alone = GroupStatus(name="here-1", ranks=(group.ranks[0].model_copy(update={"num_ranks": 1}),))
    behind = JobView(id="q", status="queued", parameters=WAN)
    places = Backlog(num_jobs=1, sample=[WAN], num_ahead={"q": 0}, started=[upscaled])
    assert eta(behind, alone, before=places).eta_s == pytest.approx(303.0 + 16.0)


def test_a_job_that_waits_for_another_is_rendered_after_that() -> None:
    links = [
        JobView(id=job_id, status="deferred", parameters=PARAMETERS, after=(before,))
        for job_id, before in (("c", "b"), ("b", "a"), ("x", "elsewhere"))
    ]
    found = estimate_jobs([*links, started("a", 3)], Backlog(), [group(in_flight=("a",))], ())
    first_s = 5 * STEP_S + 2.0
    ends = [found[job_id].eta_s for job_id in "abc"]
    assert ends == pytest.approx([first_s, first_s + ALONE_S, first_s + 2 * ALONE_S])
    assert "x" not in found
    unknown = estimate_jobs([*links, started("a", 3)], Backlog(), [], ())
    assert {unknown[job_id].reason for job_id in "abc"} == {estimates.NO_WORKER}


def test_the_end_of_all_counts_what_waits_for_other_jobs() -> None:
    parallel = waiting(40)
    assert estimate_all([], parallel, [group()], ()).eta_s == pytest.approx(40 * INTERVAL_S)
    assert estimate_all([], replace(parallel, end_s=999.0), [group()], ()).eta_s == 999.0


def test_uploads_that_are_slower_than_the_ranks_decide_the_end() -> None:
    slow = group(in_flight=("a", "b"), write_s=60.0, num_writers=2)
    assert eta(started("a", 8), slow).eta_s == pytest.approx(2.0 + 60.0)
    in_flight = [started("a", 8), started("b", 8)]
    assert estimate_all(in_flight, waiting(16), [slow], ()).eta_s == pytest.approx(18 * 30.0 + 60.0)
    queue = [started(f"j{number}", 8) for number in range(18)]
    busy = group(in_flight=tuple(view.id for view in queue), write_s=60.0, num_writers=2)
    assert estimate_all(queue, waiting(0), [busy], ()).eta_s == pytest.approx(18 * 30.0)


def test_uploads_beside_slower_ranks_delay_the_end_by_one() -> None:
    assert estimate_all([], waiting(40), [group(write_s=1.0, num_writers=2)], ()).eta_s == pytest.approx(
        40 * INTERVAL_S + 1.0
    )


def in_rounds(size: int, **places: tuple[str, int, float | None]) -> GroupStatus:
    found = {
        job_id: Outlook(components=components, num_before=number, eta_s=eta_s)
        for job_id, (components, number, eta_s) in places.items()
    }
    intake = IntakeStatus(worker="w", in_flight=tuple(places), costs=(COSTS,), places=found, round_size=size)
    return GroupStatus(name="here-1", ranks=(rank(0, num_ranks=1, intake=intake, job_id="a"),))


def test_jobs_of_a_round_say_what_they_wait_for_and_when_they_are_done() -> None:
    group = in_rounds(8, a=("transformer", 0, 50.0), b=("transformer", 12, 60.0), c=("transformer_2", 0, 70.0))
    assert eta(started("a", 3), group) == Estimate(eta_s=50.0)
    assert eta(started("b", 3), group) == Estimate(eta_s=60.0, waits_for="transformer, 12 before it")
    assert eta(started("c", 3), group) == Estimate(eta_s=70.0, waits_for="transformer_2, next")
    new = in_rounds(8, a=("transformer", 0, None), b=("transformer", 1, None))
    assert eta(started("b", 3), new) == Estimate(waits_for="transformer, 1 before it", reason=estimates.UNMEASURED)


def test_jobs_taken_for_the_next_round_count_as_waiting() -> None:
    """With one of them, which is most of the time, a whole queue had no estimate."""
    group = in_rounds(8, a=("transformer", 0, 70.0))
    assert group.intake is not None
    intake = group.intake.model_copy(update={"in_flight": ("a", "d", "e")})
    group = replace(group, ranks=(group.ranks[0].model_copy(update={"intake": intake}),))
    video_s = 8 * 0.25 + 0.1 + 2.0
    jobs = [started("a", 3), *(JobView(id=job_id, status="started", parameters=PARAMETERS) for job_id in "de")]
    assert eta(jobs[1], group).eta_s == pytest.approx(70 + 2.05 * video_s)
    assert estimate_all(jobs, Backlog(), [group], ()).eta_s == pytest.approx(70 + 2.05 * video_s)
    assert estimate_all(jobs, waiting(10), [group], ()).eta_s == pytest.approx(70 + 12 * 1.05 * video_s)
    behind = JobView(id="q", status="queued", parameters=PARAMETERS)
    first, seventh = (eta(behind, group, before=waiting(number)).eta_s for number in (0, 6))
    assert first == pytest.approx(70 + 7 * 1.05 * video_s + video_s)
    assert seventh == pytest.approx(first + 8 * 1.05 * video_s), "a round of 8 has two of them already"
    unmeasured = replace(
        group, ranks=(group.ranks[0].model_copy(update={"intake": intake.model_copy(update={"costs": ()})}),)
    )
    assert eta(jobs[1], unmeasured) == Estimate(reason=estimates.UNMEASURED)


def test_a_waiting_job_comes_after_the_present_round() -> None:
    group = in_rounds(8, a=("transformer", 0, 70.0))
    video_s = 8 * 0.25 + 0.1 + 2.0
    first, ninth = (
        eta(JobView(id="q", status="queued", parameters=PARAMETERS), group, before=waiting(number)) for number in (0, 8)
    )
    assert first.eta_s == pytest.approx(70 + 7 * 1.05 * video_s + video_s)
    assert ninth.eta_s - first.eta_s == pytest.approx(8 * 1.05 * video_s)
    jobs = [started(job_id, 3) for job_id in "ab"]
    both = in_rounds(8, a=("transformer", 0, 60.0), b=("transformer", 1, 70.0))
    # Not the sum: b waits for a.
    assert estimate_all(jobs, Backlog(), [both], ()).eta_s == 70.0
    assert estimate_all(jobs, waiting(3), [both], ()).eta_s == pytest.approx(70 + 3 * 1.05 * video_s)


def test_many_jobs_in_many_groups_are_estimated_at_once() -> None:
    """The sample was read anew for each waiting job and group: a look of the page took seconds."""
    groups = [replace(group(), name=f"group-{number}") for number in range(200)]
    jobs = [
        JobView(id=f"q{number}", status="queued", parameters=PARAMETERS | {"seed": number}) for number in range(100)
    ]
    places = Backlog(num_jobs=200, sample=[PARAMETERS] * 200, num_ahead={job.id: 7 for job in jobs})
    begun = time.process_time()
    found = estimate_jobs(jobs, places, groups, ())
    assert time.process_time() - begun < 5  # 4 million validations took minutes
    assert [each.eta_s for each in found.values()] == [pytest.approx(ALONE_S)] * len(jobs)


def test_nothing_is_promised_of_the_first_video_of_its_size() -> None:
    """Its first step took a minute and was multiplied; a small video, scaled to its size, said 948 s for 30 s."""
    first = group(in_flight=("a",), measured=False, job_id="a", step_s=50.0)
    assert eta(started("a", 1), first) == Estimate(reason=estimates.UNMEASURED)
    assert eta(started("a", 1, width=256), group(in_flight=("a",))) == Estimate(reason=estimates.UNMEASURED)


def test_a_shape_that_was_not_measured_is_scaled_from_a_similar_one() -> None:
    same = estimate_all([], waiting(10), [group()], ()).eta_s
    assert same == pytest.approx(10 * INTERVAL_S)
    larger = estimate_all([], waiting(10, width=128), [group()], ()).eta_s
    assert larger == pytest.approx(2 * same)
    for much in ({"width": 128, "frames": 4}, {"width": 128, "height": 128}):
        assert estimate_all([], waiting(10, **much), [group()], ()) == Estimate(reason=estimates.UNMEASURED)
    # A few of an unknown size are no reason to say nothing.
    odd = PARAMETERS | {"frames": 50}
    few = Backlog(num_jobs=100, sample=[PARAMETERS] * 19 + [odd])
    assert estimate_all([], few, [group()], ()).eta_s == pytest.approx(100 * INTERVAL_S)
    many = Backlog(num_jobs=100, sample=[PARAMETERS] * 17 + [odd] * 3)
    assert estimate_all([], many, [group()], ()).reason == estimates.UNMEASURED
    unguided = estimate_all([], waiting(10, max_guidance_scale=1.0), [group()], ()).eta_s
    assert same is not None
    assert unguided is not None
    assert unguided < same


def test_a_job_that_waits_comes_after_those_before_it_on_all_groups() -> None:
    view = JobView(id="q", status="queued", steps=8, parameters=PARAMETERS)
    assert eta(view, group(), before=waiting(6)).eta_s == pytest.approx(7 * INTERVAL_S)
    two = (group(), replace(group(), name="there-1"))
    assert eta(view, *two, before=waiting(6)).eta_s == pytest.approx(3.5 * INTERVAL_S)
    assert eta(view, *two, before=waiting(0)).eta_s == pytest.approx(ALONE_S)


def test_a_job_for_one_model_is_made_by_the_groups_with_it_only() -> None:
    job = JobView(id="q", status="queued", parameters=PARAMETERS | {"model": "wan-mine"})
    other = group()
    assert eta(job, other, before=waiting(3)).reason == "No worker runs the model wan-mine."
    for draining, reason in ((True, estimates.DRAINING), (False, "")):
        found = group(draining=draining)
        mine = replace(found, ranks=tuple(each.model_copy(update={"model": "/m/wan-mine"}) for each in found.ranks))
        expected = eta(job, other, mine, before=waiting(3))
        assert (expected.reason, expected.eta_s is None) == (reason, draining)
    assert eta(replace(job, parameters=PARAMETERS | {"model": ["a"]}), other, before=waiting(3)).eta_s is None


def test_jobs_in_flight_are_done_first() -> None:
    busy = group(in_flight=("a", "b"))
    alone_s = [5 * STEP_S + 2.0, 2.0]
    in_flight = [started("a", 3), started("b", 8)]
    assert estimate_all(in_flight, Backlog(), [busy], ()) == Estimate(eta_s=pytest.approx(alone_s[0]))
    found = estimate_all(in_flight, waiting(10), [busy], ())
    assert found.eta_s == pytest.approx(sum(alone_s) / 2 + 10 * INTERVAL_S)
    # A single video is not faster than on one rank.
    assert estimate_all([], waiting(1), [group()], ()).eta_s == pytest.approx(ALONE_S)
    assert estimate_all([], Backlog(), [busy], ()) == Estimate()


@pytest.mark.parametrize(
    ("groups", "pauses", "reason"),
    [
        ([group()], [SUSPENDED], estimates.PAUSED),
        ([], [Pause(text="Paused on here.", host="here")], estimates.PAUSED),
        ([group(conditions=(CONDITION,))], [], estimates.STORAGE),
        ([], [], estimates.NO_WORKER),
        ([group(silent_s=SILENT_S + 1)], [], "Not all ranks of the group on here have reported in the last 7 s."),
        ([GroupStatus(name="x", ranks=group().ranks[:1])], [], "Not all ranks"),
        ([group(draining=True)], [], estimates.DRAINING),
        ([group(measured=False)], [], estimates.UNMEASURED),
    ],
)
def test_nothing_is_promised_of_what_waits_without_a_reason(
    groups: list[GroupStatus], pauses: list[Pause], reason: str
) -> None:
    found = estimate_all([], waiting(10), groups, pauses)
    assert found.eta_s is None
    assert found.reason.startswith(reason)
    view = JobView(id="q", status="queued", steps=8, parameters=PARAMETERS)
    single = estimate_jobs([view], waiting(6), groups, pauses)["q"]
    assert (single.num_ahead, single.eta_s) == (6, None)
    assert single.reason.startswith(reason)


def test_a_group_that_can_go_on_takes_what_waits() -> None:
    without_checkpoints = CONDITION.model_copy(update={"effect": NO_CHECKPOINTS, "job_ids": ()})
    alone = estimate_all([], waiting(10), [group()], ())
    assert alone.eta_s is not None
    assert estimate_all([], waiting(10), [group(conditions=(without_checkpoints,))], ()) == alone
    assert estimate_all([], waiting(10), [group(conditions=(CONDITION,)), group()], ()) == alone


def test_nothing_is_promised_of_a_job_in_flight_whose_group_cannot_go_on() -> None:
    stuck = group(in_flight=("a", "b", "c"), conditions=(CONDITION,))
    assert eta(started("b", 8), stuck) == Estimate(condition=CONDITION, reason=estimates.STORAGE)
    assert eta(started("c", 8), stuck).eta_s is not None
    assert eta(started("a", 3)).reason == estimates.NO_WORKER
    assert "Not all ranks" in eta(started("a", 3), group(in_flight=("a",), silent_s=SILENT_S + 1)).reason
    # A pause stops what waits, not what is in flight.
    assert estimate_jobs([started("a", 8)], Backlog(), [group(in_flight=("a",))], ["Paused."])["a"].eta_s is not None


@pytest.mark.parametrize(
    "parameters",
    [{}, {"steps": "x", "frames": [], "width": -1, "height": 1e99}, {"steps": True}, PARAMETERS | {"family": ["wan"]}],
)
def test_parameters_that_are_none_end_no_estimate(parameters: dict[str, object]) -> None:
    queue = Backlog(num_jobs=20, sample=[PARAMETERS] * 19 + [parameters])
    assert estimate_all([], queue, [group()], ()).eta_s == pytest.approx(20 * INTERVAL_S)


@pytest.mark.parametrize(
    "facts",
    [{"sigmas": 7}, {"boundary_ratio": "x"}, {"defaults": {"steps": 10**12}}, {"defaults": []}, {"transformer": None}],
)
def test_facts_that_anyone_may_have_written_end_no_estimate(facts: dict[str, Any]) -> None:
    queue = Backlog(num_jobs=10, sample=[WAN])
    assert estimate_all([], queue, [wan_group(PUBLISHED | facts)], ()).reason == estimates.UNMEASURED
