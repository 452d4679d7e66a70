"""Whether a model can be rendered with, looked at without torch and without the network."""

from collections.abc import Iterator
from pathlib import Path

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.folder_check import WEIGHTS, find_problems, variants
from svdq.pipeline.models.hub import find_folder
from svdq.pipeline.models.model_index import is_svd, is_untrained
from svdq.pipeline.models.simulated_timings import timings_of
from svdq.pipeline.models.size_text import size_text
from svdq.producer.doctor import Finding, failure

SUBJECT = "model"


def check_model(name: str) -> Iterator[Finding]:
    """Look at the model of a name as in SVDQ_MODEL; nothing is fetched.

    Args:
        name: `preview`, `simulated[:…]`, a folder or a hub id.
    """
    if name == "preview":
        yield Finding(subject=SUBJECT, level="ok", text="preview (no diffusion model); SVDQ_MODEL chooses another")
        return
    try:
        if is_svd(name):
            yield from _check_folder(find_folder(name), name)
        else:
            timings_of(name)
            yield Finding(subject=SUBJECT, level="ok", text=f"{name} (its compute is a sleep, it makes no pictures)")
    except InputError as error:
        yield failure(SUBJECT, error)


def _check_folder(folder: Path, name: str) -> Iterator[Finding]:
    problems = list(find_problems(folder, name))
    for problem in problems:
        yield Finding(subject=SUBJECT, level="fail", text=problem.text, advice=problem.advice)
    if problems:
        return
    found = {component: variants(folder, component) for component in WEIGHTS}
    if half_only := [component for component, kinds in found.items() if kinds == {True}]:
        yield Finding(
            subject=SUBJECT,
            level="warn",
            text=f"{name} has half precision weights only ({', '.join(half_only)})",
            advice="they do for GPUs; to render on a CPU, get the full ones too",
        )
    size = sum(path.stat().st_size for path in folder.glob("*/*.safetensors"))
    notice = ", untrained: shows noise" if is_untrained(folder) else ""
    yield Finding(
        subject=SUBJECT, level="ok", text=f"{name}, a whole StableVideoDiffusionPipeline, {size_text(size)}{notice}"
    )
