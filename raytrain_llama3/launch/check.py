"""`check`: every node and every device of a cluster looked at and tried, before a run depends on them."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raytrain_llama3.config import env
from raytrain_llama3.config.plan import Device, DeviceSupply
from raytrain_llama3.errors import ClusterFormationError
from raytrain_llama3.launch import node_probe, reservation
from raytrain_llama3.launch.reservation import NoRoom, Reservation
from raytrain_llama3.launch.session import ALL_DEVICES_VISIBLE, Node, Session, on_node
from raytrain_llama3.messages import Finding, Verdict

_RESERVE_S = 60
_LOOK_S = 120
_IMPORT_S = 300
_TRIAL_S = 300
_ALL = "all"


def check(
    session: Session, supply: DeviceSupply, folder: Path, probe_class: type, environ: dict[str, str]
) -> list[Finding]:
    """Look at every node, try every device, and reduce over all of them.

    `probe_class` is tried in a process a device (`train.probe.DeviceProbe`); `environ` is what ranks would get.
    """
    nodes = [node for node in session.nodes() if _devices(node, supply.device, supply) > 0]
    found = _look(nodes, supply.device, folder)
    found += _shared_folder(nodes, folder)
    wanted = [(node, _devices(node, supply.device, supply)) for node in nodes]
    try:
        held = reservation.reserve(wanted, supply.device, f"raytrain-check-{secrets.token_hex(4)}", _RESERVE_S)
    except NoRoom as error:
        raise ClusterFormationError(
            f"check wants every device for itself, and some of {error} are in use: try again when the cluster is free"
        ) from error
    try:
        return found + _try_devices(held, supply.device, probe_class, environ)
    finally:
        for one in held:
            one.release()


def is_good(findings: Sequence[Finding]) -> bool:
    """Whether nothing was found that would end a run."""
    return all(finding.verdict is not Verdict.BAD for finding in findings)


def as_table(findings: Sequence[Finding]) -> str:
    """For people: a line a finding, grouped by what was looked at; alike ones on one line."""
    lines = []
    for what in dict.fromkeys(finding.what for finding in findings):
        same: dict[tuple[str, Verdict, str], list[str]] = {}
        for finding in (f for f in findings if f.what == what):
            same.setdefault((finding.value, finding.verdict, finding.remedy), []).append(finding.where)
        for (value, verdict, remedy), places in same.items():
            where = "" if len(same) == 1 else f"  [{', '.join(places)}]"
            lines.append(f"{verdict:<8} {what:<20} {value}{where}" + (f"\n{'':<30}{remedy}" if remedy else ""))
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> str:
    """For programs: `{"ok": …, "findings": [{"where": …, "what": …, "value": …, "verdict": …, "remedy": …}]}`."""
    return json.dumps({"ok": is_good(findings), "findings": [asdict(finding) for finding in findings]}, indent=1)


def _devices(node: Node, device: Device, supply: DeviceSupply) -> int:
    if device == "cuda":
        return int(node.total.get("GPU", 0))
    return min(int(node.total.get("CPU", 0)), max(supply.per_node))


def _look(nodes: Sequence[Node], device: Device, folder: Path) -> list[Finding]:
    refs = [on_node(node.node_id, node_probe.look, node.ip, node.ip, device, str(folder)) for node in nodes]
    told, lost = _gather([node.ip for node in nodes], refs, "node", _LOOK_S)
    return [finding for _, some in told for finding in some] + lost


def _shared_folder(nodes: Sequence[Node], folder: Path) -> list[Finding]:
    """A token written by the first node must be seen by all the others."""
    import ray

    if len(nodes) == 1:
        return [Finding(_ALL, "shared folder", f"{folder}: one node", Verdict.SKIPPED)]
    name = f".check-{secrets.token_hex(8)}"
    try:
        ray.get(on_node(nodes[0].node_id, node_probe.leave, str(folder), name), timeout=_LOOK_S)
    except (ray.exceptions.RayError, TimeoutError) as error:
        return [_silent(nodes[0].ip, "shared folder", error)]
    found = []
    for node in nodes[1:]:
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            if ray.get(on_node(node.node_id, node_probe.sees, str(folder), name), timeout=_LOOK_S):
                found.append(Finding(node.ip, "shared folder", str(folder)))
                continue
        remedy = "checkpoints are written by all nodes: give a checkpoint_path on storage that they share"
        found.append(
            Finding(node.ip, "shared folder", f"{folder}: {nodes[0].ip}'s file is not there", Verdict.BAD, remedy)
        )
    with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
        ray.get(on_node(nodes[0].node_id, node_probe.take_away, str(folder), name), timeout=_LOOK_S)
    return found


def _try_devices(
    held: Sequence[Reservation], device: Device, probe_class: type, environ: dict[str, str]
) -> list[Finding]:
    import ray

    remote: Any = ray.remote
    places, probes = [], []
    for one in held:
        for index in one.devices:
            where = f"{one.node.ip} device {index}"
            options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": one.inside(), "name": f"check {where}"}
            if device == "cuda":
                options["runtime_env"] = {"env_vars": ALL_DEVICES_VISIBLE}
            places.append(where)
            probes.append(remote(probe_class).options(**options).remote(where, device, index, one.node.ip))
    try:
        versions, lost = _gather(
            places, [p.prepare.remote(environ, env.POD_NAMES) for p in probes], "imports", _IMPORT_S
        )
        found = [*_compare_versions(dict(versions)), *lost]
        trials, lost = _gather(places, [p.trials.remote() for p in probes], "trials", _TRIAL_S)
        found += [finding for _, some in trials for finding in some] + lost
        return [*found, _reduce(held, places, probes)]
    finally:
        for probe in probes:
            ray.kill(probe)


def _gather(
    places: Sequence[str], refs: Sequence[Any], what: str, timeout_s: float
) -> tuple[list[tuple[str, Any]], list[Finding]]:
    """(place, answer) of those that answer, and a finding for each that fails or does not."""
    import ray

    ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    told, lost = list[tuple[str, Any]](), list[Finding]()
    for where, ref in zip(places, refs, strict=True):
        try:
            told.append((where, ray.get(ref, timeout=0)))
        except (ray.exceptions.RayError, TimeoutError) as error:
            lost.append(_silent(where, what, error))
    return told, lost


def _compare_versions(versions: dict[str, dict[str, str]]) -> list[Finding]:
    """One finding a program: the version, or who differs from the first device."""
    found = []
    for name in dict.fromkeys(name for some in versions.values() for name in some):
        by_version: dict[str, list[str]] = {}
        for where, some in versions.items():
            by_version.setdefault(some.get(name, "none"), []).append(where)
        if len(by_version) == 1:
            found.append(Finding(_ALL, name, next(iter(by_version))))
            continue
        value = "; ".join(f"{version} on {', '.join(places)}" for version, places in by_version.items())
        found.append(Finding(_ALL, name, value, Verdict.BAD, "install the same version on every node"))
    return found


def _reduce(held: Sequence[Reservation], places: Sequence[str], probes: Sequence[Any]) -> Finding:
    import ray

    if len(probes) == 1:
        return Finding(_ALL, "all-reduce", "one device", Verdict.SKIPPED)
    host = held[0].node.ip
    try:
        port = ray.get(probes[0].open_store.remote(), timeout=_TRIAL_S)
    except (ray.exceptions.RayError, TimeoutError) as error:
        return _silent(places[0], "all-reduce", error)
    world = len(probes)
    refs = [probe.all_reduce.remote(rank, world, host, port) for rank, probe in enumerate(probes)]
    rates, lost = _gather(places, refs, "all-reduce", _TRIAL_S)
    if lost:
        return lost[0]
    return Finding(_ALL, "all-reduce", f"{world} devices, {min(rate for _, rate in rates) / 1e9:.2f} GB/s through each")


def _silent(where: str, what: str, error: Exception) -> Finding:
    said = str(error).strip().splitlines()
    value = said[-1] if said else type(error).__name__
    return Finding(where, what, value, Verdict.BAD, "see this node's logs in Ray's dashboard, or its session folder")
