"""The official openai client, unchanged, against a server with a worker beside it."""

import io
import json
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import av
import psutil
import pytest
from PIL import Image

from tests.cli.serve.servers import TOKEN, TYPE, Serve, Server, multipart
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def openai() -> ModuleType:
    """Imported on demand: half a second for each test process."""
    return pytest.importorskip("openai")


@pytest.fixture
def server(serve: Serve) -> Server:
    return serve("--port", "0", "--with-worker", CUDA_VISIBLE_DEVICES="", SVDQ_MODEL="preview")


@pytest.fixture
def client(server: Server, openai: ModuleType) -> Iterator[Any]:
    with (
        warnings.catch_warnings(),
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0, timeout=120) as client,
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # of OpenAI's own service
        yield client


def test_create_poll_list_download_delete(client: Any, openai: ModuleType, server: Server, photo: Path) -> None:
    small = {"num_frames": 4, "num_inference_steps": 3, "formats": ["mp4", "gif"], "extra_params": {"fit": "pad"}}
    created = client.videos.create(
        prompt="a dog",
        input_reference=photo.read_bytes(),  # arrives as application/octet-stream, without a name
        model="preview",
        size="576x320",
        extra_body={**small, "seed": 7},
    )
    assert created.status in ("queued", "in_progress")
    assert created.model_extra is not None
    assert created.model_extra["svdq"]["parameters"]["fit"] == "pad"

    video = client.videos.poll(created.id, poll_interval_ms=200)
    assert (video.id, video.status, video.progress) == (created.id, "completed", 100), video
    assert (video.prompt, video.size, video.seconds) == ("a dog", "576x320", "0.571")
    assert video.completed_at is not None
    assert video.completed_at >= video.created_at > 1.7e9
    assert [file["format"] for file in video.model_extra["svdq"]["files"]] == ["mp4", "gif"]
    assert video.model_extra["file_name"] == video.model_extra["svdq"]["files"][0]["name"]
    assert video.model_extra["inference_time_s"] > 0

    with_file = client.videos.create_and_poll(
        prompt="", input_reference=photo, size="576x320", extra_body={**small, "seed": 8}, poll_interval_ms=200
    )
    assert with_file.status == "completed"
    assert [each.id for each in client.videos.list(limit=1)] == [with_file.id, created.id]  # two pages

    data = client.videos.download_content(created.id).read()
    with av.open(io.BytesIO(data)) as container:
        assert sum(1 for _ in container.decode(video=0)) == 4
    picture = client.videos.download_content(created.id, variant="thumbnail").read()
    with Image.open(io.BytesIO(picture)) as image:
        assert (image.format, image.size) == ("JPEG", (512, 284))
    assert server.get(f"/v1/videos/{created.id}/content?format=gif").body[:4] == b"GIF8"

    begin = time.monotonic()
    fields = {"size": "320x320", "num_frames": 4, "num_inference_steps": 3, "guidance_scale": 1}
    headers = {**server.bearer, "Content-Type": TYPE}
    rendered = server.ask("POST", "/v1/videos/sync", multipart(photo.read_bytes(), **fields), headers)
    assert (rendered.status, rendered.headers["Content-Type"], rendered.body[4:8]) == (200, "video/mp4", b"ftyp")
    assert rendered.headers["X-Model"] == "preview"
    assert rendered.headers["X-Request-Id"]
    assert json.loads(rendered.headers["X-Stage-Durations"]) == {}
    assert float(rendered.headers["X-Peak-Memory-MB"]) == 0
    assert 0 < float(rendered.headers["X-Inference-Time-S"]) < time.monotonic() - begin
    assert client.videos.retrieve(rendered.headers["X-Video-Id"]).status == "completed"

    remixed = client.videos.remix(created.id, prompt="again")
    assert remixed.remixed_from_video_id == created.id
    assert client.videos.poll(remixed.id, poll_interval_ms=200).status == "completed"

    assert client.videos.delete(created.id).deleted
    with pytest.raises(openai.NotFoundError, match="There is no video"):
        client.videos.retrieve(created.id)
    with pytest.raises(openai.BadRequestError, match="seconds"):
        client.videos.create(prompt="", input_reference=photo, seconds="0")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").videos.list()
    assert [model.id for model in client.models.list()] == [client.models.retrieve("preview").id] == ["preview"]

    fields = {"size": "1024x576", "num_frames": 14, "num_inference_steps": 1000}
    in_flight = server.create(photo.read_bytes(), **fields).json["id"]
    wait_until(lambda: server.get(f"/v1/videos/{in_flight}").json["status"] == "in_progress")
    assert server.ask("DELETE", f"/v1/videos/{in_flight}").json["deleted"]
    wait_until(lambda: server.get(f"/v1/videos/{in_flight}").status == 404)

    begin = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - begin < 30  # the worker stops after a step


@pytest.mark.long
def test_the_worker_ends_with_a_killed_server_and_the_next_one_goes_on(
    server: Server, serve: Serve, photo: Path
) -> None:
    def workers() -> list[psutil.Process]:
        home = os.environ["SVDQ_HOME"]
        found = psutil.process_iter(["cmdline", "environ"])
        return [
            each
            for each in found
            if "worker" in (each.info["cmdline"] or ()) and (each.info["environ"] or {}).get("SVDQ_HOME") == home
        ]

    fields = {"size": "320x320", "num_frames": 4, "num_inference_steps": 8}
    made = [server.create(photo.read_bytes(), seed=seed, **fields).json["id"] for seed in range(6)]
    wait_until(workers)
    server.process.kill()
    wait_until(lambda: not workers())
    again = serve("--port", "0", "--with-worker", CUDA_VISIBLE_DEVICES="", SVDQ_MODEL="preview")
    for video_id in made:
        wait_until(lambda video_id=video_id: again.get(f"/v1/videos/{video_id}").json["status"] == "completed")
