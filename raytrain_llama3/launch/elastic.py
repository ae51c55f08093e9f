"""How many nodes a run goes on with: all of the plan's, fewer after a loss, more when they are back."""

from __future__ import annotations

from raytrain_llama3.config import rules
from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.errors import ClusterFormationError, ConfigError
from raytrain_llama3.launch.crew import Crew


class Elastic:
    """The present plan between the full one and what the living nodes allow. `barred` are nodes left out."""

    def __init__(self, full: RunPlan, crew: Crew) -> None:
        self.full = self.plan = full
        self._crew = crew
        self.barred: set[str] = set()

    @property
    def usable(self) -> int:
        """Living nodes that could serve; fewer than the full layout has, as long as it does not fit on them."""
        count, wanted = self._crew.usable(self.barred), len(self.full.ranks_per_node)
        return count if self._crew.fits(self.full, self.barred) else min(count, wanted - 1)

    @property
    def is_shrunk(self) -> bool:
        """Whether the present plan has fewer ranks than the full one."""
        return self.plan is not self.full

    def restore(self) -> None:
        """Go on with the full layout."""
        self.plan = self.full

    def shrink(self, nodes: int) -> None:
        """Go on with `nodes` nodes: fewer data-parallel ranks, the same global batch.

        Raises `ClusterFormationError` when no layout fits there.
        """
        sizes = self._crew.sizes(nodes, self.barred)
        try:
            self.plan = rules.resize(self.full, sizes)
        except ConfigError as error:
            there = "+".join(map(str, sizes)) or "no"
            raise ClusterFormationError(f"cannot go on with {there} devices: {error}") from error

    def larger(self) -> RunPlan | None:
        """A plan with more data-parallel ranks than the present one has, if nodes for it are there now."""
        if not self.is_shrunk:
            return None
        sizes = self._crew.sizes(len(self.full.ranks_per_node), self.barred)
        wanted = sorted(self.full.ranks_per_node, reverse=True)
        if len(sizes) == len(wanted) and all(has >= count for has, count in zip(sizes, wanted, strict=True)):
            return self.full
        try:
            plan = rules.resize(self.full, sizes)
        except ConfigError:
            return None
        return plan if plan.layout.dp > self.plan.layout.dp else None
