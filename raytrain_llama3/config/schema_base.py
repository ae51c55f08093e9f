"""What a group of options is made of."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


def option(default: Any, *aliases: str, **constraints: Any) -> Any:
    """A field with Megatron-LM's flag names for it, e.g. `"--tensor-model-parallel-size"`."""
    return Field(default, json_schema_extra={"aliases": list(aliases)}, validate_default=True, **constraints)


class Options(BaseModel):
    """What all groups share: values never change, and a name that is not an option is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())
