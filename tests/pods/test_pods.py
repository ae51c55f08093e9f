"""The same command in every pod: one long run through whatever befalls pods, told once and looked at from all sides."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from curves import assert_alike, assert_trained_again_alike
from hosts import ENTER, Host, Network, Pod, train
from sandbox import DEMO, Command, Sandbox, events, records
from strangers import Stranger

COUNT, DEVICES, BATCH = 3, 2, 24
MODEL = (*DEMO, "--micro-batch-size", "2", "--global-batch-size", str(BATCH), "--hidden-size", "64")
MODEL += ("--ffn-hidden-size", "128", "--kv-channels", "16", "--log-interval", "1", "--eval-interval", "0")
OPEN_DASHBOARD = ("--ray-dashboard", "1", "--ray-dashboard-host", "0.0.0.0")
ENDLESS = (*MODEL, *OPEN_DASHBOARD, "--save-interval", "10", "--max-checkpoints", "0", "--train-iters", "100000")
PORT = 21000
"""Not the default, so as to see that everything moves."""
OPEN = ("--ray-port", str(PORT))
REFERENCE_STEPS = 60
TOKEN = "a-token-by-the-platforms-secret"


class Pods:
    """The pods of one run, one in each host, started by a platform that gives them its variables."""

    def __init__(self, hosts: list[Host], work: Path, count: int = COUNT) -> None:
        self.hosts, self.work, self._count = hosts, work, count
        self.now: dict[int, Pod] = {}

    def start(self, rank: int, *flags: str, **environment: str) -> Command:
        given = {"MASTER_ADDR": self.hosts[0].name, "WORLD_SIZE": str(self._count), "RANK": str(rank)}
        self.now[rank] = self.hosts[rank].pod(train(*flags, *OPEN), self.work, **given | environment)
        return self.now[rank].command

    @contextlib.contextmanager
    def restarted_together(self, *flags: str) -> Iterator[None]:
        """A platform that restarts whole jobs: when one pod has ended, the others are ended, and all start again."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(0.2):
                if any(pod.command.process.poll() is not None for pod in self.now.values()):
                    self.end()
                    for rank in sorted(self.now, reverse=True):
                        self.start(rank, *flags)

        platform = threading.Thread(target=watch)
        platform.start()
        try:
            yield
        finally:
            is_over.set()
            platform.join()

    def await_restart(self, former: Command) -> Command:
        """The head that the platform has started in place of `former`."""
        deadline = time.monotonic() + 60
        while self.now[0].command is former:
            assert time.monotonic() < deadline, "nobody has started the head again"
            time.sleep(0.05)
        return self.now[0].command

    def end(self) -> None:
        for pod in self.now.values():
            pod.kill()


@dataclass
class Story:
    """What the run printed, pod by pod, what it left behind, and what a stranger could do meanwhile."""

    work: Path
    heads: list[Command] = field(default_factory=list)
    """The first; the one that pods 1 and 2 found; the one that was started with all."""
    others: dict[str, Command] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    without_token: dict[str, str] = field(default_factory=dict)
    with_token: dict[str, str] = field(default_factory=dict)
    process_list: str = ""

    @property
    def board(self) -> Path:
        return self.work / "tensorboard_logs" / "demo"

    @property
    def token(self) -> Path:
        return self.work / "checkpoints" / "demo" / ".ray-token"


