"""Kinds of option values that need more than a type: how they are written, and which are legal."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt

from raytrain_llama3.messages import FaultKind, PlannedFault

Auto = Literal["auto"]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def _split(value: object) -> object:
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


Split = Annotated[tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat], BeforeValidator(_split)]


def _rehearsal(value: object) -> object:
    if not isinstance(value, str):
        return value
    return tuple(_planned_fault(part.strip()) for part in value.split(",") if part.strip())


def _planned_fault(text: str) -> PlannedFault:
    try:
        attempt, rank, step, kind = text.split(":")
        return PlannedFault(int(attempt), int(rank), int(step), FaultKind(kind))
    except ValueError:
        kinds = ", ".join(FaultKind)
        raise ValueError(f"{text!r} is not ATTEMPT:RANK:STEP:KIND with a KIND of {kinds}") from None


def _words(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Recompute = Annotated[tuple[Literal["core_attn", "mlp", "layer"], ...], BeforeValidator(_words)]
Offload = Annotated[tuple[Literal["qkv_linear", "core_attn", "attn_proj"], ...], BeforeValidator(_words)]
Ranks = Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_words)]


Rehearsal = Annotated[tuple[PlannedFault, ...], BeforeValidator(_rehearsal)]
