"""What `dtype` means to Megatron-core: keyword arguments for the model, the optimizer and gradient reduction."""

from __future__ import annotations

from typing import Any

import torch

from raytrain_llama3.config import estimate
from raytrain_llama3.config.plan import RunPlan

_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def params_dtype(plan: RunPlan) -> torch.dtype:
    """Type of the model's weights (fp8 keeps bf16 weights and casts them for the products)."""
    return _DTYPES[plan.config.dtype]


def uses_half(plan: RunPlan) -> bool:
    """Whether the model needs Megatron's half-precision wrapper."""
    return params_dtype(plan) is not torch.float32


def model_precision(plan: RunPlan) -> dict[str, Any]:
    """Keyword arguments for `TransformerConfig`."""
    config, dtype = plan.config, params_dtype(plan)
    chosen: dict[str, Any] = {
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
    }
    if config.dtype == "fp8":
        chosen |= {
            "fp8": config.fp8_format,
            "fp8_recipe": config.fp8_recipe,
            "fp8_amax_history_len": config.fp8_amax_history_len,
            "fp8_amax_compute_algo": config.fp8_amax_compute_algo,
            "fp8_param": config.fp8_param_gather,
            "fp8_dot_product_attention": config.fp8_attention,
        }
    return chosen


def grad_reduce_in_fp32(plan: RunPlan) -> bool:
    """Whether gradients are accumulated and reduced in fp32."""
    return not (uses_half(plan) and plan.config.grad_reduce_in_bf16)


def optimizer_precision(plan: RunPlan) -> dict[str, Any]:
    """Keyword arguments for `OptimizerConfig`."""
    config, dtype = plan.config, params_dtype(plan)
    chosen: dict[str, Any] = {
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "params_dtype": dtype,
        "fp8_recipe": config.fp8_recipe if config.dtype == "fp8" else None,
        # Of fp16: from Megatron-core's 2^32 the first dozens of steps would be left out until it had come down.
        "initial_loss_scale": 2.0**16,
    }
    if estimate.is_precision_aware(config, plan.device):
        moments = _DTYPES[plan.moments_dtype]
        chosen |= {
            "use_precision_aware_optimizer": True,
            "main_grads_dtype": torch.float32 if grad_reduce_in_fp32(plan) else torch.bfloat16,
            "exp_avg_dtype": moments,
            "exp_avg_sq_dtype": moments,
        }
    return chosen
