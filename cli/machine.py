"""`svdq redis`, `doctor` and `config`: set up and check this machine."""

import itertools
import os
from collections.abc import Iterable

import click

from svdq.cli.formatting import echo, echo_json, table, words
from svdq.cli.main import EXIT_FAILED
from svdq.cli.option_types import json_option, storage_options
from svdq.producer.embedded_redis import ensure_server, running_url, stop_server
from svdq.producer.settings import ENV_PREFIX, HIDDEN, scheme_of, shown_redis_url, without_secrets, without_urls_secrets
from svdq.producer.settings_loader import load_settings, origins
from svdq.worker.doctor import (
    Finding,
    check_machine,
    check_model,
    check_packages,
    check_redis,
    check_storage,
    check_upscaler,
    limited,
)


@click.group()
def redis() -> None:
    """Start or stop the embedded Redis server, or show its URL.

    Commands that need the server start it. It keeps running when they end, and keeps its data when it stops.
    """


@redis.command()
@json_option()
def start(as_json: bool) -> None:
    """Start the server of this home unless it runs, and print its URL.

    \b
    Examples:
      svdq redis start
    """
    found = ensure_server(load_settings().home)
    echo_json({"url": found}) if as_json else echo(found)


@redis.command()
@json_option()
def stop(as_json: bool) -> None:
    """Stop the server of this home; it keeps queued jobs.

    A running worker, `svdq watch` or `svdq serve` starts the server again: stop it first.

    \b
    Examples:
      svdq redis stop --json
    """
    was_running = stop_server(load_settings().home)
    text = "Stopped; queued jobs are kept." if was_running else "The server was not running."
    echo_json({"stopped": was_running}) if as_json else echo(text)


@redis.command()
@json_option()
def url(as_json: bool) -> int:
    """Print the URL of the server of this home.

    The exit code is 1 if it does not run.

    \b
    Examples:
      svdq redis url
      redis-cli -u $(svdq redis url) info memory
      rq info --queue-class svdq.producer.queue.SvdqQueue -u $(svdq redis url)
    """
    found = running_url(load_settings().home)
    if as_json:
        echo_json({"url": found or None})
    else:
        echo(found or "The server is not running; start it with `svdq redis start`.", err=not found)
    return 0 if found else 1


@click.command()
@click.option("--model", metavar="MODEL", help="Model to check: a folder, a hub id, preview [default: SVDQ_MODEL].")
@click.option("--quick", is_flag=True, help="Check only Redis and the storage, for a health check.")
@json_option("finding")
@storage_options
def doctor(model: str | None, quick: bool, as_json: bool, storage: str | None, redis_url: str | None) -> int:
    """Check Redis, storage, model, upscaler, GPUs, ffmpeg and versions, and say how to fix what is wrong.

    The exit code is 0 when no check fails and 1 otherwise; warnings do not count.

    \b
    Examples:
      svdq doctor --model /models/mine
      svdq doctor --quick || systemctl restart redis
      svdq doctor --json | jq 'select(.level != "ok")'
    """
    settings = load_settings(model=model, storage=storage, redis_url=redis_url)
    in_storage = limited(4.5 if quick else 30.0, check_storage, settings)
    findings: Iterable[Finding] = itertools.chain(check_redis(settings), in_storage)
    if not quick:
        of_models = itertools.chain(check_model(settings.model, settings.weights), check_upscaler(settings))
        findings = itertools.chain(findings, of_models, check_machine(), check_packages())
    exit_code = 0
    for finding in findings:
        advice = f"; {finding.advice}" if finding.advice else ""
        line = f"{finding.level:<4}  {finding.subject:<16}  {finding.text}{advice}"
        echo_json(finding._asdict()) if as_json else echo(line)
        exit_code = EXIT_FAILED if finding.level == "fail" else exit_code
    return exit_code


@click.command()
@click.option("--model", metavar="MODEL", help="Show the settings as with this option of `svdq worker`.")
@json_option()
@storage_options
def config(as_json: bool, **flags: str | None) -> None:
    """Show every setting with its value and source: a flag, a variable, a svdq.toml, or the default.

    Tokens and passwords in URLs are masked. The sources are listed in order of precedence; the svdq.toml of the working
    folder precedes the one of the home.

    \b
    Examples:
      svdq config --json
      SVDQ_MODEL=/models/mine svdq config
    """
    settings = load_settings(**flags)
    # In the order of the settings; those that may hold secrets are in no dump.
    values = dict.fromkeys(type(settings).model_fields) | settings.model_dump(mode="json")
    values["redis_url"] = None if settings.redis_url is None else shown_redis_url(settings.redis_url)
    values["storage"] = without_secrets(settings.storage)
    values["worker_options"] = without_urls_secrets(settings.worker_options)
    values["notify"] = [*map(scheme_of, settings.notify)]
    values["webhook_url"] = None if settings.webhook_url is None else scheme_of(settings.webhook_url)
    for name in ("serve_token", "webhook_secret"):
        values[name] = None if getattr(settings, name) is None else HIDDEN
    sources = origins(**flags)
    for name in os.environ:
        if name.startswith(ENV_PREFIX) and name.removeprefix(ENV_PREFIX).lower() not in values:
            echo(f"The variable {name} is no setting and has no effect; check its name.", err=True)
    if as_json:
        echo_json({name: {"value": value, "source": sources[name]} for name, value in values.items()})
        return
    if values["redis_url"] is None:
        values["redis_url"] = "the embedded server"
    rows = [(name, words(value), sources[name]) for name, value in values.items()]
    echo(*table([("setting", "value", "from"), *rows]))
