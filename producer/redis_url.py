"""Checks the URL of a Redis server before connecting, so that a mistake in it is reported as one."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import redis

from svdq.pipeline.errors import InputError
from svdq.producer.settings import without_secrets

#: Options of a rediss:// URL that name files.
FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


def check_url(url: str) -> None:
    """Check that redis-py understands a URL and all its options; nothing is connected.

    Raises:
        InputError: it does not, or a file that the URL names does not exist.
    """
    shown = without_secrets(url) if "://" in url else f"{url.partition(':')[0]}:…"
    try:
        parts = urlsplit(url)
        if parts.scheme in ("redis", "rediss") and "@" in parts.path + parts.fragment:
            raise ValueError("a password is cut in two")  # its rest would become the name of a host
        if parts.scheme in ("redis", "rediss") and not re.fullmatch(r"/*\d*", parts.path):
            raise ValueError("not a number of a database")  # redis-py would take database 0
        pool = redis.ConnectionPool.from_url(url)
        options = pool.connection_kwargs
        pool.connection_class(**options)
        str(options.get("host", "")).encode("idna")  # as for the look-up, where UnicodeError would be no RedisError
    except TypeError as error:
        unknown = re.search(r"argument '(\w+)'", str(error))
        raise InputError(
            f"The Redis URL {shown!r} has an option that does not belong to it"
            f"{f' ({unknown[1]})' if unknown else ''}; those of TLS (ssl_…) need rediss://."
        ) from error
    except (ValueError, redis.RedisError) as error:
        raise InputError(
            f"The Redis URL {shown!r} cannot be understood; write it as redis://host:6379/0, rediss://… or "
            "unix:///path (in a password, @ as %40, / as %2F, % as %25), or leave it out for the embedded server."
        ) from error
    for name in FILES:
        if options.get(name) and not Path(options[name]).is_file():
            raise InputError(f"The file {options[name]!r} of {name} in the Redis URL does not exist; correct its path.")
