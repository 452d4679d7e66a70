"""A stop while the storage neither answers nor refuses: it comes in time, and the job goes back to its queue."""

import os
import signal
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_group_stops_although_a_photo_never_comes(house, until) -> None:
    job = house.submit()
    photo = next((Path(house.settings.storage) / "inputs").iterdir())
    photo.unlink()
    os.mkfifo(photo)  # whoever opens it waits
    group = house.start(1)
    until(lambda: house.view(job).status == "started", lambda: group.text)
    group.tell(signal.SIGTERM)
    assert group.end() == 0, group.text
    assert "1 job went back to the queue" in group.text
    assert house.queued() == [job]
