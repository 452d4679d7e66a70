"""`svdq deploy`: install or remove the systemd units in cli/systemd."""

import importlib.util
import os
import pwd
import re
import shlex
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from svdq.cli.formatting import echo
from svdq.cli.option_types import GivenPath
from svdq.cli.units import (
    LINGER,
    NIGHT,
    SYSTEM_HOME,
    Scope,
    config_folder,
    install_files,
    installed_program,
    remove_units,
    systemctl,
    units_for,
)
from svdq.pipeline.errors import InputError, how_to_install


@click.group()
def deploy() -> None:
    """Install the units that an init system needs to run svdq on this machine."""


@deploy.command()
@click.option("--user", "scope", flag_value="user", help="For your own systemd; needs no further privileges.")
@click.option("--system", "scope", flag_value="system", help="For the machine's systemd, run as a separate user.")
@click.option("--install", is_flag=True, help="Install the files instead of printing them.")
@click.option("--remove", is_flag=True, help="Stop the units, and remove the files that --install has written.")
@click.option("--watch", "inbox", type=GivenPath(), help="Also watch this folder for photos.")
@click.option("--serve", is_flag=True, help="Also serve the web page and the API, on 127.0.0.1:8765.")
@click.option("--run-as", metavar="NAME", default="svdq", show_default=True, help="With --system: user to run as.")
@click.option("--force", is_flag=True, help="Overwrite, or remove, files that differ.")
@click.argument("worker_options", nargs=-1, type=click.UNPROCESSED)
def systemd(
    scope: Scope | None,
    install: bool,
    remove: bool,
    inbox: Path | None,
    serve: bool,
    run_as: str,
    force: bool,
    worker_options: tuple[str, ...],
) -> None:
    """Print, install or remove systemd units.

    There are units for Redis, a worker, a nightly timer, a watched folder, and the web page. They are the same
    everywhere. An environment file beside them has the paths of this installation and the
    settings from the environment and svdq.toml, except secrets. Arguments after `--` are options of `svdq worker`. The
    command neither enables nor starts a unit; it prints the commands that do. --remove stops and disables them, and
    keeps the queue, the videos, and files of your own.

    \b
    Examples:
      svdq deploy systemd --user                              print units for this user
      svdq deploy systemd --user --install --watch ~/inbox
      sudo /opt/svdq/bin/svdq deploy systemd --system --install
      svdq deploy systemd --system -- --warmup 1024x576x25    options of svdq worker
      svdq deploy systemd --user --remove
    """
    from svdq.cli.worker import worker
    from svdq.producer.settings import absolute

    if scope is None:
        raise click.UsageError("Give --user or --system.")
    if remove:
        if install or serve or inbox or worker_options:
            raise click.UsageError("--remove takes --user or --system and --force alone.")
        remove_units(scope, force=force)
        return
    if not re.fullmatch(r"[A-Za-z_][\w.-]*", run_as, re.ASCII):  # systemd takes an empty name for root
        raise InputError(f"--run-as {run_as!r} is not the name of a user, such as svdq.")
    root = click.get_current_context().find_root()
    worker.make_context("worker", list(worker_options), parent=root)  # raises for a wrong option
    is_system = scope == "system"
    inbox = None if inbox is None else absolute(inbox)
    if install and not is_system and inbox is not None and not inbox.is_dir():  # for the machine, a step makes it
        raise InputError(f"There is no folder {str(inbox)!r} to watch; make it first.")
    if install and serve and importlib.util.find_spec("uvicorn") is None:
        raise InputError(f"svdq serve needs packages that are not installed; {how_to_install('serve')}.")
    made = units_for(scope, inbox, run_as if is_system else None, worker_options, serve=serve)
    if not install:
        for path, text in made.contents.items():
            echo(f"# {path}", *text.splitlines(), "")
        return
    install_files(made.contents, force=force)
    config = config_folder(scope) / "svdq" / "environment"
    steps = [f"# write {', '.join(made.secrets)} into {config}, with mode 600"] if made.secrets else []
    steps += _system_steps(run_as, made.folders) if is_system else [f"{LINGER}   # keeps services after logout"]
    program = shlex.join(systemctl(scope))
    enable = " ".join([f"{program} enable --now", *made.services])
    steps += [
        f"{program} daemon-reload",
        f"{enable} svdq-worker.service   # renders day and night, or",
        f"{enable} {NIGHT}   # only at night",
    ]
    echo("", "Next:", *(f"  {step}" for step in steps))


def _system_steps(user: str, paths: Sequence[Path]) -> list[str]:
    """List what remains to do for the user, the program and the folders that systemd does not create."""
    home, steps = paths[0], []
    try:
        pwd.getpwnam(user)
    except KeyError:
        steps.append(f"useradd --system --home-dir {shlex.quote(str(home))} --shell /usr/sbin/nologin {user}")
    if (closed := _closed_folder(user)) is not None:
        steps.append(f"# {user} cannot enter {closed}: install svdq where it can, such as in /opt/svdq, first")
    missing = [path for path in paths if path != SYSTEM_HOME and not path.is_dir()]
    return steps + [f"install -d -o {user} {shlex.quote(str(path))}" for path in missing]


def _closed_folder(user: str) -> Path | None:
    """Return a folder above this svdq or its Python that, by its mode, a user cannot enter; None if there is none."""
    try:
        uid = pwd.getpwnam(user).pw_uid
        groups = os.getgrouplist(user, pwd.getpwnam(user).pw_gid)
    except KeyError:
        uid, groups = None, []
    for folder in (*installed_program().parents, *Path(sys.executable).resolve().parents):
        found = folder.stat()
        may = stat.S_IXUSR if found.st_uid == uid else stat.S_IXGRP if found.st_gid in groups else stat.S_IXOTH
        if not found.st_mode & may:
            return folder
    return None
