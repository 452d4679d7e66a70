"""LoRAs that videos choose have the bits of LoRAs in a model file, in whatever order the steps of videos are done."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from svdq.pipeline.errors import SampleError
from svdq.pipeline.models import lora_folder
from svdq.pipeline.models.compute.options import ComputeOptions
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.lora_folder import LoraFolder, digest_of
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.wan.family import WanParameters
from svdq.pipeline.models.weights import job_loras
from svdq.pipeline.video_parameters import LoraChoice
from tests.pipeline.models.wan_files import save_lora, write_model_file

CPU = torch.device("cpu")
ALL = Role(embed=True, encode=True, decode=True)
EXPERTS = {"high": "transformer", "low": "transformer_2"}
SETS = ("", "high=style_high,low=style_low:0.7", "both:-0.5", "high=style_high:0.3 both edges:2", "low=style_low edges")


def save_loras(folder: Path, base: Path) -> None:
    """Files for one expert and for both, of the layers in blocks and, in `edges`, of the others."""
    weights = load_file(next((base / "transformer").glob("*.safetensors")))
    save_lora(folder / "style_high.safetensors", weights, "comfyui", rank=3)
    save_lora(folder / "style_low.safetensors", weights, "comfyui", rank=5)
    save_lora(folder / "both.safetensors", weights, "peft", rank=6)
    generator, edges = torch.Generator().manual_seed(1), {}
    for module in ("patch_embedding", "condition_embedder.text_embedder.linear_1", "proj_out"):
        rows, *columns = weights[f"{module}.weight"].shape
        place = f"transformer.{module}"
        edges[f"{place}.lora_A.weight"] = torch.randn(2, *columns, generator=generator) * 0.2
        edges[f"{place}.lora_B.weight"] = torch.randn(rows, 2, *(1 for _ in columns[1:]), generator=generator) * 0.2
    save_file(edges, folder / "edges.safetensors")


def choices(text: str, folder: Path) -> tuple[LoraChoice, ...]:
    found = [choice for word in text.split() for choice in LoraChoice.parse(word)]
    return tuple(each.model_copy(update={"digest": digest_of(folder / f"{each.name}.safetensors")}) for each in found)


def with_set(model_file: Path, loras: tuple[LoraChoice, ...], folder: Path) -> Path:
    """A model file with LoRAs of a folder after its own."""
    text = model_file.read_text()
    for each in loras:
        for component in [EXPERTS[each.expert]] if each.expert else EXPERTS.values():
            text += f'[[lora]]\nfile = "{folder / each.name}.safetensors"\ncomponent = "{component}"\n'
            text += f"strength = {each.strength}\n"
    file = model_file.with_name("with_set.toml")
    file.write_text(text)
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lora", "dtype", "native"),
    [
        ("none", False, torch.float32, ()),
        pytest.param("none", True, torch.bfloat16, (), marks=pytest.mark.long),
        ("scaled.safetensors", True, torch.float32, ()),
        pytest.param("fp8.safetensors", True, torch.bfloat16, (), marks=pytest.mark.long),
        pytest.param("scaled.safetensors", False, torch.bfloat16, (), marks=pytest.mark.long),
        ("Q4_K.gguf", True, torch.bfloat16, ()),
        ("convrot.safetensors", True, torch.bfloat16, ("int8",)),
        pytest.param("scaled.safetensors", True, torch.bfloat16, ("fp8",), marks=pytest.mark.long),
    ],
)
def test_each_video_has_the_bits_of_its_set_in_a_model_file(
    wide_wan, tmp_path, photo, name, lora, dtype, native
) -> None:
    file = write_model_file(tmp_path, wide_wan, name, lora=lora)
    save_loras(tmp_path, wide_wan)
    options = ComputeOptions(weights="stored", native=native)
    ours = open_model(resolve(str(file)), ALL, CPU, dtype, options, LoraFolder(tmp_path))
    before = {key: value.clone() for key, value in ours.pipeline.transformer.state_dict().items()}
    video = WanParameters(prompt="A dog.", seed=3, frames=5, steps=4, width=64, height=64)
    videos = [ours.complete(video.model_copy(update={"loras": choices(text, tmp_path)})) for text in SETS]
    states = [ours.encode(photo, each) for each in videos]
    denoisers = [ours.denoiser(state, each) for state, each in zip(states, videos, strict=True)]
    for index in range(4):
        for number in (range(len(SETS)), reversed(range(len(SETS))))[index % 2]:
            states[number] = {**states[number], **denoisers[number].step(states[number], index)}
    for each, state in zip(videos, states, strict=True):
        of_file = options if native else ComputeOptions(weights="made")
        theirs = open_model(resolve(str(with_set(file, each.loras, tmp_path))), ALL, CPU, dtype, of_file)
        alone = each.model_copy(update={"loras": ()})
        expected = theirs.encode(photo, alone)
        denoiser = theirs.denoiser(expected, alone)
        for index in range(4):
            expected = {**expected, **denoiser.step(expected, index)}
        assert torch.equal(state["latents"], expected["latents"]), each.loras
    assert len({state["latents"].sum().item() for state in states}) == len(SETS)
    ours.broken_weights()  # looks at the weights of the model
    for key, value in ours.pipeline.transformer.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_tensors_of_loras_are_dropped_beyond_a_bound(tiny_wan, tmp_path, photo, monkeypatch) -> None:
    save_loras(tmp_path, tiny_wan)
    model = open_model(resolve(str(tiny_wan)), ALL, CPU, torch.float32, loras=LoraFolder(tmp_path))
    video = WanParameters(prompt="A dog.", seed=3, frames=5, steps=2, width=64, height=64)

    def latents(text: str) -> torch.Tensor:
        asked = model.complete(video.model_copy(update={"loras": choices(text, tmp_path)}))
        state = model.encode(photo, asked)
        latents: torch.Tensor = model.denoiser(state, asked).step(state, 0)["latents"]
        return latents

    first = latents("both"), latents("edges")
    assert len(model._loras._tensors) == 2
    monkeypatch.setattr(lora_folder, "KEPT_BYTES", 0)
    assert torch.equal(latents("both"), first[0])
    assert len(model._loras._tensors) == 1
    assert torch.equal(latents("edges"), first[1])


def test_a_video_after_one_whose_loras_found_no_memory_has_none(tiny_wan, tmp_path, photo, monkeypatch) -> None:
    save_loras(tmp_path, tiny_wan)
    model = open_model(resolve(str(tiny_wan)), ALL, CPU, torch.float32, loras=LoraFolder(tmp_path))
    plain = model.complete(WanParameters(prompt="A dog.", seed=3, frames=5, steps=2, width=64, height=64))
    state = model.encode(photo, plain)
    expected = model.denoiser(state, plain).step(state, 0)["latents"]
    chosen = model.complete(plain.model_copy(update={"loras": choices("both edges", tmp_path)}))

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(job_loras.JobLoras, "_replace", fail)  # after the layers of the blocks
        with pytest.raises(torch.OutOfMemoryError):
            model.denoiser(state, chosen).step(state, 0)
    assert torch.equal(model.denoiser(state, plain).step(state, 0)["latents"], expected)
    assert not torch.equal(model.denoiser(state, chosen).step(state, 0)["latents"], expected)


def test_a_lora_of_another_model_is_refused_with_numbers(tiny_wan, tiny_model, tmp_path) -> None:
    save_loras(tmp_path, tiny_wan)
    svd = open_model(resolve(str(tiny_model)), ALL, CPU, torch.float32, loras=LoraFolder(tmp_path))
    of_svd = SvdParameters(seed=3, width=64, height=64, loras=choices("both", tmp_path))
    with pytest.raises(SampleError, match=r"None of the \d+ keys of the LoRA both.safetensors .* of the unet"):
        svd.complete(of_svd)
    with pytest.raises(
        SampleError, match=r"style_high is for the high-noise expert of two, which the model .* has not"
    ):
        svd.complete(of_svd.model_copy(update={"loras": choices("high=style_high", tmp_path)}))
    weights = load_file(next((tiny_wan / "transformer").glob("*.safetensors")))
    wider = {name: torch.zeros(each.shape[0] * 2, *each.shape[1:]) for name, each in weights.items() if each.ndim == 2}
    save_lora(tmp_path / "wider.safetensors", wider, "peft")
    wan = open_model(resolve(str(tiny_wan)), ALL, CPU, torch.float32, loras=LoraFolder(tmp_path))
    video = WanParameters(seed=3, loras=choices("wider", tmp_path))
    with pytest.raises(SampleError, match=r"wider.safetensors is of another model: \d+ of its \d+ keys match"):
        wan.complete(video)
    missing = video.loras[0].model_copy(update={"digest": "0" * 16})
    with pytest.raises(SampleError, match=r"The LoRA wider is not in the folder SVDQ_LORAS of this worker"):
        wan.complete(video.model_copy(update={"loras": (missing,)}))


def test_a_file_for_one_expert_changes_that_alone(tiny_wan, tmp_path) -> None:
    save_loras(tmp_path, tiny_wan)
    both = load_file(tmp_path / "both.safetensors")
    of_low = {key.replace("transformer.", "transformer_2."): value for key, value in both.items()}
    save_file(of_low, tmp_path / "low_alone.safetensors")
    model = open_model(resolve(str(tiny_wan)), ALL, CPU, torch.float32, loras=LoraFolder(tmp_path))
    [choice] = choices("low_alone", tmp_path)
    assert [*model._loras._changing(choice)] == ["transformer_2"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("style", [("style", 1.0, None)]),
        ("anime/style.safetensors:0.8", [("anime/style", 0.8, None)]),
        ("high=A,low=B:0.8", [("A", 0.8, "high"), ("B", 0.8, "low")]),
        ("high=A:1.2, low=B:0.8", [("A", 1.2, "high"), ("B", 0.8, "low")]),
        ("low=B, C:-0.5", [("B, C", -0.5, "low")]),
        ("a:b", [("a:b", 1.0, None)]),
    ],
)
def test_a_choice_is_read_as_it_is_written(text: str, parts: list[tuple[str, float, str | None]]) -> None:
    found = LoraChoice.parse(text)
    assert [(each.name, each.strength, each.expert) for each in found] == parts
    assert LoraChoice.parse(",".join(map(str, found))) == found


def test_a_folder_of_loras_knows_its_files_by_name_and_content(tmp_path: Path) -> None:
    (tmp_path / "anime").mkdir()
    (tmp_path / ".trash").mkdir()
    for name, content in {"a": b"1", "anime/b": b"2", ".trash/c": b"3"}.items():
        (tmp_path / f"{name}.safetensors").write_bytes(content)
    (tmp_path / "notes.txt").write_text("none")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nothing")
    folder = LoraFolder(tmp_path)
    digests = folder.digests()
    assert [*digests] == ["a", "anime/b"]
    assert folder.find(digests["anime/b"]) == tmp_path / "anime" / "b.safetensors"
    (tmp_path / "a.safetensors").write_bytes(b"another")
    assert folder.find(digests["a"]) is None
    assert folder.digests()["a"] not in digests.values()
    assert LoraFolder(None).digests() == {}
