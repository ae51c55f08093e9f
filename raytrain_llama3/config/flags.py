"""The command line: reading it item by item, and the help text.

argparse stops at the first mistake, takes a switch's optional value from the positionals, and knows no item such as
`--fp8-format hybrid` in one word, all of which people who come from the script need.
"""

from __future__ import annotations

import difflib
import textwrap
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal

from raytrain_llama3.config import schema

_BOOLEANS = frozenset({"0", "1", "true", "false", "yes", "no", "on", "off", "auto"})
_FALSE = frozenset({"0", "false", "no", "off"})
_FILES = {"--config": "a TOML file", "--env-file": "a file of NAME=value lines"}


@dataclass(frozen=True, slots=True)
class Assignment:
    """One option as it was given: `source` is what to call it in a message."""

    name: str
    raw: object
    source: str


@dataclass(slots=True)
class CommandLine:
    """What the items of a command line say."""

    assignments: list[Assignment] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """`--config` files, in order."""
    env_files: list[str] = field(default_factory=list)
    """`--env-file` files, in order."""
    problems: list[str] = field(default_factory=list)


def parse(argv: Sequence[str]) -> CommandLine:
    """Read flags and the four positional arguments; every mistake goes into `problems`."""
    line, names, positionals = CommandLine(), _names(), list[str]()
    items = list(_items(argv))
    while items:
        item = items.pop(0)
        if item.startswith("-") and not _is_flag(item):
            line.problems.append(f"{item}: a flag begins with two dashes{suggestion('-' + item, names)}")
            continue
        if not _is_flag(item):
            positionals.append(item)
            continue
        flag, has_value, text = item.partition("=")
        _assign(line, names, flag, text if has_value else _take_value(flag, names, items))
    for name, raw in zip(schema.POSITIONALS, positionals, strict=False):
        if raw:  # an empty one keeps the place of those after it, as "$1" in a script does
            line.assignments.append(Assignment(name, raw, f"argument {name.upper()}"))
    for extra in positionals[len(schema.POSITIONALS) :]:
        line.problems.append(f"argument {extra!r}: the positional arguments are {_positional_names()}, no more")
    _report_contradictions(line)
    return line


def _items(argv: Sequence[str]) -> Iterator[str]:
    """Items as they were meant: flag and value in one word come apart, quotes that no shell removed go."""
    for item in (item for item in argv if item != "--"):
        if _is_flag(item) and " " in item.strip() and "=" not in item.split(" ", 1)[0]:
            flag, value = item.strip().split(None, 1)
            yield flag
            yield _unquoted(value)
        elif _is_flag(item) and "=" in item:
            flag, _, value = item.partition("=")
            yield f"{flag}={_unquoted(value)}"
        else:
            yield _unquoted(item)


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _is_flag(item: str) -> bool:
    return item.startswith("--")


def _names() -> dict[str, str]:
    """Every flag there is, and the option that it sets."""
    names = {"--config": "config", "--env-file": "env_file"}
    for name in schema.Config.model_fields:
        for flag in (schema.flag_of(name), "--" + name, *schema.aliases(name)):
            names[flag] = name
        if schema.is_switch(name):
            for flag in (schema.flag_of(name), *schema.aliases(name)):
                names.setdefault("--no-" + flag[2:], name)
    return names


def _take_value(flag: str, names: dict[str, str], items: list[str]) -> str | None:
    """The next item, if `flag` may have it: a switch takes a boolean only, and leaves a path to the positionals."""
    if not items or _is_flag(items[0]):
        return None
    name = names.get(flag)
    is_switch = flag in schema.IMPLIES or (flag in schema.FIXED and schema.FIXED[flag] == "1")
    if is_switch or (name in schema.Config.model_fields and schema.is_switch(str(name))):
        return items.pop(0) if items[0].lower() in _BOOLEANS else None
    return items.pop(0) if name or flag in schema.FIXED or not _looks_like_path(items[0]) else None


def _looks_like_path(item: str) -> bool:
    return "/" in item


def _assign(line: CommandLine, names: dict[str, str], flag: str, value: str | None) -> None:
    if flag in schema.FIXED or ("--" + flag.removeprefix("--no-") in schema.FIXED and flag not in names):
        _check_fixed(line, flag, value)
    elif flag in schema.IMPLIES:
        if value is None or value.lower() not in _FALSE:
            line.assignments.append(Assignment(*schema.IMPLIES[flag], flag))
    elif flag not in names:
        line.problems.append(f"{flag}: there is no such option{suggestion(flag, (n for n in names if '_' not in n))}")
    elif flag in _FILES:
        kind, files = _FILES[flag], line.files if flag == "--config" else line.env_files
        if value is None:
            line.problems.append(f"{flag}: needs the path of {kind}")
        else:
            files.append(value)
    else:
        _assign_option(line, names[flag], flag, value)


