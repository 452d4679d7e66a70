"""Workflows inside the files that ComfyUI writes."""

import json
from pathlib import Path

import imageio_ffmpeg
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.workflow import is_editor, read_workflow
from tests.pipeline.models.comfyui.workflows import two_experts

EDITOR = {"last_node_id": 3, "nodes": [{"id": 3, "type": "KSampler", "note": "}{ \u00e9"}], "links": []}
API = two_experts()


def png(path: Path) -> None:
    info = PngInfo()
    info.add_text("workflow", json.dumps(EDITOR))
    info.add_text("prompt", json.dumps(API))
    Image.new("RGB", (8, 8)).save(path, pnginfo=info)


def webp(path: Path) -> None:
    """As SaveAnimatedWEBP does: in the EXIF tags of make and model."""
    exif = Image.new("RGB", (8, 8)).getexif()
    exif[0x010F], exif[0x0110] = f"workflow:{json.dumps(EDITOR)}", f"prompt:{json.dumps(API)}"
    Image.new("RGB", (8, 8)).save(path, exif=exif)


def video(path: Path, *, as_comment: bool) -> None:
    """As SaveVideo does, under its own names, or VideoHelperSuite, in the comment."""
    comment = json.dumps({"prompt": json.dumps(API), "workflow": EDITOR})
    tags = {"comment": comment} if as_comment else {"prompt": json.dumps(API), "workflow": json.dumps(EDITOR)}
    options = [f"-metadata={name}={text}" for name, text in tags.items()]
    arguments = [part for option in options for part in option.split("=", 1)]
    flags = ["-movflags", "use_metadata_tags"] if path.suffix == ".mp4" else []
    codec = "libx264" if path.suffix == ".mp4" else "libvpx-vp9"
    writer = imageio_ffmpeg.write_frames(str(path), (16, 16), codec=codec, output_params=[*arguments, *flags])
    writer.send(None)
    for _ in range(4):
        writer.send(bytes(16 * 16 * 3))
    writer.close()


def test_a_long_video_before_the_workflow_is_no_matter(tmp_path: Path) -> None:
    noise = bytes(range(256)) * 40_000 + b'{"' * 1000 + b"\x00"
    (tmp_path / "long.mp4").write_bytes(noise + json.dumps(EDITOR).encode() + noise + json.dumps(API).encode() + noise)
    assert read_workflow(tmp_path / "long.mp4") == API


@pytest.mark.parametrize("name", ["a.png", "a.webp", "a.mp4", "comment.mp4", "a.webm"])
def test_files_that_comfyui_writes_have_their_workflow(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.suffix in (".png", ".webp"):
        {".png": png, ".webp": webp}[path.suffix](path)
    else:
        video(path, as_comment=name != "a.mp4")
    assert read_workflow(path) == API  # in which the editor has already resolved wires


@pytest.mark.parametrize(
    "comment",
    [
        json.dumps({"prompt": json.dumps(API)}),
        json.dumps(json.dumps({"prompt": API})),
        json.dumps(json.dumps({"prompt": json.dumps(API), "workflow": json.dumps(EDITOR)})),
    ],
    ids=["prompt alone", "encoded twice", "all encoded"],
)
def test_comments_of_videohelpersuite_are_read_as_they_are_encoded(tmp_path: Path, comment: str) -> None:
    (tmp_path / "a.mp4").write_bytes(b"\x00\x00\x00 ftypisom\x00" + comment.encode() + b"\x00moov")
    assert read_workflow(tmp_path / "a.mp4") == API


@pytest.mark.parametrize("mark", [b'"class_type" {', b'{"class_type":', b'"{"{nodes'])
def test_marks_without_a_workflow_take_time_that_grows_with_the_file(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00" + mark * 100_000)
    with pytest.raises(InputError, match="no workflow inside"):
        read_workflow(tmp_path / "a.png")


def test_json_of_the_editor_the_api_and_a_request(tmp_path: Path) -> None:
    path = tmp_path / "workflow.json"
    for document, expected in ((EDITOR, EDITOR), (API, API), ({"prompt": API, "client_id": "me"}, API)):
        path.write_text(json.dumps(document), encoding="utf-8-sig")
        assert read_workflow(path) == expected
        assert is_editor(read_workflow(path)) == (expected is EDITOR)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "has no workflow inside"),
        (b"\x89PNG no text", "has no workflow inside"),
        (b'\x89PNG "class_type" {', "has no workflow inside"),
        (b"{", "is not valid JSON"),
        (b'{"nodes":' + b"[" * 100_000, "is not valid JSON"),
        (b'{"a": "' + b" " * 17_000_000 + b'"}', "has 17 MB, and svdq reads 16"),
        (b'{"a": 1}', "is no workflow of ComfyUI"),
        (b"[1]", "is no workflow of ComfyUI"),
    ],
)
def test_files_without_one_are_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(InputError, match=sentence):
        read_workflow(tmp_path / "file")


def test_a_file_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_workflow(tmp_path / "none.json")
