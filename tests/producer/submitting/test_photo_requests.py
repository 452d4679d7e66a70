"""Lists of photos: the same in csv and JSON lines, and every bad row by its line."""

import re
from datetime import datetime
from pathlib import Path

import pytest

from svdq.pipeline.errors import InputError
from svdq.producer.job import JOBS
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.photo_requests import COLUMNS, read_batch
from svdq.producer.submitting.sources import PhotoRequest

NOW = datetime(2027, 1, 30, 21, 0).astimezone()
TEN = datetime(2027, 1, 30, 22, 0).astimezone()

CSV = """\
photo,frames,size,noise_aug_strength,format,seed,priority,at,name,output
cup.jpg,,,,,,,,,
"sub/a, b.jpg",25,576x320,0.05,mp4 gif,7,high,22:00,{stem}-{seed},x/y
"""
JSONL = """\
{"photo": "cup.jpg", "frames": null}

{"photo": "sub/a, b.jpg", "frames": 25, "size": "576x320", "noise_aug_strength": 0.05, "format": ["mp4", "gif"], \
"seed": 7, "priority": "high", "at": "22:00", "name": "{stem}-{seed}", "output": "x/y"}
"""


def rows(tmp_path: Path, name: str, text: str | bytes) -> list[PhotoRequest | InputError]:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_batch(path, lambda: NOW)


def read(tmp_path: Path, name: str, text: str | bytes) -> list[PhotoRequest]:
    requests = rows(tmp_path, name, text)
    assert not [request for request in requests if isinstance(request, InputError)]
    return [request for request in requests if isinstance(request, PhotoRequest)]


def reasons(tmp_path: Path, name: str, text: str) -> list[str]:
    """The reason for each bad row, without the name of the file."""
    said = [str(request) for request in rows(tmp_path, name, text) if isinstance(request, InputError)]
    assert all(reason.startswith(f"{name}, ") and "\n" not in reason for reason in said)
    return [reason.removeprefix(f"{name}, ") for reason in said]


def test_every_parameter_of_a_job_has_a_column() -> None:
    for job in JOBS.values():
        assert set(job.model_fields) - {"image", "last_image", "folder", "chained", "finishes"} <= set(COLUMNS)


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("list.csv", CSV, (2, 3)),
        ("list.csv", "\ufeff" + CSV.replace(",", ";").replace("a; b", "a, b").replace("\n", "\r\n"), (2, 3)),
        ("list.csv", CSV.replace(",", "\t").replace("a\t b", "a, b"), (2, 3)),
        ("list.csv", "\ufeffsep=;\r\n" + CSV.replace(",", ";").replace("a; b", "a, b").replace("\n", "\r\n"), (3, 4)),
        ("list.csv", '"sep=,"\n' + CSV, (3, 4)),
        ("list.csv", CSV.replace("noise_aug_strength", "Noise-Aug-Strength").replace("photo", "Photo"), (2, 3)),
        ("list.csv", CSV.replace("25", "25.0").replace(",7,", ",7.00,"), (2, 3)),  # as pandas writes them
        ("list.jsonl", JSONL, (1, 3)),
        ("list.jsonl", JSONL.replace("25", "25.0"), (1, 3)),
    ],
)
def test_a_list(tmp_path: Path, name: str, text: str, lines: tuple[int, int]) -> None:
    plain, full = read(tmp_path, name, text)
    assert [request.where for request in (plain, full)] == [f"{name}, line {line}: " for line in lines]
    assert (plain.path, plain.spec.drafts, plain.spec.at) == (tmp_path / "cup.jpg", (Draft(),), None)
    assert full.path == tmp_path / "sub" / "a, b.jpg"
    assert full.spec.drafts == (
        Draft(frames=25, width=576, height=320, noise_aug_strength=0.05, formats=("mp4", "gif"), seed=7),
    )
    spec = full.spec
    assert (spec.priority, spec.at, spec.name, spec.folder) == ("high", TEN, "{stem}-{seed}", "x/y")


def test_prompts_and_families(tmp_path: Path) -> None:
    text = "photo,prompt,negative_prompt,guidance_scale,guidance_scale_2,flow_shift,family\n"
    text += 'a.jpg,"A cat, ""Tom"",\njumps.",blur,3.5,4,5,\nb.jpg,,,,,,wan\nc.jpg,,,,,,\n'
    a, b, c = read(tmp_path, "list.csv", text)
    assert a.spec.drafts == (
        Draft(
            prompt='A cat, "Tom",\njumps.',
            negative_prompt="blur",
            guidance_scale=3.5,
            guidance_scale_2=4.0,
            flow_shift=5.0,
        ),
    )
    assert (b.spec.drafts, c.spec.drafts) == ((Draft(family="wan"),), (Draft(),))
    rows = '{"photo": "a.jpg", "prompt": "Käse 日本"}\n{"photo": "b.jpg", "prompt": "x", "motion_bucket_id": 5}\n'
    (reason,) = reasons(tmp_path, "list.jsonl", rows)
    assert reason.startswith("line 2: motion_bucket_id applies only to Stable Video Diffusion and prompt only to Wan")
    (reason,) = reasons(tmp_path, "list.csv", "photo,prompt,frames\na.jpg,x,18\nb.jpg,x,17\n")
    assert reason.startswith("line 2: frames 18 is not allowed")


