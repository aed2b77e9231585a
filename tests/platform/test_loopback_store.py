"""Test where the store of torch.distributed listens."""

import pytest

from tests.ranks import reserved_port

PROGRAM = """
import contextlib, os, psutil, sys
import torch, torch.distributed as dist
from verl_patches.platform.loopback_store import loopback_store

os.environ.update(RANK="0", WORLD_SIZE="1", GLOO_SOCKET_IFNAME="lo", MASTER_ADDR=sys.argv[1], MASTER_PORT=sys.argv[2])
with loopback_store() if sys.argv[3] == "ours" else contextlib.nullcontext():
    dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1), group=dist.new_group([0]))
listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
found = {place.ip for place in listening if place.port == int(sys.argv[2])}
print(*found, "TORCHELASTIC_USE_AGENT_STORE" in os.environ)
"""


@pytest.mark.parametrize(("host", "whose", "interfaces"), [
    ("127.0.0.1", "ours", {"127.0.0.1"}),
    ("127.0.0.1", "torch's", {"0.0.0.0", "::"}),
    ("localhost", "ours", {"0.0.0.0", "::"}),  # not an address of the loopback: as on several nodes
])  # fmt: skip
def test_the_store_listens_on_the_loopback_where_the_master_does(run_python, host, whose, interfaces):
    with reserved_port() as port:
        found, connects_only = run_python(PROGRAM, host, str(port), whose).check().out.split()
    assert found in interfaces and connects_only == "False"
