"""From command line, environment and files to one `Config`, remembering where each value came from."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from raytrain_llama3.config import env, env_file, flags, pods, schema
from raytrain_llama3.config.flags import Assignment
from raytrain_llama3.config.schema import Config
from raytrain_llama3.errors import ConfigError

_JOB_STOP_WAIT_S = 3
_FAST_TEST = {"train_samples": 1000, "lr_decay_samples": 800, "lr_warmup_samples": 100, "global_batch_size": 32}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and for every option that is not at its default the place that set it."""

    config: Config
    origins: dict[str, str]
    warnings: tuple[str, ...]
    environ: dict[str, str]
    """The environment, and what an `--env-file` adds to it."""
    pods: pods.Pods | None = None
    """The pods that form the cluster, if any do."""


def load(argv: Sequence[str], environ: Mapping[str, str]) -> Loaded:
    """Read every source; a flag wins over the environment, that over files (later ones first), those over defaults.

    Raises `ConfigError` with all mistakes of all sources, each with its flag, variable, or file and line.
    """
    line = flags.parse(argv)
    problems = list(line.problems)
    from_file = env_file.read(line.env_files, environ, problems)
    differing = env_file.differences(from_file, environ)
    environ = {**from_file, **environ}
    given: dict[str, Assignment] = {}
    for layer in (_from_files(line.files, problems), _from_environment(environ), line.assignments):
        given.update({assignment.name: assignment for assignment in layer})
    told = pods.read(environ, given)
    problems += told.problems
    given.update({assignment.name: assignment for assignment in told.assignments})
    config = _validate(given, problems)
    if config is None:
        raise ConfigError(tuple(problems))
    origins = {name: assignment.source for name, assignment in given.items()}
    config, warnings = _settle(config, origins)
    config, cut = _job_grace(config, environ)
    warnings += [*cut, *differing, *told.notes, *_unused(environ)]
    if told.pods is not None and config.ray_address is not None:
        warnings.append(
            f"ray_address {config.ray_address} ({origins['ray_address']}) is not used: the pods form a cluster"
        )
        config = config.model_copy(update={"ray_address": None})
    return Loaded(config, origins, tuple(warnings), dict(environ), told.pods)


def _from_environment(environ: Mapping[str, str]) -> list[Assignment]:
    # An empty variable is one that is not set, as `${TP_SIZE:-1}` reads it.
    return [
        Assignment(name, environ[name.upper()], name.upper())
        for name in Config.model_fields
        if environ.get(name.upper(), "") != "" and name not in pods.OPTIONS
    ]


def _from_files(paths: Sequence[str], problems: list[str]) -> list[Assignment]:
    found = []
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
            table = tomllib.loads(text)
        except OSError as error:
            problems.append(f"--config {path}: cannot be read: {error.strerror}")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            problems.append(f"{path}: is not TOML: {error}")
        else:
            found += [Assignment(key, value, f"{path}:{_line_of(text, key)}") for key, value in table.items()]
    known = Config.model_fields
    for item in found:
        if item.name not in known:
            problems.append(f"{item.source}: {item.name}: there is no such option{flags.suggestion(item.name, known)}")
    return [item for item in found if item.name in known]


def _line_of(text: str, key: str) -> int:
    for number, line in enumerate(text.splitlines(), 1):
        if line.split("=")[0].strip().strip("\"'[]") == key:
            return number
    return 1


def _validate(given: Mapping[str, Assignment], problems: list[str]) -> Config | None:
    try:
        config = Config.model_validate({name: a.raw for name, a in given.items()})
    except ValidationError as error:
        problems += _readable(error, given)
        return None
    return None if problems else config


