"""The sizes of a model by its name, as far as its files or its published numbers tell. Does not import torch."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.families import family_of
from svdq.pipeline.models.model_file import WEIGHTS_SUFFIXES, find_file, read_model_file, split_hub_file
from svdq.pipeline.models.model_name import is_model_file
from svdq.pipeline.models.names.model_names import find_folder, shipped_configs
from svdq.pipeline.models.needs import SizedModel, published, sizes_of
from svdq.pipeline.models.published_files import published_sizes, quantized_bits
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.models.weights.model_folder import DTYPES, check_folder

CONFIGS_BYTES = 35_000_000  # of a base whose weights are all replaced: configs, and a tokenizer of Gemma


def sized_model(name: str) -> SizedModel:
    """Return the sizes of a model by its name, as in SVDQ_MODEL; raises InputError if they are not known."""
    given = read_model_file(Path(name)) if is_model_file(name) else None
    base, replaced = (given.base, given.weights) if given else (name, {})
    model = published(base)
    try:
        found = _in_folder(find_folder(base), base, replaced)
        of_hub = model.num_weights if model else {}
        model = replace(
            found, num_weights={**of_hub, **found.num_weights}, published=model.published if model else None
        )
    except InputError:
        if model is None or (by_hub := model.published) is None:
            raise
        wanted = [each for each in by_hub.num_weights if each not in replaced]
        wanted_bytes = sum(by_hub.num_weights[each] * by_hub.stored[each] for each in wanted)
        wanted_bytes += 0 if given is None or shipped_configs(given) else CONFIGS_BYTES
        model = replace(model, download_bytes=wanted_bytes)
    here = {each: file for each, text in replaced.items() if (file := _file_here(text, Path(name))) is not None}
    layout, dtype = model.layout, model.dtype
    sizes = {each: sizes_of(layout.weights_files(here, each), layout, dtype, each) for each in here}
    in_int8 = {each: number for each, number in model.in_int8.items() if each not in replaced}
    model = replace(
        model,
        name=name,
        num_weights={**model.num_weights, **{each: found.number for each, found in sizes.items()}},
        in_int8=in_int8 | {each: found.in_int8 for each, found in sizes.items()},
    )
    if not layout.denoisers & model.num_weights.keys():
        raise InputError(f"How many weights the files of the model {name} have is not known before they are loaded.")
    if given is None:
        return model
    as_stored = {
        each: sizes[each].stored if each in sizes else _stored_by_name(text, model.num_weights.get(each, 0.0))
        for each, text in replaced.items()
    }
    as_stored = {each: number for each, number in as_stored.items() if number}
    named = dict.fromkeys([*replaced.values(), *(lora.file for lora in given.lora)])
    missing = [file for file in named if _file_here(file, Path(name)) is None]
    fetched = {file: _bytes_of(file, replaced, model.num_weights) for file in missing if split_hub_file(file)}
    return replace(
        model,
        download_bytes=model.download_bytes + sum(fetched.values()),
        unsized_files=sum(not num_bytes for num_bytes in fetched.values()),
        missing_files=len(missing) - len(fetched),
        facts=model.family.with_model_file(dict(model.facts), given, name),
        stored=as_stored,
        kept=bool(as_stored),
    )


def _in_folder(folder: Path, base: str, replaced: Collection[str]) -> SizedModel:
    """Return a model of a folder by the headers of its files; raises InputError if it is not complete."""
    family, layout = family_of(folder, base)
    check_folder(folder, base, layout, replaced=replaced)
    facts = dict(family.read_facts(folder, base))
    model = ResolvedModel(name=base, folder=folder, family=family.name, layout=layout.pipeline, facts=facts)
    return SizedModel.of(model, DTYPES[family.half])


def _file_here(file: str, model_file: Path) -> Path | None:
    try:
        return find_file(file, model_file, WEIGHTS_SUFFIXES)
    except InputError:
        return None


def _bytes_of(file: str, weights: Mapping[str, str], num_weights: Mapping[str, float]) -> int:
    """Return the bytes of a file of the hub that is not here, at least about; 0 if they are not known.

    `weights` are the files of a model file by component, and `num_weights` the numbers of weights of each.
    """
    if (size := published_sizes().get(file)) is not None:
        return size
    return int(sum(_stored_by_name(file, num_weights.get(each, 0.0)) for each in weights if weights[each] == file))


def _stored_by_name(file: str, num_weights: float) -> float:
    """Return the bytes of a file that is not here by the format in its name; 0 if that is not known."""
    return num_weights * (quantized_bits(file) or 0.0) / 8
