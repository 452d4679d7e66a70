"""Bodies as browsers and clients send them."""

BOUNDARY = "svdq-test-boundary"
TYPE = f"multipart/form-data; boundary={BOUNDARY}"


def multipart(photo: bytes | None = None, file_name: str = "a photo.jpg", **fields: object) -> bytes:
    """A form with a photo and fields; `__` in a name means a bracket."""
    parts = []
    for field, value in fields.items():
        parts.append(f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'.encode())
    if photo is not None:
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="input_reference"; filename="{file_name}"\r\n'
        parts.append(head.encode() + b"Content-Type: application/octet-stream\r\n\r\n" + photo + b"\r\n")
    return b"".join([*parts, f"--{BOUNDARY}--\r\n".encode()])
