"""Someone else on the same network, who tries every door of a Ray cluster."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from hosts import Host, python

RAY = str(Path(sys.executable).with_name("ray"))
_ASK_THE_HEAD = """
from ray._raylet import GcsClient
print("it ran", GcsClient(address="{head}:{port}").get_all_node_info(timeout=10))
"""
_AS_A_CLIENT = """
import grpc
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import ray_client_pb2, ray_client_pb2_grpc
door = ray_client_pb2_grpc.RayletDriverStub(init_grpc_channel("{head}:{port}"))
ping = ray_client_pb2.ClusterInfoRequest(type=ray_client_pb2.ClusterInfoType.PING)
try:
    print("let in", door.ClusterInfo(ping, timeout=10, wait_for_ready=True, metadata=[("client_id", "stranger")]))
except grpc.RpcError as error:
    print("refused:", error.code().name)
"""


class Stranger:
    """A host that knows where the head is; with or without the token."""

    def __init__(self, host: Host, head: str, port: int, work: Path) -> None:
        self._host, self._head, self._port, self._work = host, head, port, work

    def tries(self, token: Path | None) -> dict[str, str]:
        """What came of each door. With a token also what there is to see inside."""
        found = {
            "dashboard": self._http(self._port + 1, "/api/v0/nodes", token),
            "jobs": self._http(self._port + 1, "/api/jobs/", token),
            # Whether a node is in health is all that its agent tells anyone; jobs are handed to it.
            "agent": self._http(self._port + 4, "/api/job_agent/jobs/any/logs", token),
            "submit": self._submit(token),
            "head": self._python(_ASK_THE_HEAD, self._port, token),
            "client": self._client(token),
            "join": self._join(token),
        }
        return found | (self._look(token) if token else {})

    def _environment(self, token: Path | None) -> dict[str, str]:
        # Without a token: as somebody would who knows nothing of it, and as somebody who has made one up.
        if token is None:
            return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}

    def _run(self, program: list[str], token: Path | None, timeout_s: int = 90) -> tuple[int, str]:
        limited = ["timeout", "-k", "5", str(timeout_s), *program]
        pod = self._host.pod(limited, self._work, RAY_USAGE_STATS_ENABLED="0", **self._environment(token))
        return pod.outcome()

    def _http(self, port: int, path: str, token: Path | None, body: bool = False) -> str:
        header = ["-H", f"Authorization: Bearer {token.read_text()}"] if token else []
        shown = [] if body else ["-o", "/dev/null", "-w", "%{http_code}"]
        url = f"http://{self._head}:{port}{path}"
        done = self._host.inside("curl", "-s", "-m", "20", *shown, *header, url, check=False)
        return done.stdout if done.returncode == 0 else "no answer"

    def _submit(self, token: Path | None) -> str:
        address = f"http://{self._head}:{self._port + 1}"
        code, output = self._run([RAY, "job", "submit", "--address", address, "--", "echo", "it", "ran"], token)
        if code == 0 and "it ran" in output:
            return "it ran"
        return "refused" if "auth" in output.lower() or "401" in output else output

    def _python(self, script: str, port: int, token: Path | None) -> str:
        code, output = self._run(python("-c", script.format(head=self._head, port=port)), token)
        if code == 0 and "it ran" in output:
            return "it ran"
        return "refused" if code != 0 and "it ran" not in output and "auth" in output.lower() else output

    def _client(self, token: Path | None) -> str:
        """What Ray's client server says: it lets a call without the right token wait until the caller gives up."""
        _, output = self._run(python("-c", _AS_A_CLIENT.format(head=self._head, port=self._port + 8)), token)
        if "let in" in output:
            return "let in"
        return "refused" if "DEADLINE_EXCEEDED" in output or "UNAUTHENTICATED" in output else output

    def _join(self, token: Path | None) -> str:
        """A node of its own, for some seconds; whether the cluster took it is asked of the cluster."""
        program = [RAY, "start", f"--address={self._head}:{self._port}", "--num-cpus=0", "--block"]
        program += [f"--node-ip-address={self._host.address}", f"--temp-dir=/tmp/rs-{self._host.mark}"]
        pod = self._host.pod(program, self._work, RAY_USAGE_STATS_ENABLED="0", **self._environment(token))
        deadline = time.monotonic() + 60
        try:
            while time.monotonic() < deadline and pod.command.process.poll() is None:
                if "Ray runtime started" in pod.command.output:
                    return "joined"
                time.sleep(0.2)
            return "refused"
        finally:
            pod.kill()

    def _look(self, token: Path | None) -> dict[str, str]:
        """Names of living actors and running tasks, drivers, and the head's metrics."""
        listing = {
            kind: json.loads(self._http(self._port + 1, f"/api/v0/{kind}?limit=10000&detail=True", token, body=True))
            for kind in ("actors", "tasks")
        }
        rows = {kind: found["data"]["result"]["result"] for kind, found in listing.items()}
        jobs = json.loads(self._http(self._port + 1, "/api/jobs/", token, body=True))
        return {
            "actors": " ".join(row["name"].split("/")[0] for row in rows["actors"] if row["state"] == "ALIVE"),
            "tasks": " ".join(row["name"] for row in rows["tasks"] if row["state"] == "RUNNING"),
            "drivers": str(len(jobs)),
            "metrics": self._http(self._port + 6, "/metrics", token, body=True),
        }
