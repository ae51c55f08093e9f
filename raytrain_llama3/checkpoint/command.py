"""`checkpoint …`: look at checkpoints, compare them with their digests, bring weights to and from Hugging Face."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from raytrain_llama3.checkpoint.folder import MARKER_NAME, damaged_files, iteration_path, listed_files
from raytrain_llama3.checkpoint.store import CheckpointStore
from raytrain_llama3.errors import CheckpointError, NoSafeStateError
from raytrain_llama3.messages import SaveRecord

Say = Callable[[str], None]


def run(argv: Sequence[str], program: str, say: Say) -> int:
    """Run one of the commands; the exit code. Raises `CheckpointError` or `NoSafeStateError` where there is none."""
    given = _parser(program).parse_args(argv)
    command: Callable[[argparse.Namespace, Say], int] = given.run
    return command(given, say)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{program} checkpoint", description="Look at checkpoints, and convert them.")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, call: Callable[[argparse.Namespace, Say], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=call)
        return command

    folder = "a run's checkpoint folder, or one iteration in it"
    add("list", _list, "every iteration, and what is wrong with those that are not complete").add_argument(
        "folder", type=Path, help="a run's checkpoint folder"
    )
    for name, call, text in (
        ("verify", _verify, "compare every file with its digest; exit code 3 when one differs"),
        ("show", _show, "what is known of a checkpoint"),
    ):
        add(name, call, text).add_argument("folder", type=Path, help=f"{folder} (the newest complete one)")
    export = add("export-hf", _export, "write the weights as a Hugging Face Llama")
    export.add_argument("folder", type=Path, help=f"{folder} (the newest complete one)")
    export.add_argument("--output", type=Path, required=True, help="the folder to write")
    bring = add("import-hf", _import, "make a checkpoint of a Hugging Face Llama's weights, to start training from")
    bring.add_argument("--input", type=Path, required=True, help="a folder with config.json and safetensors")
    bring.add_argument("--output", type=Path, required=True, help="the checkpoint folder to write")
    return parser


def _list(given: argparse.Namespace, say: Say) -> int:
    store = CheckpointStore(given.folder, None)
    states = store.states()
    for step, fault in states.items():
        if fault is not None:
            say(f"{iteration_path(given.folder, step).name}  not complete: {fault}")
            continue
        sidecar = store.sidecar(step)
        files = listed_files(sidecar) or {}
        size = sum(facts.bytes for facts in files.values()) / 2**30
        say(
            f"{iteration_path(given.folder, step).name}  {sidecar['samples']} samples  {sidecar.get('dtype', '?')}  "
            f"{size:.2f} GiB in {len(files)} files  {sidecar.get('created', '?')}"
        )
    if not states:
        say(f"{given.folder}: no checkpoints")
    return 0


def _verify(given: argparse.Namespace, say: Say) -> int:
    path = _one(given.folder)
    damaged = damaged_files(path)
    for line in damaged:
        say(f"{path.name}: {line}")
    if damaged:
        raise CheckpointError(f"{path}: {len(damaged)} files are not as they were written; do not train on from it")
    say(f"{path.name}: every file is as it was written")
    return 0


def _show(given: argparse.Namespace, say: Say) -> int:
    path = _one(given.folder)
    sidecar = CheckpointStore(path.parent, None).sidecar(_step(path))
    files = listed_files(sidecar) or {}
    summary = {"path": str(path), **{name: value for name, value in sidecar.items() if name != "files"}}
    summary |= {"files": len(files), "bytes": sum(facts.bytes for facts in files.values())}
    say(json.dumps(summary, indent=2))
    return 0


def _export(given: argparse.Namespace, say: Say) -> int:
    from raytrain_llama3.checkpoint import huggingface
    from raytrain_llama3.checkpoint.hf_config import LlamaShape

    path = _one(given.folder)
    sidecar = CheckpointStore(path.parent, None).sidecar(_step(path))
    huggingface.export(path, LlamaShape.of_sidecar(sidecar, str(path)), given.output, say)
    say(f"{given.output}: load it with transformers.LlamaForCausalLM.from_pretrained; the tokenizer is not in it")
    return 0


def _import(given: argparse.Namespace, say: Say) -> int:
    from raytrain_llama3.checkpoint import huggingface
    from raytrain_llama3.checkpoint.hf_config import LlamaShape

    file = given.input / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}; a Hugging Face folder is wanted") from error
    shape = LlamaShape.of_json(config, str(file))
    store, path = CheckpointStore(given.output, None), iteration_path(given.output, 0)
    with store.lock():
        if store.states():
            raise CheckpointError(f"{given.output}: there are checkpoints already; name another folder")
        try:
            files = huggingface.bring(given.input, shape, path)
        except BaseException:
            store.discard(0)
            raise
        sidecar = {"weights_only": True, "imported_from": str(given.input), "vocab_size": shape.vocab_size}
        sidecar |= {"model": _model(shape.options()), "seq_length": shape.seq_length}
        store.publish(SaveRecord(0, 0, str(path), 0.0, sidecar, files))
    options = given.output / "model.toml"
    lines = [f"{name} = {value}" for name, value in shape.options().items()]
    options.write_text("\n".join(["# The imported model's shape.", *lines, ""]), encoding="utf-8")
    say(f"train on from it: --config {options} --load {given.output} --load-weights-only")
    return 0


def _model(options: dict[str, object]) -> dict[str, object]:
    return options | {"normalization": "RMSNorm", "apply_layernorm_1p": False, "rotary_percent": 1.0}


def _one(folder: Path) -> Path:
    """The folder of one complete checkpoint."""
    if (folder / MARKER_NAME).is_file():
        return folder.resolve()
    resume = CheckpointStore(folder, None).resume_point()
    if resume is None:
        raise NoSafeStateError(f"{folder}: there is no checkpoint")
    return Path(resume.path).resolve()


def _step(path: Path) -> int:
    return int(path.name.rpartition("_")[2])
