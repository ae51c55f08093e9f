"""`submit`: the run as a job of a Ray cluster."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from raytrain_llama3.config import env, rules
from raytrain_llama3.config.load import load
from raytrain_llama3.errors import StoppedBySignal
from raytrain_llama3.launch import submit

_ADDRESS = "http://127.0.0.1:8265"
_EPILOGUE = """Everything after -- is the run's own command line; it is checked here first. Options and performance
variables (NCCL_…) that are set in this environment go along; secrets never do. The exit code is the run's own: 143 for
a job that was stopped. Ctrl-C leaves the job alone."""


def run(program: str, argv: Sequence[str], write: Callable[[str], object]) -> int:
    """Submit, follow, and end as the job does."""
    own, arguments = submit.job_arguments(argv)
    given = _parser(program).parse_args(own)
    environ = env.snapshot()
    address = given.address or environ.get("RAY_API_SERVER_ADDRESS") or _ADDRESS
    if given.follow:
        return _follow(submit.Cluster(address), given.follow, write)
    # What is wrong with the command line is told before anything is uploaded.
    loaded = load(arguments, env.for_job(environ))
    rules.check_anywhere(loaded)
    order = submit.Order(tuple(arguments), given.working_dir, loaded.config.grace_s, environ, given.python)
    if given.dry_run:
        write(order.describe() + "\n")
        return 0
    cluster = submit.Cluster(address)
    job = cluster.submit(order, given.submission_id)
    write(f"job {job} is submitted to {address}\n")
    if given.no_wait:
        write(f"follow it: {program} submit --address {address} --follow {job}\n")
        return 0
    return _follow(cluster, job, write)


def _follow(cluster: submit.Cluster, job: str, write: Callable[[str], object]) -> int:
    try:
        code = cluster.follow(job, write)
    except KeyboardInterrupt as error:
        raise StoppedBySignal(
            f"no longer followed; job {job} goes on. Follow it again with --follow {job}, or end it with "
            f"`ray job stop --address {cluster.address} {job}`"
        ) from error
    write(f"job {job} ended: exit code {code}\n")
    return code


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{program} submit", usage="%(prog)s [options] -- [the run's options]", epilog=_EPILOGUE
    )
    add = parser.add_argument
    add("--address", help=f"the cluster's dashboard (else RAY_API_SERVER_ADDRESS, else {_ADDRESS})")
    add("--working-dir", type=Path, default=Path(), help="folder to upload (default: the present one)")
    add("--python", default="python", help="the cluster's Python (default: python)")
    add("--submission-id", help="a name for the job")
    add("--no-wait", action="store_true", help="do not follow it")
    add("--follow", metavar="JOB", help="follow a job that is there, instead of submitting one")
    add("--dry-run", action="store_true", help="show what would be run and uploaded")
    return parser
