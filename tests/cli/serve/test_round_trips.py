"""How often the server waits for an answer of Redis, which may be far away, and what it asks."""

import pytest
import redis

from svdq.producer import keys
from tests.cli.serve.servers import Serve
from tests.proxy import Proxy
from tests.ranks import rank, save
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


@pytest.mark.parametrize(("model", "times"), [("", 1), ("Wan-AI/Wan2.2-I2V-A14B-Diffusers", 0)])
def test_a_request_for_a_video_asks_once_what_workers_run(
    serve: Serve, settings, connection, photo_bytes: bytes, model: str, times: int
) -> None:
    save(connection, rank(0, num_ranks=1, model="/models/wan", family="wan"))
    server = serve(**({"SVDQ_MODEL": model} if model else {}))
    with redis.Redis.from_url(settings.redis_url).monitor() as monitor:
        assert server.create(photo_bytes).json["svdq"]["parameters"]["family"] == "wan"
        connection.echo("done")
        asked = []
        for command in iter(lambda: monitor.next_command()["command"], "ECHO done"):
            # A state of everything, which requests share, needs only the last that starts.
            asked += [command] if command.startswith(f"ZRANGE {keys.STARTING} ") and " -1 -1" not in command else []
    assert len(asked) == times + 1, asked  # one for the list of models, which requests share, too
