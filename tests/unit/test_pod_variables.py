"""What a platform's variables mean, and every way in which they can be wrong."""

from __future__ import annotations

import pytest
from command import run

from raytrain_llama3.config.load import Loaded, load
from raytrain_llama3.config.pods import Pods, table
from raytrain_llama3.config.ports import SPAN, PortPlan
from raytrain_llama3.errors import ConfigError

POD = {"WORLD_SIZE": "3", "RANK": "1", "MASTER_ADDR": "worker-0"}


def told(environ: dict[str, str], *flags: str) -> Pods:
    pods = load(list(flags), environ).pods
    assert pods is not None
    return pods


def refused(environ: dict[str, str], *flags: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(list(flags), environ)
    return caught.value.problems


def where(pods: Pods) -> tuple[int, int, str, int]:
    return (pods.count, pods.rank, pods.address, pods.port)


def test_the_platforms_words_count_pods_and_the_port_may_be_absent() -> None:
    assert where(told(POD)) == (3, 1, "worker-0", 29500)
    assert where(told(POD | {"MASTER_PORT": "1234"})) == (3, 1, "worker-0", 1234)
    assert told(POD).given == ("WORLD_SIZE=3", "RANK=1", "MASTER_ADDR=worker-0")


def test_newer_operators_words_win_where_they_are_set() -> None:
    newer = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "p-0", "PET_MASTER_PORT": "7"}
    # There WORLD_SIZE and RANK count processes.
    assert where(told({"WORLD_SIZE": "16", "RANK": "8", "MASTER_ADDR": "x"} | newer)) == (2, 0, "p-0", 7)
    assert where(told(newer)) == (2, 0, "p-0", 7)
    loaded = load([], newer | {"PET_NPROC_PER_NODE": "4", "GPUS_PER_NODE": "8"})
    assert (loaded.config.gpus_per_node, loaded.origins["gpus_per_node"]) == (4, "PET_NPROC_PER_NODE")
    assert load([], newer | {"PET_NPROC_PER_NODE": "auto"}).config.gpus_per_node == "auto"
    assert load(["--nproc-per-node", "2"], newer | {"PET_NPROC_PER_NODE": "4"}).config.gpus_per_node == 2


def test_flags_say_the_same_and_win() -> None:
    flags = ("--nnodes", "4", "--node-rank", "2", "--master-addr", "a", "--master-port", "1234")
    assert where(told({}, *flags)) == where(told(POD, *flags)) == (4, 2, "a", 1234)
    assert load([*flags, "--nproc-per-node", "2"], {}).config.gpus_per_node == 2


def test_one_pod_needs_none_of_it() -> None:
    assert load([], {}).pods is None
    assert where(told({"WORLD_SIZE": "1", "RANK": "0"})) == (1, 0, "localhost", 29500)
    # What the tutorial's script has for defaults speaks of no pods by itself.
    assert load([], {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}).pods is None


def test_a_limit_of_nodes_is_not_a_pod() -> None:
    assert load(["--nnodes", "2"], {}).pods is None
    assert load([], {"NUM_NODES": "2"}).pods is None


def ignored(loaded: Loaded) -> list[str]:
    assert loaded.pods is None
    assert loaded.config.master_addr is None
    return [line for line in loaded.warnings if "not used" in line]


