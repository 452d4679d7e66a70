"""The address of a Redis server: mistakes in it are sentences, and no password of it is shown."""

from pathlib import Path

import pytest

from svdq.pipeline.errors import InputError
from svdq.producer.redis_url import check_url

SECRET = "s3cret"


@pytest.mark.parametrize(
    "url",
    [
        "redis://host",
        "redis://:s3cret@host:6379/0",
        "rediss://user:s%403cret@host:6380/1?ssl_cert_reqs=required&socket_timeout=3",
        "rediss://host?ssl_check_hostname=false",
        "unix:///run/redis.sock?db=2",
        "unix://user:s3cret@/run/a@b/redis.sock",
    ],
)
def test_valid_urls_are_accepted(url: str) -> None:
    check_url(url)


def test_a_certificate_must_exist(tmp_path: Path) -> None:
    (tmp_path / "redis.pem").touch()
    check_url(f"rediss://host?ssl_ca_certs={tmp_path / 'redis.pem'}")
    for option in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        with pytest.raises(InputError, match=f"^The file '/nowhere.pem' of {option} in the Redis URL does not exist"):
            check_url(f"rediss://user:{SECRET}@host?{option}=/nowhere.pem")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://user:s3cret@host", "cannot be understood"),
        ("redis:/user:s3cret@host", "cannot be understood"),
        ("redis://user:s3cret@host:many", "cannot be understood"),
        ("redis://user:s3cret@[::1", "cannot be understood"),
        ("redis://user:s3cret@a..b", "cannot be understood"),
        ("redis://user:s3cret@host/jobs", "cannot be understood"),
        ("redis://:s3cret/b@host:6379/0", "/ as %2F"),
        ("redis://:a/s3cret@host:6379/0", "/ as %2F"),
        ("redis://:a#s3cret@host:6379/0", "cannot be understood"),
        ("redis://user:s3cret@b/c@host:6379/0", "@ as %40"),
        ("redis://user:a@s3cret/c@host:6379/0", "@ as %40"),
        (
            "redis://:s3cret@host?ssl_ca_certs=/x",
            "does not belong to it (ssl_ca_certs); those of TLS (ssl_…) need redi",
        ),
        ("rediss://:s3cret@host?ssl_cert_reqs=perhaps", "cannot be understood"),
        ("redis://:s3cret@host?password=s3cret&db=many", "cannot be understood"),
        ("redis://:s3cret@host?token=s3cret", "does not belong to it (token)"),
    ],
)
def test_a_mistake_is_one_sentence_without_the_password(url: str, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        check_url(url)
    assert reason in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)
