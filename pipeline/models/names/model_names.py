"""From the name of a model to its folder and all that is known of it. Never uses the network.

A name is `preview`, `simulated` with its costs, a folder, a hub id whose files are in the hub's cache, or a model file.
Does not import torch.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from svdq.pipeline.command_line import svdq_command
from svdq.pipeline.errors import InputError, first_error
from svdq.pipeline.models.families import FAMILIES, family_named, family_of, layout_of
from svdq.pipeline.models.family import FolderLayout
from svdq.pipeline.models.known_model import KnownModel
from svdq.pipeline.models.lora_folder import add_samples
from svdq.pipeline.models.model_file import (
    CONFIGS,
    HUB_ID,
    LORA_SUFFIXES,
    WEIGHTS_SUFFIXES,
    ModelFile,
    find_file,
    read_model_file,
)
from svdq.pipeline.models.model_name import FORMERLY, PRESETS, has_weights, is_model_file, preset_or_path
from svdq.pipeline.models.resolved_model import LoraFile, ResolvedModel, Timings
from svdq.pipeline.models.weights.model_folder import (
    DTYPES,
    INDEX,
    WEIGHTS,
    check_folder,
    class_in,
    formats_in,
    has_tokenizer,
    loaded_files,
    pipeline_of,
    read_index,
    read_json,
)

#: What names of files say about the expert that they are for, such as HighNoise, high_noise or HIGH.
_EXPERT = re.compile(r"(?<![a-z])(high|low)(?:[ _-]?noise)?(?![a-z])", re.IGNORECASE)


def timings_of(name: str) -> Timings:
    """Parse `simulated` or `simulated:step_ms=50,decode_ms=100`; raises InputError if a setting is not valid."""
    items = [item.partition("=") for item in filter(None, name.partition(":")[2].split(","))]
    try:
        return Timings.model_validate({key: value for key, _, value in items})
    except ValidationError as error:
        raise InputError(
            f"The model {name!r} cannot be simulated ({first_error(error)['msg']}); write it like "
            f"simulated:step_ms=50,decode_ms=100 with any of {', '.join(Timings.model_fields)}."
        ) from error


def find_folder(name: str) -> Path:
    """Return the folder of a model on this machine; never fetches one. Raises InputError if it is not here."""
    try:
        folder = Path(name).expanduser()
        if name and folder.is_dir():
            return folder
        exists = folder.exists()
    except (OSError, RuntimeError) as error:  # no permission, a name that is too long, an unknown user's home
        raise InputError(f"The model folder {name!r} cannot be read ({error}); give another.") from error
    if name.endswith(WEIGHTS_SUFFIXES):
        raise InputError(
            f"{name!r} is the name of one weights file; write a model file (.toml) with a base, and this file under "
            "[weights], as docs/models.md shows."
        )
    if exists or not HUB_ID.fullmatch(name):
        raise InputError(
            f"There is no model folder {name!r}; give a diffusers folder, a model file (.toml), a hub id such as "
            "stabilityai/stable-video-diffusion-img2vid-xt, or a name that `svdq model list` shows."
        )
    found = _cached(name)
    if found is None:
        raise InputError(
            f"The model {name} is not on this machine; fetch it with `{svdq_command('model pull', name)}`."
        )
    return found


def find_base(given: ModelFile, path: Path) -> Path:
    """Return the folder of a model file's base; svdq's configs do where no weights of it are needed and it is not here.

    Raises InputError as `find_folder`.
    """
    try:
        return find_folder(given.base)
    except InputError as error:
        if not HUB_ID.fullmatch(given.base):
            raise InputError(
                f"There is no folder {given.base!r}, the base of the model file {str(path)!r}; correct its path."
            ) from error
        if (shipped := configs_of(given, path)) is not None:
            return shipped
        split_id(given.base)
        name = preset_or_path(path)
        raise InputError(
            f"The model {given.base} is not on this machine, and the model file {name!r} needs some of it; fetch that "
            f"with `{svdq_command('model pull', name)}`."
        ) from error


def configs_of(given: ModelFile, path: Path) -> Path | None:
    """Return svdq's configs of a base if a model file needs no more of it: weights and tokenizer are all in files."""
    folder = shipped_configs(given)
    if folder is None:
        return None
    return folder if has_tokenizer(find_file(given.weights["text_encoder"], path, WEIGHTS_SUFFIXES)) else None


def shipped_configs(given: ModelFile) -> Path | None:
    """Return svdq's configs of a base all of whose weights a model file replaces; None if it has none, or not all."""
    folder = CONFIGS / given.base
    if not (folder / INDEX).is_file():
        return None
    _, layout = family_of(folder, given.base)
    index = read_json(folder, INDEX, given.base)
    is_whole = all(each in given.weights for each in layout.weighted if class_in(index, each) is not None)
    return folder if is_whole else None


