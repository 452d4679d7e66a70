"""Load on a server: `python -m tests.cli.serve.load PORT TOKEN UPLOADS PAGES` opens pages and uploads photos at once.

Prints a JSON object at the end.
"""

import asyncio
import json
import sys
import time
from typing import Any

from tests.cli.serve.servers import TYPE, jpeg, multipart

AROUND_S = 4  # seconds that pages are open before the uploads begin and after they end


async def put_load(port: int, token: str, num_uploads: int, num_pages: int) -> None:
    head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
    bodies = [multipart(jpeg(number)) for number in range(num_uploads)]
    result: dict[str, Any] = {"ids": [], "seconds": [], "num_events": 0, "num_bytes": sum(map(len, bodies))}

    async def page() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /page/events HTTP/1.1\r\n{head}\r\n".encode())
        try:
            while line := await reader.readline():
                result["num_events"] += line.startswith(b"event: state")
        finally:
            writer.close()

    async def upload(body: bytes) -> None:
        began_at = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        kind = f"Content-Type: {TYPE}\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"POST /v1/videos HTTP/1.1\r\n{head}{kind}Connection: close\r\n\r\n".encode() + body)
        answer = await reader.read()
        writer.close()
        if answer.startswith(b"HTTP/1.1 200 "):
            result["ids"].append(answer.partition(b'"id":"')[2][:20].decode())
            result["seconds"].append(time.monotonic() - began_at)

    pages = [asyncio.create_task(page()) for _ in range(num_pages)]
    await asyncio.sleep(AROUND_S)
    await asyncio.gather(*map(upload, bodies))
    await asyncio.sleep(AROUND_S)
    print(json.dumps(result))
    for each in pages:
        each.cancel()
    await asyncio.gather(*pages, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(put_load(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
