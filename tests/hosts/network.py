"""Hosts on one machine: namespaces of Linux that share a bridge, each with a cable that can be pulled.

A host has a network, a name, process ids and mounts of its own, so a process in it can neither be reached nor be looked
up from another one. Hosts end with the process that made them, however that ends; a bridge and cables that it leaves
are removed by the next network.
"""

import contextlib
import ipaddress
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.waiting import wait_until

#: Set aside for tests of networks (RFC 2544), so nobody's; a network takes 256 addresses of it.
RANGE = ipaddress.ip_network("198.18.0.0/15")
PROGRAMS = ("ip", "nsenter", "setpriv", "unshare")
#: Names of bridges; the id of the process that made it follows. A cable has a letter more, and 15 are allowed.
PREFIX = "svdqt"


class NoHostsError(Exception):
    """This machine does not let us make hosts; says why."""


class Host:
    """One host; what `command` is written before runs on it."""

    def __init__(self, name: str, address: str, hosts: str, folder: Path) -> None:
        """Make it, with a network that has nothing but the loopback.

        Args:
            name: its own idea of its name.
            address: what others will reach it at.
            hosts: its /etc/hosts.
            folder: an existing one of its own.
        """
        self.name, self.address = name, address
        #: Name of the far end of its cable, when it has one.
        self.cable = ""
        files = {"hosts": hosts, "nsswitch.conf": "hosts: files\n"}  # there is no DNS that could be asked
        for file, text in files.items():
            (folder / file).write_text(text)
        mounts = [f"mount --bind '{folder / file}' /etc/{file}" for file in files]
        inside = [*mounts, f"hostname {name}", "ip link set lo up", "echo up", "exec sleep infinity"]
        self._unshare = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL"),
                *("unshare", "--net", "--uts", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child"),
                *("sh", "-c", " && ".join(inside)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._unshare.stdout is not None
        if self._unshare.stdout.readline() != "up\n":
            raise NoHostsError(f"no right to make namespaces: {self._unshare.communicate()[1].strip()}")
        #: Its first process, with which all others of it end.
        self.pid = psutil.Process(self._unshare.pid).children()[0].pid

    @property
    def command(self) -> Sequence[str]:
        """What to write before a command that is to run on this host."""
        return ("nsenter", "--target", str(self.pid), "--net", "--uts", "--pid", "--mount", "--")

    def connect(self, bridge: str, cable: str, prefix_length: int) -> None:
        """Lay a cable from this host to a bridge."""
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        self.cable = cable
        _ip("link", "set", cable, "master", bridge, "up")
        _ip("addr", "add", f"{self.address}/{prefix_length}", "dev", "eth0", under=self.command)
        _ip("link", "set", "eth0", "up", under=self.command)

    def pull_cable(self) -> None:
        """Let nothing in or out any more; no connection is told."""
        _ip("link", "set", self.cable, "down")

    def plug_in(self) -> None:
        """Put the cable back."""
        _ip("link", "set", self.cable, "up")

    def end(self) -> None:
        """End it with all that runs on it, as when its power is cut: nobody hears of it."""
        with contextlib.suppress(NoHostsError):
            self.pull_cable()
        with self._unshare:
            self._unshare.kill()
        wait_until(lambda: not psutil.pid_exists(self.pid))
        with contextlib.suppress(NoHostsError):
            _ip("link", "del", self.cable)  # the kernel does so by itself, but later


class Network:
    """A bridge that this machine has an address at, and hosts at it."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        """Make it.

        Args:
            names: of its hosts, in the order of their addresses.
            folder: an existing one, to keep files of hosts in.

        Raises:
            NoHostsError: this machine does not let us.
        """
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if missing:
            raise NoHostsError(f"not installed: {', '.join(missing)}")
        self.hosts: dict[str, Host] = {}
        self._folder = folder
        self._bridge = f"{PREFIX}{os.getpid()}"
        self._addresses = _make_bridge(self._bridge)
        self._others = dict(zip(names, map(str, self._addresses.hosts()), strict=False))
        #: This machine's.
        self.address = str(self._addresses[-2])
        try:
            _ip("addr", "add", f"{self.address}/{self._addresses.prefixlen}", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for name in names:
                self.boot(name)
        except BaseException:
            self.end()
            raise

    def boot(self, name: str) -> Host:
        """Make a host, or make it anew when it has ended; its address stays."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        host = Host(name, self._others[name], _hosts_file(name, self._others), folder)
        self.hosts[name] = host
        cable = f"{self._bridge}{'abcdefgh'[list(self._others).index(name)]}"
        host.connect(self._bridge, cable, self._addresses.prefixlen)
        return host

    def end(self) -> None:
        """Remove everything."""
        for host in self.hosts.values():
            host.end()
        with contextlib.suppress(NoHostsError):
            _ip("link", "del", self._bridge)


def _hosts_file(name: str, addresses: dict[str, str]) -> str:
    """Write /etc/hosts as Debian's installer does: the host's own name means an address of its loopback."""
    lines = {"localhost": "127.0.0.1", **addresses, name: "127.0.1.1"}
    return "".join(f"{address} {other}\n" for other, address in lines.items())


def _make_bridge(name: str) -> ipaddress.IPv4Network:
    """Make a bridge, and choose addresses for it that nobody has here; remove what those have left who are gone."""
    for link in json.loads(_ip("-json", "link", "show")):
        left = re.fullmatch(rf"{PREFIX}(\d+)[a-h]?", link["ifname"])
        if left and not psutil.pid_exists(int(left[1])):
            with contextlib.suppress(NoHostsError):  # the kernel may be faster
                _ip("link", "del", link["ifname"])
    taken = [
        ipaddress.ip_address(address["local"])
        for link in json.loads(_ip("-4", "-json", "addr", "show"))
        for address in link.get("addr_info", ())
    ]
    networks = RANGE.subnets(new_prefix=24)
    # Two that choose at once begin at different places.
    order = itertools.chain(itertools.islice(RANGE.subnets(new_prefix=24), os.getpid() % 512, None), networks)
    chosen = next(network for network in order if not any(address in network for address in taken))
    _ip("link", "add", name, "type", "bridge")
    return ipaddress.IPv4Network(chosen)


def _ip(*arguments: str, under: Sequence[str] = ()) -> str:
    """Run `ip`.

    Raises:
        NoHostsError: it failed; that is mostly a missing right.
    """
    done = subprocess.run([*under, "ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NoHostsError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
