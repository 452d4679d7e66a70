"""Ranks that hold one of two experts: each does only its steps, whatever the boundary of a video, and none is lost."""

import threading

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from svdq.pipeline.planning.binding import Components, Segment, bind
from svdq.pipeline.planning.planner import Planner
from tests.pipeline.fakes import Chain, CountingDenoiser, CountingModel, request

HIGH, LOW = frozenset({"high"}), frozenset({"low"})


def segments(seed: int, steps: int) -> tuple[Segment, ...]:
    """Divide the steps of a video by its seed."""
    boundary = min(seed % 10, steps)
    both = (Segment(component="high", start=0, stop=boundary), Segment(component="low", start=boundary, stop=steps))
    return tuple(segment for segment in both if segment.start < segment.stop)


class ExpertModel(CountingModel):
    """Holds some experts, and refuses the steps of others."""

    def __init__(self, held: Components) -> None:
        super().__init__()
        self.held = held

    def segments(self, parameters):
        return segments(parameters.seed, parameters.steps)

    def denoiser(self, tensors, parameters, step_costs=()):
        model = self

        class ExpertDenoiser(CountingDenoiser):
            def step(self, state, index):
                (segment,) = (each for each in model.segments(parameters) if each.start <= index < each.stop)
                assert model.held is None or segment.component in model.held, f"step {index} is not of {model.held}"
                return super().step(state, index)

        return ExpertDenoiser(self, parameters)


def run(components, requests) -> Chain:
    chain = Chain(
        [ExpertModel(held) for held in components], requests, planner=Planner(len(components)), components=components
    )
    chain.run()
    return chain


def check(chain: Chain, requests) -> None:
    for each in requests:
        report = chain.source.reports[each.job_id]
        assert report.failure is None
        assert int(chain.sink.frames[each.job_id].max()) == each.parameters.steps


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    room=st.lists(st.booleans(), min_size=1, max_size=5),
    typical=st.integers(1, 8),
    videos=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=8),
)
def test_ranks_do_the_steps_of_their_experts_only(room, typical, videos) -> None:
    components = bind(segments(typical, 9), room, CountingModel.info.prior)
    requests = [request(number * 10 + boundary, steps=steps) for number, (boundary, steps) in enumerate(videos)]
    check(run(components, requests), requests)


class FullPlanner(Planner):
    """Has no room for a second video before the first has ended."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self.num_ended = 0
        self.asked = threading.Event()

    def wait_s(self, now: float) -> float:
        self.asked.set()
        return 1e6


def test_rank_0_takes_no_video_while_later_ranks_have_no_room() -> None:
    components = [HIGH, LOW]
    planner = FullPlanner(2)
    requests = [request(2, steps=9)]
    chain = Chain([ExpertModel(held) for held in components], requests, planner=planner, components=components)
    chain.start()
    assert planner.asked.wait(60)
    for stage in chain.stages:
        stage.stop()
    chain.join()
    assert chain.source.taken == []


def test_rank_0_takes_the_next_video_when_a_later_rank_reports_room() -> None:
    class Room(FullPlanner):
        def wait_s(self, now: float) -> float:
            return 1e6 if self.num_admitted > self.num_ended else 0.0

        num_admitted = 0

        def admit(self, *args, **kwargs):
            self.num_admitted += 1
            return super().admit(*args, **kwargs)

        def ended(self, index: int) -> None:
            self.num_ended += 1
            super().ended(index)

    components = [HIGH, LOW]
    requests = [request(number * 10 + 4, steps=9) for number in range(5)]
    chain = Chain([ExpertModel(held) for held in components], requests, planner=Room(2), components=components)
    chain.run()
    check(chain, requests)
