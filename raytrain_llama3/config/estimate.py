"""Parameters, memory and floating-point operations of a configuration, by arithmetic alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_llama3.config.plan import Layout
from raytrain_llama3.config.schema import Config

GIB = 2**30

# Dense peaks in FLOP/s from NVIDIA's data sheets (without sparsity); the first name that the device's contains counts.
_PEAKS = (
    ("B200", {"bf16": 2.25e15, "fp8": 4.5e15}),
    ("H200", {"bf16": 989e12, "fp8": 1979e12}),
    ("H100 PCIE", {"bf16": 756e12, "fp8": 1513e12}),
    ("H100 NVL", {"bf16": 835e12, "fp8": 1671e12}),
    ("H100", {"bf16": 989e12, "fp8": 1979e12}),
    ("H800", {"bf16": 989e12, "fp8": 1979e12}),
    ("H20", {"bf16": 148e12, "fp8": 296e12}),
    ("A100", {"bf16": 312e12}),
    ("A800", {"bf16": 312e12}),
    ("L40S", {"bf16": 362e12, "fp8": 733e12}),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense peak of one device at `dtype` in FLOP/s, or None where it is not known."""
    for name, peaks in _PEAKS:
        if name in device_name.upper():
            return peaks.get("bf16" if dtype == "fp16" else dtype)
    return None


def padded_vocab_size(vocab_size: int) -> int:
    """`vocab_size` rounded up to a multiple of 128, independently of tensor parallelism."""
    return -(-vocab_size // 128) * 128


def parameters(config: Config) -> int:
    """Weights of the whole model, embedding and output layer apart."""
    c = config
    attention = c.hidden_size * c.kv_channels * (2 * c.num_attention_heads + 2 * c.num_query_groups)
    layer = attention + 3 * c.hidden_size * c.ffn_hidden_size + 2 * c.hidden_size
    return c.num_layers * layer + c.hidden_size + 2 * padded_vocab_size(c.vocab_size) * c.hidden_size


def flops_per_token(config: Config) -> float:
    """Forward and backward floating-point operations for one token: 6 for each weight in a product, and attention.

    Attention counts the causal half alone: 6 · layers · heads · head width · sequence. Recomputation is not
    counted (model FLOPs, as in MFU; Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
    """
    c = config
    in_products = parameters(c) - padded_vocab_size(c.vocab_size) * c.hidden_size
    attention = 6 * c.num_layers * c.num_attention_heads * c.kv_channels * c.seq_length
    return 6.0 * in_products + attention


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the fullest device."""

    weights: float
    """With dtype fp8 also the fp8 copies of the layers' matrices, as they are and transposed."""
    gradients: float
    optimizer: float
    """Adam's moments and what is kept of the fp32 master weights."""
    activations: float
    """What the layers keep for the backward pass."""
    logits: float
    """Scores over the vocabulary, and what their gradient takes beside them."""
    workspace: float
    """What the kernels want beside them."""
    update: float
    """fp32 copies of gradients while weights are updated; activations and logits are gone by then."""

    @property
    def total(self) -> float:
        """At the peak of a step."""
        kept = self.weights + self.gradients + self.optimizer + self.workspace
        return kept + max(self.activations + self.logits, self.update)


PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "workspace")
"""Of `Memory`, in the order in which they are told."""


def rank_weights(config: Config, layout: Layout) -> tuple[float, float]:
    """Weights of the fullest rank (a first pipeline stage): those in its layers, and all of them."""
    embedding = padded_vocab_size(config.vocab_size) * config.hidden_size
    ends = 2 * embedding if layout.pp == 1 else embedding
    in_layers = (parameters(config) - 2 * embedding) / layout.pp / layout.tp
    return in_layers, in_layers + ends / layout.tp


def is_precision_aware(config: Config, device: str) -> bool:
    """Whether the optimizer is Transformer Engine's, which has a choice of how moments and masters are kept."""
    return device == "cuda" and config.dtype in ("bf16", "fp8") and config.use_distributed_optimizer


def keeps_remainders(config: Config, device: str) -> bool:
    """Whether of the fp32 master weights only the 2 bytes are kept that the bf16 weights lack; not for every fp8."""
    return is_precision_aware(config, device) and (config.dtype == "bf16" or config.fp8_recipe == "delayed")


