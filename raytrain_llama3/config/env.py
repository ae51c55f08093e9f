"""The one place that reads and writes `os.environ`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from raytrain_llama3.config.schema import Config

FORWARDED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "NVTE_", "CUBLAS_", "CUDNN_", "TORCHINDUCTOR_", "TRITON_")
FORWARDED = frozenset(
    {
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_LAUNCH_BLOCKING",
        "GLOO_TIMEOUT_SECONDS",
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TORCH_CPP_LOG_LEVEL",
        "TORCH_DISTRIBUTED_DEBUG",
        "TORCH_SHOW_CPP_STACKTRACES",
    }
)
"""What the user may set for the ranks on the driver's side: it is sent to all of them."""

HOST_OWN = frozenset({"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "NCCL_HOSTID"})
"""Never sent to another host: they name things of the host on which they are set."""

IN_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets it in the environment of a submitted job."""

_OF_THIS_HOST = ("RAY_ADDRESS", "PODS", "NODE_RANK", "NODE_ADDRESS")

RENAMED = {"NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
"""torch's old names, carried over."""

POD_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "PET_NNODES",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "PET_NPROC_PER_NODE",
)
"""The job platform's words for pods, which torch would take for ranks. Every TORCHELASTIC_* is one too."""


def snapshot() -> dict[str, str]:
    """This process's environment, as a copy to read from."""
    return dict(os.environ)


def apply(environment: Mapping[str, str], remove: Iterable[str]) -> None:
    """In a rank's process, before torch is imported: drop what a pod left behind, then set `environment`."""
    for name in [*remove, *(n for n in os.environ if n.startswith("TORCHELASTIC_"))]:
        os.environ.pop(name, None)
    os.environ.update(environment)


def set_defaults(environment: Mapping[str, str]) -> None:
    """Set those of `environment` that are not set yet."""
    for name, value in environment.items():
        os.environ.setdefault(name, value)


def without_pod(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a process whose children will be ranks."""
    return {k: v for k, v in environment.items() if k not in POD_NAMES and not k.startswith("TORCHELASTIC_")}


def for_job(environment: Mapping[str, str]) -> dict[str, str]:
    """What a submitted job gets of the submitter's environment: options, and what is forwarded to ranks anyway.

    Never a secret: a job's environment can be read in the dashboard.
    """
    options = {name.upper() for name in Config.model_fields} - {*_OF_THIS_HOST, *POD_NAMES}
    return {name: value for name, value in environment.items() if value and (name in options or _is_forwarded(name))}


def _is_forwarded(name: str) -> bool:
    return name in FORWARDED or (name.startswith(FORWARDED_PREFIXES) and name not in HOST_OWN)


_IB_TIMEOUTS = {"A100": "19", "A800": "19"}
"""NCCL waits 4.096 µs · 2^this for an InfiniBand acknowledgement; the script's values, 23 on anything newer."""


def for_workers(environment: Mapping[str, str], device: str, device_name: str, threads: int) -> dict[str, str]:
    """What every rank gets: the user's value where set, else one that fits `device`, a GPU called `device_name`.

    `threads` is a rank's share of its node's cores.
    """
    chosen = {"OMP_NUM_THREADS": str(threads)}
    if device == "cuda":
        # One hardware queue keeps kernels in launch order, which overlapping communication of TP and CP relies on.
        chosen |= {
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "NCCL_IB_DISABLE": "0",
            "NCCL_IB_TIMEOUT": next((t for name, t in _IB_TIMEOUTS.items() if name in device_name), "23"),
            "NCCL_P2P_DISABLE": "0",
            # Without it an 8B step fragments the last free gigabytes away.
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            # cuDNN's norms are faster than Transformer Engine's own.
            "NVTE_NORM_FWD_USE_CUDNN": "1",
            "NVTE_NORM_BWD_USE_CUDNN": "1",
            # fp8's delayed scales are saved as a pickle. Only this run's own folder is read, and Megatron-core's
            # format unpickles a file of that folder anyway.
            "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1",
        }
    else:
        # Nothing is compiled on a CPU, and the compiler is a fifth of what a rank imports.
        chosen["TORCHDYNAMO_DISABLE"] = "1"
    carried_over = {new: environment[old] for old, new in RENAMED.items() if old in environment}
    current = {name: value for name, value in environment.items() if name not in RENAMED}
    for name, value in (carried_over | current).items():
        if _is_forwarded(name):
            chosen[name] = value
    return chosen


_FILESYSTEM_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_", "HADOOP_", "ARROW_", "LIBHDFS_")
_FILESYSTEM_NAMES = frozenset({"CLASSPATH", "JAVA_HOME", "KRB5CCNAME", "KRB5_CONFIG"})


def for_feeders(environment: Mapping[str, str]) -> dict[str, str]:
    """What filesystems read of the environment in which the driver opened the data: keys, regions, where Hadoop is."""
    return {k: v for k, v in environment.items() if k in _FILESYSTEM_NAMES or k.startswith(_FILESYSTEM_PREFIXES)}
