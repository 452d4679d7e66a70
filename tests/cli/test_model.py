"""`svdq model pull` against a hub on this machine, and what doctor and worker make of what it fetched."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import redis
from PIL import Image
from safetensors.numpy import load_file, save_file

from svdq.cli.main import run
from svdq.pipeline.errors import InputError
from svdq.pipeline.models.model_name import PRESETS
from svdq.pipeline.models.names.model_names import resolve
from svdq.producer.queue import fetch, read_job
from svdq.producer.settings import Settings
from tests.conftest import Cli
from tests.hub import COMMIT, Hub, know, running

NAME = "someone/some-model"
UNET = "unet/diffusion_pytorch_model.safetensors"
HALF_UNET = "unet/diffusion_pytorch_model.fp16.safetensors"


LORA = {"A": (2, 8, 3, 3), "B": (32, 2, 1, 1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """An untrained model as it would lie on the hub, with much that svdq does not read."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    shutil.copytree(tiny_model, folder)
    for component in ("unet", "vae", "image_encoder"):
        for file in (folder / component).glob("*.safetensors"):
            halves = {name: tensor.astype(np.float16) for name, tensor in load_file(file).items()}
            save_file(halves, file.with_suffix(".fp16.safetensors"))
    (folder / "all_in_one.safetensors").write_bytes(b"much")
    factors = {f"unet.conv_in.lora_{part}.weight": np.ones(shape, np.float32) for part, shape in LORA.items()}
    save_file(factors, folder / "lora.safetensors")
    (folder / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "LICENSE.md").write_text("to be read")
    return folder


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub, which is all that the client knows, and an empty cache."""
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))]:
        monkeypatch.delenv(name)
    with running(NAME, folder) as hub:
        # For processes that are started.
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        know(monkeypatch, tmp_path / "hf" / "hub", hub.url)
        yield hub


@dataclass(frozen=True)
class Done:
    """How a command has ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def sentence(self) -> str:
        """The last line, which says what went wrong."""
        line = self.stderr.splitlines()[-1]
        assert line.startswith("Error: ")
        return line


Pull = Callable[..., Done]


@pytest.fixture
def pull(hub: Hub, capfd: pytest.CaptureFixture[str]) -> Pull:
    """Run `svdq model pull` in this process."""

    def pull(*arguments: str) -> Done:
        capfd.readouterr()
        exit_code = run(["model", "pull", *arguments])
        return Done(exit_code, *capfd.readouterr())

    return pull


def place(tmp_path: Path) -> Path:
    """The model's folder in the cache."""
    return tmp_path / "hf" / "hub" / "models--someone--some-model" / "snapshots" / COMMIT


def fetched(tmp_path: Path) -> set[str]:
    """The files that the cache has of the model."""
    return {path.relative_to(place(tmp_path)).as_posix() for path in place(tmp_path).rglob("*") if path.is_file()}


def test_a_model_is_fetched_and_used(
    pull: Pull, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], home: Path
) -> None:
    assert run(["worker", "--model", NAME, "--ranks", "1"]) == 2
    sentence = f"Error: The model {NAME} is not on this machine; fetch it with `svdq model pull {NAME}`.\n"
    assert capfd.readouterr().err == sentence
    assert hub.given == [], "seven ranks must not begin to fetch"

    done = pull(NAME)
    assert done.exit_code == 0, done.stderr
    assert f"SVDQ_MODEL={NAME}" in done.stdout
    assert str(place(tmp_path)) in done.stdout
    files = fetched(tmp_path)
    assert {"model_index.json", "LICENSE.md", UNET, "unet/config.json", "scheduler/scheduler_config.json"} <= files
    assert not {name for name in files if ".fp16" in name or name.endswith(".bin") or name.startswith("all_in_one")}

    know(monkeypatch, tmp_path / "hf" / "hub")  # from now on nobody needs the hub
    assert run(["doctor", "--model", NAME]) == 0, capfd.readouterr().out


