"""No foreign text reaches the terminal raw, whichever command prints it."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from PIL import Image

from svdq.producer.job_log import LogEntry, append_log
from svdq.worker.health.rank_log import JsonFormatter, TextFormatter
from tests.conftest import Cli
from tests.queued import add, fail, finish, start
from tests.ranks import rank

#: Clears the screen, sets the title, C1's CSI, reorders text, ends the line, and is no Unicode.
EVIL = "\x1b[2J\x1b]0;title\x07\x9b1m\u202e\rfake\nfake\udcff"


def raw(text: str) -> set[str]:
    """Which of the characters of EVIL are in an output as they are; a line end only at the start of a forged line."""
    return ({"\x1b", "\x07", "\x9b", "\u202e", "\r", "\udcff"} & set(text)) | ({"\n"} if "\nfake" in text else set())


def test_jobs_whose_fields_control_the_terminal(svdq: Cli, connection: redis.Redis) -> None:
    good, bad, started = (add(connection, number) for number in (1, 2, 3))
    finish(good, {"outputs": [f"/videos/{EVIL}.mp4"], "notice": EVIL, "used": {"name": EVIL}})
    fail(bad, EVIL.replace("\udcff", "").replace("\n", " "))
    start(started, step=1, rank=0, notice=EVIL, used={"name": EVIL})
    with connection.pipeline() as pipeline:
        rank(0, host=EVIL.replace("\udcff", ""), notice=EVIL.replace("\udcff", ""), job_id=started.id).save(pipeline)
        entry = LogEntry.now(rank=0, host="here", level="INFO", text=EVIL.replace("\udcff", ""), at=1.0)
        append_log(pipeline, good.id, [entry])
        pipeline.execute()
    seen = [["status", good.id, bad.id, started.id], ["wait", good.id, bad.id], ["logs", good.id]]
    for command in (["list"], ["list", "--json"], ["status"], *seen, ["top"], ["report"]):
        done = svdq(*command)
        assert done.stdout, command
        assert raw(done.stdout + done.stderr) - {"\n"} == set(), command
        if command != ["logs", good.id]:  # which shows lines of its own, indented
            assert raw(done.stdout + done.stderr) == set(), command


def test_names_of_files_that_control_the_terminal(svdq: Cli, home: Path, photo: Path, tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    name = os.fsdecode(b"\x1b[2J\xc2\x9b1m\xff\nfake")
    (inbox / f"{name}.jpg").write_bytes(photo.read_bytes())
    (inbox / f"bad{name}.jpg").write_bytes(b"no photo")
    for command in (
        ["watch", inbox, "--once", "--stable-for", "0.1s"],
        ["submit", str(inbox)],
        ["submit", str(inbox), "--skip-bad"],
        ["inspect", str(inbox / f"bad{name}.jpg")],
        ["fetch", name.replace("/", ""), "--output", str(tmp_path / "videos")],
    ):
        done = svdq(*command)
        assert done.stdout + done.stderr, command
        assert raw(done.stdout + done.stderr) == set(), (command, done)


@pytest.mark.usefixtures("home")
def test_a_terminal_without_the_characters_of_a_name(tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    for number, name in enumerate(("Jürgen", "写真")):
        Image.effect_noise((256, 144), number).save(inbox / f"{name}.jpg")
    command = [sys.executable, "-m", "svdq.cli"]
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    for arguments in (["submit", inbox, "--family", "svd"], ["list"]):
        done = subprocess.run([*command, *arguments], env=environment, capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")
        assert rb"\u5199\u771f" in done.stdout
        assert "Jürgen".encode("latin-1") in done.stdout


def test_metadata_that_controls_the_terminal(svdq: Cli, tmp_path: Path) -> None:
    sidecar = tmp_path / "video.json"
    evil = EVIL.encode(errors="ignore").decode()  # half characters are refused with the whole record
    record = {"svdq": evil, "job_id": "1", "job": {evil: evil, "formats": [evil]}, "model": {"name": evil}}
    sidecar.write_text(json.dumps(record))
    picture = tmp_path / "video.gif"
    Image.new("RGB", (8, 8)).save(picture, comment=json.dumps(record).encode())
    for path in (sidecar, picture):
        done = svdq("inspect", path)
        assert (done.returncode, raw(done.stdout)) == (0, set())
        assert r"\x1b[2J" in done.stdout


@pytest.mark.parametrize("json_lines", [False, True])
def test_log_lines_of_a_worker_control_no_terminal(json_lines: bool) -> None:
    try:
        raise ValueError(EVIL)
    except ValueError:
        record = logging.LogRecord("svdq", logging.ERROR, __file__, 1, f"It broke: {EVIL}", None, sys.exc_info())
    if json_lines:
        text = JsonFormatter().format(record)
        assert json.loads(text)["message"] == f"It broke: {EVIL}"
        assert "\n" not in text
    else:
        text = TextFormatter("[rank 0] %(message)s").format(record)
        assert "\nTraceback" in text
    assert raw(text) - {"\n"} == set()
