"""Nodes as network namespaces of this machine, for tests: a bridge joins them, and nothing else."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest


def ip(*words: str) -> subprocess.CompletedProcess:
    """The command `ip`; the test is skipped where there is none."""
    if shutil.which("ip") is None:
        pytest.skip("the command `ip` is not installed here")
    return subprocess.run(["ip", *words], capture_output=True, text=True)


@contextmanager
def namespaces(hosts: Sequence[str]) -> Iterator[str]:
    """A prefix; the n-th host, from 1, is in namespace PREFIX-n with link eth0. Skipped where none can be made."""
    prefix = f"vp{os.getpid()}"
    bridge = f"{prefix}-br"
    try:
        made = [ip("netns", "add", bridge)]
        made.append(ip("-n", bridge, "link", "add", "br0", "type", "bridge"))
        made.append(ip("-n", bridge, "link", "set", "br0", "up"))
        for number, host in enumerate(hosts, 1):
            name = f"{prefix}-{number}"
            made.append(ip("netns", "add", name))
            peer = ["type", "veth", "peer", "name", f"v{number}", "netns", bridge]
            made.append(ip("-n", name, "link", "add", "eth0", *peer))
            made.append(ip("-n", name, "address", "add", f"{host}/24", "dev", "eth0"))
            made += [ip("-n", name, "link", "set", link, "up") for link in ("eth0", "lo")]
            made.append(ip("-n", bridge, "link", "set", f"v{number}", "master", "br0", "up"))
        if fault := next((done.stderr.strip() for done in made if done.returncode), None):
            pytest.skip(f"network namespaces cannot be made here: {fault}")
        yield prefix
    finally:
        for name in [bridge, *(f"{prefix}-{number}" for number in range(1, len(hosts) + 1))]:
            ip("netns", "delete", name)
