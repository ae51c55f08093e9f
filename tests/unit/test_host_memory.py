from __future__ import annotations

import pytest

from raytrain_llama3.config.host_memory import host_bytes, part_bytes
from raytrain_llama3.config.layout_rules import layout_of
from raytrain_llama3.config.load import load

LLAMA_8B = 8.03e9


@pytest.mark.parametrize(
    ("flags", "world", "bytes_a_weight"),
    [
        # bf16 weights, fp32 masters, two moments: nothing of it is gathered, so it shrinks with every rank.
        ((), 1, 14),
        (("moments bf16",), 1, 10),
        ((), 8, 14 / 8),
        (("--tp-size", "2"), 8, 14 / 8),
        (
            (
                "--dtype",
                "fp32",
            ),
            1,
            16,
        ),
    ],
)
def test_a_part_of_8b(flags: tuple[str, ...], world: int, bytes_a_weight: float) -> None:
    moments = "bf16" if "moments bf16" in flags else "fp32"
    config = load([flag for flag in flags if flag.startswith("--") or flag.isalnum()], {}).config
    found = part_bytes(config, layout_of(config, world), "cuda", moments)
    assert found == pytest.approx(bytes_a_weight * LLAMA_8B, rel=0.01)


@pytest.mark.parametrize(
    ("flags", "device", "nodes", "parts"),
    [
        ((), "cuda", 1, 1),
        ((), "cpu", 1, 0),
        (("--async-save", "0"), "cuda", 1, 0),
        (("--async-save", "1"), "cpu", 1, 1),
        (("--memory-checkpoint-interval", "10"), "cuda", 1, 4),
        (("--memory-checkpoint-interval", "10"), "cuda", 3, 6),
    ],
)
def test_copies_and_generations_are_counted(flags: tuple[str, ...], device: str, nodes: int, parts: int) -> None:
    config = load(list(flags), {}).config
    layout = layout_of(config, 8)
    part = part_bytes(config, layout, device, "fp32")
    assert host_bytes(config, layout, device, "fp32", nodes) == pytest.approx(parts * part)