def _assign_option(line: CommandLine, name: str, flag: str, value: str | None) -> None:
    negated = flag.startswith("--no-") and flag not in {schema.flag_of(name), *schema.aliases(name)}
    if value is None and not schema.is_switch(name):
        line.problems.append(f"{flag}: needs a value ({_kind(name)})")
    elif negated and value is not None:
        line.problems.append(f"{flag} {value}: takes no value; say {schema.flag_of(name)} {value}")
    else:
        raw = "0" if negated else "1" if value is None else value
        line.assignments.append(Assignment(name, raw, flag))


def _check_fixed(line: CommandLine, flag: str, value: str | None) -> None:
    fixed = schema.FIXED.get(flag)
    if fixed is None:
        line.problems.append(f"{flag}: Llama3 needs {'--' + flag.removeprefix('--no-')}; leave the flag out")
    elif fixed == "1" and (value or "1").lower() in _FALSE:
        line.problems.append(f"{flag} {value}: Llama3 needs it on; leave the flag out")
    elif value is None and fixed != "1":
        line.problems.append(f"{flag}: needs a value ({fixed})")
    elif fixed != "1" and value != fixed:
        line.problems.append(f"{flag} {value}: Llama3 has {fixed}; leave the flag out or say {fixed}")


def _report_contradictions(line: CommandLine) -> None:
    """An option given through two of its names must not say two things; the same flag again replaces the first."""
    seen: dict[str, Assignment] = {}
    for given in line.assignments:
        before = seen.get(given.name)
        if before is not None and before.source != given.source and before.raw != given.raw:
            line.problems.append(f"{before.source} {before.raw} and {given.source} {given.raw} set the same option")
        seen[given.name] = given


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean …?`, or nothing where no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=2, cutoff=0.7)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _positional_names() -> str:
    return " ".join(name.upper() for name in schema.POSITIONALS)


def help_text(program: str) -> str:
    """The help of `train`: every option in its group, with default, variable and Megatron-LM's names."""
    lines = [
        f"usage: {program} [train] [--config FILE] [--OPTION VALUE …] [{_positional_names()}]",
        "",
        *_wrapped(
            "Each option is a flag (--tp-size), an environment variable (TP_SIZE) and a key in a TOML file (tp_size); "
            "a flag wins over the environment, the environment over files, files over defaults."
        ),
        "",
        "  --config FILE  TOML file of options; may be given again, later files win",
        "  --env-file FILE  variables for those not set yet, `export NAME=value` lines as for a shell's `source`",
    ]
    for group in schema.GROUPS:
        lines += ["", f"{group.__name__}: {str(group.__doc__).splitlines()[0]}"]
        for name in group.__annotations__:
            lines += _option_help(name)
    return "\n".join(lines)


def _option_help(name: str) -> list[str]:
    info = schema.Config.model_fields[name]
    facts = [f"default {shown(info.default)}", *schema.aliases(name)]
    text = " ".join(f"{info.description} [{'; '.join(facts)}]".split())
    return [f"  {schema.flag_of(name)} {_kind(name)}", *_wrapped(text, " " * 6)]


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def shown(value: object) -> str:
    """An option's value as it would be written on a command line."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        return ",".join(f"{v:g}" if isinstance(v, float) else str(v) for v in value) or "none"
    return "unset" if value is None else str(value)


def _kind(name: str) -> str:
    """The kind of value an option takes, for help and messages: `INT`, `0|1`, `bf16|fp8|…`."""
    return {"split": "A,B,C", "rehearse_faults": "A:R:S:K,…"}.get(name) or "|".join(
        _kinds(schema.Config.model_fields[name].annotation)
    )


def _kinds(annotation: Any) -> list[str]:
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return [str(a) for a in typing.get_args(annotation)]
    if origin in (typing.Union, UnionType):
        return [kind for part in typing.get_args(annotation) if part is not type(None) for kind in _kinds(part)]
    if origin is typing.Annotated:
        return _kinds(typing.get_args(annotation)[0])
    return {bool: ["0", "1"], int: ["INT"], float: ["NUMBER"], str: ["TEXT"]}.get(annotation, ["PATH"])
