"""Processes that share a GPU: every item gets a row, whatever happens to the process that had it, and one process runs at a time."""

from __future__ import annotations

import os
import time

import pytest

from dsv3_jax.benchmark import pool
from tests.benchmark import pool_work


def test_every_item_gets_a_row_though_processes_die():
    units = [("a", [1, "die", 2, "fatal", 3]), ("b", [4, 5]), ("c", ["fatal"])]
    rows: dict = {}
    for (name, _), row in pool.run(pool_work.work, units, 2):
        rows.setdefault(name, []).append(row)
    assert [row.get("item", row.get("error")) for row in rows["a"]] == ["a1", "the process died", "a2", "afatal", "a3"]
    assert [row["item"] for row in rows["b"]] == ["b4", "b5"] and [row["item"] for row in rows["c"]] == ["cfatal"]
    pids = [row.get("pid") for row in rows["a"]]
    assert pids[0] != pids[2] == pids[3] != pids[4], "a new process goes on after one that died or is of no more use"
    assert os.getpid() not in pids


def test_a_process_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(pool, "PATIENCE_S", 6)  # seconds: importing JAX takes some of them
    rows = [row for _, row in pool.run(pool_work.work, [("a", ["sleep", 1])], 1)]
    assert rows[0] == {"error": "no result in 6 s"} and rows[1]["item"] == "a1"


def test_processes_that_only_die_end_the_run(monkeypatch):
    monkeypatch.setattr(pool, "MOST_DEATHS", 1)
    with pytest.raises(RuntimeError, match="2 processes died, one after the other: the process died"):
        list(pool.run(pool_work.work, [("a", ["die"] * 9)], 1))


def test_the_deadline_ends_the_run():
    began = time.monotonic()
    rows = list(pool.run(pool_work.work, [("a", ["sleep"])], 1, deadline=began + 1))
    assert not rows and time.monotonic() - began < 60
    assert len(list(pool.run(pool_work.work, [("a", [1, 2, 3])], 0, deadline=began))) == 1


def test_one_process_runs_at_a_time(tmp_path):
    path = tmp_path / "log"
    assert len(list(pool.run(pool_work.lock_log, [str(path)] * 3, 3))) == 9
    assert path.read_text() == "in out " * 9


def test_processes_find_their_environment(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    with pool._environment():
        assert os.environ["XLA_FLAGS"] == pool.ENVIRONMENT["XLA_FLAGS"] + " --xla_dump_to=x"
        assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=x" and "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ


def test_an_error_becomes_a_row():
    def fails():
        raise RuntimeError("two\nlines")

    assert pool.attempt(lambda: {"us": 1}) == {"us": 1}
    assert pool.attempt(fails) == {"error": "RuntimeError: two lines", "fatal": False}
