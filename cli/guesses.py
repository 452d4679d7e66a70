"""Commands and options that people guess, with what does the same here."""

import click

#: By commands that other programs have.
COMMANDS = {
    **dict.fromkeys(("ls", "jobs"), "`svdq list`"),
    **dict.fromkeys(("ps", "queue", "show", "info"), "`svdq status`"),
    **dict.fromkeys(("rm", "delete", "remove", "kill"), "`svdq cancel` for jobs, `svdq prune` for old videos"),
    "stop": "`svdq cancel` for jobs, `svdq pause` for the queue, Ctrl-C for a worker",
    **dict.fromkeys(("run", "start", "render"), "`svdq worker`"),
    **dict.fromkeys(("add", "create", "generate"), "`svdq submit`"),
    **dict.fromkeys(("log", "tail"), "`svdq logs`"),
    **dict.fromkeys(("web", "ui", "server"), "`svdq serve`"),
    **dict.fromkeys(("get", "download"), "`svdq fetch`"),
    **dict.fromkeys(("clean", "purge"), "`svdq prune`"),
    **dict.fromkeys(("pull", "models"), "`svdq model pull`"),
    "help": "`svdq --help`",
    "version": "`svdq --version`",
}
_LENGTH = "--frames and --fps set the length"
_FOLDER = "--output sets the folder in the storage, `svdq fetch` copies from there"
#: By options that other programs have, for each command.
OPTIONS = {
    "worker": {
        **dict.fromkeys(
            ("--gpus", "--gpu", "--num-gpus", "--devices", "--workers"),
            "--ranks sets how many GPUs it uses, and CUDA_VISIBLE_DEVICES which",
        ),
        **dict.fromkeys(("--daemon", "--detach", "-d"), "`svdq deploy systemd` runs it as a service"),
    },
    "submit": {
        "--dry-run": "all photos are checked before any is queued, and `svdq cancel` takes jobs back",
        **dict.fromkeys(("--width", "--height", "--resolution"), "--size 1024x576 sets the size"),
        **dict.fromkeys(("--duration", "--seconds", "--length"), _LENGTH),
        **dict.fromkeys(("--count", "--num", "-n"), "--variations makes several videos of a photo"),
        **dict.fromkeys(("-o", "--out", "--output-dir"), _FOLDER),
        "--model": "`svdq worker --model` or SVDQ_MODEL sets the model",
    },
}


def answer(error: click.ClickException) -> str | None:
    """Return the sentence for a usual guess; None for any other error."""
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return None
    # Releases of click before 8.4 do not tell the command.
    command = getattr(error, "command_name", None)
    if error.ctx.parent is None and command in COMMANDS:
        return f"No such command {command!r}; use {COMMANDS[command]}."
    hints = OPTIONS.get(error.ctx.info_name or "", {})
    if isinstance(error, click.NoSuchOption) and error.option_name in hints:
        return f"No such option {error.option_name!r}: {hints[error.option_name]}."
    return None
