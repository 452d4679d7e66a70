"""Agents: the SDK's own client against `svdq serve` and `svdq mcp`."""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import anyio
import pytest
import redis

from svdq.producer.queue import statuses
from svdq.producer.submitting.enqueue import enqueue_many
from svdq.producer.submitting.entries import Entry
from tests.cli.serve.servers import TOKEN, Serve, Server
from tests.conftest import Cli
from tests.queued import JOB
from tests.waiting import PATIENCE_S

mcp = pytest.importorskip("mcp", reason="no MCP SDK")
httpx2 = pytest.importorskip("httpx2", reason="no MCP SDK")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = {"seconds": 0.5, "size": "320x192", "parameters": {"num_inference_steps": 3}}
VIDEO_ID = "a" * 20


def data_url(photo: Path) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(photo.read_bytes()).decode()}"


def over_http(server: Server, use: Callable[[Any], Awaitable[None]], token: str = TOKEN, mode: str = "auto") -> None:
    """Use a client of a server, of the newest protocol or of the one with a handshake."""
    from mcp.client.streamable_http import streamable_http_client

    async def connect() -> None:
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=PATIENCE_S) as http,
            mcp.Client(streamable_http_client(f"{server.url}/mcp", http_client=http), mode=mode) as client,
        ):
            await use(client)

    anyio.run(connect)


def over_stdio(use: Callable[[Any], Awaitable[None]], mode: str = "auto", **environment: str) -> None:
    """Use a client of `svdq mcp`, which it starts and ends."""
    program = mcp.StdioServerParameters(
        command=sys.executable, args=["-P", "-m", "svdq.cli", "mcp"], env={**os.environ, **environment}
    )

    async def connect() -> None:
        async with mcp.Client(mcp.stdio_client(program), mode=mode) as client:
            await use(client)

    anyio.run(connect)


