"""Writes a prompt beside each photo that has none, whole, by a vision model with an OpenAI-compatible server."""

import asyncio
import base64
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svdq.pipeline.errors import InputError, SvdqError, UnavailableError, how_to_install, reason_of
from svdq.pipeline.models.families import PARAMETERS
from svdq.pipeline.models.names.model_names import family_of_model
from svdq.pipeline.video_parameters import MAX_PROMPT
from svdq.producer.files import check_target, create_file, sweep
from svdq.producer.results.poster import poster_of_picture
from svdq.producer.submitting.parameters import shorten
from svdq.producer.submitting.photos import read_photo
from svdq.producer.submitting.sources import prompt_path

if TYPE_CHECKING:
    from openai import AsyncOpenAI

INSTRUCTION = (
    "This photo is the first frame of a video of five seconds. Write the prompt for an image-to-video model: in one or "
    "two sentences of plain English in the present tense, say what moves and how (people, animals, water, leaves, "
    "smoke, light), and how the camera moves, if at all. Name only motion that suits the photo; nothing new appears. "
    "Answer with the prompt alone, at most 60 words."
)
#: The same for models that make sound with the video.
INSTRUCTION_WITH_SOUND = INSTRUCTION.replace(" Name only motion", " Then say what is heard. Name only motion and sound")
SIDE = 768  # longest side of the pictures that are sent, in pixels
MAX_REFUSED = 5  # photos in a row without a caption until the command gives up
_QUOTED = re.compile("""^["'“]([^"“”]*)["'”]$""")


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionModel:
    """A model of an OpenAI-compatible server, and how it is asked; raises InputError for a URL of another kind."""

    url: str
    name: str
    instruction: str
    parallel: int  # requests at a time
    timeout_s: float  # of each try of a request

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise InputError(f"--url {self.url} is not allowed: it must begin with http:// or https://.")


def instruction_for(model: str) -> str:
    """Return what a vision model is asked for the videos of a configured model."""
    family = family_of_model(model)
    has_sound = family is not None and "sound" in PARAMETERS[family].model_fields
    return INSTRUCTION_WITH_SOUND if has_sound else INSTRUCTION


def read_instruction(path: Path) -> str:
    """Read a file with an instruction; raises InputError."""
    try:
        text = path.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(f"The instruction {str(path)!r} cannot be read ({reason}); check its path.") from error
    if not text:
        raise InputError(f"The instruction {str(path)!r} is empty; write what the model is to do.")
    return text


class _PhotoError(InputError):
    """A photo cannot be read, or nothing can be written beside it."""


class _RefusedError(SvdqError):
    """The server gives no caption for this photo; it may for others."""


def without_prompt(photos: Iterable[Path]) -> list[Path]:
    """Return the photos that lack a prompt file, one for each such file; remove what killed commands have left."""
    lacking: dict[Path, Path] = {}
    for photo in photos:
        path = prompt_path(photo)
        if path is not None and not os.path.lexists(path):
            lacking.setdefault(path, photo)
    for folder in {path.parent for path in lacking}:
        sweep((folder / name for name in os.listdir(folder)), ".")
    return list(lacking.values())


