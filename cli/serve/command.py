"""`svdq serve`: start the web page and the `/v1/videos` API."""

import contextlib
import importlib
import itertools
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import click

from svdq.cli.formatting import echo, echo_json
from svdq.cli.main import EXIT_INTERRUPTED, notify_systemd
from svdq.cli.option_types import json_option, storage_options
from svdq.cli.worker_process import BESIDE_A_PAGE, worker_process
from svdq.pipeline.errors import InputError, how_to_install, require_torch
from svdq.producer.settings import Settings
from svdq.producer.settings_loader import load_settings

EXAMPLES = """\b
Examples:
  svdq serve
  svdq serve --with-worker -- --experts rounds    options of svdq worker
  svdq serve --host 0.0.0.0 --allow-host videos.example.com
"""


OF_WORKER = "svdq.worker_options"  # key of click's context: arguments after `--`


class ServeGroup(click.Group):
    """A group that keeps arguments after `--`, unless they are of one of its commands."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = args[: args.index("--")] if "--" in args else args
        if not self.commands.keys() & {*own}:
            ctx.meta[OF_WORKER], args = args[len(own) + 1 :], own
        return super().parse_args(ctx, args)


@click.group(
    cls=ServeGroup,
    epilog=EXAMPLES,
    invoke_without_command=True,
    subcommand_metavar="[COMMAND [ARGS]... | -- WORKER_OPTIONS...]",
)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="Port; 0 takes a free one."
)
@click.option(
    "--allow-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="A name that clients may use for this server, such as the name of a proxy; repeatable.",
)
@click.option("--with-worker", is_flag=True, help="Start a worker beside the server, and stop it with the server.")
@storage_options
@click.pass_context
def serve(
    context: click.Context,
    host: str,
    port: int,
    allowed_hosts: tuple[str, ...],
    with_worker: bool,
    storage: str | None,
    redis_url: str | None,
) -> None:
    """Serve a web page to drop photos on, and the /v1/videos API.

    Every client needs the token: a browser by the link that is printed to a terminal, a program as its API key.
    The token is in the file serve-token in SVDQ_HOME, or in SVDQ_SERVE_TOKEN. `svdq serve token add NAME` makes one for
    each person, who owns what is submitted with it.

    With --with-worker, arguments after `--` are options of `svdq worker`. It frees its GPUs after ten minutes without a
    job, unless --on-demand or SVDQ_ON_DEMAND says otherwise.

    Ctrl-C or SIGTERM stops the server within three seconds; the queue is kept. A worker beside it stops after its
    current step, and its videos are continued at the next start.
    """
    if context.invoked_subcommand is not None:
        return
    try:
        from svdq.cli.serve.access import ServeOptions, is_host
        from svdq.cli.serve.api_errors import add_request_id
        from svdq.cli.serve.app import listen, make_app, run
        from svdq.cli.serve.tokens import Tokens, find_token, token_file, tokens_file
    except ModuleNotFoundError as error:
        message = f"`svdq serve` needs {error.name}, which is not installed; {how_to_install('serve')}."
        raise InputError(message) from error

    log = logging.StreamHandler(sys.stderr)
    log.addFilter(add_request_id)
    logging.basicConfig(format="%(message)s", handlers=[log])
    if not is_host(host):  # an empty one is every address of this machine
        raise InputError(f"--host {host!r} is not an address; give one to listen on, such as 127.0.0.1 or 0.0.0.0.")
    for name in allowed_hosts:
        if not is_host(name):
            raise InputError(f"--allow-host {name!r} is not a name; give one without http:// and port.")
    worker_options = context.meta[OF_WORKER]
    if with_worker:
        _check_worker(context, worker_options)
    elif worker_options:
        raise click.UsageError("Options after `--` are the worker's; give --with-worker, too.")
    settings = load_settings(redis_url=redis_url, storage=storage)
    token = find_token(settings)
    listener = listen(host, port)
    options = ServeOptions(
        host=host,
        port=listener.getsockname()[1],
        tokens=Tokens(token, tokens_file(settings)),
        allowed_hosts=tuple(name.lower() for name in allowed_hosts),
    )

    def report() -> None:
        if sys.stdout.isatty():  # a journal may have other readers
            echo(f"Serving at {options.url}/login?token={token}")
            if not options.is_local:
                _show_code(f"{options.url}/login?token={token}")
        else:
            place: Path | str = "SVDQ_SERVE_TOKEN" if settings.serve_token else token_file(settings)
            echo(f"Serving at {options.url}/ (token: {place})")
        notify_systemd()

    with _worker_beside(settings, worker_options) if with_worker else contextlib.nullcontext():
        signal_number = run(make_app(settings, options, report), listener)
    # A thread may still wait for Redis or a disk. A job is enqueued in one step and answered after that.
    os._exit(EXIT_INTERRUPTED if signal_number == signal.SIGINT else 0)


@serve.group()
def token() -> None:
    """Make, list and remove tokens with names.

    The name of a token is the owner of what is submitted with it, so each person has one. A running server takes
    changes at once. The tokens are in the file serve-tokens.json in SVDQ_HOME.
    """


@token.command("add")
@click.argument("name")
@click.option("--url", metavar="URL", help="Address of the server in the link [default: this machine, port 8765].")
@json_option()
def add_token(name: str, url: str | None, as_json: bool) -> None:
    """Make the token of a person, or show it again.

    It is shown as a link and, on a terminal, as a QR code.

    \b
    Examples:
      svdq serve token add ana
      svdq serve token add ben --url https://videos.example.com
    """
    from svdq.cli.serve import tokens

    if url is not None and not url.startswith(("http://", "https://")):
        raise InputError(f"--url {url!r} is not an address; give one such as https://videos.example.com.")
    path = tokens.tokens_file(load_settings())
    token, is_new = tokens.add_token(path, name)
    url = url or f"http://{tokens.address_of_machine() or socket.gethostname()}:8765"
    link = f"{url.rstrip('/')}/login?token={token}"
    if as_json:
        echo_json({"name": name, "token": token, "url": link, "is_new": is_new})
        return
    echo(f"{name}  {link}")
    if sys.stdout.isatty():
        _show_code(link)


@token.command("list")
@json_option("token")
def list_tokens(as_json: bool) -> None:
    """List the names of the tokens.

    `svdq serve token add NAME` shows the link of one again.

    \b
    Examples:
      svdq serve token list
    """
    from svdq.cli.serve import tokens

    names = sorted(tokens.read_tokens(tokens.tokens_file(load_settings())))
    for name in names:
        echo_json({"name": name}) if as_json else echo(name)
    if not names and not as_json:
        echo("There are no named tokens; make one with `svdq serve token add NAME`.", err=True)


@token.command("remove")
@click.argument("name")
@json_option()
def remove_token(name: str, as_json: bool) -> None:
    """Remove the token of a person.

    Browsers with it are logged out; the videos stay.

    \b
    Examples:
      svdq serve token remove ana
    """
    from svdq.cli.serve import tokens

    tokens.remove_token(tokens.tokens_file(load_settings()), name)
    echo_json({"name": name, "outcome": "removed"}) if as_json else echo(f"{name}  removed")


def _show_code(url: str) -> None:
    """Print a QR code for a phone, where the package that makes it is installed."""
    with contextlib.suppress(ModuleNotFoundError):
        code = importlib.import_module("segno").make(url, error="l", micro=False)
        rows = [[*row] for row in code.matrix_iter(border=2)]
        for upper, lower in itertools.zip_longest(rows[::2], rows[1::2], fillvalue=[0] * len(rows[0])):
            # Light on dark terminals: a code is dark on light, so light modules are drawn.
            echo("".join(" ▄▀█"[2 * (not above) + (not below)] for above, below in zip(upper, lower, strict=True)))


def _check_worker(context: click.Context, options: Sequence[str]) -> None:
    """Raise InputError if PyTorch is not installed, or click's error for options that `svdq worker` does not take."""
    require_torch("a worker beside the server")
    root = context.find_root()
    # Through the table of commands: the server itself does not import the worker.
    worker = cast(click.Group, root.command).get_command(root, "worker")
    assert worker is not None
    worker.make_context("worker", [*options], parent=root)


@contextlib.contextmanager
def _worker_beside(settings: Settings, options: Sequence[str]) -> Iterator[None]:
    """Run a worker within a block, and say so if it ends before."""
    is_stopping = threading.Event()

    def watch() -> None:
        code = process.wait()
        if not is_stopping.is_set():
            echo(f"The worker has ended with exit code {code}: photos are accepted, and wait in the queue.", err=True)

    settings = settings.model_copy(update={"on_demand": settings.on_demand or BESIDE_A_PAGE})
    with worker_process(settings, options) as process:
        threading.Thread(target=watch, name="worker-beside", daemon=True).start()
        try:
            yield
        finally:
            is_stopping.set()