def test_a_cell_may_have_lines(tmp_path: Path) -> None:
    text = 'photo,fps\n"a\nb.jpg",8\nc.jpg,0\nd.jpg,9\n'
    assert reasons(tmp_path, "list.csv", text)[0].startswith("line 4: fps 0")


def test_equal_rows_share_a_spec(tmp_path: Path) -> None:
    requests = read(tmp_path, "list.csv", "photo,fps\na.jpg,8\nb.jpg,8\n")
    assert requests[0].spec is requests[1].spec


def test_all_bad_rows_are_reported(tmp_path: Path) -> None:
    text = "\n".join(
        [
            "photo,fps,motion_bucket_id,size,seed,priority,at,name,output",
            "a.jpg,7,127,576x320,1,low,,,",
            "b.jpg,many,,,,,,,",
            ",7,,,,,,,",
            "c.jpg,,5000,,,,,,",
            "d.jpg,,,100x100,,,,,",
            "e.jpg,,,,,urgent,,,",
            "f.jpg,,,,,,yesterday,,",
            "g.jpg,,,,,,,{colour},",
            "h.jpg,,,,,,,,/tmp",
            "i.jpg,,,,,,,,,extra",
            "j.jpg",
        ]
    )
    said = reasons(tmp_path, "list.csv", text)
    wrong = ["fps 'many'", "photo", "motion_bucket_id 5000", "size 100x100", "'urgent'", "at 'yesterday'"]
    wrong += ["{colour}", "'/tmp'", "10 cells"]
    assert [reason.partition(":")[0] for reason in said] == [f"line {line}" for line in range(3, 12)]
    for reason, what in zip(said, wrong, strict=True):
        assert what in reason


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("l.csv", "photo,\na.jpg,red\n", "line 2: There is no column ''"),
        ("l.csv", "photo,size,width\na.jpg,64x64,128\n", "line 2: width contradicts"),
        ("l.csv", "photo,frames\na.jpg,14.5\n", r"line 2: frames '14\.5' is not allowed: it must be a whole number"),
        ("l.csv", "sep=;\nphoto;fps\na.jpg;0\n", "line 3: fps 0"),
        ("l.csv", "photo,format\na.jpg,avi\n", "line 2: format avi is not allowed"),
        ("l.jsonl", '{"photo": "a.jpg"}\n{"photo": \n', "line 2: The line is not valid JSON"),
        ("l.jsonl", '{"photo": ' + "[" * 100_000, "line 1: The line is not valid JSON"),
        ("l.jsonl", '["a.jpg"]', "line 1: The line is not an object"),
        ("l.jsonl", '{"photo": "a.jpg", "fps": true}', "line 1: fps true is not allowed"),
        ("l.jsonl", '{"photo": "a.jpg", "fps": [7]}', r"line 1: fps \[7\] is not allowed"),
    ],
)
def test_bad_lists(tmp_path: Path, name: str, text: str, says: str) -> None:
    (reason,) = reasons(tmp_path, name, text)
    assert re.match(says, reason), reason


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("list.txt", b"a.jpg", "ends in .csv or .jsonl"),
        ("list.csv", b"", "no rows"),
        ("list.csv", b"photo\n\n", "no rows"),
        ("list.jsonl", b"\n", "no rows"),
        ("list.csv", b"photo,colour\na.jpg,red\n", "line 1: There is no column 'colour'; the columns are photo,"),
        ("list.csv", b"photo,fps,fps\na.jpg,7,8\n", "line 1: .* twice"),
        ("list.csv", b"file\na.jpg\nb.jpg\n", "line 1: There is no column 'file'.* The first line names the columns."),
        ("list.csv", b"photo,frame\na.jpg,7\n", "line 1: There is no column 'frame'; did you mean frames?"),
        ("list.csv", b"photo,FPS,fps\na.jpg,7,8\n", "line 1: .* twice"),
        ("list.csv", b'photo\nb.jpg\n"a.jpg\n', "line 3: The line is not valid csv"),
        ("list.yaml", b"- photo: a.jpg", "ends in .csv or .jsonl"),
        ("list.csv", b"photo\n\xff.jpg\n", "save it as UTF-8 .in Excel: CSV UTF-8"),
    ],
)
def test_files_of_other_types(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read(tmp_path, name, data)


def test_no_such_list(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_batch(tmp_path / "list.csv", lambda: NOW)
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(InputError, match="cannot be read"):
        read_batch(tmp_path / "folder.csv", lambda: NOW)


def test_a_row_takes_what_it_leaves_open_from_the_options(tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    path.write_text("photo,frames,size,prompt\na.jpg,,,\nb.jpg,21,320x64,One.\nc.jpg,,auto,\n")
    defaults = Draft(frames=17, width=128, height=64, auto_size=True, prompt="All.")
    found = []
    for request in read_batch(path, lambda: NOW, JobSpec(drafts=(defaults,))):
        assert isinstance(request, PhotoRequest)
        found.append(request.spec.drafts[0])
    assert found == [defaults, Draft(frames=21, width=320, height=64, prompt="One."), defaults]
