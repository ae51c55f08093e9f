"""Whether a run that resumes goes on with the data that it began with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raytrain_llama3.errors import DataChangedError

_MEANING = {
    "seed": "samples come in another order",
    "shuffle": "samples come in another order",
    "order": "samples come in another order: another version of this software chose it",
    "weights": "the blend is another",
    "seq_length": "samples are cut anew",
    "append": "documents are packed with another end-of-document id, or without one",
    "documents": "split gives training other documents",
    "tokenizer": "token ids may mean something else",
    "column": "token ids are read from another column",
}
_SHOWN = 8


def check_unchanged(saved: object, now: Mapping[str, Any], step: int, *, accept: bool) -> list[str]:
    """Compare the fingerprint in a checkpoint's sidecar with today's; lines that say what changed.

    A sidecar without one, which an earlier version wrote, is taken as it is. Raises `DataChangedError` with the lines
    unless `accept`.
    """
    if not isinstance(saved, Mapping):
        return []
    lines = changes(saved, now)
    if lines and not accept:
        raise DataChangedError(
            f"the data is not that of the checkpoint at step {step}, so that samples would come twice or never:\n  "
            + "\n  ".join(lines)
            + "\nrestore the data and the options, or go on with other samples: --data-changed accept"
        )
    return lines


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each thing that was one way when `saved` was written and is another `now`."""
    lines = _differences("", saved, now, ("sources",))
    before, after = saved.get("sources", []), now.get("sources", [])
    if len(before) != len(after):
        return [*lines, f"{len(before)} source(s) of data then, {len(after)} now"]
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        where = f"source {number}: " if len(before) > 1 else ""
        if old.get("kind") != new.get("kind"):
            lines.append(f"{where}kind of data was {old.get('kind')}, is {new.get('kind')}")
            continue
        lines += _differences(where, old, new, ("files", "shards", "bytes"))
        files = _files(where, old.get("files"), new.get("files"))
        lines += files
        if old.get("shards") != new.get("shards") and not files:
            lines.append(f"{where}the shards hold other tokens than they did")
    return lines


def _differences(where: str, old: Mapping[str, Any], new: Mapping[str, Any], apart: tuple[str, ...]) -> list[str]:
    return [
        f"{where}{name} was {old[name]}, is {new[name]}" + (f": {_MEANING[name]}" if name in _MEANING else "")
        for name in old
        if name not in apart and name in new and old[name] != new[name]
    ]


def _files(where: str, old: object, new: object) -> list[str]:
    """Which shards went, came or changed, where both sides name them; a file that is only called otherwise is none."""
    if not isinstance(old, list) or not isinstance(new, list):
        return []
    if [counts for _, *counts in old] == [counts for _, *counts in new]:
        return []
    before, after = ({name: tuple(counts) for name, *counts in files} for files in (old, new))
    lines = [f"{where}shard {name} is gone" for name in before.keys() - after.keys()]
    lines += [f"{where}shard {name} is new" for name in after.keys() - before.keys()]
    lines += [
        f"{where}shard {name} had {before[name][0]} documents and {before[name][1]} tokens, has {after[name][0]} and "
        f"{after[name][1]}" + ("" if before[name][:2] != after[name][:2] else ", but others")
        for name in before
        if name in after and before[name] != after[name]
    ]
    return [*sorted(lines)[:_SHOWN], *([f"{where}and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])]