def _readable(error: ValidationError, given: Mapping[str, Assignment]) -> list[str]:
    """One line for each option that does not fit, unions folded: `LEARNING_RATE=fast: must be a valid number`."""
    reasons: dict[str, list[str]] = {}
    for problem in error.errors():
        reason = (
            problem["msg"].removeprefix("Value error, ").replace("Input should", "must").replace("must have", "needs")
        )
        reasons.setdefault(str(problem["loc"][0]), []).append(reason.split(", unable to")[0])
    lines = []
    for name, parts in reasons.items():
        source, raw = given[name].source, given[name].raw
        shown = f"{source} {raw}" if source.startswith(("-", "argument")) else f"{source}={raw}"
        if ":" in source:
            shown = f"{source}: {name} = {raw!r}"
        wanted = "must be three numbers such as 99,1,0" if name == "split" else " or ".join(dict.fromkeys(parts))
        lines.append(f"{shown}: {wanted.replace(' or must be', ' or')}")
    return lines


def _settle(config: Config, origins: dict[str, str]) -> tuple[Config, list[str]]:
    """Options that follow from others: `fast_test_mode`, sample counts, and `use_bf16` beside `dtype`."""
    warnings, changes = [], dict[str, Any]()
    if config.fast_test_mode:
        changes |= _FAST_TEST | {"train_iters": None}
        over = [name for name in (*_FAST_TEST, "train_iters") if name in origins]
        warnings.append(
            "fast_test_mode: train_samples 1000, lr_decay_samples 800, lr_warmup_samples 100, global_batch_size 32"
            + (f" (over {', '.join(f'{name} from {origins[name]}' for name in over)})" if over else "")
        )
        origins |= dict.fromkeys(_FAST_TEST, "fast_test_mode")
        origins.pop("train_iters", None)
    elif "train_iters" in origins or "train_samples" in origins:
        cause = "train_iters" if "train_iters" in origins else "train_samples"
        total = config.train_iters * config.global_batch_size if config.train_iters else config.train_samples
        for name, value in (("lr_decay_samples", total), ("lr_warmup_samples", total // 100)):
            if name not in origins:
                changes[name] = value
                origins[name] = f"follows {cause}"
        if "lr_warmup_samples" in changes:
            changes["lr_warmup_samples"] = min(total, changes.get("lr_decay_samples", config.lr_decay_samples)) // 100
    half = config.dtype in ("bf16", "fp8")
    if "use_bf16" in origins and config.use_bf16 != half:
        warnings.append(
            f"{origins['use_bf16']} says {int(config.use_bf16)}, but dtype={config.dtype} decides: use_bf16 is not used"
        )
    return config.model_copy(update=changes), warnings


def _job_grace(config: Config, environ: Mapping[str, str]) -> tuple[Config, list[str]]:
    """A Ray job is killed so many seconds after it is asked to stop: what cannot be done by then is not begun."""
    if env.IN_A_JOB not in environ:
        return config, []
    text = environ.get("RAY_JOB_STOP_WAIT_TIME_S", "")
    wait_s = int(float(text)) if text.replace(".", "", 1).isdigit() else _JOB_STOP_WAIT_S
    if wait_s > config.grace_s:
        return config, []
    grace_s = max(wait_s - 1, 1)
    return config.model_copy(update={"grace_s": grace_s}), [
        f"grace_s {config.grace_s} becomes {grace_s}: Ray kills a stopped job after {wait_s} s; with "
        f"RAY_JOB_STOP_WAIT_TIME_S={config.grace_s + 15} in the job's environment, which `submit` sets, it has the "
        "time to save"
    ]


def _unused(environ: Mapping[str, str]) -> list[str]:
    if environ.get("PRETRAIN_SCRIPT_PATH"):
        return [f"PRETRAIN_SCRIPT_PATH={environ['PRETRAIN_SCRIPT_PATH']} is not used: this package is the script"]
    return []


def table(loaded: Loaded) -> str:
    """The configuration, a line an option in its group, with the source of whatever is not at its default."""
    lines = []
    for group in schema.GROUPS:
        lines.append(group.__name__)
        for name in group.__annotations__:
            value = flags.shown(getattr(loaded.config, name))
            origin = loaded.origins.get(name)
            lines.append(f"  {name:<40} {value}" + (f"  ({origin})" if origin else ""))
    return "\n".join(lines)
