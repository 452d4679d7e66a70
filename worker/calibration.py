"""`svdq model calibrate`: measures by which curve steps of a model can be skipped, and writes it into a model file."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.media.image import prepare_photo
from svdq.pipeline.models.families import family_named, titles_of
from svdq.pipeline.models.family import MeasuredCurve, imported
from svdq.pipeline.models.loader import dtype_for, open_model
from svdq.pipeline.models.model_file import read_model_file
from svdq.pipeline.models.model_name import is_model_file, model_stem
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.video_model import Role
from svdq.producer.files import write_file
from svdq.worker.bench.measure import headless_pyplot
from svdq.worker.device import choose_device


def calibrate(
    name: str,
    photo: Path,
    prompt: str,
    *,
    steps: int | None,
    shape: str | None,
    output: Path | None,
    plot_path: Path | None,
    announce: Callable[[str], object],
) -> tuple[Path, MeasuredCurve]:
    """Measure the curve of a model and write it; return the model file and the curve.

    Raises InputError if a model, a photo or a file cannot be used.
    """
    path = output or (Path(name) if is_model_file(name) else Path(f"{model_stem(name)}.toml"))
    before = _text_before(name, path)
    if plot_path is not None:
        headless_pyplot()
    device = choose_device("auto", 0)
    resolved = resolve(name, on_gpus=device.type == "cuda")
    family = family_named(resolved.family) if resolved.family else None
    if family is None or not family.calibrate:
        titles = titles_of(lambda each: each.calibrate)
        raise InputError(f"The model {name} is not one of {titles}, whose steps alone are skipped; name one that is.")
    if isinstance(resolved.facts.get("sigmas"), list):
        raise InputError(f"The model {name} has a distilled schedule, all of whose steps are needed; none is skipped.")
    video = family.parameters.of_shape(shape) if shape else family.parameters.model_validate({"seed": 0})
    completed = family.complete(video.model_copy(update={"prompt": prompt, "steps": steps}), resolved.facts)
    try:
        picture = prepare_photo(photo.read_bytes(), completed.width, completed.height)
    except OSError as error:
        raise InputError(f"The photo {str(photo)!r} cannot be read ({error.strerror}); give another.") from error
    role = Role(embed=True, encode=True, decode=True, in_rounds=True)
    model = open_model(resolved, role, device, dtype_for(resolved, device))
    measure: Callable[..., MeasuredCurve] = imported(family.calibrate)
    found = measure(model, picture, completed, lambda step: announce(f"Step {step} of {completed.steps}."))
    rows = "".join(f"{key} = {json.dumps(ratios)}\n" for key, ratios in found.table.items())
    write_file(path, [before, f"\n# Measured by svdq model calibrate: {found.about}.\n[step_cache]\n{rows}"])
    if plot_path is not None:
        _plot(plot_path, found.table, found.computed, completed.steps)
    return path, found


def _text_before(name: str, path: Path) -> str:
    """Return what the model file has besides the curve; raises InputError if it has one, or is another's."""
    if is_model_file(name):
        if read_model_file(Path(name)).step_cache is not None:
            raise InputError(f"The model file {name!r} has a step_cache; remove it to measure it again.")
        if not path.exists() or not path.samefile(name):
            raise InputError(f"The curve of the model file {name!r} is written into it; leave --output out.")
        return Path(name).read_text(encoding="utf-8")
    if path.exists():
        raise InputError(f"There is a file {str(path)!r}; name another with --output.")
    base = str(Path(name).expanduser().absolute()) if Path(name).expanduser().is_dir() else name
    return f"base = {json.dumps(base, ensure_ascii=False)}\n"


def _plot(path: Path, table: Mapping[str, Sequence[float]], computed: Mapping[float, int], num_steps: int) -> None:
    pyplot: Any = headless_pyplot()
    figure, (ratios, thresholds) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    start = 0
    for name, curve in table.items():
        ratios.plot(range(start, start + len(curve)), curve, marker=".", label=name)
        start += len(curve)
    ratios.set(xlabel="step", ylabel="magnitude of the residual, over the step before")
    ratios.legend()
    thresholds.plot(list(computed), list(computed.values()), marker="o")
    thresholds.set(xlabel="step_cache", ylabel=f"computed of {num_steps} steps", ylim=(0, None))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