def memory(config: Config, layout: Layout, device: str, moments: str | None = None) -> Memory:
    """What the fullest device (a first pipeline stage) holds at the peak of a step.

    `moments` is what "auto" became for `optimizer_moments_dtype`; without it auto counts as fp32. Held against one
    H200 by `tests/gpu/test_gpu_memory.py`.
    """
    c, half = config, config.dtype != "fp32"
    in_layers, mine = rank_weights(c, layout)
    shards = layout.dp * layout.cp if c.use_distributed_optimizer else 1
    half_moments = is_precision_aware(c, device) and (moments or c.optimizer_moments_dtype) == "bf16"
    master = (2 if keeps_remainders(c, device) else 4) if half else 0
    half_gradients = half and c.grad_reduce_in_bf16
    # Weights that are fp8 themselves take the place of their bf16 originals.
    copies = in_layers * 2 if c.dtype == "fp8" and not c.fp8_param_gather else 0
    return Memory(
        weights=mine * (2 if half else 4) + copies,
        gradients=mine * (2 if half_gradients else 4),
        optimizer=mine * ((4 if half_moments else 8) + master) / shards,
        activations=_activations(c, layout, device),
        logits=_logits(c, layout, device) if layout.pp == 1 else 0.0,
        workspace=_workspace(c, layout) if device == "cuda" else 0.0,
        update=mine * 4 / shards if half_gradients and not keeps_remainders(c, device) else 0.0,
    )


def _activations(config: Config, layout: Layout, device: str) -> float:
    """Kept by a stage's layers over the micro-batches that it has in flight."""
    c = config
    tokens = layout.micro_batch_size * c.seq_length / layout.cp
    layers, in_flight = c.num_layers / layout.pp, min(layout.pp, layout.num_micro_batches)
    whole, kept = _token_in_layer(c, layout, device), _token_in_layer(c, layout, device, c.recompute_modules)
    # What is computed again is there for one layer at a time.
    return tokens * (kept * layers * in_flight + (whole - kept))


def _token_in_layer(config: Config, layout: Layout, device: str, again: Sequence[str] = ()) -> float:
    """Bytes that one token leaves in one layer, when the parts in `again` are not kept."""
    c, width = config, 2 if config.dtype != "fp32" else 4
    # An input of a product is kept in the product's format.
    of_product = 1 if c.dtype == "fp8" else width
    queries, keys = c.num_attention_heads * c.kv_channels / layout.tp, c.num_query_groups * c.kv_channels / layout.tp
    hidden, ffn = c.hidden_size / (layout.tp if layout.sequence_parallel else 1), c.ffn_hidden_size / layout.tp
    if "layer" in again:
        return hidden * width
    norms_and_residual = 2 * hidden * width + hidden * of_product
    attention = (2 * queries + 2 * keys) * (1 if c.dtype == "fp8" and c.fp8_attention else width)
    if of_product != width:
        attention += queries * of_product
    if device == "cpu" and not c.recompute_activations and "core_attn" not in again:
        # The CPU has no fused attention: scores and weights are kept for every pair of tokens.
        attention += 2 * c.num_attention_heads / layout.tp * c.seq_length * width
    mlp = 0.0 if "mlp" in again else hidden * of_product + 2 * ffn * width + ffn * of_product
    return norms_and_residual + attention + mlp


def _logits(config: Config, layout: Layout, device: str) -> float:
    width = 2 if config.dtype != "fp32" else 4
    tokens = layout.micro_batch_size * config.seq_length / layout.cp
    # With Transformer Engine's kernel the gradient takes the logits' place; the others work in fp32 beside them.
    by_kernel = device == "cuda" and config.cross_entropy_loss_fusion and config.dtype != "fp16"
    kept = width if by_kernel else width + 4
    return tokens * padded_vocab_size(config.vocab_size) / layout.tp * kept


def _workspace(config: Config, layout: Layout) -> float:
    """What cuBLAS wants (32 MiB), and a gradient of each shape that autograd asks for though it is in the buffer."""
    c, width = config, 2 if config.dtype != "fp32" else 4
    queries, keys = c.num_attention_heads * c.kv_channels, c.num_query_groups * c.kv_channels
    shapes = (queries + 2 * keys, queries, 3 * c.ffn_hidden_size, padded_vocab_size(c.vocab_size))
    return 32 * 2**20 + sum(shapes) * c.hidden_size / layout.tp * width
