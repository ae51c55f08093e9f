"""The shape of a Llama, in our options' words and in those of Hugging Face's `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raytrain_llama3.config.estimate import padded_vocab_size
from raytrain_llama3.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """What both sides must know to turn one's tensors into the other's."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    seq_length: int
    rotary_base: float
    norm_epsilon: float

    @classmethod
    def of_sidecar(cls, sidecar: Mapping[str, Any], where: str) -> LlamaShape:
        """As a checkpoint's sidecar has it. Raises `CheckpointError` when Llama has not what that model has."""
        model = sidecar.get("model")
        if not isinstance(model, dict):
            raise CheckpointError(f"{where}: its sidecar does not say what model it is")
        for name, usual in (("normalization", "RMSNorm"), ("apply_layernorm_1p", False), ("rotary_percent", 1.0)):
            if model[name] != usual:
                raise CheckpointError(f"{where}: {name} {model[name]} has no place in Hugging Face's Llama")
        names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
        names += ("kv_channels", "rotary_base", "norm_epsilon")  # type: ignore[assignment]
        length = model["max_position_embeddings"] or sidecar["seq_length"]
        return cls(vocab_size=sidecar["vocab_size"], seq_length=length, **{name: model[name] for name in names})

    @classmethod
    def of_json(cls, config: Mapping[str, Any], where: str) -> LlamaShape:
        """As `config.json` has it. Raises `CheckpointError` naming what is not supported or not there."""
        if config.get("model_type") != "llama":
            raise CheckpointError(f"{where}: model_type {config.get('model_type')} is not llama")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind != "default":
            raise CheckpointError(f"{where}: rotary positions of type {kind} are not supported, only plain ones")
        for name, usual in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
            if config.get(name, usual) != usual:
                raise CheckpointError(f"{where}: {name} {config[name]} is not supported")
        try:
            heads = config["num_attention_heads"]
            return cls(
                num_layers=config["num_hidden_layers"],
                hidden_size=config["hidden_size"],
                ffn_hidden_size=config["intermediate_size"],
                num_attention_heads=heads,
                num_query_groups=config.get("num_key_value_heads") or heads,
                kv_channels=config.get("head_dim") or config["hidden_size"] // heads,
                vocab_size=config["vocab_size"],
                seq_length=config.get("max_position_embeddings", 8192),
                rotary_base=rope.get("rope_theta") or config.get("rope_theta") or 10_000,
                norm_epsilon=config.get("rms_norm_eps", 1e-6),
            )
        except KeyError as error:
            raise CheckpointError(f"{where}: has no {error.args[0]}") from error

    def to_json(self, dtype: str) -> dict[str, object]:
        """What `config.json` says."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_query_groups,
            "head_dim": self.kv_channels,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.seq_length,
            "rope_theta": self.rotary_base,
            "rms_norm_eps": self.norm_epsilon,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
        }

    def options(self) -> dict[str, object]:
        """The options of a run that trains it."""
        return {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "ffn_hidden_size": self.ffn_hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "num_query_groups": self.num_query_groups,
            "kv_channels": self.kv_channels,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.seq_length,
            "rotary_base": int(self.rotary_base),
            "norm_epsilon": self.norm_epsilon,
        }

    @property
    def embedding(self) -> tuple[int, int]:
        """Shape of the embedding, without padding."""
        return self.vocab_size, self.hidden_size

    def attention_parts(self) -> Iterator[tuple[str, Callable[[Tensor], Tensor], int]]:
        """Query, key and value projections: name, how to take it from Megatron's joint one, and its rows."""
        per_group, width = self.num_attention_heads // self.num_query_groups, self.kv_channels
        for name, first, count in (("q_proj", 0, per_group), ("k_proj", per_group, 1), ("v_proj", per_group + 1, 1)):

            def part(joint: Tensor, first: int = first, count: int = count) -> Tensor:
                # Rows are stored group by group: its queries, then its key, then its value.
                groups = joint.view(self.num_query_groups, per_group + 2, width, self.hidden_size)
                return groups[:, first : first + count].reshape(-1, self.hidden_size)

            yield name, part, self.num_query_groups * count * width

    def joined_attention(self, parts: list[Tensor]) -> Tensor:
        """The reverse: query, key and value projections as Megatron's joint one."""
        import torch

        groups = [part.view(self.num_query_groups, -1, self.kv_channels, self.hidden_size) for part in parts]
        return torch.cat(groups, dim=1).reshape(-1, self.hidden_size)

    def gate_and_up(self) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
        """Gate and up projections: name, and how to take it from Megatron's joint one."""
        yield "gate_proj", lambda joint: joint[: self.ffn_hidden_size]
        yield "up_proj", lambda joint: joint[self.ffn_hidden_size :]

    def unpadded(self, table: Tensor) -> Tensor:
        """The rows of an embedding or output layer that stand for tokens."""
        return table[: self.vocab_size]

    def padded(self, table: Tensor) -> Tensor:
        """With rows of zeros up to the padded vocabulary."""
        import torch

        rows = table.new_zeros(padded_vocab_size(self.vocab_size) - self.vocab_size, self.hidden_size)
        return torch.cat([table, rows])
