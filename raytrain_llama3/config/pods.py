"""What a job platform tells its pods: read from its variables and our flags, and every mistake in them told at once.

`WORLD_SIZE` and `RANK` are pods here (AIStudio, Kubeflow's older operators), not processes as torch has it. Newer
operators give the `PET_*` names, which win.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field

from raytrain_llama3.config.env import IN_A_JOB
from raytrain_llama3.config.flags import Assignment
from raytrain_llama3.config.ports import SPAN, PortPlan
from raytrain_llama3.config.schema import Config

DEFAULT_PORT = 29500
OPTIONS = ("node_rank", "master_addr", "master_port")
"""Options that a pod's variables give, read here and not with the others."""

_VARIABLES = {
    "num_nodes": ("PET_NNODES", "WORLD_SIZE"),
    "node_rank": ("PET_NODE_RANK", "RANK", "NODE_RANK"),
    "master_addr": ("PET_MASTER_ADDR", "MASTER_ADDR"),
    "master_port": ("PET_MASTER_PORT", "MASTER_PORT"),
}
_TELLING = ("num_nodes", "node_rank", "master_addr")
_OFF = frozenset({"0", "false", "no", "off"})
_ON = frozenset({"1", "true", "yes", "on"})
_LARGEST_PORT = 65535


@dataclass(frozen=True, slots=True)
class Pods:
    """Which pod of how many this is, and where pod 0 is. `given` is what was injected, as `NAME=value`."""

    count: int
    rank: int
    address: str
    port: int
    given: tuple[str, ...]

    @property
    def is_head(self) -> bool:
        """Whether Ray's head and the driver are here: the rank alone decides."""
        return self.rank == 0


@dataclass(slots=True)
class Reading:
    """What was found: nothing at all, pods, or mistakes; and a line about what is not used."""

    pods: Pods | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    """What the pod's variables say, as options."""


@dataclass(frozen=True, slots=True)
class _Word:
    """One value as somebody gave it."""

    text: str
    source: str

    @property
    def shown(self) -> str:
        return f"{self.source} {self.text}" if self.source.startswith("-") else f"{self.source}={self.text}"


def read(environ: Mapping[str, str], given: Mapping[str, Assignment]) -> Reading:
    """Pods, if the environment or flags speak of any and no cluster is named; `pods` (the option) decides otherwise."""
    reading = Reading()
    wish = str(given["pods"].raw).lower() if "pods" in given else "auto"
    words = {name: word for name in _VARIABLES if (word := _find(name, environ, given)) is not None}
    telling = [words[name] for name in _TELLING if name in words and _is_telling(name, words)]
    if wish in _OFF or not (telling or wish in _ON):
        return reading
    if wish not in _ON and (cluster := _named_cluster(environ, given)):
        variables = [word.source for word in telling if not word.source.startswith("-")]
        if variables:
            reading.notes.append(
                f"{', '.join(variables)}: not used, since {cluster}; --pods forms a cluster from the pods instead"
            )
        return reading
    _check_launcher(environ, reading.problems)
    reading.pods = _pods(words, PortPlan(_base(given)), reading.problems)
    if reading.problems:
        reading.pods = None
        return reading
    reading.assignments = [Assignment(name, words[name].text, words[name].source) for name in OPTIONS if name in words]
    each = environ.get("PET_NPROC_PER_NODE", "")
    if each.isdigit() and not ("gpus_per_node" in given and given["gpus_per_node"].source.startswith("-")):
        reading.assignments.append(Assignment("gpus_per_node", each, "PET_NPROC_PER_NODE"))
    return reading


def _find(name: str, environ: Mapping[str, str], given: Mapping[str, Assignment]) -> _Word | None:
    flag = given.get(name)
    if flag is not None and flag.source.startswith("-"):
        return _Word(str(flag.raw), flag.source)
    for variable in _VARIABLES[name]:
        if environ.get(variable, "").strip():
            return _Word(environ[variable].strip(), variable)
    if flag is not None and name != "num_nodes":
        return _Word(str(flag.raw), flag.source)
    return None


def _is_telling(name: str, words: Mapping[str, _Word]) -> bool:
    """Whether the value means pods by itself: `--nnodes` also limits the nodes of a cluster that is there."""
    word = words[name]
    if name == "num_nodes":
        return not word.source.startswith("-") or "master_addr" in words or "node_rank" in words
    return name != "master_addr" or not is_loopback(word.text)


def _named_cluster(environ: Mapping[str, str], given: Mapping[str, Assignment]) -> str:
    if IN_A_JOB in environ:
        return "this is a job of a Ray cluster"
    address = given.get("ray_address")
    return f"{address.source} names a Ray cluster, {address.raw}" if address else ""


def _base(given: Mapping[str, Assignment]) -> int:
    """The first Ray port; a value that is no port is told of with the other options."""
    raw = given["ray_port"].raw if "ray_port" in given else Config.model_fields["ray_port"].default
    return int(str(raw)) if str(raw).isdigit() else int(Config.model_fields["ray_port"].default)


def _check_launcher(environ: Mapping[str, str], problems: list[str]) -> None:
    if environ.get("TORCHELASTIC_RUN_ID") and environ.get("LOCAL_RANK"):
        problems.append(
            f"LOCAL_RANK={environ['LOCAL_RANK']}: this process was started by torchrun; start the command itself, once "
            "in each pod: it starts the ranks"
        )


