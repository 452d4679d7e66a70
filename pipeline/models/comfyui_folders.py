"""The folders of a ComfyUI: where a file is that a node names, or where it belongs."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any

from svdq.pipeline.errors import InputError, how_to_install

#: The folders of denoisers, and of other kinds of files, the first being where new files belong.
_DENOISERS = ("diffusion_models", "unet", "unet_gguf", "checkpoints")
_KINDS: Mapping[str, tuple[str, ...]] = {
    "checkpoint": ("checkpoints", "diffusion_models", "unet", "unet_gguf"),
    "text_encoder": ("text_encoders", "clip", "clip_gguf"),
    "vae": ("vae", "checkpoints"),
    "audio_vae": ("vae", "checkpoints"),
    "vocoder": ("vae", "checkpoints"),
    "connectors": ("text_encoders", "clip", "checkpoints", "diffusion_models"),
    "latent_upsampler": ("latent_upscale_models", "upscale_models"),
    "upscaler": ("upscale_models",),
    "image_encoder": ("clip_vision",),
    "lora": ("loras",),
}
_MAX_EXTRA, _MAX_DEPTH = 100_000, 5  # letters of it, and levels; ComfyUI's has two
_IN_HOME = ("~/ComfyUI", "~/comfy/ComfyUI")  # the second is where comfy-cli installs it
EXTRA = "extra_model_paths.yaml"


@dataclass(frozen=True, kw_only=True)
class Folders:
    """The folders of one ComfyUI."""

    models: Path | None  # its models folder; None: there is no ComfyUI
    extra: Mapping[str, Sequence[Path]] = field(default_factory=dict)  # more folders, by name such as loras

    def candidates(self, kind: str, name: str) -> list[Path]:
        """Return the files that a node may mean: one, or several if that is ambiguous.

        Of files of that name in several subfolders, the one counts whose path ends in most parts of the name.
        """
        inside = _relative(name)
        there = self._of(kind)
        found = [file for folder in there for file in self._files_of(folder).get(inside.name, ())]
        for folder in there:
            if folder / inside in found:
                return [folder / inside]
        tails = [_num_equal(file.parts, inside.parts) for file in found]
        return [file for file, tail in zip(found, tails, strict=True) if tail == max(tails)]

    def find(self, name: str) -> Path | None:
        """Return a file by its name alone, of whatever kind; None if it is in no folder."""
        there = list(dict.fromkeys(each for kind in ("", *_KINDS) for each in self._of(kind)))
        found = next((folder / name for folder in there if (folder / name).is_file()), None)
        return found or next((files[name][0] for files in map(self._files_of, there) if name in files), None)

    def _files_of(self, folder: Path) -> Mapping[str, Sequence[Path]]:
        """Return all files below a folder by their names."""
        if folder not in self._listed:
            files: dict[str, list[Path]] = {}
            for place, _, names in os.walk(folder, followlinks=True):
                for name in names:
                    files.setdefault(name, []).append(Path(place, name))
            self._listed[folder] = files
        return self._listed[folder]

    @cached_property
    def _listed(self) -> dict[Path, Mapping[str, Sequence[Path]]]:
        return {}

    def place_for(self, kind: str, name: str) -> Path:
        """Return where a missing file belongs."""
        return (self.models or Path("ComfyUI/models")) / _KINDS.get(kind, _DENOISERS)[0] / _relative(name)

    def photo(self, name: str) -> Path | None:
        """Return a photo in ComfyUI's inputs, or in the folder that its name ends in; None if it is not there."""
        name, folder = split_photo(name)
        if self.models is None:
            return None
        found = self.models.parent / folder / _relative(name)
        try:
            return found if found.is_file() else None
        except OSError:  # a name that is too long
            return None

    def _of(self, kind: str) -> list[Path]:
        names = _KINDS.get(kind, _DENOISERS)
        own = [] if self.models is None else [self.models / name for name in names]
        return [*dict.fromkeys([*own, *(folder for name in names for folder in self.extra.get(name, ()))])]


def split_photo(name: str) -> tuple[str, str]:
    """Return the name of a photo and its folder, which ComfyUI writes after it: `cat.png [output]`, else `input`."""
    found = re.fullmatch(r"(.*?) ?\[(input|output|temp)\]", name, re.DOTALL)
    return (found[1], found[2]) if found else (name, "input")


def _num_equal(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many parts at the end of two paths are equal but for upper and lower case."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0].casefold() == pair[1].casefold(), pairs))


def _relative(name: str) -> PurePosixPath:
    """Return a node's name of a file as a path inside a folder; on Windows ComfyUI writes backslashes."""
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    return PurePosixPath(*parts or ["_"])


def find_folders(given: Path | None, file: Path, *, in_working_folder: bool = True) -> Folders:
    """Return the folders of the ComfyUI in a given folder, around a file, in the home, or in the working folder.

    May raise InputError.
    """
    if given is not None:
        if not given.is_dir():
            raise InputError(f"There is no folder {str(given)!r}; give ComfyUI's, or its models folder.")
        models: Path | None = given / "models" if (given / "models").is_dir() else given
    else:
        around = [*file.absolute().parents, *(Path(os.path.expanduser(each)) for each in _IN_HOME)]
        around += [Path("ComfyUI").absolute()] * in_working_folder
        found = (each / "models" for each in around)
        models = next((each for each in found if any((each / name).is_dir() for name in _DENOISERS[:2])), None)
    if models is None:
        return Folders(models=None)
    models = models.absolute()
    files = (each / EXTRA for each in (given or models, models.parent))
    extra = next((_read_extra(file) for file in files if file.is_file()), {})
    return Folders(models=models, extra=extra)


def _read_extra(file: Path) -> dict[str, list[Path]]:
    """Read extra_model_paths.yaml: sections, each with a base_path and folders by name, several on lines."""
    try:
        import yaml
    except ImportError as error:
        raise InputError(f"To read {file} needs the package PyYAML; {how_to_install('worker')}.") from error
    try:
        text = file.read_text(encoding="utf-8")
        if len(text) > _MAX_EXTRA:
            raise ValueError(f"it has more than {_MAX_EXTRA:,} letters")
        depth = 0
        for event in yaml.parse(text):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH or isinstance(event, yaml.AliasEvent):
                raise ValueError("it has aliases (*) or nested lists, which are not of ComfyUI")
        document: Any = yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InputError(f"{file} cannot be read ({str(error).splitlines()[0]}); correct it.") from error
    found: dict[str, list[Path]] = {}
    for section in document.values() if isinstance(document, dict) else ():
        if not isinstance(section, dict):
            continue
        base_path = section.get("base_path")
        base = file.parent / os.path.expandvars(os.path.expanduser(base_path if isinstance(base_path, str) else ""))
        for name, folders in section.items():
            if isinstance(folders, str) and name not in ("base_path", "is_default"):
                found.setdefault(name, []).extend(base / each.strip() for each in folders.splitlines() if each.strip())
    return found
