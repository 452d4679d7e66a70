"""How often the commands that look at all jobs wait for an answer of Redis, which may be far away."""

import pytest

from tests.proxy import Proxy
from tests.worker.jobs import put


@pytest.mark.parametrize(("command", "number"), [("status", 8), ("list", 7)])
def test_a_command_asks_redis_few_times(settings, connection, svdq, monkeypatch, command: str, number: int) -> None:
    put(connection, "a", "b")
    with Proxy(settings.redis_url, delay_s=0.2) as proxy:
        monkeypatch.setenv("SVDQ_REDIS_URL", proxy.url)
        assert svdq(command).returncode == 0
        assert proxy.num_round_trips <= number
        proxy.shutdown()
