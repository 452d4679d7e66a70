"""`svdq batch`: submit the photos of a list, each with its own parameters."""

from pathlib import Path
from typing import Any

import click

from svdq.cli.main import redis_options, storage_option
from svdq.cli.option_types import GivenPath
from svdq.cli.video_options import VideoCommand, job_options, parameter_options, read_spec, submission_options
from svdq.producer.job import PARAMETER_KEYS

HELP = f"""Submit the photos of a list, each with its own parameters.

FILE is a .csv file whose first line names the columns, or a .jsonl file with an object on each line. Columns are photo
(a path, relative to the list), the parameters of `svdq submit` ({", ".join(PARAMETER_KEYS)}; also
width and height instead of size), and priority, at, name and output. An empty or missing field takes the value of the
option, such as --frames, or else its default, and the prompt that of photo.txt beside photo.jpg.

All rows and photos are checked before anything is submitted; each error names the line. One bad row stops the whole
submission, unless --skip-bad leaves bad rows out. Rows that were submitted before are recognized, so a list can grow
and be submitted again.
"""

EXAMPLES = """\b
Examples:
  svdq batch tonight.csv --wait
  svdq batch tonight.csv --size 576x320 --format gif --at 22:00 --output night
\b
  tonight.csv:
    photo,frames,motion_bucket_id,name,output,at
    photos/cup.jpg,25,127,,,
    photos/dog.jpg,14,60,dog-{seed},animals,22:00
\b
  the same as tonight.jsonl:
    {"photo": "photos/cup.jpg", "frames": 25, "motion_bucket_id": 127}
    {"photo": "photos/dog.jpg", "frames": 14, "name": "dog-{seed}", "output": "animals", "at": "22:00"}
"""


@click.command(cls=VideoCommand, epilog=EXAMPLES, help=HELP)
@click.argument("file", type=GivenPath())
@parameter_options
@job_options
@submission_options
@storage_option
@redis_options
def batch(
    file: Path,
    skip_bad: bool,
    do_wait: bool,
    verbose: bool,
    as_json: bool,
    storage: str | None,
    redis_url: str | None,
    **options: Any,
) -> int:
    """Submit the photos of a list, each with its own parameters."""
    # Imported here so that `svdq batch --help` stays fast.
    from datetime import datetime

    from svdq.cli.submissions import submit_and_print
    from svdq.producer.settings_loader import load_settings
    from svdq.producer.submitting.photo_lists import read_batch

    settings = load_settings(redis_url=redis_url, storage=storage)
    defaults = read_spec(settings, **options)
    defaults.check()
    requests = read_batch(file, datetime.now().astimezone(), defaults)
    return submit_and_print(settings, requests, skip_bad=skip_bad, do_wait=do_wait, verbose=verbose, as_json=as_json)
