"""LoRAs that submissions name: they are looked up by name, and jobs carry names and digests."""

import json
from pathlib import Path

import pytest
import redis

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.lora_folder import digest_of
from svdq.pipeline.video_parameters import MAX_LORAS
from svdq.producer.settings import Settings
from svdq.producer.status.ranks import IntakeStatus
from svdq.producer.submitting.draft import Draft, sweep
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.loras import KnownLoras
from tests.conftest import Cli
from tests.ranks import rank, save

NAMES = ("style_high_noise", "style_low_noise", "anime/line", "detail", "old/detail", "only-HIGH", "highlights")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of LoRAs; what they contain is looked at by workers alone."""
    for name in NAMES:
        path = tmp_path / "loras" / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "loras"


def look_up(settings: Settings, connection: redis.Redis, *texts: str, **more: object) -> JobSpec:
    spec = JobSpec(drafts=(Draft(loras=texts, family="wan"),), **more)
    return KnownLoras(settings, connection).looked_up(spec)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("anime/line:0.8", ["anime/line:0.8"]),
        ("line.safetensors", ["anime/line:1"]),
        ("style:0.7", ["high=style_high_noise:0.7", "low=style_low_noise:0.7"]),
        ("STYLE", ["high=style_high_noise:1", "low=style_low_noise:1"]),
        ("style_low_noise", ["low=style_low_noise:1"]),
        ("high=style,low=detail:2", ["high=style_high_noise:2", "low=detail:2"]),
        ("high=only-HIGH", ["high=only-HIGH:1"]),
        ("only-HIGH", ["only-HIGH:1"]),
        ("highlights", ["highlights:1"]),
        ("detail", ["detail:1"]),
    ],
)
def test_a_name_is_looked_up_in_the_folder(settings, connection, folder, text: str, found: list[str]) -> None:
    settings = settings.model_copy(update={"loras": folder})
    [options] = look_up(settings, connection, text).drafts
    assert [str(each) for each in options.loras] == found
    for each in options.loras:
        assert each.digest == digest_of(folder / f"{each.name}.safetensors")


def test_a_name_that_is_not_there_is_one_sentence(settings, connection, folder) -> None:
    known = settings.model_copy(update={"loras": folder})
    with pytest.raises(InputError, match=r"There is no LoRA 'anime/lime' in '.*/loras'; did you mean anime/line\?"):
        look_up(known, connection, "anime/lime")
    with pytest.raises(InputError, match=r"There is no LoRA 'only' in '.*/loras'"):
        look_up(known, connection, "only")  # one half alone
    with pytest.raises(InputError, match=r"There is no LoRA 'a'.*; set SVDQ_LORAS to the folder with your LoRAs\."):
        look_up(settings, connection, "a")
    (folder / "old" / "line.safetensors").write_text("another")
    with pytest.raises(InputError, match="There are several LoRAs line: anime/line, old/line; give one with its"):
        look_up(known, connection, "line")


def test_workers_say_which_loras_they_have(settings, connection, folder, photo, svdq: Cli) -> None:
    save(connection, rank(0, num_ranks=1, intake=IntakeStatus(worker="w", loras={"theirs": "a" * 16})))
    [options] = look_up(settings, connection, "theirs:0.5").drafts
    assert [each.digest for each in options.loras] == ["a" * 16]
    own = settings.model_copy(update={"loras": folder})
    with pytest.raises(InputError, match="did you mean"):
        look_up(own, connection, "their")
    done = svdq("submit", photo, "--lora", "theirs", SVDQ_LORAS=str(folder))
    assert done.returncode == 0, done.stderr


def test_a_prompt_may_name_loras_and_each_link_of_a_chain_has_its_own(
    settings, connection, folder, photo, svdq: Cli, monkeypatch
) -> None:
    monkeypatch.setenv("SVDQ_LORAS", str(folder))
    photo.with_suffix(".txt").write_text("a dog <lora:style:0.7> runs")
    then = ("--then", "it jumps <lora:line:0.5>", "--then", "it sits")
    done = svdq("submit", photo, "--family", "wan", "--lora", "detail", *then, "--json")
    assert done.returncode == 0, done.stderr
    links = [json.loads(svdq("status", json.loads(line)["id"], "--json").stdout) for line in done.stdout.splitlines()]
    assert [link["prompt"] for link in links] == ["a dog runs", "it jumps", "it sits"]
    of_photo = ["detail", "style_high_noise", "style_low_noise"]
    assert [[lora["name"] for lora in link["loras"]] for link in links] == [of_photo, ["anime/line"], of_photo]
    done = svdq("submit", photo, "--prompt", "a <lora:line:99>")
    assert done.returncode == 2
    assert "has a LoRA that cannot be read: write <lora:NAME:STRENGTH>" in done.stderr


def test_a_sweep_over_strengths(settings) -> None:
    options = Draft(loras=("a:0.3", "high=b,low=c"), family="wan")
    found = sweep(options, ["lora=0.6,0.8", "steps=4,8"])
    assert [(each.steps, *(lora.strength for lora in each.loras)) for each in found] == [
        (4, 0.6, 0.6, 0.6), (8, 0.6, 0.6, 0.6), (4, 0.8, 0.8, 0.8), (8, 0.8, 0.8, 0.8),
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"--sweep lora=0\.6 needs a LoRA whose strength it changes"):
        sweep(Draft(), ["lora=0.6"])
    with pytest.raises(InputError, match="--sweep lora=11 must have strengths from -10 to 10"):
        sweep(options, ["lora=11"])


def test_lists_folders_and_commands_choose_loras_and_ids_without_them_stay(
    settings, folder, photo, svdq: Cli, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("SVDQ_LORAS", str(folder))

    def submitted(*words: object) -> list[dict[str, object]]:
        done = svdq(*words, "--json")
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    [plain] = submitted("submit", photo, "--family", "wan", "--seed", "1")
    [chosen] = submitted("submit", photo, "--family", "wan", "--seed", "1", "--lora", "style:0.7", "--lora", "detail")
    assert plain["id"] != chosen["id"]
    shown = json.loads(svdq("status", chosen["id"], "--json").stdout)
    names = ["style_high_noise", "style_low_noise", "detail"]
    assert [each["name"] for each in shown["loras"]] == names
    assert str(folder) not in json.dumps(shown["loras"])
    assert "LoRA: high=style_high_noise:0.7; low=style_low_noise:0.7; detail:1" in svdq("status", chosen["id"]).stdout
    assert "loras" not in json.loads(svdq("status", plain["id"], "--json").stdout)

    path = tmp_path / "list.jsonl"
    rows = [{"photo": str(photo), "seed": 1, "lora": ["style:0.7", "detail"]}, {"photo": str(photo), "seed": 1}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    again = submitted("batch", path, "--family", "wan")
    assert [each["id"] for each in again] == [chosen["id"], plain["id"]]
    path = tmp_path / "list.csv"
    path.write_text(f"photo,seed,lora\n{photo},1,style:0.7;detail\n")
    assert [each["id"] for each in submitted("batch", path, "--family", "wan")] == [chosen["id"]]

    inbox = tmp_path / "inbox"
    inbox.mkdir()
    (inbox / "photo.jpg").write_bytes(photo.read_bytes())
    (inbox / "svdq.toml").write_text('lora = ["style:0.7", "detail"]\nfamily = "wan"\nseed = 1\n')
    done = svdq("watch", inbox, "--existing", "--once", "--stable-for", "0.1")
    assert chosen["id"] in done.stdout
    (inbox / "svdq.toml").write_text('lora = ["style:0.7"]\nfamily = "wan"\nseed = 1\n')
    (inbox / "other.txt").write_text("<lora:detail>")
    (inbox / "other.jpg").write_bytes(photo.read_bytes())
    done = svdq("watch", inbox, "--existing", "--once", "--stable-for", "0.1")
    assert f"{chosen['id']}  other.jpg" in done.stdout
    (inbox / "svdq.toml").write_text('lora = "nothing"\nfamily = "wan"\n')
    (inbox / "photo.jpg").write_bytes(photo.read_bytes() + b" ")
    done = svdq("watch", inbox, "--existing", "--once", "--stable-for", "0.1")
    assert "There is no LoRA 'nothing'" in done.stdout + done.stderr

    many = ["--lora", "detail"] * (MAX_LORAS + 1)
    done = svdq("submit", photo, "--family", "wan", *many)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--lora" in done.stderr
