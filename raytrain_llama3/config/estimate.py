"""Parameters, memory and floating-point operations of a configuration, by arithmetic alone."""

from __future__ import annotations

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
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """All of them together."""
        return self.weights + self.gradients + self.optimizer + self.activations


def memory(config: Config, layout: Layout, device: str) -> Memory:
    """What the fullest device (a first pipeline stage) holds at the peak of a step.

    Held against one H200: Llama3-8B, sequence 8192, bf16 moments, 113 GiB measured.
    """
    c, half = config, config.dtype != "fp32"
    embedding = padded_vocab_size(c.vocab_size) * c.hidden_size
    ends = 2 * embedding if layout.pp == 1 else embedding
    mine = ((parameters(c) - 2 * embedding) / layout.pp + ends) / layout.tp
    shards = layout.dp * layout.cp if c.use_distributed_optimizer else 1
    precise = device == "cuda" and c.dtype in ("bf16", "fp8") and c.use_distributed_optimizer
    moments = 4 if precise and c.optimizer_moments_dtype == "bf16" else 8
    # Precision-aware state keeps the 2 bytes of the fp32 master weight that its bf16 copy lacks; not for every fp8.
    split = precise and (c.dtype == "bf16" or c.fp8_recipe == "delayed")
    master = (2 if split else 4) if half else 0
    return Memory(
        weights=mine * (2 if half else 4),
        gradients=mine * (2 if half and c.grad_reduce_in_bf16 else 4),
        optimizer=mine * (moments + master) / shards,
        activations=_activations(c, layout, device),
    )


def _activations(config: Config, layout: Layout, device: str) -> float:
    c, width = config, 2 if config.dtype != "fp32" else 4
    tokens = layout.micro_batch_size * c.seq_length / layout.cp
    queries, keys = c.num_attention_heads * c.kv_channels, c.num_query_groups * c.kv_channels
    residual = 4 * c.hidden_size / (layout.tp if layout.sequence_parallel else 1)
    inner = (3 * queries + 4 * keys + 3 * c.ffn_hidden_size) / layout.tp
    scores = 0.0
    if device == "cpu" and not c.recompute_activations:
        # The CPU has no fused attention: scores and weights are kept for every pair of tokens.
        scores = 2 * c.num_attention_heads * c.seq_length / layout.tp
    layers = c.num_layers / layout.pp
    in_flight = min(layout.pp, layout.num_micro_batches)
    logits = tokens * padded_vocab_size(c.vocab_size) / layout.tp * (width + 4)
    return tokens * width * (residual + inner + scores) * layers * in_flight + (logits if layout.pp == 1 else 0)
