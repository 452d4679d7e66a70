"""`svdq caption`: write a prompt beside each photo."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from svdq.cli.formatting import echo, echo_json
from svdq.cli.main import EXIT_FAILED
from svdq.cli.option_types import MANY, GivenPath, NumberRange, amount_options, json_option

if TYPE_CHECKING:
    from svdq.pipeline.errors import SvdqError


@click.command()
@click.argument("photos", metavar="PHOTO...", nargs=-1, required=True, shell_complete=click.Path().shell_complete)
@click.option("--recursive", is_flag=True, help="Include subfolders.")
@click.option(
    "--url",
    default="http://localhost:11434/v1",
    show_default=True,
    metavar="URL",
    help="Address of the server; OPENAI_API_KEY is its key, if it needs one.",
)
@click.option("--vision-model", "name", required=True, metavar="NAME", help="Model of that server; it must see images.")
@click.option(
    "--prompt-file",
    type=GivenPath(),
    metavar="FILE",
    help="Instruction to the model [default: say in one or two sentences what moves, and how].",
)
@click.option(
    "--parallel",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    metavar="N",
    help="Photos asked about at once.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=NumberRange(0, 86400, min_open=True),
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="Longest time for an answer; a request is tried three times.",
)
@amount_options("photos")
@json_option("photo")
def caption(
    *, photos: tuple[str, ...], recursive: bool, prompt_file: Path | None, verbose: bool, as_json: bool, **asked: Any
) -> int:
    """Write a prompt beside each photo, by a vision model.

    svdq asks a server with the API of OpenAI, such as Ollama, LM Studio or vLLM, what could move in each PHOTO. The
    server receives the photo as a small JPEG. The answer becomes photo.txt beside photo.jpg, which `svdq submit`
    reads as the prompt. PHOTO is a file, a folder or a pattern, as for `svdq submit`.

    A photo that has a .txt is left out, and nothing is ever overwritten. An interrupted command can be repeated: it
    continues with the photos that have none. A photo that gets no caption is named, and the exit code is then 1.

    \b
    Examples:
      svdq caption holiday/ --vision-model qwen2.5vl
      svdq caption holiday/ --recursive --url http://gpu-box:8000/v1 --vision-model Qwen/Qwen3-VL-8B-Instruct
      svdq caption 'holiday/*.jpg' --vision-model gemma3 --prompt-file instruction.txt --parallel 1
    """
    from svdq.cli.submissions import Bar, print_reasons
    from svdq.pipeline.errors import InputError
    from svdq.producer.captions import VisionModel, instruction_for, read_instruction, without_prompt
    from svdq.producer.captions import caption as write_captions
    from svdq.producer.settings_loader import load_settings
    from svdq.producer.storage.storage import Storage
    from svdq.producer.submitting.sources import find_photos

    settings = load_settings()
    instruction = read_instruction(prompt_file) if prompt_file else instruction_for(settings.model)
    model = VisionModel(instruction=instruction, **asked)
    stdin, folder = sys.stdin.buffer if sys.stdin else None, Storage.open_for_command(settings.storage).folder
    found = [each.path for each in find_photos(photos, recursive=recursive, stdin=stdin, storage=folder).photos]
    if gone := next((path for path in found if not os.path.lexists(path)), None):
        raise InputError(f"There is no file {str(gone)!r}; check its path.")
    lacking = without_prompt(found)
    has_lines = not as_json and (verbose or len(lacking) < MANY)
    num_written = 0
    bar = Bar(is_drawn=sys.stderr.isatty() and not (has_lines and sys.stdout.isatty()))

    def on_end(photo: Path, outcome: "str | SvdqError") -> None:
        nonlocal num_written
        bar.advance()
        if as_json:
            echo_json({"photo": str(photo), ("prompt" if isinstance(outcome, str) else "error"): str(outcome)})
        if not isinstance(outcome, str):
            bar.leave_out(str(outcome))
            return
        num_written += 1
        if has_lines:
            echo(f"{photo}: {outcome}")

    try:
        bar.begin("captioning", len(lacking))
        write_captions(lacking, model, settings.max_pixels, on_end)
    finally:
        bar.close()
        print_reasons(bar.reasons)
        there, missing = len(found) - len(lacking), len(lacking) - num_written
        echo(f"Captions written: {num_written:,}; there already: {there:,}; still missing: {missing:,}.", err=as_json)
    return EXIT_FAILED if bar.reasons else 0
