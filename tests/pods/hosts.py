"""Real hosts on one machine: network namespaces with addresses, names and process numbers of their own.

A pod is a command in such a host, as process 1 of a container would be: killing it kills everything in it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest
from sandbox import Command

ROOT = Path(__file__).resolve().parents[2]
ENTER = '"$@"'
"""In a shell: the arguments that stand after the script."""
IN_CI = "RAYTRAIN_NO_SKIP"
_SUBNET = "10.77.83"


def sh(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=check, timeout=30)


def require_namespaces() -> None:
    """Skip with the reason where hosts cannot be made; continuous integration sets a variable that forbids it."""
    reason = _why_not()
    if reason and os.environ.get(IN_CI):
        pytest.fail(f"{IN_CI} is set, but {reason}")
    if reason:
        pytest.skip(reason)


def _why_not() -> str:
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found (Debian: iproute2, util-linux)"
    probe = f"rtprobe{os.getpid()}"
    done = sh("ip", "netns", "add", probe, check=False)
    if done.returncode:
        return f"ip netns add: {done.stderr.strip()}"
    done = sh("ip", "link", "add", probe[:13], "type", "veth", "peer", "name", "p0", "netns", probe, check=False)
    sh("ip", "netns", "del", probe, check=False)
    return f"ip link add type veth: {done.stderr.strip()}" if done.returncode else ""


class Host:
    """One namespace. `name` is its host name, and what others call it once they know."""

    def __init__(self, network: Network, name: str, number: int) -> None:
        self.name, self.address = name, f"{_SUBNET}.{number}"
        self._network, self._space, self._wire = network, f"rt{network.mark}-{number}", f"rt{network.mark}v{number}"
        self.mark = f"{network.mark}-{number}"
        self._hosts = Path("/etc/netns") / self._space / "hosts"
        self._hosts.parent.mkdir(parents=True)
        # As Debian has it: the host's own name is a loopback address to itself.
        self._hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        sh("ip", "netns", "add", self._space)
        sh("ip", "link", "add", self._wire, "type", "veth", "peer", "name", "eth0", "netns", self._space)
        sh("ip", "link", "set", self._wire, "master", network.bridge, "up")
        self.inside("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.inside("ip", "link", "set", "eth0", "up")
        self.inside("ip", "link", "set", "lo", "up")
        self.inside("ip", "route", "add", "default", "via", f"{_SUBNET}.254")

    def knows(self, *others: Host) -> None:
        """From now on names of `others` resolve here."""
        # In place: a running process has this very file mounted.
        with self._hosts.open("a") as file:
            file.writelines(f"{other.address} {other.name}\n" for other in others)

    def inside(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return sh("ip", "netns", "exec", self._space, *words, check=check)

    def cut(self) -> None:
        """Pull its cable."""
        sh("ip", "link", "set", self._wire, "down")

    def give_back(self) -> None:
        sh("ip", "link", "set", self._wire, "up")

    def pod(self, program: Sequence[str], work: Path, **environment: str) -> Pod:
        return Pod(self, program, work, self._network.environment | environment)

    def command(self, program: Sequence[str]) -> list[str]:
        """`program` in this host: own network, own process numbers, own name, own /proc."""
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
        named = ["sh", "-c", f'hostname {self.name}; exec "$@"', "sh"]
        return ["ip", "netns", "exec", self._space, *apart, *named, *program]

    def close(self) -> None:
        sh("ip", "link", "del", self._wire, check=False)
        sh("ip", "netns", "del", self._space, check=False)
        shutil.rmtree(self._hosts.parent, ignore_errors=True)


class Network:
    """A switch and the hosts on it."""

    def __init__(self, temporary: Path) -> None:
        self.mark = uuid.uuid4().hex[:6]
        self.bridge = f"rt{self.mark}br"
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "VIRTUAL_ENV")}
        # What a killed pod leaves there goes with the network; short, as Ray's sockets want.
        self._temporary = Path(tempfile.mkdtemp(prefix="rt-", dir="/tmp"))
        own = {"HOME": str(temporary), "TMPDIR": str(self._temporary), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.environment = kept | own
        self._hosts: list[Host] = []
        sh("ip", "link", "add", self.bridge, "type", "bridge")
        sh("ip", "link", "set", self.bridge, "up")

    def host(self, name: str) -> Host:
        self._hosts.append(Host(self, name, len(self._hosts) + 1))
        return self._hosts[-1]

    def close(self) -> None:
        for host in self._hosts:
            host.close()
        sh("ip", "link", "del", self.bridge, check=False)
        shutil.rmtree(self._temporary, ignore_errors=True)


class Pod:
    """One container of a host: starts at once, ends with everything in it."""

    def __init__(self, host: Host, program: Sequence[str], work: Path, environment: dict[str, str]) -> None:
        self.host = host
        self.command = Command(host.command(program), work, environment)

    @property
    def pid(self) -> int:
        """Process 1 of the pod, as numbered outside."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            # sudo-like layers exec each other; `unshare` alone forks.
            children = Path(f"/proc/{self.command.process.pid}/task/{self.command.process.pid}/children").read_text()
            if children.strip():
                return int(children.split()[0])
            time.sleep(0.05)
        raise AssertionError("the pod has not started")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Everything in it is gone at once."""
        self.command.process.kill()
        self.command.process.wait(30)

    def wait(self) -> int:
        return self.command.wait()

    def outcome(self) -> tuple[int, str]:
        """Its exit code and output; nothing of it is left, also when the wait for it is cut short."""
        try:
            return self.wait(), self.command.output
        finally:
            self.kill()


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def train(*arguments: str) -> list[str]:
    return python("-m", "raytrain_llama3", *arguments)