def test_the_other_weights_and_another_revision(pull: Pull, hub: Hub, tmp_path: Path) -> None:
    done = pull(f"{NAME}@v9")
    assert (done.exit_code, f"has no revision 'v9'; see {hub.url}/{NAME}" in done.sentence) == (2, True)
    name = f"{NAME}@{COMMIT}"
    done = pull(f"{NAME}@{COMMIT}", "--variant", "fp16")
    assert f"SVDQ_MODEL={name}" in done.stdout, done.stderr
    assert HALF_UNET in fetched(tmp_path)
    assert UNET not in fetched(tmp_path)
    resolve(name, on_gpus=True)
    # Seen before any rank starts: processors need the full weights.
    with pytest.raises(InputError, match=r"half precision weights only.* `--variant full`"):
        resolve(name, on_gpus=False)
    with pytest.raises(InputError, match="not on this machine"):
        resolve(NAME)
    given = len(hub.given)
    assert pull(name).exit_code == 0
    assert sorted(hub.given[given:]) == sorted(
        file for file in fetched(tmp_path) if file.endswith(".safetensors") and ".fp16" not in file
    )
    resolve(name, on_gpus=False)


def test_of_two_sets_of_parts_the_one_in_the_index_is_fetched(
    tiny_model: Path, hub: Hub, pull: Pull, tmp_path: Path
) -> None:
    """As in Lightricks/LTX-2.5-Diffusers, which has a transformer in four and in eight parts, and connectors whole."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    stem = "unet/diffusion_pytorch_model"
    weights = load_file(folder / UNET)
    for total in (2, 4):
        for number in range(1, total + 1):
            names = sorted(weights)[number - 1 :: total]
            save_file(
                {name: weights[name] for name in names}, folder / f"{stem}-0000{number}-of-0000{total}.safetensors"
            )
    parts = [f"diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    shards = {name: parts[place % 2] for place, name in enumerate(sorted(weights))}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    hub.folder = folder
    done = pull(NAME)
    assert done.exit_code == 0, done.stderr
    of_unet = {name for name in fetched(tmp_path) if name.startswith("unet/") and name.endswith(".safetensors")}
    assert of_unet == {f"unet/{part}" for part in parts}
    resolve(NAME, on_gpus=False)


@pytest.mark.parametrize(
    ("refusal", "token", "words"),
    [
        ((401, "GatedRepo"), "", "without a token (401): accept its license at"),
        ((403, ""), "hf_wrong", "with your token (403): accept its license at"),
    ],
)
def test_a_licence_that_is_not_accepted(
    pull: Pull,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: tuple[int, str],
    token: str,
    words: str,
) -> None:
    hub.refuse, hub.token = refusal, "hf_right"
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    done = pull(NAME)
    assert done.exit_code == 2
    assert words in done.sentence
    assert f"{hub.url}/{NAME}" in done.sentence
    assert "hf_wrong" not in done.stderr + done.stdout
    assert fetched(tmp_path) == set()
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert pull(NAME).exit_code == 0


def test_no_such_model_and_no_hub(pull: Pull, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = pull("someone/else")
    assert (done.exit_code, "has no model someone/else, or lacks a file (404)" in done.sentence) == (2, True)
    done = pull("nonsense")
    assert (done.exit_code, "is not a hub id" in done.sentence) == (2, True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone" / "mine").mkdir(parents=True)
    done = pull("someone/mine")
    assert (done.exit_code, "is a folder here, which svdq uses as it is" in done.sentence) == (2, True)
    done = pull(f"{NAME}@v1@v2")
    assert (done.exit_code, "names two revisions; give one" in done.sentence) == (2, True)
    know(monkeypatch, tmp_path / "hf" / "hub")
    done = pull(NAME)
    assert (done.exit_code, "The hub at http://127.0.0.1:1 cannot be reached" in done.sentence) == (3, True)


def test_offline(svdq: Cli, hub: Hub) -> None:
    done = svdq("model", "pull", NAME, HF_HUB_OFFLINE="1")
    assert (done.returncode, done.stderr) == (
        2,
        f"Error: HF_HUB_OFFLINE is set, so {NAME} is not fetched; unset it to pull.\n",
    )


def test_too_little_disk_is_seen_first(pull: Pull, hub: Hub, tmp_path: Path) -> None:
    hub.sizes[UNET] = 10**18
    done = pull(NAME)
    assert done.exit_code == 2
    assert f"The model {NAME} takes 1000000000.0 GB, and {tmp_path / 'hf' / 'hub'} has" in done.sentence
    assert set(hub.given) <= {"model_index.json", UNET}, "only what says how large it is"


def test_a_transfer_that_breaks_off(pull: Pull, hub: Hub, folder: Path, tmp_path: Path) -> None:
    hub.breaks, hub.after_break = {UNET: 1}, 503
    done = pull(NAME)
    assert done.exit_code == 3
    assert f"did not send {NAME} (503); try again later" in done.sentence
    whole = fetched(tmp_path)
    assert len(whole) > 5
    assert UNET not in whole
    with pytest.raises(InputError, match="not on this machine"):
        resolve(NAME)  # half a model is not taken for one that is here

    # The next one goes on, and a break in the middle of it is nothing.
    hub.breaks, hub.after_break = {UNET: 1}, None
    given = len(hub.given)
    assert pull(NAME).exit_code == 0
    assert not set(hub.given[given:]) & whole, "what is whole is not fetched again"
    assert (place(tmp_path) / UNET).read_bytes() == (folder / UNET).read_bytes()
    resolve(NAME)


def test_a_file_that_went_bad_on_the_disk_is_fetched_again(pull: Pull, hub: Hub, folder: Path, tmp_path: Path) -> None:
    assert pull(NAME).exit_code == 0
    file = place(tmp_path) / UNET
    file.resolve().write_bytes(b"\0" * 100)
    with pytest.raises(InputError, match="fetch it again"):
        resolve(NAME)
    given = len(hub.given)
    assert pull(NAME).exit_code == 0
    assert hub.given[given:] == [UNET]
    assert file.read_bytes() == (folder / UNET).read_bytes()


def test_a_model_of_wan_is_fetched_with_its_tokenizer(
    tiny_wan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(NAME, tiny_wan) as hub:
        know(monkeypatch, tmp_path / "hf" / "hub", hub.url)
        assert run(["model", "pull", NAME]) == 0
    wanted = {"transformer_2/config.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"}
    assert wanted <= fetched(tmp_path)
    resolve(NAME)


def test_a_model_of_another_kind_is_refused_before_anything_is_fetched(
    pull: Pull, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    shutil.copytree(hub.folder, other)
    index = json.loads((other / "model_index.json").read_text(encoding="utf-8"))
    (other / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxPipeline"}), encoding="utf-8")
    hub.folder = other
    done = pull(NAME)
    assert done.exit_code == 2
    assert "is a FluxPipeline; svdq needs a StableVideoDiffusionPipeline such as" in done.sentence
    assert hub.given == ["model_index.json"]


def test_a_model_file_fetches_what_it_names_and_nothing_that_it_replaces(
    pull: Pull, hub: Hub, folder: Path, tmp_path: Path
) -> None:
    shutil.copy(folder / UNET, tmp_path / "mine.safetensors")
    (tmp_path / "calm.toml").write_text(
        f'base = "{NAME}"\n[weights]\nunet = "mine.safetensors"\n[defaults]\nmotion_bucket_id = 60\n'
        f'[[lora]]\nfile = "{NAME}:lora.safetensors"\ncomponent = "unet"\n'
    )
    done = pull(str(tmp_path / "calm.toml"), "--variant", "full")
    assert done.exit_code == 0, done.stderr
    files = fetched(tmp_path)
    assert "unet/config.json" in files
    assert UNET not in files
    model = resolve(str(tmp_path / "calm.toml"), on_gpus=False)
    assert (model.name, model.base, model.weights) == ("calm", NAME, {"unet": tmp_path / "mine.safetensors"})
    assert [lora.file.name for lora in model.loras] == ["lora.safetensors"]
    assert run(["model", "check", str(tmp_path / "calm.toml")]) == 0


def test_a_file_that_is_missing_here_is_named_before_anything_is_fetched(pull: Pull, hub: Hub, tmp_path: Path) -> None:
    entry = '[[lora]]\nfile = "none.safetensors"\ncomponent = "unet"\n'
    (tmp_path / "none.toml").write_text(f'base = "{NAME}"\n{entry}')
    done = pull(str(tmp_path / "none.toml"))
    assert (done.exit_code, hub.given) == (2, [])
    assert done.sentence.endswith("none.safetensors', which a model file names; correct its path.")


def test_a_model_file_of_any_folder_fills_in_what_a_job_leaves_open(
    svdq: Cli, settings: Settings, connection: redis.Redis, tiny_model: Path, tmp_path: Path, photo: Path
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "calm.toml").write_text(f'base = "{tiny_model}"\n[defaults]\nmotion_bucket_id = 60\n')
    settings.home.mkdir(exist_ok=True)
    (settings.home / "svdq.toml").write_text(f'model = "{tmp_path}/models/calm.toml"\n')
    for options, expected in (((), 60), (("--motion-bucket-id", "90"), 90)):
        done = svdq("submit", str(photo), *options)
        assert done.returncode == 0, done.stderr
        rq_job = fetch(connection, done.stdout.split()[0])
        assert read_job(rq_job).motion_bucket_id == expected


def test_the_check_of_another_model_names_the_command_for_it(svdq: Cli) -> None:
    done = svdq("model", "check", "preview")
    assert (done.returncode, done.stderr) == (
        2,
        "Error: 'preview' is no model file (.toml); `svdq doctor --model preview` checks any other model.\n",
    )


def test_commands_for_models_print_json(svdq: Cli, pull: Pull, hub: Hub, tiny_model: Path, tmp_path: Path) -> None:
    done = pull(NAME, "--json")
    assert json.loads(done.stdout) == {"model": NAME, "variant": "full", "folder": str(place(tmp_path))}
    made = svdq("model", "tiny", tmp_path / "tiny", "--json")
    assert json.loads(made.stdout)["folder"] == str(tmp_path / "tiny")
    converted = svdq("model", "convert", tmp_path / "tiny", tmp_path / "half", "--json")
    assert json.loads(converted.stdout).keys() == {"folder", "dtype", "bytes"}
    (tmp_path / "calm.toml").write_text(f'base = "{tiny_model}"\n[defaults]\nmotion_bucket_id = 60\n')
    checked = svdq("model", "check", tmp_path / "calm.toml", "--json")
    assert json.loads(checked.stdout) == {"model": str(tmp_path / "calm.toml"), "family": "svd", "found": []}


def test_a_preset_is_used_by_its_name_from_any_folder(svdq: Cli, tmp_path: Path) -> None:
    listed = {each["name"]: each for each in map(json.loads, svdq("model", "list", "--json").stdout.splitlines())}
    assert {"wan2.2-4step", "svd-xt-calm", "Wan-AI/Wan2.2-I2V-A14B-Diffusers"} <= listed.keys()
    preset = listed["wan2.2-4step"]
    assert (preset["card_gb"], preset["streamed_card_gb"], preset["fetched"]) == (24, 12, False)
    assert preset["download_bytes"] == pytest.approx(38e9, rel=0.01)
    rows = [re.split(r"\s{2,}", line) for line in svdq("model", "list").stdout.splitlines()]
    assert rows[0] == ["model", "family", "card", "to fetch"]
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8").partition("### Presets")[2]
    named = re.findall(r"^\| (`[^|]*`) \|.*\| ([^|]*) \| ([\d.]+) GB \|$", page, re.MULTILINE)
    said = {name: (card, size) for names, card, size in named for name in re.findall("`(.*?)`", names)}
    shown = {row[0]: (row[2], f"{float(row[3].split()[0]):.2g}") for row in rows if row[0] in PRESETS}
    sizes = {name: (card, f"{float(size):.2g}") for name, (card, size) in said.items()}
    assert sizes == shown
    planned = svdq("plan", "--model", "wan2.2-4step", "--gpus", "1x24")
    assert planned.stdout.startswith("wan2.2-4step: 832x480, 81 frames, 4 steps.")
    photo = tmp_path / "photo.png"
    Image.new("RGB", (832, 480)).save(photo)
    submitted = svdq("submit", str(photo), SVDQ_MODEL="wan2.2-4step")
    assert submitted.returncode == 0, submitted.stderr
    shown = json.loads(svdq("status", submitted.stdout.split()[0], "--json").stdout)
    assert shown["family"] == "wan"
