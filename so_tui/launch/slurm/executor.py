"""Supervisors as jobs of Slurm.

An attempt's folder holds ``job.sh``, the batch script, and ``submission.json``, which says what
became of it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from so_tui.folders import Environment, cache_home
from so_tui.launch.launch import FORGOTTEN, Executor, Job, another_start, read_launch
from so_tui.launch.slurm import client
from so_tui.launch.slurm.client import SlurmError, explained, queue
from so_tui.launch.slurm.script import (
    batch_script,
    load_site,
    site_name,
)
from so_tui.launch.supervisor.ending import queued_state
from so_tui.machine.types import Machine
from so_tui.plan.plan import Launch
from so_tui.runs.directory import (
    RunDirectory,
    own_launch,
    write_run_file,
    write_run_json,
)
from so_tui.runs.lock import run_lock
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.state import read_state, write_state
from so_tui.spec import ModelSpec, Problem, RunSpec, resolve_source
from so_tui.spec.check import exists
from so_tui.trust.decoding import readable_json
from so_tui.trust.files import read_bounded
from so_tui.trust.folders import is_own_place
from so_tui.trust.text import so_tui_command

# What of a spec is in the local cache of the Hugging Face hub, by its files alone: a login node
# may have none of the packages.
#
# Problem codes: not-cached: Nodes without internet would have to download it. foreign-interpreter:
# The interpreter of jobs is built for a different architecture than that of the nodes.


_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


class _Index(Struct):
    """Of weights in several files."""

    weight_map: dict[str, str]
    """The file of each tensor."""


class _HubCache:
    """The cache folders that an environment names."""

    def __init__(self, environment: Environment) -> None:
        home = Path(
            environment.get("HF_HOME")
            or Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
        ).expanduser()
        self.hub = Path(
            environment.get("HF_HUB_CACHE")
            or environment.get("HUGGINGFACE_HUB_CACHE")
            or home / "hub"
        ).expanduser()
        given = Path(environment.get("HF_DATASETS_CACHE") or home / "datasets").expanduser()
        # The trainer does not read rows that others may have prepared.
        self.datasets = given if is_own_place(given) else cache_home(environment) / "datasets"

    def snapshot(self, name: str, revision: str) -> Path | None:
        """Return the folder of a model's files at a branch, tag or commit; None if there is
        none.
        """
        folder = self.hub / f"models--{name.replace('/', '--')}"
        try:
            commit = read_bounded(folder / "refs" / revision, 100).decode(errors="replace").strip()
        except OSError:
            commit = revision
        found = folder / "snapshots" / commit
        return found if "/" not in commit and found.is_dir() else None

    def has_data(self, name: str) -> bool:
        """Return whether anything of a data set was downloaded or prepared."""
        prepared = self.datasets / name.replace("/", "___")
        downloaded = self.hub / f"datasets--{name.replace('/', '--')}" / "snapshots"
        folders = (prepared, prepared.with_name(prepared.name.lower()), downloaded)
        return any(folder.is_dir() for folder in folders)


def _not_cached(spec: RunSpec, environment: Environment, where: str) -> Iterator[Problem]:
    """Yield a problem for each part of a spec that is on the hub and not in the cache.

    Args:
        spec: What is to be trained.
        environment: In which the nodes would look for it.
        where: Whose nodes have no internet, for the message.
    """
    cache, command = _HubCache(environment), so_tui_command("prepare", spec.name)
    for field, name, missing in _absent(cache, spec):
        yield Problem(
            "not-cached",
            field,
            name,
            f"{missing}, and nodes of {where} have no internet",
            f"Run `{command}` here first, with the same HF_HOME.",
        )


def _absent(cache: _HubCache, spec: RunSpec) -> Iterator[tuple[str, str, str]]:
    """Yield field and name of what is on the hub and not in the cache, and what is missing."""
    model = spec.model
    for field, name, weights, tokenizer in (
        ("model.id", model.id, model.weights == "pretrained", not model.tokenizer),
        ("model.tokenizer", model.tokenizer, False, bool(model.tokenizer)),
    ):
        if (weights or tokenizer) and _on_hub(name):
            missing = _missing(cache, model, name, weights=weights, tokenizer=tokenizer)
            if missing is not None:
                yield field, name, f"{missing} is not in {cache.hub}"
    sources = [("data.source", part.source) for part in spec.data.sources]
    for field, name in (*sources, ("data.evaluation", spec.data.evaluation)):
        if name and _on_hub(name) and not cache.has_data(name):
            yield field, name, f"is neither in {cache.datasets} nor in {cache.hub}"


def _on_hub(text: str) -> bool:
    return (
        resolve_source(text) == text
        and text.count("/") <= 1
        and not exists(Path(text).expanduser())
    )


def _missing(
    cache: _HubCache, model: ModelSpec, name: str, *, weights: bool, tokenizer: bool
) -> str | None:
    """Return which file of a model is missing of those that are wanted; None if none is."""
    own = name == model.id
    folder = cache.snapshot(name, model.revision if own else "main")
    if folder is None:
        return f"revision {model.revision}" if own else "it"
    if tokenizer and not any((folder / file).exists() for file in _TOKENIZERS):
        return "its tokenizer"
    if not weights:
        return None
    index = readable_json(folder / _INDEX, _Index)
    shards = sorted(set(index.weight_map.values())) if index else ["model.safetensors"]
    files = ("config.json", *shards)
    return next((file for file in files if not (folder / file).exists()), None)


_FORGOTTEN_S = 60.0
"""An answer this much younger than a submission, without the job, means that Slurm has forgotten it
or never had it. Clocks differ.
"""


class Submission(Struct, frozen=True, kw_only=True):
    """``submission.json``: an attempt as it was submitted."""

    v: int = 1
    job_id: Annotated[str, Meta(pattern=r"^\d{0,12}\Z")] = ""
    """Empty until Slurm has accepted it."""
    cluster: str
    """The cluster's name: job numbers mean nothing on another one, which may share the home."""
    partition: str
    site: str
    poll_s: Annotated[float, Meta(ge=1)]
    submitted: float
    works_in: Annotated[int, Meta(ge=0)] = 0
    """The attempt in whose folder the job works, if it is an earlier one: Slurm has started the job
    again.
    """
    stands_in: bool = False
    """Whether the settings of a new run were chosen for the submitting host, which stood for nodes
    that nobody has described. Those nodes may be quite different.
    """