def _cached(name: str) -> Path | None:
    repository, revision = split_id(name)
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(repository, INDEX, revision=revision)
    except (ImportError, ValueError):  # the hub allows fewer names than HUB_ID
        return None
    return Path(found).parent if isinstance(found, str) else None


def split_id(name: str) -> tuple[str, str | None]:
    """Split a hub id into `organisation/model` and the revision after an @.

    Raises InputError if it is none, or if the repository has the authors' files in place of diffusers'.
    """
    if name.count("@") > 1:
        raise InputError(f"{name!r} names two revisions; give one after an @.")
    if not HUB_ID.fullmatch(name):
        raise InputError(
            f"{name!r} is not a hub id; write it as organisation/model, or organisation/model@revision, such as "
            "stabilityai/stable-video-diffusion-img2vid-xt."
        )
    repository, _, revision = name.partition("@")
    if (converted := _converted(repository)) is not None:
        raise InputError(f"The model {name} has the authors' own files; give {converted}.")
    return repository, revision or None


def _converted(repository: str) -> str | None:
    """Return the published repository with diffusers' files of a model whose authors' own one is given, if it is one.

    Its name begins alike, goes on with a dash, and ends in "Diffusers" or "diffusers".
    """
    owner, _, model = repository.partition("/")
    published = [PurePosixPath(each) for family in FAMILIES for each in family.models]
    own = f"{model}-".lower()
    alike = [each for each in published if re.match(rf"{re.escape(own)}(.*-)?diffusers$", each.name.lower())]
    return str(min(alike)) if owner in {each.parts[0] for each in published} and alike else None


def resolve(name: str, *, on_gpus: bool | None = None, dtype: str = "auto") -> ResolvedModel:
    """Find a model on this machine, and check it as far as is possible without torch.

    For ranks on GPUs half precision weights do; if `on_gpus` is None and the `dtype` of `ComputeOptions` is auto, all
    weights in the folder are checked, and there is no fingerprint. Raises InputError if the model does not
    exist here, is not complete, or is none that svdq runs.
    """
    if name == "preview":
        return ResolvedModel(name=name)
    if not has_weights(name):
        return ResolvedModel(name=name, timings=timings_of(name))
    try:
        return _resolve(name, on_gpus, dtype)
    except InputError as error:
        if former := what_it_was(name):
            raise InputError(f"{error} {former}") from error
        raise


def what_it_was(name: str) -> str:
    """Say in a sentence which preset is what another one was, if its files are on this machine; else "".

    They show that the name was used, and that jobs may wait for what it meant.
    """
    former = FORMERLY.get(Path(name).stem)
    if former is None or PRESETS[Path(name).stem] != name:
        return ""
    try:
        path = Path(PRESETS[former])
        given = read_model_file(path)
        find_base(given, path)
        for lora in given.lora:
            find_file(lora.file, path, LORA_SUFFIXES)
    except InputError:
        return ""
    return f"What {Path(name).stem} was before is the preset {former} now, whose files are on this machine, too."


def _resolve(name: str, on_gpus: bool | None, dtype: str) -> ResolvedModel:
    given = read_model_file(Path(name)) if is_model_file(name) else None
    folder = find_folder(name) if given is None else find_base(given, Path(name))
    family, layout = family_of(folder, name)
    torch_dtype = DTYPES.get(dtype)
    if torch_dtype is None and on_gpus is not None:
        torch_dtype = DTYPES[family.half] if on_gpus else "float32"
    check_folder(folder, name, layout, torch_dtype, replaced=given.weights if given else ())
    model = ResolvedModel(
        name=name,
        folder=folder.absolute(),
        family=family.name,
        layout=layout.pipeline,
        facts=dict(family.read_facts(folder, name)),
    )
    if given is not None:
        model = _changed(model, given, Path(name))
    formats = formats_in(_files_of_denoisers(model, layout, torch_dtype or DTYPES[family.half]))
    model = model.model_copy(update={"formats": tuple(sorted(formats))})
    if torch_dtype is not None:
        model = model.model_copy(update={"fingerprint": _fingerprint(_files_of(model, layout, torch_dtype), given)})
    return model


def _changed(model: ResolvedModel, given: ModelFile, path: Path) -> ResolvedModel:
    """Return the model of a model file, from the model of its base."""
    assert model.folder is not None
    assert model.family is not None
    if not has_weights(path.stem):
        raise InputError(f"The model file {str(path)!r} has the name of a model without weights; rename it.")
    family, layout = family_named(model.family), layout_of(model)
    index = read_index(model.folder, model.name, layout)
    denoisers = [each for each in layout.denoisers if class_in(index, each) is not None]
    weighted = [each for each in layout.weighted if class_in(index, each) is not None]
    named = [
        *((each, weighted) for each in given.weights),
        *((each.component, denoisers) for each in given.lora),
    ]
    for component, allowed in named:
        if component not in allowed:
            raise InputError(
                f"The model file {str(path)!r} names the component {component!r}; the base {given.base} has "
                f"{' and '.join(sorted(allowed))}."
            )
    _check_experts([*given.weights.items()], family.experts, path)
    _check_experts([(lora.component, lora.file) for lora in given.lora], family.experts, path)
    return model.model_copy(
        update={
            "name": path.stem,
            "base": given.base,
            "facts": family.with_model_file(dict(model.facts), given, str(path)),
            "weights": {
                component: find_file(name, path, WEIGHTS_SUFFIXES) for component, name in given.weights.items()
            },
            "loras": tuple(
                LoraFile(
                    file=find_file(lora.file, path, LORA_SUFFIXES), component=lora.component, strength=lora.strength
                )
                for lora in given.lora
            ),
        }
    )


