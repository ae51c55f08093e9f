"""Megatron-core on a CPU: everything that it takes, in one context.

Megatron-core is written for CUDA. Its collectives, schedules, optimizer and checkpoints are device-neutral, but
they ask for `device="cuda"`, current streams and CUDA random states. Inside `cpu_device()` those requests mean
the CPU; outside nothing is changed. Tested with megatron-core 0.19.2 and torch 2.11.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core import utils
from megatron.core.optimizer import clip_grads, distrib_optimizer
from megatron.core.optimizer import optimizer as mixed_precision
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


@contextlib.contextmanager
def cpu_device() -> Iterator[None]:
    """Let this thread's Megatron-core run on the CPU until the context ends."""
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in _stand_ins():
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        stack.enter_context(_CudaMeansCpu())
        yield


def _stand_ins() -> Iterable[tuple[object, str, object]]:
    return (
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "synchronize", _nothing),
        (torch.cuda, "empty_cache", _nothing),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "current_stream", _Stream),
        (torch.cuda, "stream", contextlib.nullcontext),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", _get_rng_state),
        (megatron_random, "_get_cuda_rng_state", _get_rng_state),
        (megatron_random, "_set_cuda_rng_state", _set_rng_state),
        (megatron_optimizer, "Adam", FusedAdamW),
        (megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False),
        (distrib_optimizer, "Adam", FusedAdamW),
        # Says that `step` lives in the parameter groups, which is what makes the state reshardable.
        (distrib_optimizer, "HAVE_APEX_OR_TE", True),
        (distrib_optimizer, "USING_TE_OPTIMIZER", True),
        # Where Transformer Engine is installed its CUDA kernels are taken for these.
        (clip_grads, "multi_tensor_applier", utils.local_multi_tensor_applier),
        (clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm),
        (clip_grads, "multi_tensor_scale_impl", utils.local_multi_tensor_scale),
        (clip_grads, "multi_tensor_scale_tensor_impl", None),
        (mixed_precision, "multi_tensor_applier", utils.local_multi_tensor_applier),
        (mixed_precision, "multi_tensor_scale_impl", utils.local_multi_tensor_scale),
    )


class _CudaMeansCpu(TorchFunctionMode):
    """Reads "cuda" as "cpu" in every torch call of this thread."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            # The optimizer sorts parameters by the name of their CUDA tensor type.
            return func(*args).replace("torch.", "torch.cuda.")
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func is Tensor.to:
            args = tuple(_on_cpu(a) for a in args)
            kwargs.pop("non_blocking", None)
        return func(*args, **kwargs)


def _on_cpu(value: object) -> object:
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    return _CPU if isinstance(value, str) and value.split(":")[0] == "cuda" else value


def _nothing(*_args: object, **_kwargs: object) -> None:
    return None


class _Stream:
    """A CPU has one stream, and it is always in order."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def wait_stream(self, _stream: object) -> None:
        pass

    def wait_event(self, _event: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _get_rng_state(*_args: object, **_kwargs: object) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: Tensor, *_args: object, **_kwargs: object) -> None:
    torch.set_rng_state(state)


class FusedAdamW(torch.optim.Optimizer):
    """AdamW over torch's fused CPU kernel, with the constructor and state of Transformer Engine's FusedAdam.

    torch's own AdamW keeps `step` in each parameter's state, where Megatron-core's reshardable checkpoints cannot
    take it from; here it is in the parameter group. Loshchilov & Hutter 2019, arXiv:1711.05101.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
        **unsupported: object,
    ) -> None:
        if not adam_w_mode or capturable or unsupported:
            raise ValueError(f"FusedAdamW on a CPU is plain AdamW; got {adam_w_mode=} {capturable=} {unsupported=}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, in place."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            step = torch.tensor(float(group["step"]))
            torch._fused_adamw_(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                [step] * len(params),
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )


class RMSNorm(nn.Module):
    """RMSNorm that says when it works on a slice of the sequence, so that its gradient is summed over TP.

    Stands in for Transformer Engine's; Megatron-core's own wrapper refuses sequence parallel. Zhang & Sennrich 2019,
    arXiv:1910.07467.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_kwargs: object) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        fill = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(fill(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """`x`: [seq, batch, hidden]; same shape out."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        return nn.functional.rms_norm(x, weight.shape, weight, self.eps)


class LayerNorm(RMSNorm):
    """LayerNorm (with optional zero-centred gain) for the script's `apply_layernorm_1p`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: object) -> None:
        super().__init__(config, hidden_size, eps, **kwargs)
        self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """`x`: [seq, batch, hidden]; same shape out."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        return nn.functional.layer_norm(x, weight.shape, weight, self.bias, self.eps)


def norm_class(normalization: str) -> Callable[..., nn.Module]:
    """The norm module for `normalization` ("RMSNorm" or "LayerNorm")."""
    return functools.partial(RMSNorm if normalization == "RMSNorm" else LayerNorm)
