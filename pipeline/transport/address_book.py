"""Address books, in which the ranks of a group publish and find their addresses."""

import ipaddress
import os
import time
from pathlib import Path
from typing import Final, Protocol

from svdq.pipeline.transport.sockets import facing

#: Seconds between two lookups of an entry of another host.
_RETRY_S: Final = 1.0


class AddressBook(Protocol):
    """Stores the addresses of ranks; only the ranks of the group may be able to read and write it."""

    def publish(self, name: str, entry: str) -> None:
        """Write an entry, replacing an existing one."""
        ...

    def look_up(self, name: str) -> str | None:
        """Return an entry; None if there is none yet."""
        ...


class FolderBook:
    """Stores entries as files in a folder that only this user can enter."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def publish(self, name: str, entry: str) -> None:
        """Write an entry, replacing an existing one."""
        temporary = self._folder / f".{name}-{os.getpid()}"
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(entry)
        temporary.replace(self._folder / name)

    def look_up(self, name: str) -> str | None:
        """Return an entry; None if there is none yet."""
        try:
            return (self._folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None


def address_among_hosts(book: AddressBook, rank: int, elsewhere: int, host: str, port: int) -> str:
    """Return the address of this host that other hosts of the group can reach.

    The book is the same for all ranks, `elsewhere` a rank on another host. All ranks know the name of `host`, such as
    MASTER_ADDR; it may be this one. Any port of it will do.
    """
    address = facing(host, port)
    book.publish(f"rank{rank}-faces", address)
    if ipaddress.ip_address(address).is_loopback:
        # A host's own name often resolves to loopback (Debian's /etc/hosts): use the address that faces another host.
        while (other := book.look_up(f"rank{elsewhere}-faces")) is None:
            book.publish(f"rank{rank}-faces", address)
            time.sleep(_RETRY_S)
        address = facing(other, port)
    return address
