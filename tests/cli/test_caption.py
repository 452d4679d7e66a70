"""`svdq caption` against a small server: every photo gets one caption, and what is wrong is said."""

import base64
import importlib.util
import io
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pillow_heif
import pytest
from PIL import Image

from tests.conftest import Cli
from tests.forks import Fork
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="no openai")

PARALLEL = 4


def caption_of(number: int) -> str:
    return f"Photo {number} moves."


def number_in(request: dict[str, Any]) -> int:
    """Which photo a request shows: its color."""
    url = request["messages"][0]["content"][1]["image_url"]["url"]
    kind, _, data = url.partition(",")
    assert kind == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        assert max(image.size) <= 768
        pixel = image.convert("RGB").getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return round(pixel[0] / 10) + 25 * round(pixel[1] / 10)


def color_of(number: int) -> tuple[int, int, int]:
    return number % 25 * 10, number // 25 * 10, 0


class VisionServer:
    """Answers as a server of OpenAI's API does, or as `answer` says: a body, an error's status, or None to hang up."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.asked: Counter[int] = Counter()
        self.keys: set[str | None] = set()
        self.answer: Callable[[int], object] = lambda number: completion(caption_of(number))
        self.closing = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(body)
                outer.keys.add(self.headers["Authorization"])
                number = number_in(body)
                outer.asked[number] += 1
                answer = 404 if self.path != "/v1/chat/completions" else outer.answer(number)
                if answer is None:
                    self.close_connection = True
                    return
                status = answer if isinstance(answer, int) else 200
                text = (
                    answer
                    if isinstance(answer, str)
                    else json.dumps({"error": {"message": "no"}} if status != 200 else answer)
                )
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign] - a client was killed
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def completion(text: str | None, reason: str = "stop") -> dict[str, object]:
    message = {"role": "assistant", "content": text}
    return {"choices": [{"index": 0, "finish_reason": reason, "message": message}]}


@pytest.fixture
def server() -> Iterator[VisionServer]:
    server = VisionServer()
    yield server
    server.close()


@pytest.fixture
def ask(svdq: Cli, server: VisionServer, home: Path) -> Cli:
    return lambda *words: svdq("caption", "--url", server.url, "--vision-model", "seer", *words)


def photos_in(folder: Path, num_photos: int, suffix: str = ".png") -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{number:03}{suffix}" for number in range(num_photos)]
    for number, path in enumerate(paths):
        if not path.exists():
            Image.new("RGB", (8, 8), color_of(number)).save(path)
    return paths


def texts_in(folder: Path) -> dict[str, tuple[str, int, int]]:
    """The captions, each with what changes when its file is written again."""
    found = {}
    for path in folder.glob("*.txt"):
        status = path.stat()
        found[path.stem] = (path.read_text(), status.st_ino, status.st_mtime_ns)
    return found


@pytest.mark.slow
def test_killed_twice_each_of_200_photos_is_captioned_once(
    ask: Cli, server: VisionServer, home: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "photos"
    photos = photos_in(folder, 200)
    (folder / "007.txt").write_text("mine")
    may_answer = threading.Semaphore(0)

    def answer(number: int) -> object:
        may_answer.acquire()
        return completion(caption_of(number))

    server.answer = answer
    before: dict[str, tuple[str, int, int]] = texts_in(folder)
    for num_more in (60, 60):
        log = tmp_path / "log"
        words = ["caption", str(folder), "--url", server.url, "--vision-model", "seer", "--parallel", str(PARALLEL)]
        process = Fork(words, log, log)
        for _ in range(num_more):
            may_answer.release()
        # Requests of the process before took some of them.
        enough = len(before) + num_more - 2 * PARALLEL
        wait_until(lambda enough=enough: len(texts_in(folder)) >= enough, log.read_text)
        process.kill()
        process.wait()
        after = texts_in(folder)
        assert after.items() >= before.items()
        before = after
    for _ in range(250):
        may_answer.release()

    done = ask(folder)

    assert (done.returncode, done.stderr) == (0, "")
    there = len(before)
    assert done.stdout == f"Captions written: {200 - there}; there already: {there}; still missing: 0.\n"
    after = texts_in(folder)
    assert after.items() >= before.items()  # the same files, not written again
    assert {name: text for name, (text, _, _) in after.items()} == {
        f"{number:03}": "mine" if number == 7 else f"{caption_of(number)}\n" for number in range(200)
    }
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        name for path in photos for name in (path.name, path.with_suffix(".txt").name)
    )
    assert server.asked.total() <= 199 + 2 * PARALLEL
    assert 7 not in server.asked


@pytest.mark.parametrize(("model", "is_heard"), [("preview", False), ("Lightricks/LTX-2.5-Diffusers", True)])
def test_sound_is_asked_for_where_the_configured_model_makes_it(
    ask: Cli, server: VisionServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, is_heard: bool
) -> None:
    monkeypatch.setenv("SVDQ_MODEL", model)
    assert ask(*photos_in(tmp_path / "a", 1)).returncode == 0
    (request,) = server.requests
    assert ("say what is heard" in request["messages"][0]["content"][0]["text"]) == is_heard


def test_a_caption_is_the_prompt_of_the_photo(
    ask: Cli, svdq: Cli, server: VisionServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    pillow_heif.register_heif_opener()
    photo, heic = photos_in(tmp_path / "a", 1)[0], photos_in(tmp_path / "b", 2, ".heic")[1]
    (tmp_path / "instruction.txt").write_text("What moves?")
    server.answer = lambda number: completion(f'<think>\nwell</think>\n "{caption_of(number)}\n It rains\a." ')

    done = ask(photo, heic, "--prompt-file", tmp_path / "instruction.txt")

    assert done.returncode == 0, done.stderr
    assert photo.with_suffix(".txt").read_text() == "Photo 0 moves. It rains.\n"
    assert f"{heic}: Photo 1 moves. It rains." in done.stdout.splitlines()
    assert server.keys == {"Bearer secret"}
    assert {request["model"] for request in server.requests} == {"seer"}
    assert {request["messages"][0]["content"][0]["text"] for request in server.requests} == {"What moves?"}
    made = json.loads(svdq("submit", photo, "--json").stdout)
    assert '"Photo 0 moves. It rains."' in svdq("status", made["id"]).stdout


@pytest.mark.parametrize(
    ("answer", "caption"),
    [
        ('**Prompt:** "The wave breaks."', "The wave breaks."),
        ("```\nThe *wave*\n breaks.\n```", "The wave breaks."),
        ("“The wave's foam breaks.”", "The wave's foam breaks."),
        ('"Stop" blinks, then "Go"', '"Stop" blinks, then "Go"'),
    ],
)
def test_what_models_add_to_a_caption_is_left_out(
    ask: Cli, server: VisionServer, tmp_path: Path, answer: str, caption: str
) -> None:
    (photo,) = photos_in(tmp_path, 1)
    server.answer = lambda number: completion(answer)
    assert ask(tmp_path).returncode == 0
    assert photo.with_suffix(".txt").read_text() == f"{caption}\n"


def test_a_large_photo_is_sent_small_and_upright(ask: Cli, server: VisionServer, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (2000, 1000), color_of(3)).save(tmp_path / "large.jpg", exif=exif)
    assert ask(tmp_path / "large.jpg").returncode == 0
    data = server.requests[0]["messages"][0]["content"][1]["image_url"]["url"].partition(",")[2]
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        assert image.size == (384, 768)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (completion(""), "the model's answer is empty"),
        (completion(None), "the model's answer is empty"),
        (completion("The wave", "length"), "the model's answer is cut short by its limit of tokens"),
        (completion("wave " * 2000), "the model's answer is longer than a prompt may be"),
        ("{", "the server's answer is not JSON"),
        ({"choices": []}, "the server's answer is no chat completion"),
        (["hello"], "the server's answer is no chat completion"),
        (400, "the server answers with an error (Error code: 400"),
    ],
)
def test_a_photo_without_an_answer_is_named_and_the_others_go_on(
    ask: Cli, server: VisionServer, tmp_path: Path, wrong: object, reason: str
) -> None:
    photos = photos_in(tmp_path, 3)
    photos[2].write_bytes(b"no photo")
    server.answer = lambda number: wrong if number == 1 else completion(caption_of(number))
    done = ask(tmp_path)
    assert done.returncode == 1
    assert f"{photos[1]}: {reason}" in done.stderr
    assert f"{photos[2]}: " in done.stderr
    assert done.stdout.splitlines()[-1] == "Captions written: 1; there already: 0; still missing: 2."
    assert list(texts_in(tmp_path)) == ["000"]

    again = ask(tmp_path, "--json", "--quiet")
    assert {json.loads(line)["photo"] for line in again.stdout.splitlines()} == {str(photos[1]), str(photos[2])}
    assert all("error" in json.loads(line) for line in again.stdout.splitlines())
    server.answer = lambda number: completion(caption_of(number))
    [line] = ask(photos[1], "--json").stdout.splitlines()
    assert json.loads(line) == {"photo": str(photos[1]), "prompt": "Photo 1 moves."}


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (401, 2, "refuses the key"),
        (404, 2, "has no model 'seer', or no such address"),
        (422, 3, "There is no caption for 5 photos in a row; the last reason:"),
    ],
)
def test_a_server_that_answers_nothing_ends_the_command(
    ask: Cli, server: VisionServer, tmp_path: Path, status: int, code: int, reason: str
) -> None:
    photos_in(tmp_path, 30)
    server.answer = lambda number: status
    done = ask(tmp_path)
    assert done.returncode == code
    assert f"Error: {'' if code == 3 else f'The server at {server.url} '}{reason}" in done.stderr
    assert texts_in(tmp_path) == {}
    assert server.asked.total() < 30


@pytest.mark.slow
def test_a_server_that_dies_or_is_slow_ends_the_command(ask: Cli, server: VisionServer, tmp_path: Path) -> None:
    photos_in(tmp_path, 12)

    def die_at_five(number: int) -> object:
        return completion(caption_of(number)) if number < 5 else None

    server.answer = die_at_five
    done = ask(tmp_path, "--parallel", "1")
    assert done.returncode == 3
    assert f"The server at {server.url} cannot be reached (" in done.stderr
    assert done.stdout.splitlines()[-1] == "Captions written: 5; there already: 0; still missing: 7."

    def never(number: int) -> object:
        server.closing.wait()
        return None

    server.answer = never
    before = texts_in(tmp_path)
    done = ask(tmp_path, "--timeout", "0.2")
    assert done.returncode == 3
    assert "has not answered within 0.2 s, in 3 tries; raise --timeout, or lower --parallel." in done.stderr
    assert texts_in(tmp_path) == before


def test_a_prompt_that_appears_meanwhile_stays(ask: Cli, server: VisionServer, tmp_path: Path) -> None:
    (photo,) = photos_in(tmp_path, 1)

    def write_first(number: int) -> object:
        photo.with_suffix(".txt").write_text("mine")
        return completion(caption_of(number))

    server.answer = write_first
    done = ask(tmp_path)
    assert done.returncode == 1
    assert "There is a prompt beside it by now, which was left as it is." in done.stderr
    assert photo.with_suffix(".txt").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 3  # with the home


def test_an_unreachable_server_and_wrong_input_are_sentences(svdq: Cli, home: Path, tmp_path: Path) -> None:
    (photo,) = photos_in(tmp_path, 1)
    for url, code, reason in (
        ("http://127.0.0.1:1/v1", 3, "The server at http://127.0.0.1:1/v1 cannot be reached"),
        ("localhost:11434", 2, "--url localhost:11434 is not allowed: it must begin with http:// or https://."),
    ):
        done = svdq("caption", photo, "--url", url, "--vision-model", "seer")
        assert (done.returncode, reason in done.stderr) == (code, True), done.stderr
    assert done.stdout == ""
    done = svdq("caption", photo, "--vision-model", "seer", "--prompt-file", tmp_path / "none.txt")
    assert (done.returncode, "cannot be read (No such file or directory)" in done.stderr) == (2, True)
    done = svdq("caption", photo, tmp_path / "gone.jpg", "--vision-model", "seer")
    assert (done.returncode, f"There is no file {str(tmp_path / 'gone.jpg')!r}" in done.stderr) == (2, True)
    assert texts_in(tmp_path) == {}
