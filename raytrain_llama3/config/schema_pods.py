"""Options about pods that form a cluster."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from raytrain_llama3.config.schema_base import Options
from raytrain_llama3.config.values import Auto


class Pods(Options):
    """A cluster formed by pods that all run this command: WORLD_SIZE is their number and RANK one pod's, or PET_*."""

    pods: Auto | bool = "auto"
    """Form the cluster from the pods' variables; auto: where they are set and no Ray cluster is named."""
    node_rank: NonNegativeInt | None = None
    """This pod's number, from 0 (RANK, PET_NODE_RANK); pod 0 is the head."""
    master_addr: str | None = None
    """Name or address of pod 0 (PET_MASTER_ADDR wins over the variable)."""
    master_port: Annotated[int, Field(ge=1, le=65535)] = 29500
    """The platform's port on pod 0. Nothing here listens on it: Ray and torch have ports of their own."""
    node_address: str | None = None
    """This pod's address for Ray, gloo and NCCL; unset: the one from which the kernel reaches master_addr."""
    ray_port: Annotated[int, Field(ge=1024, le=64435)] = 20000
    """First of the 1,100 ports that a Ray of pods uses on every node."""
    join_timeout_s: PositiveInt = 600
    """How long pods wait for each other before they end with 139, seconds; a lost pod or head is waited for anew."""
