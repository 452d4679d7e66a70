"""Which models fit which GPUs: what docs/gpus.md says, by the published sizes and step times."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from svdq.cli.main import cli
from svdq.cli.worker import divide
from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute.memory import size_text
from svdq.pipeline.models.compute.options import DEFAULTS
from svdq.pipeline.models.model_name import PRESETS
from svdq.pipeline.models.names.sized_model import sized_model
from svdq.producer.text import duration
from svdq.worker.cards import GENERATIONS, Cards
from svdq.worker.config import RankConfig
from svdq.worker.fit import NUM_VIDEOS, least_need, to_fetch, ways
from svdq.worker.launcher.launcher import LaunchOptions

ROOT = Path(__file__).parents[2]
FOUR_STEPS = PRESETS["wan2.2-4step-bf16"]
A14B, TI2V = "Wan-AI/Wan2.2-I2V-A14B-Diffusers", "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
SVD = "stabilityai/stable-video-diffusion-img2vid-xt"
LTX = "diffusers/LTX-2.3-Distilled-Diffusers"
#: What the page says of each model: its name there, that of the model, and the shape.
MODELS = (
    ("Wan 2.2 A14B, 832x480, 4 steps", FOUR_STEPS, None),
    ("Wan 2.2 A14B, 832x480, 40 steps", A14B, None),
    ("Wan 2.2 A14B, 1280x720, 4 steps", FOUR_STEPS, "1280x720x81"),
    ("Wan 2.2 TI2V-5B, 1280x704, 50 steps", TI2V, None),
    ("SVD-XT, 1024x576, 25 steps", SVD, None),
    ("LTX-2.3, 768x512, 8 and 3 steps", LTX, None),
    ("LTX-2.3, 1280x704, 8 and 3 steps", LTX, "1280x704x121"),
)
GPUS = ("1x16", "1x24", "2x24", "1x48", "1x80", "7x24")


@pytest.mark.parametrize(("gpus", "auto"), [("1x80", "rounds"), ("2x80", "bound"), ("7x80", "bound")])
def test_a_worker_waits_for_as_much_memory_as_its_plan_needs(gpus: str, auto: str) -> None:
    """By auto it takes the way that needs least, where another program leaves less than all of the model needs."""
    cards, known = Cards.parse(gpus), sized_model(FOUR_STEPS)
    assert cards is not None
    found = ways(known, known.video(), cards, 1, None)
    needs = {each.command.rpartition(" ")[2]: each.need_bytes for each in found if not each.approximate}
    reserved = cards.total_bytes - cards.room_bytes
    for experts, chosen in {"auto": auto, "resident": "resident", auto: auto}.items():
        assert least_need(FOUR_STEPS, DEFAULTS, experts, cards.number) == needs[chosen] + reserved
    assert least_need("preview", DEFAULTS, "auto", 1) == 0


@pytest.mark.parametrize(
    ("gpus", "model", "options", "why"),
    [
        ("2x24", A14B, {"approximate": ("int8",)}, "about 19% faster than `--ranks 2 --experts bound`"),
        ("2x40", A14B, {}, "about 19% faster"),
        ("2x40", A14B, {"dtype": "fp32"}, ""),  # an expert does not fit
        ("2x40", A14B, {"approximate": ("int8",)}, "about 19% faster than `--ranks 2 --experts bound`"),
        ("2x40", FOUR_STEPS, {"approximate": ("int8",)}, "about 5% faster"),  # two steps of each expert
        ("2x24", A14B, {}, ""),  # an expert does not fit
        ("2x80", A14B, {"approximate": ("int8",)}, ""),  # both fit
        ("3x24", A14B, {"approximate": ("int8",)}, ""),
        ("2x24", A14B, {"approximate": ("int8",), "experts": "bound"}, ""),
        ("2x24", SVD, {}, ""),
        ("2x24", "simulated", {}, ""),
    ],
)
def test_two_gpus_without_room_for_both_experts_get_rounds_of_their_own(gpus, model, options, why, capsys) -> None:
    asked = LaunchOptions(rank=RankConfig(**options))
    found = divide(asked, model, Cards.parse(gpus))
    assert (found.ranks, found.groups) == ((1, 2) if why else (None, 1))
    said = capsys.readouterr().err
    assert why in said
    assert bool(said) == bool(why)
    given = LaunchOptions(ranks=2, rank=RankConfig(**options))
    assert divide(given, model, Cards.parse(gpus)) == given


@pytest.mark.parametrize(("limit_gb", "why"), [(42, "about 19%"), (15, "the only way that fits"), (12, ""), (90, "")])
def test_a_limit_counts_in_place_of_what_two_gpus_have(limit_gb: int, why: str, capsys) -> None:
    """Streamed blocks let both experts fit 19 GB, and one 16 GB."""
    offload = "off" if limit_gb > 20 else "blocks"
    cards = Cards(number=2, total_bytes=24 * 2**30, limit_bytes=limit_gb * 10**9)
    found = divide(LaunchOptions(rank=RankConfig(offload=offload)), A14B, cards)
    assert found.groups == (2 if why else 1)
    assert why in capsys.readouterr().err


def row(gpus: str, title: str, name: str, shape: str | None) -> str:
    """Return the line about a model in the section about some GPUs: the first way that fits."""
    cards, known = Cards.parse(gpus), sized_model(name)
    assert cards is not None
    step = cards.step_of(known.published)
    found = ways(known, known.video(shape), cards, NUM_VIDEOS, step.step_s if step else None)
    way = next((way for way in found if way.fits), None)
    if way is None:
        return f"| {title} | **no** | |"
    time = duration(way.time_s) if way.time_s is not None else "no published time"
    return f"| {title} | `{way.command}`{', in parts' * way.in_parts} | {time} |"


@pytest.mark.parametrize("gpus", GPUS)
def test_the_page_about_gpus_says_what_svdq_plan_says(home: Path, gpus: str) -> None:
    page = (ROOT / "docs/gpus.md").read_text(encoding="utf-8")
    section = page.partition(f"\n`--gpus {gpus}`")[2].partition("\n## ")[0]
    rows = [row(gpus, *model) for model in MODELS]
    assert all(each in section for each in rows), "\n" + "\n".join(rows)


def test_the_page_about_gpus_has_the_times_of_steps_that_plans_are_made_of() -> None:
    page = (ROOT / "docs/gpus.md").read_text(encoding="utf-8")
    published = [sized_model(name).published for name in (A14B, TI2V, SVD)]
    steps = [step for each in published if each is not None for step in each.steps]
    for step in steps:
        row = rf"^\| {step.gpu} \| .* \| {step.step_s:g} s \| {re.escape(step.source)}"
        assert re.search(row, page, re.MULTILINE), row
    assert len(steps) == 5


def test_the_example_of_the_page_is_what_svdq_plan_prints(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/gpus.md").read_text(encoding="utf-8")
    command, output = page.partition("```console\n$ svdq ")[2].partition("```")[0].split("\n", 1)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**12))
    result = CliRunner().invoke(cli, command.split(), catch_exceptions=False)
    assert [line.rstrip() for line in result.stdout.splitlines()] == output.splitlines()


def test_a_folder_is_known_by_the_headers_of_its_files(tiny_wan: Path, tmp_path: Path) -> None:
    """Also as the base of a model file, whose other files may be missing."""
    known = sized_model(str(tiny_wan))
    assert to_fetch(known) == ""
    assert known.has_experts
    stored = sum(path.stat().st_size for path in tiny_wan.glob("transformer/*.safetensors"))
    assert known.num_weights["transformer"] == pytest.approx(stored / 4, rel=0.1)
    model_file = tmp_path / "mine.toml"
    model_file.write_text(f'base = "{tiny_wan}"\n[[lora]]\nfile = "no.safetensors"\ncomponent = "transformer"\n')
    changed = sized_model(str(model_file))
    assert to_fetch(changed) == "1 file that the model file names missing"
    assert replace(changed, name=known.name, missing_files=0) == known


def test_files_that_a_model_file_names_count_once_by_what_is_known_of_their_sizes(tmp_path: Path) -> None:
    """Of files of the hub the bytes, as far as their names say them; paths that are not there are missing."""
    whole, audio = "someone/ltx:whole-fp8.safetensors", "audio.safetensors"
    (tmp_path / "mine.toml").write_text(
        f'base = "{LTX}"\n[weights]\ntransformer = "{whole}"\nconnectors = "{whole}"\n'
        f'audio_vae = "{audio}"\nvocoder = "{audio}"\nvae = "someone/ltx:some-vae.safetensors"\n'
        '[[lora]]\nfile = "someone/ltx:style.safetensors"\ncomponent = "transformer"\n'
    )
    known, base = sized_model(str(tmp_path / "mine.toml")), sized_model(LTX)
    wanted = ("text_encoder", "latent_upsampler")
    of_base = sum(base.num_weights[each] * 2 for each in wanted)
    of_files = base.num_weights["transformer"] + base.num_weights["connectors"]
    assert known.download_bytes == pytest.approx(of_base + of_files, rel=0.01)
    assert (known.unsized_files, known.missing_files) == (2, 1)
    assert to_fetch(known) == (
        f"{size_text(known.download_bytes)} and 2 files of unknown size to fetch; "
        "1 file that the model file names missing"
    )


def test_the_defaults_of_a_model_file_count_for_its_usual_video(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f'base = "{SVD}"\n[defaults]\nsteps = 6\nwidth = 512\n')
    known = sized_model(str(tmp_path / "mine.toml"))
    videos = [known.video(), known.video("256x128x5")]
    assert [(each.width, each.height, each.frames, each.steps) for each in videos] == [
        (512, 576, 25, 6),
        (256, 128, 5, 6),
    ]


def test_weights_that_nothing_is_known_of_are_said_to_be_so(tiny_wan: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_wan, tmp_path / "wan", ignore=shutil.ignore_patterns("*.safetensors"))
    for component in ("vae", "text_encoder"):
        shutil.copytree(tiny_wan / component, folder / component, dirs_exist_ok=True)
    model_file = tmp_path / "mine.toml"
    model_file.write_text(f'base = "{folder}"\n[weights]\ntransformer = "a.gguf"\ntransformer_2 = "b.gguf"\n')
    with pytest.raises(InputError, match="is not known before they are loaded"):
        sized_model(str(model_file))


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        ("fp8_scaled.safetensors", 8),
        ("int8_convrot.safetensors", 8),
        ("nvfp4.safetensors", 4.5),
        ("Q4_K_M.gguf", 4.8),
        ("Q8_0.gguf", 8.5),
    ],
)
def test_a_file_that_is_not_here_is_known_by_the_format_in_its_name(tmp_path: Path, kind: str, bits: float) -> None:
    files = "".join(f'{name} = "owner/files:{name}-{kind}"\n' for name in ("transformer", "transformer_2"))
    (tmp_path / "mine.toml").write_text(f'base = "{A14B}"\n[weights]\n{files}')
    known, base = sized_model(str(tmp_path / "mine.toml")), sized_model(A14B)
    assert known.weights("transformer") == pytest.approx(base.num_weights["transformer"] * bits / 8, rel=1e-6)
    small, large = (ways(known, known.video(), Cards.parse(cards), 1, None)[0] for cards in ("1x24", "1x80"))
    assert small.need_bytes < large.need_bytes, "weights are made where there is room"
    assert large.fits


def stored_file(folder: Path, kind: str, text: str) -> str:
    files = "".join(f'{name} = "owner/files:{name}-{kind}"\n' for name in ("transformer", "transformer_2"))
    path = folder / "mine.toml"
    path.write_text(f'base = "{A14B}"\n[weights]\n{files}text_encoder = "owner/files:{text}"\n')
    return str(path)


@pytest.mark.parametrize(
    ("gpus", "title"),
    [("1x8", "8 GB"), ("1x12", "12 GB"), ("1x16", "16 GB"), ("1x24", "24 GB"), ("7x24", "seven of 24 GB")],
)
def test_the_page_says_what_int8_fp8_and_gguf_files_need(home: Path, tmp_path: Path, gpus: str, title: str) -> None:
    cells = []
    for kind, text in (
        ("int8_convrot.safetensors", "umt5_fp8.safetensors"),
        ("Q4_K_M.gguf", "umt5-Q8_0.gguf"),
        ("", ""),
    ):
        known = sized_model(stored_file(tmp_path, kind, text) if kind else PRESETS["ltx-2.5-distilled"])
        way = next((each for each in ways(known, known.video(), Cards.parse(gpus), 1, None) if each.fits), None)
        cells.append("**no**")
        if way is not None:
            cells[-1] = f"`{way.command}`{', in parts' * way.in_parts}: {size_text(way.need_bytes)}"
    row = f"| {title} | {' | '.join(cells)} |"
    assert row in (ROOT / "docs/gpus.md").read_text(encoding="utf-8"), row


def test_the_page_says_which_files_are_for_which_cards() -> None:
    page = (ROOT / "docs/gpus.md").read_text(encoding="utf-8")
    for each in GENERATIONS:
        row = f"| {each.title} | {each.files} | {'; '.join(map(str, each.gains)) or 'none published'} |"
        assert row in page, row


@pytest.mark.parametrize(
    ("card", "says"),
    [
        ("3060", "Files of the transformer to take: int8 (int8 is 2.0 times as fast as bf16 on RTX 3060"),
        ("4090", "Files of the transformer to take: int8 (int8 is 1.76 times as fast as bf16 on RTX 4070 Ti SUPER"),
        ("a5000", "Files of the transformer to take: int8 (int8 is 1.0 times as fast as bf16 on RTX A6000"),
        ("t4", "Files of the transformer to take: int8."),
        ("5090", "Files of the transformer to take: fp8 or nvfp4."),
        ("h100", "Files of the transformer to take: bf16."),
        ("1x24", "Files of the transformer to take: int8 for RTX 20 to 40, fp8 or nvfp4 for RTX 50, bf16 for H100."),
    ],
)
def test_the_files_to_take_follow_from_the_card(home: Path, tmp_path: Path, card: str, says: str) -> None:
    model = stored_file(tmp_path, "int8_convrot.safetensors", "umt5_fp8.safetensors")
    said = CliRunner().invoke(cli, ["plan", "--model", model, "--gpus", card], catch_exceptions=False).stdout
    assert says in said
    said = CliRunner().invoke(cli, ["plan", "--model", SVD, "--gpus", card], catch_exceptions=False).stdout
    assert "Files of" not in said


def test_the_page_says_what_small_gpus_can_do(home: Path, tmp_path: Path) -> None:
    fp8 = stored_file(tmp_path, "fp8_scaled.safetensors", "umt5_fp8.safetensors")
    for title, model, shape in (
        ("SVD-XT, 576x320, 14 frames", SVD, "576x320x14"),
        ("SVD-XT, 1024x576, 14 frames", SVD, "1024x576x14"),
        ("Wan 2.2 A14B in fp8, 640x352, 81 frames", fp8, "640x352x81"),
        ("Wan 2.2 A14B in fp8, 832x480, 81 frames", fp8, "832x480x81"),
    ):
        cells = [row(gpus, title, model, shape).split(" | ")[1].rstrip("| ") for gpus in ("1x8", "1x12")]
        expected = f"| {title} | {' | '.join(cells)} |"
        assert expected in (ROOT / "docs/gpus.md").read_text(encoding="utf-8"), expected


def test_what_does_not_fit_is_told_of_smaller_files(home: Path) -> None:
    for model, words in ((A14B, "fp8 or GGUF, the text encoder's too"), (SVD, "choose a smaller --shape, or GPUs")):
        said = CliRunner().invoke(cli, ["plan", "--model", model, "--gpus", "1x8"], catch_exceptions=False).stdout
        assert words in said.splitlines()[-1]
