"""Do several hosts of a network make one run, when one of them is cut off in the middle?

Each host is a network namespace with a link to a bridge; they share the file system. Needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from trial_sweeps import SETTINGS, Cluster, Sweeps, assert_equal, end, table, wait_for

NETWORK = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"  # of this process: tests may run side by side
TAG = f"kv{os.getpid() % 10**6}"  # interfaces have short names
SOON = SETTINGS | {  # a host that says nothing is given up within seconds
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "12s",
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "3s",
}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Network:
    """A bridge here, and hosts that are reached through it."""

    def __init__(self) -> None:
        self.hosts: list[str] = []
        ip("link", "add", TAG, "type", "bridge")
        ip("addr", "add", f"{NETWORK}.1/24", "dev", TAG)
        ip("link", "set", TAG, "up")

    def host(self) -> list[str]:
        """The words before a command that runs there; its address is NETWORK.(2 + number)."""
        number = len(self.hosts)
        name = f"{TAG}-{number}"
        ip("netns", "add", name)
        self.hosts.append(name)
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", name, "master", TAG, "up")
        ip("-n", name, "addr", "add", f"{NETWORK}.{2 + number}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
        return ["ip", "netns", "exec", name]

    def cut(self, number: int) -> None:
        ip("link", "set", self.hosts[number], "down")

    def remove(self) -> None:
        for name in self.hosts:
            subprocess.run(["ip", "link", "del", name], capture_output=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", TAG], capture_output=True)


@pytest.fixture
def network() -> Iterator[Network]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    try:
        made = Network()
        made.host()
    except subprocess.CalledProcessError as problem:
        pytest.skip(f"no network namespaces here: {problem.stderr.decode().strip()}")
    yield made
    made.remove()


def test_a_host_is_cut_off(network: Network, sweeps: Sweeps, single: Path, tmp_path: Path) -> None:
    """It goes on, and writes, but nobody hears of it."""
    sweeps.fault_once("t1", f"ip -o -4 addr show eth0 >{tmp_path}/where.partial; mv {tmp_path}/where.partial "
                      f"{tmp_path}/where; sleep 15")  # fmt: skip
    cluster = Cluster.started(tmp_path, f"{NETWORK}.1", SOON)
    try:
        hosts = [["ip", "netns", "exec", network.hosts[0]], network.host(), network.host()]
        for number, host in enumerate(hosts):
            cluster.worker(host, f"{NETWORK}.{2 + number}")
        client = sweeps.start("--executor", f"dask:{cluster.address}")
        wait_for((tmp_path / "where").exists)
        cut = int((tmp_path / "where").read_text().split(f"{NETWORK}.")[1].split("/")[0])
        network.cut(cut - 2)
        out, err = client.communicate(timeout=90)
        assert client.returncode == 0, err
        assert_equal(sweeps.output, single)
        rows = table(sweeps.output)
        assert rows["t1"]["attempts"] == "2" and out.startswith("sweep    4 of 4 tasks done")
    finally:
        for process in cluster.processes:
            end(process)
