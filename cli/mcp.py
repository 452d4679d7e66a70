"""`svdq mcp`: the tools of agents, over stdio."""

import logging
import secrets
import signal
import sys

import click

from svdq.cli.formatting import echo
from svdq.cli.option_types import with_settings
from svdq.pipeline.errors import InputError, how_to_install
from svdq.producer.settings import Settings


@click.command()
@with_settings
def mcp(settings: Settings) -> None:
    """Serve agents by the Model Context Protocol, over stdin and stdout.

    The host of an agent starts this command. Its tools are submit, status, wait, cancel, estimate, fetch and plan,
    and may read photos and write videos wherever you may. At /mcp, `svdq serve` has those of the tools that
    use no files of its machine.

    \b
    Examples:
      svdq mcp
      svdq mcp --redis-url redis://gpu-host:6379/0
    """
    try:
        from starlette.requests import Request

        from svdq.cli.plan_tool import Plan
        from svdq.cli.serve.access import ServeOptions
        from svdq.cli.serve.agent_tools import LOCAL_TOOLS
        from svdq.cli.serve.app import make_app
        from svdq.cli.serve.mcp_endpoint import PATH
        from svdq.cli.serve.mcp_server import run_stdio
        from svdq.cli.serve.tokens import Tokens
    except ModuleNotFoundError as error:
        message = f"`svdq mcp` needs {error.name}, which is not installed; {how_to_install('mcp')}."
        raise InputError(message) from error

    if sys.stdin.isatty():
        echo("Waiting for an agent on stdin: its host starts this command (docs/mcp.md). Ctrl-C ends it.", err=True)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    # A read of stdin cannot be interrupted otherwise. A job is enqueued in one step and answered after that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    token = secrets.token_urlsafe()
    app = make_app(settings, ServeOptions(tokens=Tokens(token)), lambda: None)
    headers = [(b"authorization", f"Bearer {token}".encode())]
    scope = {"type": "http", "method": "POST", "path": PATH, "query_string": b"", "headers": headers, "app": app}
    local = Request(scope | {"server": ("localhost", None), "state": {"owner": ""}})
    run_stdio({**LOCAL_TOOLS, "plan": Plan}, local)
