"""One rank's process: its device, torch.distributed and Megatron's parallel groups, opened and closed here alone."""

from __future__ import annotations

import contextlib
import datetime
import gc
import hashlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel

from raytrain_llama3.config import env
from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.config.rules import unfit
from raytrain_llama3.errors import HardwareError
from raytrain_llama3.messages import KeeperAddress, ProcessFacts, RankSpec, Rendezvous

_MEMORY_S = 30.0
_FREE_SHARE = 0.9
"""Less is taken up by contexts of other ranks' and standing-by processes."""


@dataclass(frozen=True, slots=True)
class Process:
    """What the rest of `train` needs to know about the process it runs in."""

    rank: int
    world_size: int
    device: torch.device
    dp_rank: int
    tp_rank: int
    pp_rank: int
    cp_group: dist.ProcessGroup
    store: dist.Store
    """Of this attempt's ranks, with a connection of its own: other threads may wait on it."""
    attempt: int = 0
    keepers: tuple[KeeperAddress, ...] = ()
    warnings: tuple[str, ...] = ()


def host_store(address: str, port: int, timeout_minutes: float) -> dist.TCPStore:
    """Open the store that every rank of an attempt meets at. Port 0 takes a free one; read `store.port`."""
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(minutes=timeout_minutes),
    )


@contextlib.contextmanager
def open_process(
    plan: RunPlan, spec: RankSpec, rendezvous: Rendezvous, facts: ProcessFacts, store: dist.Store | None = None
) -> Iterator[Process]:
    """Join the attempt's process group and build Megatron's groups; undone when the block ends well.

    `store` is rank 0's own store; the others connect to it. Raises `HardwareError` when the ranks do not fit
    together (other versions, another configuration, one device twice).
    """
    with contextlib.ExitStack() as stack:
        device = _open_device(plan, spec, stack)
        warnings = _await_memory(spec, device)
        timeout = datetime.timedelta(minutes=plan.config.distributed_timeout_minutes)
        if store is None:
            store = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout)
        _compare_ranks(dist.PrefixStore(f"{rendezvous.prefix}/facts", store), plan, spec, facts, device)
        choose_interface(spec.node_ip)
        dist.init_process_group(
            backend="gloo" if plan.device == "cpu" else "cpu:gloo,cuda:nccl",
            store=dist.PrefixStore(f"{rendezvous.prefix}/world", store),
            rank=spec.rank,
            world_size=spec.world_size,
            timeout=timeout,
            device_id=None if plan.device == "cpu" else device,
        )
        _open_model_parallel(plan)
        own = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout)
        saves = dist.PrefixStore(f"{rendezvous.prefix}/saves", own)
        yield replace(_describe(spec, device, saves), warnings=warnings)
        # Not after an exception: closing is collective, the other ranks may never come, and the process ends anyway.
        close_groups()


def reseed(seed: int, step: int) -> None:
    """Set every random state as a pure function of (seed, step, pipeline and tensor-parallel rank).

    Called before a step that draws random numbers (dropout), so that a resumed run draws what an uninterrupted
    one of the same layout would have drawn, and checkpoints need no random state.
    """
    drawn_from = f"{seed}/{step}/{parallel_state.get_pipeline_model_parallel_rank()}"
    mine = int.from_bytes(hashlib.blake2b(drawn_from.encode(), digest_size=4).digest(), "little") >> 1
    torch.manual_seed(mine)
    # Adds the tensor-parallel rank where ranks must differ.
    tensor_parallel.model_parallel_cuda_manual_seed(mine, force_reset_rng=True)


def _open_device(plan: RunPlan, spec: RankSpec, stack: contextlib.ExitStack) -> torch.device:
    if plan.device == "cpu":
        from raytrain_llama3.train.cpu_device import cpu_device

        stack.enter_context(cpu_device())
        return torch.device("cpu")
    from raytrain_llama3.train.gpu_device import gpu_device

    return stack.enter_context(gpu_device(spec.device_index))


