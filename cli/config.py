"""`svdq config`: show the effective settings."""

import json

import click

from svdq.cli.formatting import echo, table
from svdq.cli.main import redis_options, storage_option

EXAMPLES = """\b
Examples:
  svdq config
  svdq config --json
  SVDQ_MODEL=/models/svd-xt svdq config
"""


@click.command(epilog=EXAMPLES)
@click.option("--model", metavar="MODEL", help="Show the settings as with this option of `svdq worker`.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: a value and a source for each setting.")
@storage_option
@redis_options
def config(as_json: bool, **flags: str | None) -> None:
    """Show every setting with its value and source: a flag, a variable, a svdq.toml, or the default.

    Passwords in URLs are masked. The sources are listed in order of precedence; the svdq.toml of the working folder
    precedes that of the home.
    """
    from svdq.producer.settings import Settings, origins, without_secrets

    values = Settings.load(**flags).model_dump(mode="json")
    for name in ("redis_url", "storage"):
        if values[name] is not None:
            values[name] = without_secrets(values[name])
    sources = origins(**flags)
    if as_json:
        echo(json.dumps({name: {"value": value, "source": sources[name]} for name, value in values.items()}))
        return
    if values["redis_url"] is None:
        values["redis_url"] = "the embedded server"
    for line in table(
        [("setting", "value", "from")] + [(name, _words(values[name]), sources[name]) for name in values]
    ):
        echo(line)


def _words(value: object) -> str:
    if value is None or value == []:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
