"""Several processes as one: started, agreed, watched and ended together. With one process, every function here does nothing.

    distributed.join(cluster)          # the processes find each other; no device is touched
    with distributed.agreed() as same: # a user's mistake in any of them ends all of them, with one message
        same["--mesh"] = mesh
    distributed.connect()              # jax.distributed, and a first sum over all devices under a watchdog
    distributed.broadcast(integers)    # process 0's, in every process
    distributed.leave(code)            # cli.run's last act

Exit code 3: other processes did not come, were lost, or hang. Group does the talking; what is here knows JAX and this process.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import NoReturn

import numpy as np

from dsv3_jax.cluster import Cluster
from dsv3_jax.group import LOST, Group
from dsv3_jax.group import Ended as Ended  # what broadcast raises
from dsv3_jax.peer import Said, identity

INIT_TIMEOUT_S = 300.0
SETTLE_S = 3.0  # an error of the devices may be the news of a process that died: so long we wait to hear of that

_group: Group | None = None
_number = 0  # of this process, known before the group is there


def count() -> int:
    """How many processes take part."""
    return 1 if _group is None else _group.count


def process() -> int:
    """The number of this process."""
    return _number


def join(cluster: Cluster | None, timeout_s: float = INIT_TIMEOUT_S) -> None:
    """Find the other processes, within `timeout_s` seconds; None is a run of one process.

    Process 0 says on standard error whom it waits for. When some do not come, or differ in what must be the same, every process that is
    there ends with a message and exit code 3 or 2. From here on `leave` has to be called, and a process that dies ends the others.
    Raises ValueError where process 0 cannot listen.
    """
    global _group, _number
    if cluster is None:
        return
    _number = cluster.process
    if cluster.process and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # where process 0 hears Ctrl-C too, it decides; elsewhere this ends the run at once
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    _group = Group(cluster, identity(versions), timeout_s, _say, _die)


@contextlib.contextmanager
def agreed() -> Iterator[Said]:
    """A part of the set-up that every process does, where a ValueError or OSError of one ends all of them with exit code 2.

    Yields a dict for what must be the same everywhere, such as flags. Process 0's own error is raised there as it is, another's as
    ValueError that names the process; the others raise Ended and say nothing.
    """
    facts: Said = {}
    if _group is None:
        yield facts
        return
    fault: Exception | None = None
    try:
        yield facts
    except (ValueError, OSError) as e:
        fault = e
    code, text = _group.agree(one_line(fault) if fault else "", facts)
    if fault is not None:
        raise fault
    if code == 1:  # a fault of ours in another process, whose traceback is there
        _group.fail(code, text)
    if code:
        raise ValueError(text)


def connect(timeout_s: float = INIT_TIMEOUT_S) -> None:
    """Start jax.distributed and add up a 1 of every device, or end this process with exit code 3 after `timeout_s` seconds."""
    if _group is None:
        return
    cluster = _group.cluster
    with watchdog(timeout_s, f"JAX's service at {cluster.service} was not reached within {timeout_s:g} s: is this port open?"):
        import jax

        jax.config.update("jax_enable_preemption_service", False)  # it would have SIGTERM end nothing
        if cluster.process:
            logging.getLogger("jax").setLevel(logging.ERROR)
        jax.distributed.initialize(
            cluster.service, cluster.count, cluster.process, cluster.local_device_ids,
            cluster_detection_method="deactivate", initialization_timeout=int(timeout_s) + 60,
            coordinator_bind_address=cluster.service if cluster.is_loopback else None,
        )  # fmt: skip
    text = (
        f"a first sum over all devices has not ended after {timeout_s:g} s. Likely causes: NCCL takes a network card that does not reach "
        "the other hosts (NCCL_SOCKET_IFNAME=eth0 names one; NCCL_DEBUG=INFO shows the choice), InfiniBand that does not work "
        "(NCCL_IB_DISABLE=1 tells), a firewall between the hosts (NCCL takes any port), or different versions of NCCL or the driver"
    )
    with watchdog(timeout_s, text):
        devices = jax.devices()
        if devices[0].platform == "cpu":
            _hush()
        found = _sum_of_ones()
    if found != len(devices):
        raise RuntimeError(f"a sum of 1 over {len(devices)} devices gave {found}: the devices or their links are faulty")
    if not cluster.process:
        machines = len({who["machine"] for who in (_group.who, *(p.who for p in _group.peers.values()))})
        set_by = " ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NCCL_"))
        hosts = f"{machines} host{'' if machines == 1 else 's'}"
        _say(f"{cluster.count} processes on {hosts}, {len(devices)} devices ({devices[0].device_kind}) {set_by}".rstrip())


def _sum_of_ones() -> int:
    import jax

    mesh = jax.make_mesh((jax.device_count(),), ("all",))
    spread = jax.sharding.NamedSharding(mesh, jax.P("all"))
    ones = jax.make_array_from_callback((jax.device_count(),), spread, lambda _: np.ones(1, np.int32))
    add = jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=jax.P("all"), out_specs=jax.P())
    return int(np.asarray(jax.jit(add)(ones))[0])


def broadcast(values: np.ndarray | None = None) -> np.ndarray:
    """Return process 0's integers in every process: int64, one dimension. `values` of others count for nothing.

    Costs no device time, and waits as long as process 0 takes. Raises Ended, where process 0 has ended the run instead.
    """
    if _group is None:
        return np.asarray(values, np.int64).reshape(-1)
    return _group.broadcast(values)


@contextlib.contextmanager
def watchdog(seconds: float, text: str) -> Iterator[None]:
    """End the run with `text` and exit code 3 if the block takes longer: what hangs in C++ can be ended in no other way."""
    timer = threading.Timer(seconds, lambda: _group.fail(LOST, text) if _group else _die(LOST, text))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def leave(code: int, word: str = "", error: BaseException | None = None) -> None:
    """End this process together with the others, without coming back; does nothing for one process.

    word: what this process has failed with, for the others. error: an exception that nobody has shown yet. jax.distributed's own farewell
    is left out: it waits for processes that are gone, and aborts those that are late.
    """
    if _group is None:
        return
    if error is not None:
        _group.settles(SETTLE_S)
        text = "".join(traceback.format_exception(error))
        _say(text.rstrip())
        word = one_line(error)
    _group.end(code, "" if _number == 0 else word)
    _exit(code)


def one_line(e: BaseException) -> str:
    """What an exception says, with the file that an OSError is about."""
    if isinstance(e, OSError) and e.strerror:
        return f"{e.filename}: {e.strerror}" if e.filename is not None else e.strerror
    return str(e).strip() or type(e).__name__


def prefix() -> str:
    """What a message on standard error begins with: nothing in process 0, the process's number elsewhere."""
    return f"process {_number}: " if _number else ""


def _say(text: str) -> None:
    os.write(2, f"{prefix()}{text}\n".encode())  # in one piece, and whoever holds the lock of sys.stderr


def _die(code: int, text: str) -> NoReturn:
    if text:
        _say(f"error: {text}")
    _exit(code)


def _exit(code: int) -> NoReturn:
    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    (thread := threading.Thread(target=flush, daemon=True)).start()
    thread.join(2.0)  # the main thread may hold a stream that nobody reads any more
    os._exit(code)


def _hush() -> None:
    """Keep gloo, which CPUs talk through, from writing to standard output: Python keeps a copy of it, and file 1 leads nowhere."""
    sys.stdout.flush()
    copy, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout = os.fdopen(copy, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, buffering=1)