def _pods(words: Mapping[str, _Word], plan: PortPlan, problems: list[str]) -> Pods | None:
    count = _whole(words.get("num_nodes"), 1, "a number of pods, at least 1", problems)
    rank = _whole(words.get("node_rank"), 0, "a pod's number, from 0", problems)
    port = _port(words.get("master_port"), plan, problems)
    given = tuple(word.shown for word in words.values())
    _check_complete(words, count, problems)
    if count is not None and rank is not None and rank >= max(count, 1):
        problems.append(
            f"{words['node_rank'].shown}: must be less than the number of pods, {count} "
            f"({words['num_nodes'].shown if 'num_nodes' in words else 'no WORLD_SIZE: one pod'}); both count pods, not "
            "processes"
        )
    address = words.get("master_addr")
    if address is not None:
        _check_address(address, count, problems)
    if problems or count is None or rank is None or port is None:
        return None
    return Pods(count, rank, address.text if address else "localhost", port, given)


def _whole(word: _Word | None, least: int, kind: str, problems: list[str]) -> int | None:
    """A whole number of at least `least`, which is also the value where none is given; None for a bad one."""
    if word is None:
        return least
    if word.text.isdigit() and int(word.text) >= least:
        return int(word.text)
    hint = "; a range needs an elastic launcher: give the one number" if ":" in word.text else ""
    problems.append(f"{word.shown}: must be {kind}{hint}")
    return None


def _port(word: _Word | None, plan: PortPlan, problems: list[str]) -> int | None:
    if word is None:
        return DEFAULT_PORT
    if not word.text.isdigit() or not 1 <= int(word.text) <= _LARGEST_PORT:
        hint = (
            " (Kubernetes sets such a variable for a Service with that name: give --master-port)"
            if "://" in word.text
            else ""
        )
        problems.append(f"{word.shown}: must be a port number from 1 to {_LARGEST_PORT}{hint}")
        return None
    if int(word.text) in plan:
        problems.append(
            f"{word.shown}: is one of the ports {plan} that Ray uses here: give another, or move Ray's with "
            f"--ray-port {_elsewhere(int(word.text))}"
        )
    return int(word.text)


def _elsewhere(port: int) -> int:
    """A base whose plan does not hold `port`."""
    return port + 1 if port + SPAN < 32768 else port - SPAN


def _check_complete(words: Mapping[str, _Word], count: int | None, problems: list[str]) -> None:
    """All of the variables, or none: half of them would have every pod train alone over the same checkpoints."""
    if "num_nodes" not in words:
        others = ", ".join(words[name].shown for name in ("node_rank", "master_addr") if name in words)
        if others:
            problems.append(
                f"{others}: WORLD_SIZE is missing (the number of pods; as a flag --nnodes): give it, or unset the rest"
            )
        return
    if count == 1:
        return
    missing = {"node_rank": "RANK (as a flag --node-rank)", "master_addr": "MASTER_ADDR (as a flag --master-addr)"}
    for name, shown in missing.items():
        if name not in words:
            problems.append(f"{words['num_nodes'].shown}: {shown} is missing: each of several pods needs it")


def _check_address(word: _Word, count: int | None, problems: list[str]) -> None:
    if "://" in word.text or "/" in word.text or any(c.isspace() for c in word.text):
        problems.append(f"{word.shown}: must be a host name or an address alone, such as worker-0 or 10.0.0.7")
    elif ":" in word.text and not _is_ip(word.text):
        host, _, tail = word.text.partition(":")
        problems.append(f"{word.shown}: must be a host alone: give MASTER_ADDR={host} and MASTER_PORT={tail}")
    elif is_loopback(word.text) and count is not None and count > 1:
        problems.append(
            f"{word.shown}: is this pod itself, in each of the {count} pods: give a name or an address of pod 0 that "
            'the others reach (an operator that gives pod 0 localhost: add --master-addr "$(hostname -i)" there)'
        )


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether a name or an address always means the host that asks."""
    if address.lower() == "localhost":
        return True
    if not _is_ip(address):
        return False
    found = ipaddress.ip_address(address)
    return found.is_loopback or found.is_unspecified


def table(pods: Pods, devices: int, device: str, node_address: str, plan: PortPlan) -> str:
    """What was injected and what it becomes, as far as this pod can know it before the others have joined."""
    world, first = pods.count * devices, pods.rank * devices
    span = f"{first}" if devices == 1 else f"{first}–{first + devices - 1}"
    alike = "" if pods.count == 1 else " (if every pod has as many)"
    rows = {
        "injected": ", ".join(pods.given) or "nothing: one pod",
        "nodes": str(pods.count),
        "node rank": f"{pods.rank}" + (" (Ray's head and the driver are here)" if pods.is_head else ""),
        "devices here": f"{devices} {device}",
        "world size": f"{pods.count} × {devices} = {world} ranks{alike}",
        "ranks here": span + alike,
        "main address": pods.address + (f", reached from {node_address}" if node_address else ""),
        "ports": f"{plan} for Ray, head {plan.gcs}, dashboard {plan.dashboard}; MASTER_PORT {pods.port} stays free",
    }
    width = max(map(len, rows))
    return "\n".join(["pods", *(f"  {name:<{width}}  {value}" for name, value in rows.items())])
