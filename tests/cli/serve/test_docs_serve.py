"""The examples of docs/serve.md and docs/sharing.md are run as they are."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.serve.servers import Serve
from tests.conftest import Cli

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "serve.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(script: str, **written: str) -> str:
    """Run a script in which other values stand for those that are written; return what it prints."""
    for value, here in written.items():
        assert value in script
        script = script.replace(value, here)
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.long
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_the_curl_examples(serve: Serve, photo: Path, home: Path) -> None:
    server = serve("--port", "0", "--with-worker", CUDA_VISIBLE_DEVICES="", SVDQ_SERVE_TOKEN="")
    shutil.copy(photo, "photo.jpg")
    section = PAGE.partition("## A video by curl")[2].partition("\n## ")[0]
    blocks = BLOCK.findall(section)
    assert len(blocks) == 5
    script = "".join(f"{block}echo\necho ==\n" for block in blocks)
    printed = run(script, **{"http://127.0.0.1:8765": server.url, "~/.local/share/svdq/": f"{home}/"})
    parts = printed.split("\n==\n")
    assert json.loads(parts[0])["data"][0]["id"] == "preview"
    video = json.loads(Path("video.json").read_text())
    assert video["svdq"]["parameters"]["motion_bucket_id"] == 60
    assert json.loads(parts[2])["svdq"]["seed"] == 7
    assert Path("video.mp4").read_bytes()[4:8] == b"ftyp"
    assert Path("picture.jpg").read_bytes()[:2] == b"\xff\xd8"
    assert f'"remixed_from_video_id":"{video["id"]}"' in parts[4]
    assert parts[4].strip().endswith('"deleted":true}')


@pytest.mark.long
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_the_video_of_a_person_with_a_token(serve: Serve, svdq: Cli, photo: Path) -> None:
    server = serve("--port", "0", "--with-worker", CUDA_VISIBLE_DEVICES="")
    section = (DOCS / "sharing.md").read_text(encoding="utf-8").partition("## Two people")[2].partition("\n## ")[0]
    link = re.search(r"^ben  (\S+)/login\?token=(\S+)$", section, re.MULTILINE)
    assert link is not None
    token = json.loads(svdq("serve", "token", "add", "ben", "--json").stdout)["token"]
    shutil.copy(photo, "cat.jpg")
    run(BLOCK.findall(section)[-1], **{link[1]: server.url, link[2]: token})
    assert Path("cat.mp4").read_bytes()[4:8] == b"ftyp"
    assert json.loads(Path("video.json").read_text())["svdq"]["owner"] == "ben"


def test_the_page_names_every_error_code() -> None:
    folder = Path(__file__).parents[3] / "cli/serve"
    code = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    used = set(re.findall(r'code="([a-z_]+)"', code)) | {"redis_unavailable", "storage_unavailable"}
    table = PAGE.partition("## Errors")[2].partition("\n## ")[0]
    assert used - set(re.findall(r"`([a-z_]+)`", table)) <= {"internal_error"}