def _is_this_host(planned_for: Machine) -> bool:
    """Return whether a launch was planned for this host, which stands for nodes that no job has
    seen.
    """
    return planned_for.hostname == socket.gethostname()


class SlurmExecutor(Executor):
    """Submits supervisors to a partition."""

    here = False

    def __init__(
        self, *, edit: Callable[[str], str] = str, job_id: str = "", works_in: int = 0
    ) -> None:
        """Submit batch scripts as ``edit`` returns them. What it raises ends the start, before
        anything is submitted.

        With ``job_id``, nothing is submitted: attempts are started in this job, which was submitted
        for the attempt ``works_in``, and which Slurm has started again.
        """
        self._edit, self._job_id, self._works_in = edit, job_id, works_in
        self.digest = ""
        """The hash of the launch that was started last."""

    def start(self, run: RunDirectory, attempt: int, digest: str = "") -> None:
        """Submit the attempt's supervisor; see ``Executor.start``. The run's state is ``queued``
        before Slurm can start the job.
        """
        launch = read_launch(run, attempt, digest)
        self.digest = digest
        plan = launch.plan
        name = site_name(plan.spec.slurm.site)
        site = load_site(name)
        cluster = client.cluster_name()  # without it, nobody could tell later whose job it is
        script = self._edit(batch_script(plan, site, run.path, attempt, _checkpoint_s(run), digest))
        submission = Submission(
            cluster=cluster,
            partition=plan.spec.slurm.partition,
            site=name,
            poll_s=site.poll_s,
            submitted=time.time(),
            works_in=self._works_in,
            stands_in=attempt == 1 and _is_this_host(launch.machine),
        )
        with run_lock(run, assume_dead=launch.assume_dead) as lock:
            before = read_state(run)
            if lock is None or before.state == "queued":
                raise another_start(run)
            # The first node plans anew, and replaces its launch before others may have read it.
            content = own_launch(run, attempt, digest=digest)
            for node in range(1, plan.spec.nodes):
                write_run_file(run, run.launch_path(attempt, node), content)
            write_run_file(run, run.job_script_path(attempt), script.encode())
            _write_submission(run, attempt, submission)
            queued = queued_state(before)
            write_state(run, queued)
        try:
            job_id = self._job_id or client.submit(
                script, str(run.named(run.attempt_dir(attempt))), os.environ
            )
        except BaseException as error:
            if (
                read_state(run) == queued
            ):  # sbatch may have failed to say that it succeeded, and the job may have started
                write_state(run, before)
            if isinstance(error, SlurmError):
                raise explained(error, plan.spec) from error
            raise
        with contextlib.suppress(OSError):  # the job is found by its folder, too
            _write_submission(run, attempt, replace(submission, job_id=job_id))

    def unavailable(self, launch: Launch) -> tuple[Problem, ...]:
        """Return that the nodes cannot execute the interpreter, if the architectures of both are
        known, and what is not in the cache, if nodes have no internet.
        """
        spec, nodes = launch.spec, launch.machine
        site = load_site(site_name(spec.slurm.site))
        problems = []
        built_for = site.architecture  # reads the interpreter's file
        if built_for and not _is_this_host(nodes) and built_for != nodes.architecture:
            problems.append(
                Problem(
                    "foreign-interpreter",
                    "slurm.site",
                    site.interpreter,
                    f"is built for {built_for}, and the nodes of partition "
                    f"{spec.slurm.partition} are {nodes.architecture}",
                    "Install so-tui with its training packages for them, and name that interpreter "
                    "in the site profile (python = ...).",
                )
            )
        if not site.internet:
            problems += _not_cached(spec, {**os.environ, **site.environment}, site.title)
        return tuple(problems)

    def preview(self, launch: Launch) -> str:
        """Return the batch script, with a placeholder for the run directory."""
        return batch_script(
            launch.plan, load_site(site_name(launch.spec.slurm.site)), Path("RUN"), 1
        )

    def status(self, run: RunDirectory, attempt: int) -> Job | None:
        """Return what Slurm knows of the attempt's job; Slurm is asked at most once in the
        profile's interval.
        """
        submission = read_submission(run, attempt)
        if submission is None:
            return None
        unknown = Job(id=submission.job_id, state="")
        here = submission.cluster == client.cluster_here()
        answer = queue(submission.cluster, submission.poll_s) if here else None
        if answer is None:
            return unknown
        if (job := _job_of(run, attempt, submission, answer.jobs)) is not None:
            # It may have ended since.
            return unknown if answer.error and job.phase == "running" else job
        if (
            answer.error
            or answer.asked < submission.submitted + _FORGOTTEN_S
            or any(job.id == submission.job_id for job in answer.jobs)
        ):
            return unknown
        recorded = None
        if submission.job_id:
            recorded = _accounted(submission.job_id, int(time.monotonic() // 60))
        job = _job_of(run, attempt, submission, filter(None, [recorded]))
        return job or replace(unknown, state=FORGOTTEN)

    def cancel(self, run: RunDirectory, attempt: int) -> None:
        """Cancel the attempt's job; see ``Executor.cancel``."""
        submission = read_submission(run, attempt)
        if submission is None:
            return
        if submission.cluster != client.cluster_name():
            raise SlurmError(
                f"its job is on the cluster {submission.cluster}. Cancel it from a login node of "
                "that cluster"
            )
        if job := _job_of(run, attempt, submission, client.own_jobs()):
            client.cancel(job.id)


def read_submission(run: RunDirectory, attempt: int) -> Submission | None:
    """Return how an attempt was submitted; None if it was not, or the file is damaged or not this
    user's own.

    Another user's jobs are not in the queue that is asked for, and what their files say must not
    decide what Slurm is asked.
    """
    return readable_json(run.submission_path(attempt), Submission, own=True)


def _write_submission(run: RunDirectory, attempt: int, submission: Submission) -> None:
    """Write ``submission.json``. Raises OSError."""
    write_run_json(run, run.submission_path(attempt), submission)


def _job_of(
    run: RunDirectory, attempt: int, submission: Submission, jobs: Iterable[Job]
) -> Job | None:
    """Return an attempt's job: it works in the attempt's folder, and has the number that was
    written, if it was.

    The number alone would name the original's job in a copy of its folder, and some other job once
    Slurm begins to count again.
    """
    folder = run.attempt_dir(submission.works_in or attempt)
    for job in jobs:
        # The folder may be of another host, gone, or no path.
        with contextlib.suppress(OSError, ValueError):
            if job.id == (submission.job_id or job.id) and folder.samefile(job.folder):
                return job
    return None


def _checkpoint_s(run: RunDirectory) -> float | None:
    """Return the seconds that the run's slowest checkpoint took; None if none was saved."""
    reader = MetricsReader(run)
    while reader.poll(limit_records=10_000, limit_s=1.0).more:
        continue
    return max((record.seconds for record in reader.events.checkpoints), default=None)


@lru_cache(maxsize=64)
def _accounted(job_id: str, minute: int) -> Job | None:
    """Return a job as the accounting database recorded it, asked at most once a minute."""
    return client.accounted(job_id)
