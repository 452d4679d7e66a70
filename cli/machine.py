"""`svdq model`, `redis`, `doctor`, `config` and `completion`: set up and check this machine."""

import itertools
import os
from pathlib import Path
from typing import Literal

import click

from svdq.cli.formatting import echo, echo_json, table, words
from svdq.cli.main import EXIT_FAILED, json_option, redis_options, storage_option


@click.group()
def model() -> None:
    """Fetch models, or create a small untrained one for tests."""


@model.command()
@click.argument("name", metavar="ID")
@click.option(
    "--variant",
    type=click.Choice(["fp16", "full"]),
    help="Weights to fetch: half precision for GPUs, full for CPUs [default: fp16 if there is a GPU].",
)
@click.option("--revision", metavar="REV", help="A branch, tag or commit [default: main].")
def pull(name: str, variant: Literal["fp16", "full"] | None, revision: str | None) -> None:
    """Fetch a model from the hub into its cache.

    Only the files that svdq reads are fetched, after a check of the free disk space. Complete files are not fetched
    again. HF_HOME moves the cache; HF_TOKEN gives access to models whose license must be accepted.

    \b
    Examples:
      svdq model pull stabilityai/stable-video-diffusion-img2vid-xt
      HF_TOKEN=... svdq model pull stabilityai/stable-video-diffusion-img2vid-xt-1-1
      svdq model pull stabilityai/stable-video-diffusion-img2vid --variant full
      svdq model pull Wan-AI/Wan2.2-I2V-A14B-Diffusers
    """
    from svdq.pipeline.models import pull as hub
    from svdq.pipeline.models.memory import size_text
    from svdq.worker.launcher.gpus import visible_gpus

    wanted = variant or ("fp16" if visible_gpus() else "full")
    plan = hub.make_plan(f"{name}@{revision}" if revision else name, wanted)
    free = hub.check_space(plan)
    note = " (it has no fp16 weights)" if wanted != plan.variant else ""
    echo(
        f"{plan.name}: {len(plan.files)} files, {plan.variant} weights{note}; "
        f"{len(plan.missing)} to fetch, {size_text(plan.bytes_missing)} of {size_text(free)} free."
    )
    if plan.large:
        sizes = " and ".join(f"{component} has {size_text(size)}" for component, size in plan.large.items())
        echo(
            f"Its weights are float32 ({sizes}), twice what GPUs compute with; "
            f"`svdq model convert {plan.name} DIR --dtype bf16` writes a copy of half the size afterwards.",
            err=True,
        )
    numbers = {file.path: number for number, file in enumerate(plan.missing, 1)}
    folder = hub.pull(
        plan,
        lambda file: echo(f"{numbers[file.path]}/{len(numbers)}  {file.path}  {size_text(file.size)}", err=True),
    )
    echo(folder)
    echo(f"Use it with SVDQ_MODEL={plan.name}")


@model.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--family", type=click.Choice(["svd", "wan"]), default="svd", show_default=True, help="Family of models.")
def tiny(folder: Path, family: str) -> None:
    """Write an untrained model into DIR: the real classes, less than 15 MB, the same bits every time.

    svd is Stable Video Diffusion; wan is Wan 2.2 I2V-A14B with both of its experts, less than 1 MB.
    Its videos show noise. It serves for tests and for comparisons with diffusers.

    \b
    Examples:
      svdq model tiny /tmp/tiny
      svdq model tiny --family wan /tmp/tiny-wan
      svdq worker --model /tmp/tiny --burst
    """
    from svdq.pipeline.installed import require_torch

    require_torch("the untrained model")
    # Imported here so that `--help` does not import torch.
    from svdq.pipeline.models.family import imported
    from svdq.pipeline.models.registry import family_named

    imported(family_named(family).tiny)(folder)
    echo(f"{folder}: tiny (untrained: shows noise). Use it with SVDQ_MODEL={folder}")


@model.command("convert")
@click.argument("source", metavar="MODEL")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["bf16", "fp16"]), default="bf16", show_default=True, help="Half precision.")
def convert_command(source: str, folder: Path, dtype: str) -> None:
    """Write a copy of MODEL in half precision into DIR: half the disk, and half as long to load.

    MODEL is a folder or a hub id that was fetched. Weights that diffusers keeps in float32 stay so, as do the VAE and
    the image encoder: in that dtype, the copy gives the same videos. It takes about 4 GB of memory. DIR appears when
    the copy is complete.

    \b
    Examples:
      svdq model convert Wan-AI/Wan2.2-I2V-A14B-Diffusers /models/wan-bf16 --dtype bf16
    """
    from svdq.pipeline.installed import require_torch
    from svdq.pipeline.models.hub import find_folder
    from svdq.pipeline.models.memory import size_text

    found = find_folder(source)
    require_torch("conversion")
    # Imported here so that `--help` does not import torch.
    import torch

    from svdq.pipeline.models.convert import convert
    from svdq.pipeline.models.options import DTYPES

    total = convert(
        found,
        folder,
        source,
        getattr(torch, DTYPES[dtype]),
        on_file=lambda file, num_bytes: echo(f"{file}  {size_text(num_bytes)}", err=True),
    )
    echo(f"{folder}: {size_text(total)} of weights in {dtype}. Use it with SVDQ_MODEL={folder}")


