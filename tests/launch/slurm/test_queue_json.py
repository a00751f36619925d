"""``squeue --json`` as Slurm 24.11.5 of Debian 13 printed it, and when it is asked for. Shell scripts stand for squeue."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from so_tui.launch.slurm import client
from so_tui.launch.slurm.client import Job, RefusedError, parse_queue_json

RECORDED = Path(__file__).with_name("recorded") / "squeue-24.11.5.json"
TEXT = "7|RUNNING|None|2026-11-24T00:13:00|n1|/text\n"


def test_jobs_are_read_as_from_text() -> None:
    runs, waits, begins, cancelled = parse_queue_json(RECORDED.read_text())
    assert runs == Job(id="1", state="RUNNING", start=1795617552.0, nodes="n1", folder="/tmp")
    assert waits == Job(id="2", state="PENDING", reason="Resources", folder="/tmp")
    assert (begins.reason, begins.start) == ("BeginTime", 1795621151.0)
    assert (cancelled.id, cancelled.state) == ("4", "CANCELLED")


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (["COMPLETED", "COMPLETING"], "COMPLETING"),
        (["PENDING", "REQUEUE_HOLD"], "REQUEUE_HOLD"),
        (["RUNNING", "CONFIGURING"], "CONFIGURING"),
        (["NODE_FAIL", "COMPLETING", "REQUEUED"], "COMPLETING"),
    ],
)
def test_what_modifies_a_state_counts(states: list[str], state: str) -> None:
    (job,) = parse_queue_json(
        msgspec.json.encode({"jobs": [{"job_id": 7, "job_state": states}]}).decode()
    )
    assert job.state == state


@pytest.mark.parametrize(
    "printed",
    [
        "",
        "{}",
        "[]",
        '{"jobs": 1}',
        '{"jobs": [{}]}',
        '{"jobs": [{"job_id": -1, "job_state": ["x"]}]}',
    ],
)
def test_what_is_of_another_form_is_an_error(printed: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        parse_queue_json(printed)


def squeue(folder: Path, version: str, json: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a squeue of a version, which executes ``json`` for ``--json``, and writes down each question."""
    lines = f"""#!/bin/sh
case "$*" in
--version) echo "slurm {version}"; exit;;
*--json*) echo json >> {folder}/asked; {json};;
*) echo text >> {folder}/asked; printf '{TEXT}';;
esac
"""
    (folder / "squeue").write_text(lines)
    (folder / "squeue").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("version", "json", "asked", "folder"),
    [
        ("24.11.5", f"cat {RECORDED}", ["json"], "/tmp"),
        ("25.05.0", f"cat {RECORDED}", ["json"], "/tmp"),
        ("22.05.8", f"cat {RECORDED}", ["text"], "/text"),
        ("24.05.1", f"cat {RECORDED}", ["text"], "/text"),
        ("of-its-own", f"cat {RECORDED}", ["text"], "/text"),
        (
            "24.11.5",
            "echo 'squeue: error: no serializer/json plugin' >&2; exit 1",
            ["json", "text"],
            "/text",
        ),
        ("26.05.0", "echo '{}'", ["json", "text"], "/text"),
    ],
)
def test_json_is_asked_for_where_the_version_has_it(
    version: str,
    json: str,
    asked: list[str],
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    squeue(tmp_path, version, json, monkeypatch)
    assert {job.folder for job in client.own_jobs()} == {folder}
    assert (tmp_path / "asked").read_text().split() == asked


def test_a_silent_controller_is_not_asked_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue(
        tmp_path,
        "24.11.5",
        "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
        monkeypatch,
    )
    with pytest.raises(RefusedError):
        client.own_jobs()
    assert (tmp_path / "asked").read_text().split() == ["json"]