async def call(client: Any, name: str, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool(name, arguments)
    assert not result.is_error, result.content
    assert json.loads(result.content[0].text) == result.structured_content  # for clients that read only the text
    found: dict[str, Any] = result.structured_content
    return found


async def refused(client: Any, name: str, **arguments: Any) -> str:
    result = await client.call_tool(name, arguments)
    assert result.is_error
    [content] = result.content
    return str(content.text)


async def make_video(client: Any, photo: str, seed: int) -> tuple[dict[str, Any], list[Any]]:
    """Make a video and wait for it; return it, and its links."""
    submitted = await call(client, "submit", photo=photo, prompt="a dog", seed=seed, **SMALL)
    assert (submitted["existing"], submitted["files"]) == (False, [])
    reports: list[tuple[float, float | None, str | None]] = []

    async def report(done: float, total: float | None, text: str | None) -> None:
        reports.append((done, total, text))

    asked = {"video_id": submitted["id"], "timeout_s": PATIENCE_S}
    ended = await client.call_tool("wait", asked, progress_callback=report)
    video = ended.structured_content
    assert (ended.is_error, video["id"], video["status"]) == (False, submitted["id"], "completed"), video
    assert reports == sorted(reports, key=lambda each: each[0])
    again = await call(client, "submit", photo=photo, prompt="a dog", seed=seed, **SMALL)
    assert (again["id"], again["existing"]) == (video["id"], True)
    return video, ended.content[1:]


def test_an_agent_makes_waits_for_and_gets_videos(serve: Serve, photo: Path, tmp_path: Path) -> None:
    server = serve("--port", "0", "--with-worker", CUDA_VISIBLE_DEVICES="", SVDQ_MODEL="preview")

    async def use(client: Any, seed: int) -> None:
        tools = (await client.list_tools()).tools
        assert [tool.name for tool in tools] == ["submit", "status", "wait", "cancel", "estimate"]
        video, [link] = await make_video(client, data_url(photo), seed)
        assert (link.uri, link.mime_type) == (video["files"][0]["url"], "video/mp4")
        answer = server.get(link.uri.removeprefix(server.url))
        assert (answer.status, answer.body[4:8]) == (200, b"ftyp")
        other = await call(client, "submit", video_id=video["id"], prompt="a cat")
        assert (other["size"], other["existing"]) == ("320x192", False)
        assert other["seed"] != seed
        newest = await call(client, "status", limit=2)
        assert [each["id"] for each in newest["videos"]] == [other["id"], video["id"]]
        assert newest["queue"]["models"] == ["preview"]

    over_http(server, lambda client: use(client, 1))
    over_http(server, lambda client: use(client, 2), mode="legacy")

    async def use_here(client: Any, seed: int) -> None:
        video, [link] = await make_video(client, str(photo), seed)
        assert video["name"] == photo.stem
        stored = Path(unquote(link.uri.removeprefix("file://")))
        fetched = await call(client, "fetch", video_id=video["id"], folder=str(tmp_path / "mine"))
        assert [Path(path).read_bytes() for path in fetched["paths"]] == [stored.read_bytes()]
        folder = f"{photo}/x"  # the photo is no folder
        reason = "(Not a directory); give another."  # without an option of commands
        assert (await refused(client, "fetch", video_id=video["id"], folder=folder)).endswith(reason)

    over_stdio(lambda client: use_here(client, 3))
    over_stdio(lambda client: use_here(client, 4), mode="legacy")
    assert server.stop() == 0
    assert "Traceback" not in server.output.read_text()


def tracks(path: Path) -> dict[str, int]:
    """The number of frames or packets of each track of a video, by its kind, as FFmpeg's own program reads it."""
    entries = "stream=codec_type,nb_read_frames"
    command = ["ffprobe", "-v", "error", "-count_frames", "-show_entries", entries, "-of", "json", str(path)]
    streams = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["streams"]
    return {stream["codec_type"]: int(stream["nb_read_frames"]) for stream in streams}


@pytest.mark.skipif(shutil.which("ffprobe") is None, reason="ffprobe is not installed")
def test_an_agent_gets_videos_with_sound(serve: Serve, svdq: Cli, tiny_ltx: Path, photo: Path, tmp_path: Path) -> None:
    worker = ("--with-worker", "--", "--ranks", "1", "--device", "cpu")
    server = serve("--port", "0", *worker, SVDQ_MODEL=str(tiny_ltx))
    token = json.loads(svdq("serve", "token", "add", "ana", "--json").stdout)["token"]
    made: dict[str, str] = {}  # owners by video

    async def make(client: Any, photo: str, prompt: str) -> tuple[dict[str, Any], Any]:
        asked = {"prompt": prompt, "sound": True, "size": "64x64", "parameters": {"num_frames": 17}}
        submitted = await call(client, "submit", photo=photo, **asked)
        ended = await client.call_tool("wait", {"video_id": submitted["id"], "timeout_s": PATIENCE_S})
        video = ended.structured_content
        assert video["status"] == "completed", video
        made[video["id"]] = video["owner"]
        return video, ended.content[1]

    async def use_here(client: Any) -> None:
        video, _ = await make(client, str(photo), "A dog barks.")
        [path] = (await call(client, "fetch", video_id=video["id"], folder=str(tmp_path / "mine")))["paths"]
        found = tracks(Path(path))
        assert (found["video"], found["audio"] > 0) == (17, True)

    async def use_there(client: Any) -> None:
        video, link = await make(client, data_url(photo), "A cat purrs.")
        answer = server.get(link.uri.removeprefix(server.url), Authorization=f"Bearer {token}")
        (tmp_path / "hers.mp4").write_bytes(answer.body)
        found = tracks(tmp_path / "hers.mp4")
        assert (found["video"], found["audio"] > 0) == (17, True)
        assert video["owner"] == "ana"
        hers = (await call(client, "status"))["videos"]
        assert [each["id"] for each in hers] == [video["id"]]
        everybodys = (await call(client, "status", whose="everybody"))["videos"]
        assert {each["id"]: each["owner"] for each in everybodys} == made

    over_stdio(use_here)
    over_http(server, use_there, token)
    assert len(made) == 2


def test_errors_are_sentences(server: Server, photo: Path, connection: redis.Redis) -> None:
    async def use(client: Any) -> None:
        for arguments, words in (
            ({}, "either photo or video_id"),
            ({"photo": str(photo)}, "this server reads no files"),
            ({"photo": data_url(photo), "seconds": -1}, "seconds -1.0 is not allowed"),
            ({"photo": data_url(photo), "parameters": {"fotos": 1}}, "There is no parameter 'fotos'"),
            ({"fotos": 1}, "There is no argument 'fotos'"),
            ({"photo": "data:image/jpeg;base64,aGVsbG8="}, "not a photo"),
            ({"video_id": VIDEO_ID}, f"There is no video '{VIDEO_ID}'"),
        ):
            assert words in await refused(client, "submit", **arguments)
        assert "timeout_s is not allowed" in await refused(client, "wait", video_id=VIDEO_ID, timeout_s=1e9)
        assert "There is no tool 'frobnicate'" in await refused(client, "frobnicate")
        assert "is too large" in await refused(client, "wait", video_id="a" * (1 << 20))

    over_http(server, use)
    assert connection.keys("rq:job:*") == []


def test_a_video_is_estimated_and_canceled(server: Server, photo: Path, connection: redis.Redis) -> None:
    async def use(client: Any) -> None:
        video = await call(client, "submit", photo=data_url(photo), **SMALL)
        waiting = await call(client, "wait", video_id=video["id"], timeout_s=0.1)
        assert (waiting["status"], waiting["eta_reason"]) == ("queued", "No worker is running.")
        assert (await call(client, "estimate", num_videos=10, **SMALL))["eta_reason"] == "No worker is running."
        assert await call(client, "cancel", video_id=video["id"]) == {"id": video["id"], "outcome": "canceled"}
        assert statuses(connection, [video["id"]]) == ["canceled"]
        assert "it has ended already" in await refused(client, "cancel", video_id=video["id"])

    over_http(server, use)


def test_plans_are_those_of_the_command(svdq: Cli) -> None:
    async def use(client: Any) -> None:
        options = ["--model", "wan2.2-4step", "--gpus", "2xA5000", "--videos", "1000", "--json"]
        printed = json.loads(svdq("plan", *options).stdout)
        planned = await call(client, "plan", model="wan2.2-4step", gpus="2xA5000", num_videos=1000)
        found = [(way["command"], way["fits"], way.get("time_s")) for way in planned["ways"]]
        assert found == [(way["command"], way["fits"], way["time_s"]) for way in printed["ways"]]
        assert "--gpus '9x' is not known" in await refused(client, "plan", gpus="9x")

    over_stdio(use)


def test_the_user_of_the_machine_reads_what_a_command_would_say(home: Path, tmp_path: Path) -> None:
    async def use(client: Any) -> None:
        missing = str(tmp_path / "cup.jpg")
        assert await refused(client, "submit", photo=missing) == f"There is no file {missing!r}; check its path."
        assert "'/dev/zero' cannot be read" in await refused(client, "submit", photo="/dev/zero")
        assert "The Redis server" in await refused(client, "fetch", video_id=VIDEO_ID, folder=str(tmp_path))

    over_stdio(use, SVDQ_REDIS_URL="redis://127.0.0.1:1/0")


def test_a_named_token_sees_its_owners_videos_first(server: Server, svdq: Cli, connection: redis.Redis) -> None:
    token = json.loads(svdq("serve", "token", "add", "ana", "--json").stdout)["token"]
    for number, owner in enumerate(("ana", "ben", "ben")):
        enqueue_many(connection, [Entry(job=JOB, job_id=f"{number:020}", owner=owner)])

    async def owners(client: Any, **arguments: Any) -> set[str]:
        return {video["owner"] for video in (await call(client, "status", **arguments))["videos"]}

    async def use_hers(client: Any) -> None:
        assert await owners(client, limit=1) == {"ana"}
        assert await owners(client, whose="everybody") == {"ana", "ben"}

    async def use_the_servers(client: Any) -> None:
        assert await owners(client) == {"ana", "ben"}

    over_http(server, use_hers, token)
    over_http(server, use_the_servers)


def test_a_wait_ends_with_its_token(server: Server, svdq: Cli, connection: redis.Redis) -> None:
    token = json.loads(svdq("serve", "token", "add", "ana", "--json").stdout)["token"]
    enqueue_many(connection, [Entry(job=JOB, job_id=VIDEO_ID)])

    async def use(client: Any) -> None:
        async def remove_token(*_: object) -> None:  # when the wait has begun
            await anyio.to_thread.run_sync(lambda: svdq("serve", "token", "remove", "ana"))

        asked = {"video_id": VIDEO_ID, "timeout_s": PATIENCE_S}
        ended = await client.call_tool("wait", asked, progress_callback=remove_token)
        assert ended.is_error
        assert "The token is missing or wrong" in ended.content[0].text

    over_http(server, use, token)


def test_requests_without_a_token_and_large_ones_are_refused(server: Server) -> None:
    asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
    accepted = {**server.bearer, "Accept": "application/json, text/event-stream"}
    assert server.ask("POST", "/mcp", asked, {}).error["code"] == "invalid_api_key"
    assert server.get("/mcp").status == 405
    assert server.ask("POST", "/mcp", asked, accepted).status == 200
    assert server.ask("POST", "/mcp", b"{}", {**accepted, "Content-Length": str(17 << 20)}).status == 413
    many = server.ask("POST", "/mcp", {**asked, "params": {"_meta": {"a": [0] * 20_000}}}, accepted)
    assert (many.status, many.error["code"]) == (400, "bad_json")


def test_stdout_has_only_messages_and_the_end_of_stdin_ends_it(home: Path) -> None:
    asked = '{"jsonrpc": "2.0", "id": 1, "method": "ping"}\nnonsense\n'
    command = [sys.executable, "-P", "-m", "svdq.cli", "mcp"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert {json.loads(line)["jsonrpc"] for line in done.stdout.splitlines()} == {"2.0"}


def test_without_the_sdk_a_sentence_says_what_to_install(home: Path) -> None:
    code = "import sys; sys.modules['mcp'] = None; from svdq.cli.main import run; sys.exit(run(['mcp']))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, "`svdq mcp` needs mcp" in done.stderr) == (2, True), done.stderr
