"""Llama weights between a `torch_dist` checkpoint and a Hugging Face folder, a tensor at a time.

Neither direction needs a model, a process group, or more memory than a few tensors: a checkpoint is read by boxes of
its global tensors, whatever layout saved it, and written in such boxes for any layout to load.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raytrain_llama3.checkpoint import distcp
from raytrain_llama3.checkpoint.distcp import COMMON_KEY, Blob, Box, Item
from raytrain_llama3.checkpoint.hf_config import LlamaShape
from raytrain_llama3.checkpoint.reading import FolderSource, Reader
from raytrain_llama3.errors import CheckpointError
from raytrain_llama3.messages import FileFacts

_SHARD_BYTES = 2 << 30
_FILES = 4
_LAYER = "decoder.layers."
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_FINAL_NORM = "decoder.final_layernorm.weight"
_QKV, _FC1 = _LAYER + "self_attention.linear_qkv.weight", _LAYER + "mlp.linear_fc1.weight"
_PLAIN = {
    "input_layernorm": _LAYER + "self_attention.linear_qkv.layer_norm_weight",
    "post_attention_layernorm": _LAYER + "mlp.linear_fc1.layer_norm_weight",
    "self_attn.o_proj": _LAYER + "self_attention.linear_proj.weight",
    "mlp.down_proj": _LAYER + "mlp.linear_fc2.weight",
}
"""Weights of a layer that are the same in both, by Hugging Face's name."""


@dataclass(frozen=True, slots=True)
class _Whole:
    """One Hugging Face tensor: its name, its size in bytes, and how to read it."""

    name: str
    nbytes: int
    read: Callable[[], Tensor]