def _await_memory(spec: RankSpec, device: torch.device) -> tuple[str, ...]:
    """After a fault: see that the device's memory is free again, and say so if it is not within `_MEMORY_S`.

    Of a killed process the driver gives memory back some time after the process is gone.
    """
    if device.type == "cpu" or not spec.attempt:
        return ()
    deadline = time.monotonic() + _MEMORY_S
    while True:
        free, total = torch.cuda.mem_get_info(device)
        if free > _FREE_SHARE * total:
            return ()
        if time.monotonic() > deadline:
            return (
                f"device {device.index} on {spec.node_ip}: {(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB are "
                f"held by others {_MEMORY_S:.0f} s after the last attempt was cleared (see nvidia-smi there)",
            )
        time.sleep(0.1)


def _open_model_parallel(plan: RunPlan) -> None:
    layout = plan.layout
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        distributed_timeout_minutes=plan.config.distributed_timeout_minutes,
    )
    reseed(plan.config.seed, 0)


def close_groups() -> bool:
    """Undo what `open_process` did to this process; whether nothing of it is left, so that it can open another.

    Collective with NCCL. gloo's connections just close, so that this also serves after another rank was lost.
    """
    parallel_state.destroy_model_parallel()
    tensor_parallel.random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    torch.cuda.empty_cache()
    return not any(isinstance(found, DistributedDataParallel) for found in gc.get_objects())


def _describe(spec: RankSpec, device: torch.device, store: dist.Store) -> Process:
    return Process(
        rank=spec.rank,
        world_size=spec.world_size,
        device=device,
        dp_rank=parallel_state.get_data_parallel_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_group=parallel_state.get_context_parallel_group(),
        store=store,
        attempt=spec.attempt,
        keepers=spec.keepers,
    )


def choose_interface(node_ip: str) -> None:
    """Point gloo and NCCL at the interface that carries `node_ip`, unless the user named one.

    A host's name often maps to 127.0.0.1, which gloo would then bind.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family in (socket.AF_INET, socket.AF_INET6) and a.address == node_ip for a in addresses):
            env.set_defaults({"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name})
            return


def plan_digest(plan: RunPlan) -> str:
    """A short hash of everything that all ranks must agree on."""
    agreed = {"config": plan.config.model_dump(mode="json"), "layout": asdict(plan.layout), "steps": plan.train_steps}
    return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()[:12]


def _compare_ranks(store: dist.Store, plan: RunPlan, spec: RankSpec, facts: ProcessFacts, device: torch.device) -> None:
    """Every rank tells rank 0 who it is; rank 0 answers with what does not fit, by name."""
    mine: dict[str, Any] = {
        "name": spec.name,
        "host": facts.hostname,
        "device": "",
        "unfit": [],
        "plan": plan_digest(plan),
        **facts.versions,
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        mine |= {"device": str(gpu.uuid), "unfit": unfit(plan, gpu.name, gpu.total_memory, capability_of(device))}
    store.set(str(spec.rank), json.dumps(mine))
    if spec.rank == 0:
        everyone = [json.loads(store.get(str(rank))) for rank in range(spec.world_size)]
        store.set("verdict", json.dumps(mismatches(everyone)))
    problems = json.loads(store.get("verdict"))
    if problems:
        raise HardwareError("the ranks do not fit together:\n  " + "\n  ".join(problems))


def capability_of(device: torch.device) -> float:
    """Of a GPU, as people write it: 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return float(f"{major}.{minor}")


def mismatches(everyone: list[dict[str, Any]]) -> list[str]:
    """Compare the ranks' facts (rank order) with rank 0's; a line for each difference and each rank that is unfit."""
    first, problems, seen = everyone[0], [], dict[str, str]()
    for facts in everyone:
        where = f"{facts['name']} on {facts['host']}"
        problems += [f"{where}: {line}" for line in facts["unfit"]]
        for key in sorted(first.keys() - {"name", "host", "device", "unfit"}):
            if facts.get(key) != first[key]:
                problems.append(f"{where} has {key} {facts.get(key)}, {first['name']} has {first[key]}")
        device = facts["device"]
        if device and device in seen:
            problems.append(f"{where} uses device {device}, which {seen[device]} uses too")
        seen.setdefault(device, where)
    return problems