def caption(
    photos: Sequence[Path], model: VisionModel, max_pixels: int, on_end: Callable[[Path, str | SvdqError], None]
) -> None:
    """Write a caption beside each photo; `on_end` receives it, or why this photo gets none.

    Raises InputError if the package openai is missing, or the server refuses the key or does not know the model, and
    UnavailableError if the server cannot be reached, is too slow, or gives no captions for several photos in a row.
    """
    try:
        from openai import AsyncOpenAI
    except ImportError as error:
        raise InputError(f"Captions need the package openai; {how_to_install('caption')}.") from error
    waiting, num_refused = iter(photos), 0

    async def work(client: "AsyncOpenAI") -> None:
        nonlocal num_refused
        for photo in waiting:
            try:
                text = await _caption(client, photo, model, max_pixels)
            except (_PhotoError, _RefusedError) as error:
                num_refused += isinstance(error, _RefusedError)
                if num_refused >= MAX_REFUSED:
                    raise UnavailableError(
                        f"There is no caption for {MAX_REFUSED} photos in a row; the last reason: {error}"
                    ) from error
                on_end(photo, error)
            else:
                num_refused = 0
                on_end(photo, text)

    async def work_together() -> None:
        key = os.environ.get("OPENAI_API_KEY") or "none"  # local servers need none, and the client insists on one
        async with AsyncOpenAI(base_url=model.url, api_key=key, timeout=model.timeout_s) as client:
            await asyncio.gather(*(work(client) for _ in range(model.parallel)))

    asyncio.run(work_together())


async def _caption(client: "AsyncOpenAI", photo: Path, model: VisionModel, max_pixels: int) -> str:
    path = prompt_path(photo)
    assert path is not None, "without_prompt leaves them out"
    try:
        check_target(path, ())
        picture = await asyncio.to_thread(lambda: poster_of_picture(read_photo(photo, max_pixels), SIDE, max_pixels))
    except InputError as error:
        raise _PhotoError(f"{photo}: {error}") from error
    text = await _ask(client, str(photo), picture, model)
    try:
        if not create_file(path, f"{text}\n"):
            raise InputError("There is a prompt beside it by now, which was left as it is.")
    except InputError as error:
        raise _PhotoError(f"{photo}: {error}") from error
    return text


async def _ask(client: "AsyncOpenAI", photo: str, picture: bytes, model: VisionModel) -> str:
    import openai

    image = {"url": f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}"}
    content: Any = [{"type": "text", "text": model.instruction}, {"type": "image_url", "image_url": image}]
    try:
        answer = await client.chat.completions.create(model=model.name, messages=[{"role": "user", "content": content}])
    except openai.APITimeoutError as error:
        raise UnavailableError(
            f"The server at {model.url} has not answered within {model.timeout_s:g} s, in {client.max_retries + 1} "
            "tries; raise --timeout, or lower --parallel."
        ) from error
    except openai.APIConnectionError as error:
        reason = reason_of(error.__cause__ if isinstance(error.__cause__, Exception) else error)
        raise UnavailableError(
            f"The server at {model.url} cannot be reached ({reason}); start it, or check --url."
        ) from error
    except openai.APIStatusError as error:
        reason = shorten(reason_of(error))
        if error.status_code in (401, 403):
            raise InputError(f"The server at {model.url} refuses the key ({reason}); set OPENAI_API_KEY.") from error
        if error.status_code == 404:
            raise InputError(
                f"The server at {model.url} has no model {model.name!r}, or no such address ({reason}); check "
                "--vision-model, and --url, which ends in /v1 for most servers."
            ) from error
        raise _RefusedError(f"{photo}: the server answers with an error ({reason}).") from error
    except ValueError as error:
        raise _RefusedError(f"{photo}: the server's answer is not JSON.") from error
    try:
        choice = answer.choices[0]
        text, is_cut = str(choice.message.content or ""), choice.finish_reason == "length"
    except (AttributeError, IndexError, TypeError) as error:
        raise _RefusedError(f"{photo}: the server's answer is no chat completion; check --url.") from error
    # Models that think may do so within their answer, and others add Markdown, a heading or quotation marks.
    text = " ".join(re.sub("[*`#]", "", text.rpartition("</think>")[2]).split())
    text = _QUOTED.sub(r"\1", re.sub("(?i)^prompt: *", "", "".join(filter(str.isprintable, text)))).strip()
    if is_cut or not text or len(text) > MAX_PROMPT:
        how = "empty" if not text else "cut short by its limit of tokens" if is_cut else "longer than a prompt may be"
        raise _RefusedError(f"{photo}: the model's answer is {how}.")
    return text