def export(folder: Path, shape: LlamaShape, output: Path, say: Callable[[str], None]) -> None:
    """Write the weights of the checkpoint in `folder` into `output` as safetensors with `config.json` and index.

    Raises `CheckpointError` when `output` holds something, or the checkpoint is of another shape.
    """
    save_file = _safetensors("torch").save_file
    _empty(output)
    try:
        reader = Reader(FolderSource(folder))
        tensors = list(_exported(reader, shape))
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{folder}: {error.args[0]}") from error
    shards = _shards(tensors)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({one.name: one.read() for one in shard}, output / file, metadata={"format": "pt"})
        places |= {one.name: file for one in shard}
        say(f"{file}: {len(shard)} tensors, {sum(one.nbytes for one in shard) / 2**30:.2f} GiB")
    total = sum(one.nbytes for one in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    _write_text(output / "model.safetensors.index.json", json.dumps(index, indent=2))
    dtype = str(reader.dtype(_EMBEDDING)).removeprefix("torch.")
    _write_text(output / "config.json", json.dumps(shape.to_json(dtype), indent=2))


def bring(source: Path, shape: LlamaShape, folder: Path) -> dict[str, FileFacts]:
    """Write the weights of the Hugging Face folder `source` into `folder`, which is made; what its files are."""
    with _Safetensors(source) as weights:
        folder.mkdir(parents=True)
        rows: list[list[Callable[[], tuple[Item, Tensor]]]] = [[] for _ in range(_FILES)]
        for number, one in enumerate(_imported(weights, shape)):
            rows[number % _FILES].append(one)
        common: tuple[Item, bytes] = (Blob(COMMON_KEY), distcp.pack({"progress": {"step": 0, "samples": 0}}))
        files = {f"__0_{i}.distcp": _row(row, common if i == 0 else None) for i, row in enumerate(rows)}
        part = distcp.write_files(folder, files)
    return distcp.write_index(folder, [part])


def _row(
    row: list[Callable[[], tuple[Item, Tensor]]], first: tuple[Item, bytes] | None
) -> Iterator[tuple[Item, Tensor | bytes]]:
    if first is not None:
        yield first
    for read in row:
        item, tensor = read()
        yield item, distcp.alone(tensor)


def _exported(reader: Reader, shape: LlamaShape) -> Iterator[_Whole]:
    """Every tensor of the Hugging Face model, in its order."""
    dtype = reader.dtype(_EMBEDDING)
    if dtype is None:
        raise KeyError(f"{_EMBEDDING} is not in the checkpoint")
    hidden, width = shape.hidden_size, dtype.itemsize

    def one(name: str, key: str, rows: int, read: Callable[[Tensor], Tensor], layer: int | None) -> _Whole:
        whole = reader.shape(key)
        at = () if layer is None else (layer,)
        sizes = (1,) * len(at) + whole[len(at) :]

        def now() -> Tensor:
            found = reader.tensor(key, at + (0,) * (len(whole) - len(at)), sizes)
            return read(found[0] if at else found).contiguous()

        return _Whole(name, rows * width, now)

    yield one("model.embed_tokens.weight", _EMBEDDING, shape.vocab_size * hidden, shape.unpadded, None)
    for i in range(shape.num_layers):
        at = f"model.layers.{i}."
        for name, part, rows in shape.attention_parts():
            yield one(f"{at}self_attn.{name}.weight", _QKV, rows * hidden, part, i)
        for name, part in shape.gate_and_up():
            yield one(f"{at}mlp.{name}.weight", _FC1, shape.ffn_hidden_size * hidden, part, i)
        for name, key in _PLAIN.items():
            numbers = torch.Size(reader.shape(key)[1:]).numel()
            yield one(f"{at}{name}.weight", key, numbers, _same, i)
    yield one("model.norm.weight", _FINAL_NORM, hidden, _same, None)
    yield one("lm_head.weight", _OUTPUT, shape.vocab_size * hidden, shape.unpadded, None)


def _imported(weights: _Safetensors, shape: LlamaShape) -> Iterator[Callable[[], tuple[Item, Tensor]]]:
    """Every tensor of the checkpoint, to be read when it is written."""

    def one(key: str, read: Callable[[], Tensor], layer: int | None = None) -> Callable[[], tuple[Item, Tensor]]:
        def now() -> tuple[Item, Tensor]:
            tensor = read()
            sizes = tuple(tensor.shape)
            if layer is None:
                return Box(key, tensor.dtype, sizes, (0,) * len(sizes), sizes), tensor
            offsets, whole = (layer, *(0 for _ in sizes)), (shape.num_layers, *sizes)
            return Box(key, tensor.dtype, whole, offsets, (1, *sizes)), tensor[None]

        return now

    head = "lm_head.weight" if "lm_head.weight" in weights.names else "model.embed_tokens.weight"
    yield one(_EMBEDDING, lambda: shape.padded(weights.get("model.embed_tokens.weight", shape.embedding)))
    for i in range(shape.num_layers):
        at = f"model.layers.{i}."
        yield one(_QKV, lambda at=at: shape.joined_attention(weights.get_all(at + "self_attn.", "qkv", shape)), i)  # type: ignore[misc]
        yield one(_FC1, lambda at=at: torch.cat(weights.get_all(at + "mlp.", "gate_up", shape)), i)  # type: ignore[misc]
        for name, key in _PLAIN.items():
            yield one(key, lambda name=f"{at}{name}.weight": weights.get(name, None), i)  # type: ignore[misc]
    yield one(_FINAL_NORM, lambda: weights.get("model.norm.weight", (shape.hidden_size,)))
    yield one(_OUTPUT, lambda: shape.padded(weights.get(head, shape.embedding)))


class _Safetensors:
    """The tensors of a folder, by name, read one at a time."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        self._folder, self._stack = folder, contextlib.ExitStack()
        if index.is_file():
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        else:
            files = {"model.safetensors"}
        self._files: dict[str, Any] = {}
        safe_open = _safetensors().safe_open
        for file in sorted(files):
            if not (folder / file).is_file():
                raise CheckpointError(f"{folder / file}: is missing; a Hugging Face folder with safetensors is wanted")
            opened = self._stack.enter_context(safe_open(folder / file, framework="pt"))
            self._files |= dict.fromkeys(opened.keys(), opened)

    def __enter__(self) -> _Safetensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._files)

    def get(self, name: str, sizes: tuple[int, ...] | None) -> Tensor:
        """One tensor. Raises `CheckpointError` when it is not there or not of `sizes`."""
        if name not in self._files:
            raise CheckpointError(f"{self._folder}: has no tensor {name}")
        found: Tensor = self._files[name].get_tensor(name)
        if sizes is not None and tuple(found.shape) != sizes:
            raise CheckpointError(f"{self._folder}: {name} has shape {list(found.shape)}, {list(sizes)} is wanted")
        return found

    def get_all(self, prefix: str, which: str, shape: LlamaShape) -> list[Tensor]:
        """Those that become one in a checkpoint: `qkv`, or `gate_up`."""
        if which == "qkv":
            wanted = {name: (rows, shape.hidden_size) for name, _, rows in shape.attention_parts()}
        else:
            wanted = {name: (shape.ffn_hidden_size, shape.hidden_size) for name, _ in shape.gate_and_up()}
        return [self.get(f"{prefix}{name}.weight", sizes) for name, sizes in wanted.items()]


def _shards(tensors: list[_Whole]) -> list[list[_Whole]]:
    shards: list[list[_Whole]] = [[]]
    filled = 0
    for one in tensors:
        if shards[-1] and filled + one.nbytes > _SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(one)
        filled += one.nbytes
    return shards


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _empty(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: is not empty; name a folder that is not there yet")
    folder.mkdir(parents=True, exist_ok=True)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")


def _safetensors(module: str = "") -> Any:
    import importlib

    try:
        return importlib.import_module(f"safetensors.{module}" if module else "safetensors")
    except ImportError as error:
        raise CheckpointError("this needs the package safetensors: pip install 'raytrain-llama3[hf]'") from error