def _check_experts(files: Sequence[tuple[str, str]], experts: Mapping[str, str], path: Path) -> None:
    """Raise InputError if the names of files for two components say that each is for the other expert."""
    said = {
        expert: {half.lower() for name, file in files if name == component for half in _EXPERT.findall(Path(file).stem)}
        for expert, component in experts.items()
    }
    if said == {"high": {"low"}, "low": {"high"}}:
        raise InputError(
            f"The model file {str(path)!r} has the files of the two experts swapped, by their names: {experts['high']} "
            f"is the high-noise expert, and {experts['low']} the low-noise one."
        )


def _files_of_denoisers(model: ResolvedModel, layout: FolderLayout, dtype: str) -> Iterator[Path]:
    assert model.folder is not None
    for each in layout.denoisers:
        if each in model.weights:
            yield model.weights[each]
        else:
            yield from loaded_files(model.folder, each, WEIGHTS[layout.dtype_of(each, dtype)])


def _files_of(model: ResolvedModel, layout: FolderLayout, dtype: str) -> dict[str, Path]:
    """Return the files that decide the weights, by what they are."""
    folder = model.folder
    assert folder is not None
    weights = [
        file
        for each in layout.weighted
        if each not in model.weights
        for file in loaded_files(folder, each, WEIGHTS[layout.dtype_of(each, dtype)])
    ]
    files = [folder / INDEX, *sorted(folder.glob("*/*config.json")), *weights]
    return (
        {str(file.relative_to(folder)): file for file in files}
        | {f"{component} from a file": file for component, file in model.weights.items()}
        | {f"LoRA {place} {lora.component} {lora.strength}": lora.file for place, lora in enumerate(model.loras)}
    )


def _fingerprint(files: Mapping[str, Path], given: ModelFile | None) -> str:
    """Return a hash of the names, sizes and samples of files, which is the same on all machines."""
    digest = hashlib.sha256()
    if given is not None:
        digest.update(given.scheduler.model_dump_json().encode())
        if given.step_cache is not None:
            digest.update(given.step_cache.model_dump_json().encode())
    for name, file in files.items():
        if file.is_file():  # opening a pipe would block
            digest.update(f"{name} ".encode())
            add_samples(digest, file)
    return digest.hexdigest()[:16]


def known_model(name: str) -> KnownModel | None:
    """Return what is known of a model by its name; None if its family is not.

    The facts of its files count, else the published model's of its hub id, else, with `is_assumed`, its family's.
    """
    if (family_name := family_of_model(name)) is None:
        return None
    family = family_named(family_name)
    try:
        given = read_model_file(Path(name)) if is_model_file(name) else None
        base = given.base if given else name
        try:
            facts = family.read_facts(find_folder(base), base)
        except InputError:
            facts = family.models[base.partition("@")[0]].facts
        facts = family.with_model_file(dict(facts), given, name) if given else facts
        return KnownModel(name=name, family=family, facts=facts)
    except (InputError, KeyError):
        return KnownModel(name=name, family=family, facts=family.published, is_assumed=True)


def check_name(name: str) -> None:
    """Raise an InputError for the path of a folder or model file that is not there, or as `split_id`."""
    is_path = name.startswith(("/", "~", "./", "../")) or is_model_file(name)
    if is_path and not os.path.exists(os.path.expanduser(name)):
        raise InputError(f"There is no model at {name!r}; check the path in SVDQ_MODEL.")
    if HUB_ID.fullmatch(name):
        split_id(name)


def family_of_model(name: str) -> str | None:
    """Return the family of a model by its name; None if that is not known on this machine.

    Reads only the model_index.json of a folder, or of a hub id in the cache; without one, the published name counts.
    `preview` and `simulated` render videos of all families.
    """
    if not has_weights(name):
        return None
    try:
        if is_model_file(name):
            return family_of_model(read_model_file(Path(name)).base)
        pipeline = pipeline_of(find_folder(name), name)
    except InputError:
        published = PurePosixPath(name).name.lower()
        return next((family.name for family in FAMILIES if published.startswith(family.published_as)), None)
    return next((family.name for family in FAMILIES if pipeline in family.layouts), None)
