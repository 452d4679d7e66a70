"""Model files with tiny Wan: frames of diffusers with the same LoRAs and scheduler, on any number of ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.model_name import with_presets
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.wan.denoiser import Schedule
from svdq.pipeline.models.wan.family import FAMILY, WanParameters
from tests.pipeline import ranks
from tests.pipeline.models.wan_files import save_lora

SIGMAS = [1.0, 0.75, 0.5, 0.25]
HIGH, LOW = frozenset({"transformer"}), frozenset({"transformer_2"})
VIDEO = WanParameters(prompt="A dog runs.", seed=1, frames=5, width=64, height=64)


def write_model_file(folder: Path, base: Path) -> Path:
    """A model file as people have them: a LoRA for each expert, four steps, and an Euler schedule."""
    for component in ("transformer", "transformer_2"):
        weights = load_file(next((base / component).glob("*.safetensors")))
        save_lora(folder / f"{component}.safetensors", weights, "comfyui", rank=3 if component == "transformer" else 4)
    (folder / "tiny-4step.toml").write_text(f"""
base = "{base}"
[[lora]]
file = "transformer.safetensors"
component = "transformer"
strength = 0.8
[[lora]]
file = "transformer_2.safetensors"
component = "transformer_2"
[defaults]
steps = 4
guidance_scale = 1.0
[scheduler]
class = "FlowMatchEulerDiscreteScheduler"
shift = 5.0
sigmas = {SIGMAS}
""")
    return folder / "tiny-4step.toml"


def with_diffusers(
    base: Path,
    folder: Path,
    image: Image.Image,
    video: WanParameters,
    strengths: tuple[float, float] = (0.8, 1.0),
) -> NDArray[Any]:
    """The frames of diffusers with the same LoRAs and scheduler."""
    import diffusers

    pipeline = diffusers.WanImageToVideoPipeline.from_pretrained(base)
    for component, strength in zip(("transformer", "transformer_2"), strengths, strict=True):
        file = str(folder / f"{component}.safetensors")
        pipeline.load_lora_weights(file, load_into_transformer_2=component == "transformer_2")
        pipeline.fuse_lora(components=[component], lora_scale=strength)
        pipeline.unload_lora_weights()
    pipeline.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0)
    set_timesteps = pipeline.scheduler.set_timesteps
    pipeline.scheduler.set_timesteps = lambda steps, device: set_timesteps(sigmas=SIGMAS, device=device)
    frames = pipeline(
        image=image,
        prompt=video.prompt,
        width=video.width,
        height=video.height,
        num_frames=video.frames,
        num_inference_steps=4,
        guidance_scale=1.0,
        generator=torch.Generator("cpu").manual_seed(video.seed),
        output_type="np",
    ).frames[0]
    return np.asarray((frames * 255).round(), dtype=np.uint8)


@pytest.mark.slow
def test_frames_are_those_of_diffusers_and_the_same_on_all_ranks(
    tiny_wan: Path, image: Image.Image, tmp_path: Path
) -> None:
    path = write_model_file(tmp_path, tiny_wan)
    model = resolve(str(path), dtype="fp32")
    assert model.name == "tiny-4step"
    videos = [
        FAMILY.complete(VIDEO.model_copy(update={"seed": seed, "steps": steps}), model.facts)
        for seed, steps in ((1, None), (2, 9))
    ]
    assert [video.steps for video in videos] == [4, 4]  # sigmas are for their number of steps
    plain = ranks.render(str(tiny_wan), image, videos, num_ranks=1)
    first = ranks.render(str(path), image, videos, num_ranks=1)
    for frames, video, unchanged in zip(first, videos, plain, strict=True):
        theirs = with_diffusers(tiny_wan, tmp_path, image, video)
        assert np.abs(frames.astype(int) - theirs).max() <= 1
        assert np.abs(frames.astype(int) - unchanged).max() > 10
    for components in ((None,) * 3, (HIGH, HIGH, LOW)):
        again = ranks.render(str(path), image, videos, num_ranks=len(components), components=components)
        for frames, expected in zip(again, first, strict=True):
            np.testing.assert_array_equal(frames, expected)


def test_the_fingerprint_is_that_of_the_content(tiny_wan: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = (write_model_file(tmp_path / name, tiny_wan) for name in ("a", "b"))
    renamed = two.rename(two.with_name("other.toml"))
    assert resolve(str(one), dtype="fp32").fingerprint == resolve(str(renamed), dtype="fp32").fingerprint
    for old, new in (
        ("0.8", "0.7"),
        ("0.25]", "0.2]"),
        ("shift = 5.0", "shift = 3.0"),
        ("0.25]", "0.25]\nswitch_at = 2"),
    ):
        changed = one.with_name("changed.toml")
        changed.write_text(one.read_text().replace(old, new))
        assert resolve(str(changed), dtype="fp32").fingerprint != resolve(str(one), dtype="fp32").fingerprint


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps = 4", "steps = 8", r"there are 4 sigmas for 8 steps; give as many"),
        ("steps = 4", "number = 4", r"has a default number, which this model has no parameter for\."),
        ("steps = 4", "step = 4", r"has a default step, which this model has no parameter for; did you mean steps\?"),
        (
            "guidance_scale = 1.0",
            "guidance_scale = -1",
            r"The default guidance_scale of the model file .* greater than or equal to 0",
        ),
        ("strength", "weight", r"lora\.0\.weight: is no key of a model file"),
        ('component = "transformer_2"', 'component = "vae"', r"the component 'vae'; the base .* has transformer and"),
        (
            "[defaults]",
            '[weights]\nunet = "a.gguf"\n[defaults]',
            r"the component 'unet'; the base .* has text_encoder and",
        ),
        (
            '"transformer.safetensors"',
            '"none.safetensors"',
            r"There is no file '.*/none.safetensors', which a model file",
        ),
        ('"transformer.safetensors"', '"lora.pt"', r"'lora.pt' .* must end in .safetensors"),
        (
            '"transformer.safetensors"',
            '"a/b:c.safetensors"',
            r"a/b:c.safetensors is not on this machine; fetch it with",
        ),
        ("FlowMatchEulerDiscreteScheduler", "DDIMScheduler", r"There is no scheduler 'DDIMScheduler'"),
        ("[1.0, 0.75", "[0.5, 0.75", r"sigmas must fall from step to step"),
        (f"sigmas = {SIGMAS}", 'sigmas = "karras"', r"there is no schedule 'karras'; it may be simple, normal"),
        (f"sigmas = {SIGMAS}", "sigmas = []", r"sigmas must name one noise level"),
        ("shift = 5.0", "boundary = 0.9\nswitch_at = 2", r"boundary and switch_at exclude each other"),
        ("base =", "base", r"is not valid TOML"),
        ("base = ", 'base = "." #', r"has no readable model_index.json; give a folder that diffusers"),
        ("base = ", 'base = "Wan-AI/Wan2.2-I2V-A14B" #', r"authors' own files; give Wan-AI/Wan2.2-I2V-A14B-Diffusers"),
        ('base = "', 'base = "/none', r"There is no folder '/none.*', the base of the model file"),
        ("base = ", 'base = "../none" #', r"base: '../none' is neither a folder, relative to the file, nor a hub id"),
        ("guidance_scale = 1.0", "seed = 1", r"has a default for seed, and each job has another"),
        ('"transformer.safetensors"', '"a--b/c:d.safetensors"', r"a--b/c:d.safetensors is not on this machine"),
        ("guidance_scale = 1.0", "frames = 8", r"The default frames of .* should be 1 more than a multiple of 4"),
    ],
)
def test_mistakes_are_sentences(tiny_wan: Path, tmp_path: Path, old: str, new: str, message: str) -> None:
    path = write_model_file(tmp_path, tiny_wan)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(InputError, match=message) as caught:
        resolve(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "is_swapped"),
    [
        (("wan2.2_i2v_low_noise_14B", "wan2.2_i2v_high_noise_14B"), True),
        (("Wan2.2-I2V-A14B-LowNoise-Q4_K_M", "Wan2.2-I2V-A14B-HighNoise-Q4_K_M"), True),
        (("4steps-lora_LOW_fp16", "4steps-lora_HIGH_fp16"), True),
        (("4steps-lora_HIGH_fp16", "4steps-lora_LOW_fp16"), False),
        (("lowres", "highlights"), False),
        (("one_low_noise", "one_low_noise"), False),  # of one file for both, a name says nothing
    ],
)
@pytest.mark.parametrize("is_lora", [False, True])
def test_swapped_files_of_two_experts_are_refused(
    tiny_wan: Path, tmp_path: Path, names: tuple[str, str], is_swapped: bool, is_lora: bool
) -> None:
    components = ("transformer", "transformer_2")
    for name in names:
        (tmp_path / f"{name}.safetensors").touch()
    entries = [
        f'[[lora]]\nfile = "{name}.safetensors"\ncomponent = "{component}"'
        if is_lora
        else f'weights.{component} = "{name}.safetensors"'
        for name, component in zip(names, components, strict=True)
    ]
    path = tmp_path / "mine.toml"
    path.write_text("\n".join([f'base = "{tiny_wan}"', *entries]))
    if not is_swapped:
        assert resolve(str(path)).name == "mine"
        return
    with pytest.raises(InputError, match="has the files of the two experts swapped, by their names: transformer is"):
        resolve(str(path))


def test_either_scheduler_takes_sigmas(tiny_wan: Path, tmp_path: Path) -> None:
    import diffusers

    path = write_model_file(tmp_path, tiny_wan)
    path.write_text(path.read_text().replace("FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler"))
    facts = resolve(str(path)).facts
    theirs: Any = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
    )
    theirs.set_timesteps(sigmas=np.array(SIGMAS))
    assert Schedule(4, 5.0, facts).timesteps.tolist() == theirs.timesteps.tolist()


def test_paths_are_relative_to_the_file(tiny_wan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model_file(tmp_path, tiny_wan)
    (tmp_path / "base").symlink_to(tiny_wan)
    path.write_text(path.read_text().replace(str(tiny_wan), "base"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model = resolve("../tiny-4step.toml")
    assert model.folder is not None
    assert all(
        file.is_absolute() and file.is_file() for file in (model.folder / "model_index.json", model.loras[0].file)
    )


def test_the_name_of_a_model_without_weights_is_refused(tiny_wan: Path, tmp_path: Path) -> None:
    path = write_model_file(tmp_path, tiny_wan)
    with pytest.raises(InputError, match=r"preview.toml' has the name of a model without weights; rename it"):
        resolve(str(path.rename(path.with_name("preview.toml"))))


def test_svd_has_no_other_scheduler(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "svd.toml"
    path.write_text(f'base = "{tiny_model}"\n[defaults]\nmotion_bucket_id = 60\n[scheduler]\nshift = 3.0\n')
    with pytest.raises(InputError, match="has a scheduler, which Stable Video Diffusion cannot change"):
        resolve(str(path))


def test_a_path_may_begin_with_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    assert with_presets("~/models/mine.toml") == "/somebody/models/mine.toml"
