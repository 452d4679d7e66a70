"""`svdq batch`: a list of photos, each with parameters of its own, into the queue."""

from pathlib import Path

import click

from svdq.cli.main import redis_options, storage_option
from svdq.cli.parameters import submission_options

EXAMPLES = """\b
Examples:
  svdq batch tonight.csv --wait
\b
  tonight.csv:
    photo,frames,motion_bucket_id,name,output,at
    photos/cup.jpg,25,127,,,
    photos/dog.jpg,14,60,dog-{seed},animals,22:00
\b
  the same as tonight.yaml:
    - {photo: photos/cup.jpg, frames: 25, motion_bucket_id: 127}
    - photo: photos/dog.jpg
      frames: 14
      motion_bucket_id: 60
      name: dog-{seed}
      output: animals
      at: 22:00
"""


@click.command(epilog=EXAMPLES)
@click.argument("file", type=click.Path(path_type=Path))
@submission_options
@storage_option
@redis_options
def batch(
    file: Path,
    force: bool,
    skip_bad: bool,
    do_wait: bool,
    as_json: bool,
    storage: str | None,
    redis_url: str | None,
) -> int:
    """Submit the photos of a list, each with parameters of its own.

    FILE is a .csv file whose first line names the columns, a .jsonl file with an object on each line, or a .yaml file
    with a list of mappings. Columns are photo (a path, from where the list lies), those that the parameters of `svdq
    submit` have (frames, steps, size or width and height, fps, seed, motion_bucket_id, noise_aug_strength,
    min_guidance_scale, max_guidance_scale, decode_chunk_size, format, fit), and priority, at, name and output. What a
    row leaves out is at its default.

    All rows are checked before anything is done; a row that is wrong is told of with its line. Rows that are there
    already are recognised, so a list may grow and be submitted again.
    """
    # Imported here: `svdq batch --help` needs none of it.
    from datetime import datetime

    from svdq.cli.submissions import print_reasons, submit_and_tell
    from svdq.producer.settings import Settings
    from svdq.producer.submitting.batch import BadRowsError, read_batch

    settings = Settings.load(redis_url=redis_url, storage=storage)
    try:
        requests = read_batch(file, datetime.now().astimezone(), force=force)
    except BadRowsError as error:
        print_reasons(error.reasons)
        raise
    return submit_and_tell(settings, requests, skip_bad=skip_bad, do_wait=do_wait, as_json=as_json)
