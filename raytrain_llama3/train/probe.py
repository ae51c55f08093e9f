"""What one device can do, tried in a process of its own: versions, a product, an attention, an fp8 layer, a reduction.

Nothing here is training; each trial is small, forward and backward, and compared with fp32.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from raytrain_llama3.config import env
from raytrain_llama3.config.plan import Device
from raytrain_llama3.config.rules import FP8_CAPABILITY
from raytrain_llama3.messages import Finding, Verdict

_SIZE = 512
_HEADS, _CHANNELS, _TOKENS = 8, 64, 256
_TOLERANCE = 0.05
_FP8_TOLERANCE = 0.2
_REDUCE_BYTES: dict[Device, int] = {"cuda": 256 * 2**20, "cpu": 8 * 2**20}
_ROUNDS = 5
_GROUP_S = 120


class DeviceProbe:
    """An actor that tries one device. `where` names it in every finding."""

    def __init__(self, where: str, device: Device, index: int, node_ip: str) -> None:
        self._where, self._device, self._index, self._node_ip = where, device, index, node_ip
        self._store: Any = None

    def prepare(self, environment: Mapping[str, str], remove: tuple[str, ...]) -> dict[str, str]:
        """Set the environment, import torch (seconds), and say which versions are here."""
        env.apply(environment, remove)
        import torch

        from raytrain_llama3.train.process import choose_interface

        choose_interface(self._node_ip)
        if self._device == "cuda":
            torch.cuda.set_device(self._index)
        return _versions()

    def trials(self) -> list[Finding]:
        """Each kernel that training uses, tried once."""
        found = [self._try("bf16 product", _product)]
        found.append(self._try("attention", _attention))
        if self._device == "cpu":
            return [*found, Finding(self._where, "fp8 layer", "needs a GPU", Verdict.SKIPPED)]
        return [*found, self._try("fp8 layer", _fp8_layer), *self._backends(), *self._cudnn()]

    def open_store(self) -> int:
        """Rank 0: the port of the store at which all devices meet."""
        from raytrain_llama3.train.process import host_store

        self._store = host_store(self._node_ip, 0, _GROUP_S / 60)
        return int(self._store.port)

    def all_reduce(self, rank: int, world: int, host: str, port: int) -> float:
        """Bytes a second through each device's link (bus bandwidth) of an all-reduce over all devices."""
        import torch
        import torch.distributed as dist

        store = self._store or dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_GROUP_S))
        device = self._torch_device()
        dist.init_process_group(
            "nccl" if self._device == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=_GROUP_S),
            device_id=device if self._device == "cuda" else None,
        )
        data = torch.ones(_REDUCE_BYTES[self._device] // 4, device=device)
        dist.all_reduce(data)
        if data[0].item() != world:
            raise ArithmeticError(f"the sum over {world} devices is {data[0].item()}")
        began = time.perf_counter()
        for _ in range(_ROUNDS):
            dist.all_reduce(data)
        self._synchronize()
        seconds = (time.perf_counter() - began) / _ROUNDS
        dist.destroy_process_group()
        return 2 * (world - 1) / world * _REDUCE_BYTES[self._device] / seconds

    def _torch_device(self) -> Any:
        import torch

        return torch.device("cuda", self._index) if self._device == "cuda" else torch.device("cpu")

    def _synchronize(self) -> None:
        import torch

        if self._device == "cuda":
            torch.cuda.synchronize()

    def _try(self, what: str, trial: Callable[[Any], str]) -> Finding:
        import torch

        torch.manual_seed(0)
        try:
            value = trial(self._torch_device())
        except _Skipped as skipped:
            return Finding(self._where, what, str(skipped), Verdict.SKIPPED)
        except Exception as error:  # noqa: BLE001  (whatever a kernel raises is what is looked for)
            remedy = "torch, Transformer Engine and cuDNN must be built for each other and for this GPU"
            return Finding(self._where, what, f"{type(error).__name__}: {error}".splitlines()[0], Verdict.BAD, remedy)
        return Finding(self._where, what, value)

    def _backends(self) -> list[Finding]:
        import torch

        kernels: Any = torch.backends.cuda
        there = {
            "flash": kernels.flash_sdp_enabled(),
            "memory-efficient": kernels.mem_efficient_sdp_enabled(),
            "cuDNN": kernels.cudnn_sdp_enabled(),
            "math": kernels.math_sdp_enabled(),
        }
        names = [name for name, is_there in there.items() if is_there]
        return [Finding(self._where, "attention backends", ", ".join(names))]

    def _cudnn(self) -> Iterator[Finding]:
        loaded, built = cudnn_versions()
        if loaded[0] != built[0] or loaded[1] < built[1]:
            yield Finding(
                self._where,
                "cuDNN's origin",
                f"{_dotted(loaded)}, and torch was built with {_dotted(built)}",
                Verdict.WARNING,
                "attention runs with it, and torch's own convolutions would not: take the other one off "
                "LD_LIBRARY_PATH, or use an image whose torch and cuDNN belong together",
            )


class _Skipped(Exception):
    """Not to be had here, which is no fault."""


def _product(device: Any) -> str:
    import torch

    a = torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16, requires_grad=True)
    b = torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16, requires_grad=True)
    product: Any = a @ b
    product.sum().backward()
    wanted = a.detach().float() @ b.detach().float()
    assert a.grad is not None
    _compare(product, wanted, _TOLERANCE)
    _compare(a.grad, b.detach().float().sum(1).expand_as(a), _TOLERANCE)
    return f"{_SIZE} × {_SIZE}, forward and backward, as in fp32"


