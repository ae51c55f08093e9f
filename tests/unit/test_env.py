from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from raytrain_llama3.config import env

POD = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "pod-0",
    "MASTER_PORT": "23456",
    "LOCAL_RANK": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "PET_NNODES": "4",
}


def workers(environment: dict[str, str], device: str = "cuda", name: str = "NVIDIA H200") -> dict[str, str]:
    return env.for_workers(environment, device, name, threads=4)


@pytest.mark.parametrize(
    "name",
    [
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_LAUNCH_BLOCKING",
        "NCCL_DEBUG",
        "NCCL_IB_DISABLE",
        "NCCL_IB_TIMEOUT",
        "NCCL_P2P_DISABLE",
        "NVTE_FUSED_ATTN",
        "OMP_NUM_THREADS",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TORCH_DISTRIBUTED_DEBUG",
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
        "TRITON_CACHE_DIR",
    ],
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_the_user_set_for_performance_reaches_the_workers(name: str, device: str) -> None:
    assert workers({name: "the user's"}, device)[name] == "the user's"


@pytest.mark.parametrize(
    "name",
    [
        *("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "NCCL_HOSTID"),
        *("CUDA_VISIBLE_DEVICES", "HOSTNAME", "HOME", "PATH", "TMPDIR", "RAY_ADDRESS", "RAY_AUTH_TOKEN"),
        *("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "MY_OMP_NUM_THREADS", "TP_SIZE"),
        *POD,
    ],
)
def test_what_is_the_hosts_own_or_not_in_the_list_is_never_forwarded(name: str) -> None:
    assert name not in workers({name: "the host's"})


def test_defaults_fit_the_device() -> None:
    assert workers({}, "cuda") == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1",
        "NVTE_NORM_BWD_USE_CUDNN": "1",
        "NVTE_NORM_FWD_USE_CUDNN": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "NCCL_IB_DISABLE": "0",
        "NCCL_IB_TIMEOUT": "23",
        "NCCL_P2P_DISABLE": "0",
        "OMP_NUM_THREADS": "4",
    }
    assert workers({}, "cpu") == {"OMP_NUM_THREADS": "4", "TORCHDYNAMO_DISABLE": "1"}


@pytest.mark.parametrize(
    ("name", "timeout"), [("NVIDIA A100-SXM4-80GB", "19"), ("NVIDIA H100 80GB HBM3", "23"), ("NVIDIA B200", "23")]
)
def test_infiniband_waits_as_long_as_the_script_says_for_each_chip(name: str, timeout: str) -> None:
    assert workers({}, "cuda", name)["NCCL_IB_TIMEOUT"] == timeout
    assert workers({"NCCL_IB_TIMEOUT": "7"}, "cuda", name)["NCCL_IB_TIMEOUT"] == "7"


OLD, NEW = "NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@pytest.mark.parametrize(
    ("given", "value"), [({OLD: "1"}, "1"), ({OLD: "1", NEW: "3"}, "3"), ({NEW: "3", OLD: "1"}, "3")]
)
def test_torchs_old_name_is_carried_over_and_its_new_one_wins(given: dict[str, str], value: str) -> None:
    told = workers(given)
    assert told[NEW] == value
    assert OLD not in told


@pytest.fixture
def environment() -> Iterator[None]:
    """Whatever a test does to `os.environ` is undone."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("environment")
def test_a_pods_names_are_gone_before_a_rank_imports_torch() -> None:
    os.environ.update(POD | {"KEPT": "1", "OMP_NUM_THREADS": "64"})
    env.apply({"OMP_NUM_THREADS": "2", "NEW": "x"}, env.POD_NAMES)
    assert not POD.keys() & os.environ.keys()
    assert (os.environ["KEPT"], os.environ["OMP_NUM_THREADS"], os.environ["NEW"]) == ("1", "2", "x")


@pytest.mark.usefixtures("environment")
def test_a_name_that_is_removed_and_given_is_set() -> None:
    os.environ["RANK"] = "3"
    env.apply({"RANK": "0"}, ["RANK", "NOT_THERE"])
    assert os.environ["RANK"] == "0"


def test_an_environment_for_children_has_no_pod_in_it() -> None:
    given = POD | {"PATH": "/bin", "TORCH_DISTRIBUTED_DEBUG": "INFO"}
    assert env.without_pod(given) == {"PATH": "/bin", "TORCH_DISTRIBUTED_DEBUG": "INFO"}
    assert "RANK" in given


@pytest.mark.usefixtures("environment")
def test_defaults_leave_alone_what_is_set() -> None:
    os.environ["SET"] = "the user's"
    env.set_defaults({"SET": "ours", "UNSET": "ours"})
    assert (os.environ["SET"], os.environ["UNSET"]) == ("the user's", "ours")


@pytest.mark.usefixtures("environment")
def test_a_snapshot_is_a_copy() -> None:
    before = env.snapshot()
    os.environ["LATER"] = "1"
    before["ONLY_HERE"] = "1"
    assert "LATER" not in before
    assert "ONLY_HERE" not in os.environ


def test_feeders_get_what_filesystems_read_and_no_more() -> None:
    keys = {"AWS_ACCESS_KEY_ID": "k", "GOOGLE_APPLICATION_CREDENTIALS": "/f", "HADOOP_HOME": "/h", "CLASSPATH": "c"}
    assert env.for_feeders(keys | {"RANK": "1", "HOME": "/", "NCCL_DEBUG": "INFO"}) == keys
