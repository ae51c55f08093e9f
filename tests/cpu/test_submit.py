"""`submit`: a run as a job, through dropped connections, to its own exit code; and what a stop saves."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox import DEMO, Command, Sandbox

RAY = str(Path(sys.executable).with_name("ray"))
TOKEN = "0123456789abcdef" * 4
SECRET = "a-key-that-nobody-may-see"
RUN = (*DEMO, "--hidden-size", "64", "--ffn-hidden-size", "128", "--kv-channels", "16", "--log-interval", "1")
RUN += ("--eval-interval", "0", "--gpus-per-node", "1", "--micro-batch-size", "16")


class Proxy:
    """A way to a port that can be cut: every connection through it, at once."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._open: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self) -> int:
        connections, self._open = self._open, []
        for connection in connections:
            # Both directions end, whoever reads.
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        return len(connections)

    def _serve(self) -> None:
        while True:
            near, _ = self._server.accept()
            far = socket.create_connection(self._target)
            self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return


class Head:
    """A Ray cluster with a job server, as `ray start --head` makes it; asks for a token."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        token = sandbox.work / "token"
        token.write_text(TOKEN)
        self._environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        gcs, self.port, agent = free_ports(3)
        head = [RAY, "start", "--head", "--num-cpus=4", f"--port={gcs}", f"--dashboard-port={self.port}"]
        head += [f"--dashboard-agent-listen-port={agent}", f"--temp-dir={sandbox.root}/r", "--disable-usage-stats"]
        starting = sandbox.start_program(head, **self._environment)
        assert starting.wait() == 0, starting.output

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def submit(self, *arguments: str, port: int | None = None, **extra: str) -> Command:
        """Our command; Ray's agent, which takes jobs, is ready some seconds after `ray start` is."""
        address = f"http://127.0.0.1:{port or self.port}"
        program = ["submit", "--address", address, "--python", sys.executable, *arguments]
        return self.sandbox.start(*program, **self._environment | extra)

    def ray(self, *words: str) -> Command:
        command = self.sandbox.start_program([RAY, "job", *words], **self._environment)
        command.wait()
        return command


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(listener.getsockname()[1]) for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    sandbox = Sandbox(tmp_path_factory.mktemp("head"))
    # A folder to upload: little, with something in it that must not go along.
    (sandbox.work / "checkpoints").mkdir()
    (sandbox.work / "checkpoints" / "huge.bin").write_bytes(b"x" * 2**20)
    (sandbox.work / "notes.txt").write_text("goes along")
    yield Head(sandbox)
    sandbox.close()


def run_flags(place: Path, *flags: str) -> list[str]:
    return ["--", *RUN, "--checkpoint-path", str(place / "c"), "--logs-path", str(place / "logs"), *flags]


def result(place: Path) -> dict[str, object]:
    return json.loads((place / "logs" / "result.json").read_text())


def test_a_job_succeeds_through_a_cut_connection_and_its_log_is_whole(head: Head, tmp_path: Path) -> None:
    proxy = Proxy(head.port)
    job = head.submit(*run_flags(tmp_path, "--train-iters", "60"), port=proxy.port, SEED="77", WANDB_API_KEY=SECRET)
    job.wait_for(r"step +5/60")
    assert proxy.cut() > 0
    assert job.wait() == 0, job.output
    steps = [int(step) for step in re.findall(r"^step +(\d+)/60 \| loss", job.output, re.MULTILINE)]
    assert steps == list(range(1, 61))
    assert "target reached: step 60" in job.output
    assert job.lines[-1].endswith("exit code 0")
    assert result(tmp_path)["saved_step"] == 60
    # Options of the submitter's environment go along; secrets do not.
    assert json.loads((tmp_path / "c" / "iter_0000060" / "sidecar.json").read_text())
    listing = head.ray("list", "--address", head.address)
    assert "'SEED': '77'" in listing.output
    assert SECRET not in listing.output
    assert TOKEN not in listing.output + job.output


def test_a_run_that_fails_on_the_cluster_gives_its_own_exit_code(head: Head, tmp_path: Path) -> None:
    job = head.submit(*run_flags(tmp_path, "--train-iters", "3", "--tp-size", "2"))
    assert job.wait() == 2, job.output
    assert "error: tp_size 2" in job.output


def test_a_bad_command_line_is_told_before_anything_is_uploaded(head: Head, tmp_path: Path) -> None:
    job = head.submit(*run_flags(tmp_path, "--dtype", "int8"))
    assert job.wait() == 2
    assert job.lines == ["error: --dtype int8: must be 'bf16', 'fp8', 'fp16' or 'fp32'"]


def test_a_dry_run_shows_what_would_go_and_nothing_goes(head: Head, tmp_path: Path) -> None:
    before = head.ray("list", "--address", head.address).output.count("submission_id=")
    shown = head.submit("--dry-run", *run_flags(tmp_path), WANDB_API_KEY=SECRET, NCCL_DEBUG="INFO", TP_SIZE="1")
    assert shown.wait() == 0, shown.output
    assert f"entrypoint   exec {sys.executable} -m raytrain_llama3 --config" in shown.output
    assert "RAY_JOB_STOP_WAIT_TIME_S=75" in shown.output
    assert "NCCL_DEBUG=INFO" in shown.output
    assert "TP_SIZE=1" in shown.output
    assert "notes.txt" in shown.output
    assert "huge.bin" not in shown.output
    assert SECRET not in shown.output
    assert head.ray("list", "--address", head.address).output.count("submission_id=") == before


@pytest.mark.parametrize("grace_s", [3, 60])
def test_a_stopped_job_ends_with_143_and_says_whether_it_saved(head: Head, grace_s: int, tmp_path: Path) -> None:
    name = f"stopped-{grace_s}"
    flags = run_flags(tmp_path, "--train-iters", "100000", "--save-interval", "0")
    if grace_s == 3:
        # As somebody has it who uses Ray's own command: three seconds from SIGTERM to SIGKILL.
        line = [sys.executable, "-m", "raytrain_llama3", *flags[1:]]
        taken = head.ray("submit", "--address", head.address, "--no-wait", "--submission-id", name, "--", *line)
        assert taken.process.returncode == 0, taken.output
        job = head.submit("--follow", name)
        job.wait_for("grace_s 60 becomes 2: Ray kills a stopped job after 3 s")
    else:
        job = head.submit("--submission-id", name, *flags)
    job.wait_for(r"step +3/")
    stopping = head.ray("stop", "--address", head.address, name)
    assert stopping.process.returncode == 0, stopping.output
    assert job.wait() == 143, job.output
    assert job.lines[-1] == f"job {name} ended: exit code 143"
    saved = result(tmp_path)
    assert saved["exit_code"] == 143
    if grace_s == 3:
        assert "do not save and stop" in job.output
        assert saved["saved_step"] is None
        assert job.lines[-2].split() == ["saved", "no", "complete", "checkpoint"]
        return
    step = saved["saved_step"]
    assert isinstance(step, int)
    assert step >= 3
    assert job.lines[-2].split() == ["saved", "up", "to", "step", str(step)]
    assert (tmp_path / "c" / f"iter_{step:07d}" / "COMMITTED").is_file()
