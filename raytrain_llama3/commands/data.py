"""The command `data`: its arguments, and what each of its commands does."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raytrain_llama3.errors import ConfigError

if TYPE_CHECKING:
    from raytrain_llama3.data.tokenize import Runner

_SMALL_BYTES = 64 << 20


def run(program: str, argv: list[str], say: Callable[[str], None]) -> int:
    """Run `data tokenize`, `inspect` or `convert`; returns the exit code."""
    given = _parser(program).parse_args(argv)
    commands: dict[str, Callable[[argparse.Namespace, Callable[[str], None]], None]] = {
        "tokenize": _tokenize,
        "inspect": _inspect,
        "convert": _convert,
    }
    commands[given.command](given, say)
    return 0


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{program} data", description="Make, look at and convert token ids.")
    commands = parser.add_subparsers(dest="command", required=True)
    _tokenize_arguments(commands.add_parser("tokenize", help="turn text into a dataset folder"))
    look = commands.add_parser("inspect", help="check data and say what is in it")
    look.add_argument("place", help="what data_arg takes: a dataset folder, Arrow or Parquet files, a URI, a prefix")
    look.add_argument("--column", help="column of token ids")
    look.add_argument("--tokenizer", "--tokenizer-arg", help="decodes the first documents; else as the manifest says")
    look.add_argument("--vocab-size", type=int, help="ids must be below it; else as the manifest says")
    look.add_argument("--seq-length", type=int, default=8192, help="tokens a sample (8192)")
    look.add_argument("--global-batch-size", type=int, default=128, help="samples a step (128)")
    look.add_argument("--train-samples", type=int, help="samples of a run, to be told in epochs")
    change = commands.add_parser("convert", help="turn Megatron's .bin and .idx into Arrow, or back")
    change.add_argument("--input", required=True, help="a prefix of .bin and .idx, or Arrow or Parquet shards")
    change.add_argument("--output", type=Path, required=True, help="a dataset folder, or a prefix to write")
    change.add_argument("--to", choices=("arrow", "indexed"), required=True, help="what to write")
    change.add_argument("--tokenizer", "--tokenizer-model", default="bytes", help="what the ids mean (for arrow)")
    change.add_argument("--overwrite", action="store_true", help="replace what is there")
    return parser


def _tokenize_arguments(make: argparse.ArgumentParser) -> None:
    from raytrain_llama3.data.documents import SUFFIXES

    make.add_argument("--input", nargs="+", required=True, help="files, patterns, or folders to search")
    make.add_argument("--output", type=Path, help="the dataset folder to write")
    make.add_argument("--output-prefix", help="Megatron-LM's word: writes the folder PREFIX_KEY_document")
    make.add_argument(
        "--tokenizer", "--tokenizer-model", default="bytes", help="bytes, a tokenizer.json, its folder, or a .model"
    )
    make.add_argument("--tokenizer-type", help="Megatron-LM's word: the tokenizer's file says it here")
    make.add_argument("--column", "--json-keys", default="text", help="key of JSON lines, column of Parquet (text)")
    make.add_argument(
        "--append-eod", action=argparse.BooleanOptionalAction, default=True, help="end each document with its id (on)"
    )
    make.add_argument("--workers", type=int, help="processes; unset: one a core, or none for little text")
    make.add_argument("--shards", type=int, help="files to write; unset: by the amount of text")
    make.add_argument("--suffixes", nargs="+", help=f"which files of a folder ({' '.join(SUFFIXES)})")
    make.add_argument("--seed", type=int, default=0, help="decides the order of documents")
    make.add_argument("--overwrite", action="store_true", help="replace a dataset that is there")


def _tokenize(given: argparse.Namespace, say: Callable[[str], None]) -> None:
    from raytrain_llama3.data.documents import SUFFIXES
    from raytrain_llama3.data.tokenize import tokenize

    output = _output(given)
    if given.tokenizer_type not in (None, "HuggingFaceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer",
                                    "TikTokenizer", "Llama3Tokenizer"):  # fmt: skip
        say(f"note: --tokenizer-type {given.tokenizer_type} is not used: the file {given.tokenizer} says what it is")
    suffixes = tuple(given.suffixes or SUFFIXES)
    with _runner(given, suffixes, say) as runner:
        manifest = tokenize(
            given.input,
            output,
            given.tokenizer,
            suffixes=suffixes,
            column=given.column,
            append_eod=given.append_eod,
            shards=given.shards,
            log=say,
            seed=given.seed,
            overwrite=given.overwrite,
            run=runner,
        )
    say(f"train on it: --data-arg {output} --tokenizer-arg {given.tokenizer} --vocab-size {manifest.vocab_size}")


def _output(given: argparse.Namespace) -> Path:
    if (given.output is None) == (given.output_prefix is None):
        raise ConfigError(("data tokenize: give --output or --output-prefix, one of the two",))
    return given.output or Path(f"{given.output_prefix}_{given.column}_document")


@contextlib.contextmanager
def _runner(given: argparse.Namespace, suffixes: Sequence[str], say: Callable[[str], None]) -> Iterator[Runner]:
    """Processes under Ray, as many as asked for; little text is done here, before Ray would have started."""
    from raytrain_llama3.data.tokenize import here

    if given.workers is not None and given.workers < 1:
        raise ConfigError((f"--workers {given.workers}: must be at least 1",))
    if given.workers is None and _bytes(given.input, suffixes) < _SMALL_BYTES:
        yield here
        return
    from raytrain_llama3.launch.tokenizing import ray_runner

    with ray_runner(given.workers or os.cpu_count() or 1) as runner:
        yield runner


def _bytes(inputs: Sequence[str], suffixes: Sequence[str]) -> int:
    from raytrain_llama3.data.documents import find_files

    return sum(Path(file).stat().st_size for file in find_files(inputs, suffixes))


def _inspect(given: argparse.Namespace, say: Callable[[str], None]) -> None:
    from raytrain_llama3.data.inspect import inspect

    say(
        inspect(
            given.place,
            column=given.column,
            tokenizer=given.tokenizer,
            vocab_size=given.vocab_size,
            seq_length=given.seq_length,
            global_batch_size=given.global_batch_size,
            train_samples=given.train_samples,
        )
    )


def _convert(given: argparse.Namespace, say: Callable[[str], None]) -> None:
    from raytrain_llama3.data import convert

    if given.to == "indexed":
        convert.to_indexed(given.input, given.output, overwrite=given.overwrite, log=say)
    else:
        convert.to_arrow(given.input, given.output, given.tokenizer, overwrite=given.overwrite, log=say)
