"""A bucket of an S3 server on this machine that keeps every version of its objects."""

import json
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

NAME = "svdq-faults"


class Bucket:
    """The storage of one campaign; its credentials are in the environment of this process."""

    def __init__(self) -> None:
        """Start the server."""
        import boto3
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.endpoint = f"http://{host}:{port}"
        self.url = f"s3://{NAME}"
        os.environ |= {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "AKIASVDQTEST",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        self._client: Any = boto3.client("s3")
        self._client.create_bucket(Bucket=NAME)
        self._client.put_bucket_versioning(Bucket=NAME, VersioningConfiguration={"Status": "Enabled"})

    def copy_to(self, folder: Path) -> None:
        """Copy the present objects."""
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=NAME):
            for found in page.get("Contents", ()):
                path = folder / found["Key"]
                path.parent.mkdir(parents=True, exist_ok=True)
                self._client.download_file(NAME, found["Key"], str(path))

    def counts(self) -> Counter[str]:
        """Count the renderings of each sidecar; a writer that is not answered writes one rendering several times."""
        renderings = set()
        for page in self._client.get_paginator("list_object_versions").paginate(Bucket=NAME, Prefix="outputs/"):
            for version in page.get("Versions", ()):
                key = version["Key"]
                if key.endswith(".json"):
                    body = self._client.get_object(Bucket=NAME, Key=key, VersionId=version["VersionId"])["Body"].read()
                    sidecar = json.loads(body)
                    renderings.add((Path(key).name, json.dumps([sidecar["group"], sidecar["stages"]])))
        return Counter(name for name, _ in renderings)

    def stop(self) -> None:
        """Stop the server."""
        self._server.stop()
