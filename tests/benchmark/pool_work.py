"""Work for test_pool.py, in a module that other processes can import; units are (name, items)."""

from __future__ import annotations

import os
import time


def work(unit, skip, lock):
    name, items = unit
    for item in items[skip:]:
        if item == "die":
            with lock:
                os._exit(3)
        if item == "sleep":
            time.sleep(600)
        with lock:
            yield {"item": f"{name}{item}", "pid": os.getpid()} | ({"error": "x", "fatal": True} if item == "fatal" else {})


def lock_log(unit, skip, lock):
    """Appends 'in' and 'out' to a file around a pause."""
    for _ in range(3):
        with lock, open(unit, "a") as f:
            f.write("in ")
            f.flush()
            time.sleep(0.02)
            f.write("out ")
        yield {}
