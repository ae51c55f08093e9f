"""`ray up` for real: provider `local`, over SSH, from a desk to two machines; then a job; then `ray down`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hosts import IN_CI, ROOT, Host, Network, Pod
from sandbox import DEMO

SSHD = "/usr/sbin/sshd"
VENV = Path(sys.executable).parents[1]
SSH = "ssh -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"


class Machine:
    """A host with a home folder of its own, into which one may log in with the key."""

    def __init__(self, host: Host, folder: Path, key: Path) -> None:
        self.host, self.home = host, folder / host.name
        (self.home / "ray").mkdir(parents=True)
        users = (Path("/etc/passwd").read_text()).splitlines()
        root = f"root:x:0:0:root:{self.home}:/bin/bash"
        passwd = folder / f"{host.name}.passwd"
        passwd.write_text("\n".join([root, *(user for user in users if not user.startswith("root:"))]) + "\n")
        options = ["-o", "UsePAM=no", "-o", "PidFile=none", "-o", "StrictModes=no", "-o", "PermitRootLogin=yes"]
        options += ["-o", f"AuthorizedKeysFile={key}.pub"]
        # Of its own: who root is, and Ray's default folder.
        mounts = f"mount --bind {passwd} /etc/passwd && mkdir -p /tmp/ray && mount --bind {self.home}/ray /tmp/ray"
        self.pod: Pod = host.pod(["sh", "-c", f"{mounts} && exec {SSHD} -D -e {' '.join(options)}"], folder)

    def run(self, script: str, folder: Path, **environment: str) -> tuple[int, str]:
        """A command at this machine's own keyboard."""
        mounts = f"mkdir -p /tmp/ray && mount --bind {self.home}/ray /tmp/ray && "
        pod = self.host.pod(["bash", "-c", mounts + script], folder, HOME=str(self.home), **environment)
        return pod.outcome()


@pytest.fixture(scope="module")
def machines(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Machine]]]:
    missing = [name for name in (SSHD, "ssh", "rsync") if shutil.which(name) is None]
    if missing:
        reason = f"{', '.join(missing)} not found (Debian: openssh-server, openssh-client, rsync)"
        (pytest.fail if IN_CI in os.environ else pytest.skip)(reason)
    # Short: ssh's own sockets lie below.
    folder = tmp_path_factory.mktemp("up")
    Path("/run/sshd").mkdir(exist_ok=True)
    key = folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, timeout=30)
    there = [Machine(network.host(name), folder, key) for name in ("head", "node", "desk")]
    try:
        yield folder, there
    finally:
        for machine in there:
            machine.pod.kill()


def cluster_file(folder: Path, machines: list[Machine]) -> Path:
    """cluster/ray_up_local.yaml with these addresses, and this machine's Python instead of a new one."""
    config = yaml.safe_load((ROOT / "cluster" / "ray_up_local.yaml").read_text())
    config["provider"] |= {"head_ip": machines[0].host.address, "worker_ips": [machines[1].host.address]}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(folder / "key")}
    token = folder / "token"
    token.write_text("fedcba9876543210" * 4)
    config["file_mounts"] = {"~/raytrain_llama3/configs": str(ROOT / "configs"), "~/raytrain_token": str(token)}
    kept = [command for command in config["setup_commands"] if "venv/bin/p" not in command]
    assert kept[0] == "chmod 600 ~/raytrain_token"
    config["setup_commands"] = [*kept, f"ln -sfn {VENV} ~/raytrain_venv"]
    for kind in ("head", "worker"):
        commands = config[f"{kind}_start_ray_commands"]
        small = f"{commands[-1]} --num-cpus=2 --object-store-memory=80000000"
        commands[-1] = f"export PYTHONPATH={ROOT} OMP_NUM_THREADS=1; {small}"
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_ray_up_then_a_job_then_ray_down(machines: tuple[Path, list[Machine]]) -> None:
    folder, (head, node, desk) = machines
    jobs = "http://127.0.0.1:8265"
    config, ray = cluster_file(folder, [head, node]), VENV / "bin" / "ray"
    login = f"{SSH} -i {folder}/key root@"
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token"), "TERM": "dumb"}
    run = " ".join([*DEMO, "--num-nodes", "2", "--gpus-per-node", "2", "--train-iters", "3", "--eval-interval", "0"])
    run += f" --micro-batch-size 4 --checkpoint-path {folder}/c --logs-path {folder}/logs"
    steps = {
        "up": f"{ray} up -y --no-config-cache {config}",
        "tunnel": f"{login}{head.host.address} -f -N -L 8265:127.0.0.1:8265",
        "nodes": f"until {ray} list nodes --address {jobs} | grep -c ALIVE | grep -qx 2; do sleep 1; done",
        "submit": f"cd {folder} && {sys.executable} -m raytrain_llama3 submit --python {sys.executable} "
        f"--working-dir {ROOT}/configs -- {run}",
        "down": f"{ray} down -y {config}",
        "gone": f"! {login}{head.host.address} 'pgrep -x gcs_server || pgrep -x raylet'",
        # Nobody stops a node of the provider `local`: its raylet gives the head up by itself.
        "gone there too": f"timeout 150 {login}{node.host.address} 'while pgrep -x raylet; do sleep 1; done'",
    }
    script = " && ".join(f"echo '== {name}' && {{ {command}; }}" for name, command in steps.items())
    code, output = desk.run(script, folder, **environment)
    assert code == 0, output
    assert [name for name in steps if f"== {name}" in output] == list(steps)
    assert "target reached: step 3" in output
    assert "exit code 0" in output
    assert (folder / "c" / "iter_0000003" / "COMMITTED").is_file()
    logs = [path.read_text() for path in sorted((folder / "logs" / "attempt_0").glob("rank_*.log"))]
    assert len(logs) == 4
    assert ["node-0" in log for log in logs] == [True, True, False, False]
    assert (folder / "token").read_text() not in output