@pytest.fixture(scope="module")
def hosts(network: Network) -> list[Host]:
    return [network.host(f"worker-{i}") for i in range(COUNT)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of six ranks on one machine."""
    sandbox = Sandbox(tmp_path_factory.mktemp("reference"))
    flags = ("--gpus-per-node", str(COUNT * DEVICES), "--save-interval", "0", "--save-at-end", "0")
    try:
        command = sandbox.run(*MODEL, *flags, "--train-iters", str(REFERENCE_STEPS))
        assert command.process.returncode == 0, command.output
    finally:
        sandbox.close()
    return losses(sandbox.work / "tensorboard_logs" / "demo")


@pytest.fixture(scope="module")
def story(hosts: list[Host], network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """One run: it joins in the wrong order, meets a stranger, loses a pod, a cable, and its head, and is stopped."""
    told = Story(tmp_path_factory.mktemp("run"))
    pods = Pods(hosts, told.work)
    flags = (*ENDLESS, "--gpus-per-node", str(DEVICES))
    try:
        join_in_the_wrong_order(pods, told, flags)
        told.heads[0].wait_for("step +12/")
        stranger = Stranger(network.host("stranger"), hosts[0].address, PORT, told.work)
        told.without_token = stranger.tries(None)
        told.with_token = stranger.tries(told.token)
        told.process_list = process_list()

        pods.now[2].kill()
        told.heads[0].wait_for(r"node \S+ is gone")
        told.others["2 again"] = pods.start(2, *flags)
        told.heads[0].wait_for(r"step .* attempt 1\b")

        before = len(told.heads[0].lines)
        hosts[2].cut()
        told.heads[0].wait_for(f"node {re.escape(hosts[2].address)} is gone", after=before)
        hosts[2].give_back()
        told.heads[0].wait_for(r"step .* attempt 2\b")

        hosts[1].cut()
        told.heads[0].wait_for(f"node {re.escape(hosts[1].address)} is gone")
        told.others["1"].wait_for("the head is gone")
        hosts[1].give_back()
        told.heads[0].wait_for(r"step .* attempt 3\b")

        told.heads[0].wait_between_saves(10)
        # The platform starts the head again; the others find it by themselves.
        before = len(told.others["2 again"].lines)
        pods.now[0].kill()
        told.others["2 again"].wait_for("the head is gone", after=before)
        told.heads.append(pods.start(0, *flags))
        told.heads[1].wait_for(r"^step +\d+/")

        told.heads[1].wait_between_saves(10)
        with pods.restarted_together(*flags):
            pods.now[0].kill()
            told.heads.append(pods.await_restart(told.heads[1]))
            told.heads[2].wait_for(r"^step +\d+/")
        for pod in pods.now.values():
            pod.signal(signal.SIGTERM)
        told.codes = {rank: pod.wait() for rank, pod in pods.now.items()}
        yield told
    finally:
        pods.end()


def process_list() -> str:
    """Every command line of this machine, whichever host it runs in."""
    return "\n".join(" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))


def join_in_the_wrong_order(pods: Pods, told: Story, flags: tuple[str, ...]) -> None:
    """The last pod first, whose name for pod 0 does not resolve yet; then pod 0; then, late, the pod between."""
    hosts = pods.hosts
    told.others["2 early"] = last = pods.start(2, *flags)
    last.wait_for("waiting for the head: MASTER_ADDR worker-0 does not resolve here")
    hosts[2].knows(hosts[0])
    last.wait_for(f"waiting for the head: worker-0:{PORT} does not answer")
    told.heads.append(pods.start(0, *flags))
    last.wait_for("pod 2 serves at")
    told.heads[0].wait_for("waiting for pod 1 of 3")
    hosts[1].knows(hosts[0])
    told.others["1"] = pods.start(1, *flags)


def losses(board: Path) -> list[float]:
    """The loss of each step from 1 on; of one that was trained again, the later."""
    last = {step["step"]: step for step in records(board, "step")}
    assert sorted(last) == list(range(1, len(last) + 1))
    assert [last[step]["samples"] for step in sorted(last)] == [BATCH * step for step in sorted(last)]
    return [last[step]["loss"] for step in sorted(last)]


def test_the_loss_is_that_of_one_machine_with_as_many_devices(story: Story, reference: list[float]) -> None:
    assert_alike(losses(story.board), reference, tolerance=1e-4)


def test_each_pod_prints_first_what_its_variables_become(story: Story, hosts: list[Host]) -> None:
    for rank, command in ((0, story.heads[0]), (1, story.others["1"]), (2, story.others["2 again"])):
        assert command.lines[0] == "pods"
        table = dict(line.strip().split("  ", 1) for line in command.lines[1:9])
        rows = {name: value.strip() for name, value in table.items()}
        assert rows["injected"] == f"WORLD_SIZE=3, RANK={rank}, MASTER_ADDR=worker-0"
        assert rows["node rank"].startswith(str(rank))
        assert rows["world size"].startswith("3 × 2 = 6 ranks")
        assert rows["ranks here"].startswith(f"{2 * rank}–{2 * rank + 1}")
        assert rows["main address"] == f"worker-0, reached from {hosts[rank].address}"


def test_the_head_says_when_all_are_there_and_ranks_follow_the_pods_numbers(story: Story, hosts: list[Host]) -> None:
    assert "the cluster has formed: 3 nodes with 2 + 2 + 2 devices" in story.heads[0].lines
    logs = story.work / "logs" / "demo" / "attempt_0"
    for rank in range(COUNT * DEVICES):
        assert f"rank-{rank}@node-{rank // DEVICES}" in (logs / f"rank_{rank}.log").read_text()


def test_a_lost_pod_and_cut_cables_are_lost_nodes_and_the_run_gets_over_them(story: Story, hosts: list[Host]) -> None:
    faults = [event["failure"] for event in events(story.board, "fault")][:3]
    told = [(fault["kind"], fault["node_ip"]) for fault in faults]
    assert told == [("node died", hosts[number].address) for number in (2, 2, 1)]
    assert_trained_again_alike(story.board, tolerance=1e-4)
    assert "pod 2 serves at" in story.others["2 again"].output
    # Cut off for so long that it gave its head up: it joined a second time once it could.
    served = [line for line in story.others["1"].lines if line.startswith("pod 1 serves at")]
    assert len(served) >= 2, story.others["1"].output


def test_a_new_head_finds_the_pods_again_and_the_run_resumes_by_itself(story: Story) -> None:
    assert "the head is gone: this pod's ranks end, and it waits for a new head" in story.others["2 again"].lines
    assert_goes_on(story.heads[0], story.heads[1])


def test_all_pods_restarted_by_their_platform_resume_by_themselves(story: Story) -> None:
    assert_goes_on(story.heads[1], story.heads[2])


def assert_goes_on(former: Command, head: Command) -> None:
    assert "the cluster has formed: 3 nodes with 2 + 2 + 2 devices" in head.lines
    assert any(line.startswith("resuming from ") for line in head.lines)
    before, after = ([int(n) for n in re.findall(r"^step +(\d+)/", c.output, re.MULTILINE)] for c in (former, head))
    # Of what was trained no more is lost than lies between two saves.
    assert before[-1] - 2 * 10 < after[0] <= before[-1] + 1


def test_all_pods_end_with_the_drivers_exit_code_once_it_has_saved(story: Story) -> None:
    assert story.codes == {0: 143, 1: 143, 2: 143}
    saved = re.search(r"stopped after step (\d+), saved at step (\d+)", story.heads[2].output)
    assert saved
    assert saved[1] == saved[2]
    result = json.loads((story.work / "logs" / "demo" / "result.json").read_text())
    assert (result["exit_code"], result["saved_step"]) == (143, int(saved[2]))


def test_the_token_is_the_owners_alone_and_in_nothing_that_the_run_wrote(story: Story) -> None:
    assert stat.S_IMODE(story.token.stat().st_mode) == 0o600
    token = story.token.read_text()
    assert len(token) == 64
    assert "--node-manager-port" in story.process_list.replace("_", "-")
    for written in (story.process_list, *(command.output for command in [*story.heads, *story.others.values()])):
        assert token not in written
    files = [path for path in story.work.rglob("*") if path.is_file() and path != story.token]
    assert len(files) > 20
    assert [path for path in files if token.encode() in path.read_bytes()] == []


def test_a_stranger_without_the_token_gets_nowhere(story: Story) -> None:
    assert story.without_token["dashboard"] == "401"
    assert story.without_token["jobs"] == "401"
    assert story.without_token["agent"] == "401"
    assert story.without_token["submit"] == "refused"
    assert story.without_token["head"] == "refused"
    assert story.without_token["client"] == "refused"
    assert story.without_token["join"] == "refused"


def test_with_the_token_all_of_it_works(story: Story) -> None:
    assert story.with_token["dashboard"] == "200"
    assert story.with_token["submit"] == "it ran"
    assert story.with_token["agent"] not in ("401", "no answer")
    assert story.with_token["head"] == "it ran"
    assert story.with_token["client"] == "let in"
    assert story.with_token["join"] == "joined"


def test_the_dashboard_is_where_the_log_says_and_knows_ranks_by_name(story: Story, hosts: list[Host]) -> None:
    said = re.search(r"Ray dashboard: http://(\S+)", story.heads[0].output)
    assert said
    assert said[1] == f"{hosts[0].address}:{PORT + 1}"
    names = {f"rank-{rank}@node-{rank // DEVICES}" for rank in range(COUNT * DEVICES)}
    assert names <= set(story.with_token["actors"].split())
    assert names <= set(story.with_token["tasks"].split())
    # Pod 0's driver, which is no submitted job, and the job of the stranger who had the token.
    assert int(story.with_token["drivers"]) >= 2
    metrics = story.with_token["metrics"]
    assert re.search(r'^ray_raytrain_loss\{.*run="demo".*\} [\d.]+', metrics, re.MULTILINE)
    assert re.search(r"^ray_raytrain_tokens_per_second\{", metrics, re.MULTILINE)


def test_pods_with_different_numbers_of_devices_train_and_end_with_0(hosts: list[Host], tmp_path: Path) -> None:
    """And form a cluster of their own, though another is named, as they were asked to."""
    pods = Pods(hosts, tmp_path, count=2)
    hosts[1].knows(hosts[0])
    flags = (*MODEL, "--train-iters", "3", "--pods", "--ray-address", "10.77.83.99:6379")
    try:
        pods.start(0, *flags, GPUS_PER_NODE="1")
        pods.start(1, *flags, GPUS_PER_NODE="2")
        codes = [pods.now[rank].wait() for rank in range(2)]
        output = pods.now[0].command.output
        assert codes == [0, 0], output
        assert "ray_address 10.77.83.99:6379 (--ray-address) is not used: the pods form a cluster" in output
        assert "the cluster has formed: 2 nodes with 1 + 2 devices" in output
        assert (tmp_path / "checkpoints" / "demo" / "iter_0000003" / "COMMITTED").is_file()
        assert "pod 1 ends as pod 0 did: exit code 0" in pods.now[1].command.output
    finally:
        pods.end()


def test_check_in_every_pod_tries_all_devices_and_finds_the_folder_that_is_not_shared(
    hosts: list[Host], tmp_path: Path
) -> None:
    hosts[1].knows(hosts[0])
    folder = tmp_path / "not-shared"
    folder.mkdir()
    # A disk of its own in each pod, and so a token by the platform's secret.
    script = f"mount -t tmpfs none {folder} && exec {ENTER}"
    program = ["sh", "-c", script, "sh", *train("check", "--json", "--checkpoint-path", str(folder), *OPEN)]
    given = {"MASTER_ADDR": hosts[0].name, "WORLD_SIZE": "2", "RAY_AUTH_TOKEN": TOKEN, "DEVICE": "cpu"}
    pods = [hosts[n].pod(program, tmp_path, **given, RANK=str(n), GPUS_PER_NODE=str(n + 1)) for n in range(2)]
    try:
        assert [pod.wait() for pod in pods] == [2, 2], pods[0].command.output
    finally:
        for pod in pods:
            pod.kill()
    told = json.loads(pods[0].command.output)
    assert told["ok"] is False
    (bad,) = [finding for finding in told["findings"] if finding["verdict"] == "BAD"]
    assert (bad["what"], bad["where"]) == ("shared folder", hosts[1].address)
    assert "give a checkpoint_path on storage that they share" in bad["remedy"]
    values = {finding["what"]: finding["value"] for finding in told["findings"]}
    assert values["all-reduce"].startswith("3 devices, ")
    tried = [finding["where"] for finding in told["findings"] if finding["what"] == "attention"]
    assert tried == [f"{hosts[0].address} device 0", f"{hosts[1].address} device 0", f"{hosts[1].address} device 1"]
    places = {finding["value"].split(",")[0] for finding in told["findings"] if finding["what"] == "network"}
    assert places == {f"{host.address} on eth0" for host in hosts[:2]}
    assert TOKEN not in pods[0].command.output + pods[1].command.output


@pytest.mark.parametrize(
    ("rank", "environment", "told"),
    [
        (1, {"MASTER_ADDR": "nowhere"}, "MASTER_ADDR nowhere does not resolve here"),
        (0, {"MASTER_ADDR": "nowhere"}, "MASTER_ADDR nowhere does not resolve here"),
        (1, {}, f"worker-0:{PORT} does not answer"),
        (1, {"MASTER_ADDR": "worker-1"}, "MASTER_ADDR worker-1 resolves to 127.0.1.1 here, which is this pod itself"),
        (0, {}, "pods 1, 2 of 3 did not join within join_timeout_s 5 s"),
    ],
)
def test_what_only_time_can_show_is_one_message_and_may_be_retried(
    rank: int, environment: dict[str, str], told: str, hosts: list[Host], tmp_path: Path
) -> None:
    pods = Pods(hosts, tmp_path)
    hosts[1].knows(hosts[0])
    try:
        command = pods.start(rank, *MODEL, "--join-timeout-s", "5", **environment)
        assert pods.now[rank].wait() == 139, command.output
    finally:
        pods.end()
    errors = [line for line in command.lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert told in errors[0]
    assert "--join-timeout-s" in errors[0] or "join_timeout_s" in errors[0]
    assert "Traceback" not in command.output


def test_a_port_in_use_is_named_with_who_holds_it_and_the_flag_that_moves_it(hosts: list[Host], tmp_path: Path) -> None:
    listen = f"import socket; s = socket.create_server(('', {PORT + 2})); print('listens', flush=True); s.accept()"
    pods = Pods(hosts, tmp_path)
    # In the pod itself, before the command.
    script = f'"$1" -c "{listen}" & sleep 2; exec {ENTER}'
    given = {"MASTER_ADDR": "worker-0", "WORLD_SIZE": "3", "RANK": "0"}
    pod = hosts[0].pod(["sh", "-c", script, "sh", *train(*MODEL, *OPEN)], tmp_path, **given)
    pods.now[0] = pod
    try:
        assert pod.wait() == 139, pod.command.output
    finally:
        pods.end()
    (error,) = [line for line in pod.command.lines if line.startswith("error: ")]
    assert f"port {PORT + 2} (node-manager, held by process" in error
    assert "--ray-port" in error
