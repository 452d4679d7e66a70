"""What `svdq worker --nnodes` takes, and what it says when it cannot."""

import re

import pytest

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer.settings import Settings
from svdq.worker.launcher.hosts import Hosts, read_hosts


@pytest.fixture
def shared(settings: Settings) -> Settings:
    return settings.model_copy(update={"redis_url": "redis://127.0.0.1:1/0"})


@pytest.mark.parametrize(
    ("num", "endpoint", "num_groups", "sentence"),
    [
        (1, "render1:29400", 1, "say how many with --nnodes"),
        (2, None, 1, "needs --rdzv-endpoint HOST:PORT"),
        (2, "render1:29400", 2, "leave out --groups"),
        (2, "render1:http", 1, "is not HOST:PORT"),
        (2, ":29400", 1, "is not HOST:PORT"),
        (2, "render1:70000", 1, "is not HOST:PORT"),
    ],
)
def test_what_cannot_be_meant_is_refused(shared: Settings, num, endpoint, num_groups, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        read_hosts(shared, num, endpoint, num_groups)


def test_a_private_redis_does_not_do(settings: Settings) -> None:
    with pytest.raises(InputError, match="needs a Redis that all 2 hosts reach"):
        read_hosts(settings.model_copy(update={"redis_url": None}), 2, "render1:29400", 1)


@pytest.mark.parametrize("host", ["nowhere.invalid", "a..b"])
def test_a_host_that_is_not_there_may_come(shared: Settings, host: str) -> None:
    with pytest.raises(UnavailableError, match=rf"no way to --rdzv-endpoint {re.escape(host)}"):
        read_hosts(shared, 2, host, 1)


def test_the_host_that_keeps_the_store_is_called_what_others_call_it(shared: Settings) -> None:
    assert read_hosts(shared, 1, None, 3) is None
    assert read_hosts(shared, 2, "localhost", 1) == Hosts(
        num=2, store_host="localhost", store_port=29400, own_address="localhost", keeps_store=None
    )


def test_the_log_says_what_is_open(shared: Settings) -> None:
    hosts = read_hosts(shared, 2, "localhost:29411", 1)
    assert hosts is not None
    assert "port 29411 of localhost, at all its addresses" in hosts.warning