def _attention(device: Any) -> str:
    """Transformer Engine's where there is one, as in training; else torch's."""
    import torch

    attend: Any = torch.nn.functional.scaled_dot_product_attention
    # [batch, heads, tokens, channels]
    q, k, v = (
        torch.randn(1, _HEADS, _TOKENS, _CHANNELS, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    wanted = attend(*(t.detach().float() for t in (q, k, v)), is_causal=True)
    engine = _engine() if device.type == "cuda" else None
    if engine is None:
        got, by = attend(q, k, v, is_causal=True), "torch"
    else:
        layer = engine.DotProductAttention(_HEADS, _CHANNELS, attn_mask_type="causal", qkv_format="sbhd").to(device)
        # [tokens, batch, heads, channels] in, [tokens, batch, heads · channels] out
        out = layer(*(t.permute(2, 0, 1, 3).contiguous() for t in (q, k, v)))
        got, by = out.view(_TOKENS, 1, _HEADS, _CHANNELS).permute(1, 2, 0, 3), "Transformer Engine"
    got.sum().backward()
    _compare(got, wanted, _TOLERANCE)
    assert q.grad is not None
    if not torch.isfinite(q.grad).all():
        raise ArithmeticError("a gradient is not finite")
    return f"causal, forward and backward, by {by}, as in fp32"


def _fp8_layer(device: Any) -> str:
    import torch

    from raytrain_llama3.train.process import capability_of

    engine, capability = _engine(), capability_of(device)
    if capability < FP8_CAPABILITY:
        raise _Skipped(f"capability {capability} has no fp8 ({FP8_CAPABILITY} and more has): use dtype bf16")
    if engine is None:
        raise _Skipped("Transformer Engine is not installed: use dtype bf16, or install the extra gpu")
    layer = engine.Linear(_SIZE, _SIZE, bias=False, params_dtype=torch.bfloat16, device=device)
    x = torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16, requires_grad=True)
    with engine.fp8_autocast(enabled=True):
        y = layer(x)
    y.sum().backward()
    _compare(y, x.detach().float() @ layer.weight.detach().float().T, _FP8_TOLERANCE)
    return f"{_SIZE} × {_SIZE}, forward and backward, near fp32"


def _engine() -> Any:
    try:
        import transformer_engine.pytorch as engine
    except ImportError:
        return None
    return engine


def _compare(got: Any, wanted: Any, tolerance: float) -> None:
    off = (got.detach().float() - wanted).norm().item() / max(wanted.norm().item(), 1e-30)
    # Also where `off` is NaN.
    if not off < tolerance:
        raise ArithmeticError(f"differs from fp32 by {off:.2g} of its norm")


def _versions() -> dict[str, str]:
    import megatron.core
    import torch

    from raytrain_llama3 import __version__

    found = {
        "raytrain_llama3": __version__,
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "Megatron-core": str(megatron.core.__version__),
        "Transformer Engine": _engine_version(),
        "CUDA": str(torch.version.cuda or "none"),
    }
    if torch.cuda.is_available():
        library: Any = torch.cuda.nccl
        found["cuDNN"] = _dotted(cudnn_versions()[0])
        found["NCCL"] = _dotted(library.version())
    return found


def cudnn_versions() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The cuDNN that is loaded, and the one that torch 2.11 was built with.

    Not `torch.backends.cudnn.version()`: it raises when they differ, and only for the first one in a process who asks.
    """
    from torch._C import _cudnn

    return _cudnn.getRuntimeVersion(), _cudnn.getCompileVersion()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _engine_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("transformer-engine")
    except PackageNotFoundError:
        return "none"