def test_inside_a_cluster_a_pods_words_are_left_alone_with_one_line() -> None:
    (line,) = ignored(load([], POD | {"RAY_ADDRESS": "10.0.0.1:6379"}))
    assert line.startswith("WORLD_SIZE, RANK, MASTER_ADDR: not used, since RAY_ADDRESS names a Ray cluster, 10.0.0.1")
    assert "--pods" in line
    (line,) = ignored(load([], POD | {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RANK": "99"}))
    assert "this is a job of a Ray cluster" in line
    assert ignored(load(["--no-pods"], POD)) == []


def test_pods_asks_for_them_even_there() -> None:
    loaded = load(["--pods"], POD | {"RAY_ADDRESS": "10.0.0.1:6379"})
    assert loaded.pods is not None
    assert loaded.config.ray_address is None
    assert any("ray_address 10.0.0.1:6379 (RAY_ADDRESS) is not used" in line for line in loaded.warnings)


@pytest.mark.parametrize(
    ("changes", "starts"),
    [
        ({"RANK": "3"}, ["RANK=3: must be less than the number of pods, 3"]),
        ({"RANK": "-1"}, ["RANK=-1: must be a pod's number"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE=0: must be a number of pods", ]),
        ({"WORLD_SIZE": ""}, ["RANK=1, MASTER_ADDR=worker-0: WORLD_SIZE is missing", "RANK=1: must be less than"]),
        ({"RANK": ""}, ["WORLD_SIZE=3: RANK (as a flag --node-rank) is missing"]),
        ({"MASTER_ADDR": ""}, ["WORLD_SIZE=3: MASTER_ADDR (as a flag --master-addr) is missing"]),
        ({"MASTER_PORT": "tcp://10.96.0.1:29500"}, ["MASTER_PORT=tcp://10.96.0.1:29500: must be a port number"]),
        ({"MASTER_PORT": "70000"}, ["MASTER_PORT=70000: must be a port number"]),
        ({"MASTER_PORT": "20000"}, ["MASTER_PORT=20000: is one of the ports 20000–21099"]),
        ({"MASTER_ADDR": "tcp://10.96.0.1:29500"}, ["MASTER_ADDR=tcp://10.96.0.1:29500: must be a host name"]),
        ({"MASTER_ADDR": "worker-0:29500"}, ["MASTER_ADDR=worker-0:29500: must be a host alone: give MASTER_ADDR=w"]),
        ({"MASTER_ADDR": "localhost"}, ["MASTER_ADDR=localhost: is this pod itself, in each of the 3 pods"]),
        ({"MASTER_ADDR": "127.0.0.1"}, ["MASTER_ADDR=127.0.0.1: is this pod itself"]),
        ({"PET_NNODES": "1:4"}, ["PET_NNODES=1:4: must be a number of pods, at least 1; a range needs"]),
        ({"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0"}, ["LOCAL_RANK=0: this process was started by torchrun"]),
        (
            {"RANK": "x", "WORLD_SIZE": "y", "MASTER_PORT": "z"},
            ["WORLD_SIZE=y", "RANK=x", "MASTER_PORT=z"],
        ),
    ],
)  # fmt: skip
def test_a_bad_variable_is_one_line_with_its_value(changes: dict[str, str], starts: list[str]) -> None:
    lines = refused(POD | changes)
    assert len(lines) == len(starts), lines
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start)


def test_a_remedy_that_is_named_works() -> None:
    (line,) = refused(POD | {"MASTER_PORT": "20500"})
    base = line.rsplit(" ", 1)[-1]
    assert told(POD | {"MASTER_PORT": "20500"}, "--ray-port", base).port == 20500


def test_mistakes_of_pods_and_of_options_are_told_together_at_once() -> None:
    ended = run("--dtype", "int8", environ=POD | {"RANK": "7"})
    assert ended.code == 2
    assert ended.out == ""
    assert [line.split(":")[0] for line in ended.errors] == ["error", "error"]
    assert "Traceback" not in " ".join(ended.errors)
    assert not {"ray", "torch"} & ended.imported


def test_the_table_says_what_each_word_becomes() -> None:
    lines = table(told(POD), 8, "cuda", "10.0.0.8", PortPlan(20000)).splitlines()
    rows = {line[2:15].strip(): line[15:].strip() for line in lines[1:]}
    assert rows["injected"] == "WORLD_SIZE=3, RANK=1, MASTER_ADDR=worker-0"
    assert rows["nodes"] == "3"
    assert rows["node rank"] == "1"
    assert rows["world size"].startswith("3 × 8 = 24 ranks")
    assert rows["ranks here"].startswith("8–15")
    assert rows["main address"] == "worker-0, reached from 10.0.0.8"
    assert "20000–21099" in rows["ports"]
    assert "29500" in rows["ports"]


def test_no_two_services_share_a_port_and_all_lie_below_the_kernels_range() -> None:
    plan = PortPlan(20000)
    ports = [plan.gcs, plan.dashboard, plan.client, *plan.services.values()]
    assert len(set(ports)) == len(ports)
    assert all(port in plan for port in ports)
    first, last = plan.workers
    assert max(ports) < first < last < plan.last == 20000 + SPAN - 1 < 29500 < 32768


def test_a_ray_that_follows_another_in_its_pod_shares_no_port_with_it_but_that_of_the_metrics() -> None:
    one, other = PortPlan(20000), PortPlan(20000, turn=1)
    ports = [{*plan.services.values(), *range(plan.workers[0], plan.workers[1] + 1)} for plan in (one, other)]
    assert ports[0] & ports[1] == {one.metrics} == {other.metrics}
    assert not {one.gcs, one.dashboard, one.client} & ports[1]
    assert one.gcs == other.gcs
    assert max(ports[1]) == one.last == other.last