@click.group()
def redis() -> None:
    """Start or stop the embedded Redis server, or show its URL.

    Commands that need the server start it. It keeps running when they end, and keeps its data when it stops.
    """


@redis.command()
def start() -> None:
    """Start the server of this home if it is not running, and print its URL."""
    from svdq.producer.embedded_redis.server import ensure_server
    from svdq.producer.settings import Settings

    echo(ensure_server(Settings.load().home))


@redis.command()
def stop() -> None:
    """Stop the server of this home; it keeps queued jobs."""
    from svdq.producer.embedded_redis.server import stop_server
    from svdq.producer.settings import Settings

    echo("Stopped; queued jobs are kept." if stop_server(Settings.load().home) else "The server was not running.")


@redis.command()
def url() -> int:
    """Print the URL of the server of this home; the exit code is 1 if it is not running.

    \b
    Examples:
      svdq redis url
      redis-cli -u $(svdq redis url) info memory
      rq info --queue-class svdq.producer.queue.SvdqQueue -u $(svdq redis url)
    """
    from svdq.producer.embedded_redis.server import running_url
    from svdq.producer.settings import Settings

    found = running_url(Settings.load().home)
    echo(found or "The server is not running; start it with `svdq redis start`.", err=not found)
    return 0 if found else 1


@click.command()
@click.option("--model", metavar="MODEL", help="Model to check: a folder, a hub id, preview [default: SVDQ_MODEL].")
@click.option("--quick", is_flag=True, help="Check only Redis and the storage, for a health check.")
@json_option("finding")
@storage_option
@redis_options
def doctor(model: str | None, quick: bool, as_json: bool, storage: str | None, redis_url: str | None) -> int:
    """Check Redis, storage, model, GPUs, ffmpeg and versions, and say how to fix what is wrong.

    The exit code is 0 when no check fails and 1 otherwise; warnings do not count.

    \b
    Examples:
      svdq doctor
      svdq doctor --model /models/svd-xt
      svdq doctor --quick || systemctl restart redis
      svdq doctor --json | jq 'select(.level != "ok")'
    """
    from svdq.producer.doctor import check_model, check_packages, check_redis, check_storage
    from svdq.producer.settings import Settings

    settings = Settings.load(model=model, storage=storage, redis_url=redis_url)
    findings = itertools.chain(check_redis(settings), check_storage(settings))
    if not quick:
        from svdq.worker.doctor import check_machine

        findings = itertools.chain(findings, check_model(settings.model), check_machine(), check_packages())
    failed = False
    for finding in findings:
        failed = failed or finding.level == "fail"
        if as_json:
            echo_json(finding._asdict())
        else:
            advice = f"; {finding.advice}" if finding.advice else ""
            echo(f"{finding.level:<4}  {finding.subject:<16}  {finding.text}{advice}")
    return EXIT_FAILED if failed else 0


@click.command()
@click.option("--model", metavar="MODEL", help="Show the settings as with this option of `svdq worker`.")
@json_option()
@storage_option
@redis_options
def config(as_json: bool, **flags: str | None) -> None:
    """Show every setting with its value and source: a flag, a variable, a svdq.toml, or the default.

    Tokens and passwords in URLs are masked. The sources are listed in order of precedence; the svdq.toml of the working
    folder precedes that of the home.

    \b
    Examples:
      svdq config
      svdq config --json
      SVDQ_MODEL=/models/svd-xt svdq config
    """
    from svdq.producer.settings import ENV_PREFIX, Settings, origins, without_secrets

    values = Settings.load(**flags).model_dump(mode="json")
    for name in ("redis_url", "storage"):
        if values[name] is not None:
            values[name] = without_secrets(values[name])
    values["notify"] = [f"{url.partition(':')[0]}://***" for url in values["notify"]]
    values["serve_token"] = None if values["serve_token"] is None else "***"
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


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes svdq's commands, options and files in a shell.

    The script calls svdq for each completion, so an upgrade of svdq does not require a new script.

    \b
    Examples:
      svdq completion bash > ~/.local/share/bash-completion/completions/svdq
      svdq completion zsh > ~/.zfunc/_svdq          with fpath+=~/.zfunc before compinit
      svdq completion fish > ~/.config/fish/completions/svdq.fish
    """
    from click.shell_completion import get_completion_class

    from svdq.cli.main import cli

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "svdq", "_SVDQ_COMPLETE").source())  # noqa: TID251 - many lines, all ours
