"""Finds files where ComfyUI has them: in its folders, and in those that extra_model_paths.yaml names."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from svdq.pipeline.errors import InputError, how_to_install

#: The folders of each kind of file, the first being where new files belong.
KINDS: Mapping[str, tuple[str, ...]] = {
    "checkpoint": ("checkpoints", "diffusion_models", "unet", "unet_gguf"),
    "transformer": ("diffusion_models", "unet", "unet_gguf", "checkpoints"),
    "transformer_2": ("diffusion_models", "unet", "unet_gguf", "checkpoints"),
    "text_encoder": ("text_encoders", "clip", "clip_gguf"),
    "vae": ("vae", "checkpoints"),
    "audio_vae": ("vae", "checkpoints"),
    "vocoder": ("vae", "checkpoints"),
    "connectors": ("text_encoders", "clip", "checkpoints", "diffusion_models"),
    "latent_upsampler": ("latent_upscale_models", "upscale_models"),
    "image_encoder": ("clip_vision",),
    "lora": ("loras",),
}
EXTRA = "extra_model_paths.yaml"
#: Bits of a weight by a part of a file's name, in its order; of GGUF with the factors of its blocks.
_BITS = (
    ("q8_0", 8.5), ("q6_k", 6.6), ("q5_", 5.6), ("q4_", 4.8), ("q3_", 3.9), ("q2_", 2.9),
    ("fp8", 8), ("e4m3", 8), ("e5m2", 8), ("int8", 8), ("fp32", 32),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Folders:
    """The folders of one ComfyUI."""

    models: Path | None  # its models folder; None: there is no ComfyUI
    extra: Mapping[str, Sequence[Path]] = field(default_factory=dict)  # more folders, by name such as loras

    def find(self, kind: str, name: str) -> Path | None:
        """Return the file that a node names, also where it has been moved to a subfolder; None if it is missing."""
        inside = _relative(name)
        there = [each for each in self._of(kind) if each.is_dir()]
        for folder in there:
            if (folder / inside).is_file():
                return folder / inside
        for folder in there:
            for place, _, files in os.walk(folder, followlinks=True):
                if inside.name in files:
                    return Path(place) / inside.name
        return None

    def place_for(self, kind: str, name: str) -> Path:
        """Return where a missing file belongs."""
        return (self.models or Path("ComfyUI/models")) / KINDS[kind][0] / _relative(name)

    def photo(self, name: str) -> Path | None:
        """Return a photo in ComfyUI's folder of inputs; None if it is not there."""
        found = None if self.models is None else self.models.parent / "input" / _relative(name)
        return found if found is not None and found.is_file() else None

    def _of(self, kind: str) -> list[Path]:
        own = [] if self.models is None else [self.models / name for name in KINDS[kind]]
        return [*own, *(folder for name in KINDS[kind] for folder in self.extra.get(name, ()))]


def _relative(name: str) -> PurePosixPath:
    """Return a node's name of a file as a path inside a folder; on Windows ComfyUI writes backslashes."""
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    return PurePosixPath(*parts or ["_"])


def find_folders(given: Path | None, workflow: Path) -> Folders:
    """Return the folders of the ComfyUI in a given folder, around a workflow, or in the home; may raise InputError."""
    if given is not None:
        if not given.is_dir():
            raise InputError(f"There is no folder {str(given)!r}; give ComfyUI's, or its models folder.")
        models: Path | None = given / "models" if (given / "models").is_dir() else given
    else:
        around = [*workflow.absolute().parents, Path.home() / "ComfyUI", Path("ComfyUI").absolute()]
        found = (each / "models" for each in around)
        models = next(
            (each for each in found if any((each / name).is_dir() for name in KINDS["transformer"][:2])), None
        )
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
        document: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{file} cannot be read ({str(error).splitlines()[0]}); correct it.") from error
    found: dict[str, list[Path]] = {}
    for section in document.values() if isinstance(document, dict) else ():
        if not isinstance(section, dict):
            continue
        base = file.parent / os.path.expandvars(os.path.expanduser(str(section.get("base_path") or "")))
        for name, folders in section.items():
            if isinstance(folders, str) and name not in ("base_path", "is_default"):
                found.setdefault(name, []).extend(base / each.strip() for each in folders.splitlines() if each.strip())
    return found


def about_bytes(name: str, num_weights: int) -> int:
    """Estimate the size of a file of so many weights by its name."""
    lowered = name.lower()
    bits = next((bits for part, bits in _BITS if re.search(rf"(^|[^a-z]){part}", lowered)), 16)
    return int(num_weights * bits / 8)
