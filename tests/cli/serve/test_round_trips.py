"""How often the server waits for an answer of Redis, which may be far away."""

from tests.cli.serve.servers import Serve
from tests.proxy import Proxy
from tests.worker.jobs import put


def test_a_list_of_videos_asks_redis_few_times(serve: Serve, settings, connection) -> None:
    """Seven one after the other: the state of the groups is read beside the page."""
    put(connection, "a", "b", "c")
    with Proxy(settings.redis_url) as proxy:
        server = serve(SVDQ_REDIS_URL=proxy.url)
        assert server.get("/v1/videos").status == 200
        proxy.delay_s = 0.2
        before = proxy.num_round_trips
        answer = server.get("/v1/videos")
        assert len(answer.json["data"]) == 3
        assert proxy.num_round_trips - before <= 12
        proxy.shutdown()
