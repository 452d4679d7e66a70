"""`svdq model`: models for machines without weights."""

from pathlib import Path

import click


@click.group()
def model() -> None:
    """Make models for trying things out."""


EXAMPLES = """\b
Examples:
  svdq model tiny /tmp/tiny
  svdq worker --model /tmp/tiny --burst
"""


@model.command(epilog=EXAMPLES)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
def tiny(folder: Path) -> None:
    """Write an untrained model into DIR: the real classes, under 15 MB, the same bits every time.

    It shows noise. Tests and comparisons with diffusers run on it.
    """
    # Imported on demand: the help texts must not wait for torch.
    from svdq.pipeline.models.tiny import write_tiny_model

    write_tiny_model(folder)
    click.echo(f"{folder}: tiny (untrained: shows noise). Use it with SVDQ_MODEL={folder}")
