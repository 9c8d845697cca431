"""The processes of one run: how they find each other, hear of each other's end, and follow process 0, over plain TCP.

Every process holds one connection to process 0 for as long as it lives. A kernel closes the connections of a process that dies, however
it dies, and gives up one to a machine that has gone: so a loss is known at once, in a thread of its own, whatever the main thread
waits for. A device's collective could not say who is missing, and would keep the GPUs busy while somebody thinks about a prompt.

What is said once is JSON, integers are int64 with their length first.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable

import numpy as np

from dsv3_jax.cluster import Cluster
from dsv3_jax.peer import Peer, Said

LOST = 3  # exit code: other processes did not come, were lost, or hang
FIRST_NOTE_S, NOTE_EVERY_S = 2.0, 10.0  # when a process that waits says so
GRACE_S = 5.0  # for a main thread to end by itself once the run has ended elsewhere
_HELLO, _WELCOME, _STATUS, _INTEGERS, _END = b"h", b"w", b"s", b"i", b"e"


class Ended(SystemExit):
    """The run has ended in another process; `code` is the exit code of all."""


class Group:
    """The processes of a run, from the moment in which all of them are there.

    say(text) shows a line about waiting. die(code, text) ends this process from any thread and does not come back; it is called when
    another was lost, or has failed and this one's main thread does not notice within GRACE_S.
    """

    def __init__(self, cluster: Cluster, who: Said, timeout_s: float, say: Callable[[str], None], die: Callable[[int, str], None]):
        self.cluster, self.process, self.count = cluster, cluster.process, cluster.count
        self.who, self._die, self._say = who, die, say
        self._ended: tuple[int, str] | None = None
        self._lock = threading.Lock()
        self.peers: dict[int, Peer] = {}
        wait = self._gather if self.process == 0 else self._find
        wait(time.monotonic(), timeout_s)

    # ---- finding each other

    def _gather(self, began: float, timeout_s: float) -> None:
        """Process 0: accept the others until all are there."""
        with self._listen() as listener:
            listener.settimeout(0.2)
            noted = FIRST_NOTE_S
            while len(self.peers) < self.count - 1:
                with contextlib.suppress(TimeoutError):
                    self._admit(listener.accept()[0])
                waited = time.monotonic() - began
                missing = [i for i in range(1, self.count) if i not in self.peers]
                text = f"{_processes(missing)} of {self.count} at {self.cluster.address}"
                if missing and waited > timeout_s:
                    self.fail(LOST, f"{text} did not come within {timeout_s:g} s (--init_timeout_s): not started, or a firewall between?")
                if missing and waited > noted:
                    noted = waited + NOTE_EVERY_S
                    self._say(f"waiting for {text} ({waited:.0f} s)")
        for peer in self.peers.values():
            peer.tell(_WELCOME, who=self.who)

    def _listen(self) -> socket.socket:
        cluster, everywhere = self.cluster, "" if not self.cluster.is_loopback else self.cluster.host
        try:
            if not everywhere and socket.has_dualstack_ipv6():
                return socket.create_server(("", cluster.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=self.count)
            family = socket.AF_INET6 if ":" in everywhere else socket.AF_INET
            return socket.create_server((everywhere, cluster.port), family=family, backlog=self.count)
        except OSError as e:
            raise ValueError(f"coordinator_address = {cluster.address!r}: cannot listen there ({e.strerror}); choose another port") from e

    def _admit(self, connection: socket.socket) -> None:
        peer = Peer(connection, 0, {})
        frame = peer.read(2.0)
        if frame is None or frame[0] != _HELLO:
            return peer.close()  # a stranger
        hello = json.loads(frame[1])
        peer.process, peer.who = int(hello["process"]), hello["who"]
        if fault := self._fault(peer, int(hello["count"])):
            peer.tell(_END, code=2, text=fault)
            self.fail(2, fault)
        self.peers[peer.process] = peer
        threading.Thread(target=self._listen_to, args=(peer,), daemon=True).start()
        return None

    def _fault(self, peer: Peer, count: int) -> str:
        """Why a process cannot take part, or ''."""
        who = peer.who
        if count != self.count:
            return f"{peer.name} was started as one of {count} processes, and process 0 as one of {self.count}; give all the same number"
        if not 0 < peer.process < self.count or peer.process in self.peers:
            there = self.peers[peer.process].name if peer.process in self.peers else f"process {peer.process}"
            return f"{peer.name} came, and {there} is here already; every process needs a --process_id of its own"
        if self.cluster.is_loopback and who["machine"] != self.who["machine"]:
            return f"coordinator_address = {self.cluster.address!r}: is a loopback address, and {peer.name} runs on another host"
        for name in self.who.keys() - {"host", "machine", "pid"}:
            if who.get(name) != self.who[name]:
                return f"{peer.name} has {name} {who.get(name)}, and process 0 has {self.who[name]}; install the same everywhere"
        return ""

    def _find(self, began: float, timeout_s: float) -> None:
        """The other processes: connect to process 0, which may start later, and wait until it has all."""
        noted, where = FIRST_NOTE_S, self.cluster.address
        hint = " (a loopback address: right only if process 0 runs on this host)" if self.cluster.is_loopback else ""
        while True:
            waited, reason = time.monotonic() - began, "no answer"
            try:
                connection = socket.create_connection((self.cluster.host, self.cluster.port), timeout=min(5.0, max(1.0, timeout_s)))
                break
            except OSError as e:
                reason = e.strerror or str(e) or reason
            if waited > timeout_s:
                self._die(LOST, f"process 0 of {self.count} was not found at {where} within {timeout_s:g} s ({reason}){hint}")
                raise Ended(LOST)
            if waited > noted:
                noted = waited + NOTE_EVERY_S
                self._say(f"waiting for process 0 of {self.count} at {where} ({waited:.0f} s): {reason}{hint}")
            time.sleep(0.2)
        peer = Peer(connection, 0, {"host": self.cluster.host})
        peer.tell(_HELLO, process=self.process, count=self.count, who=self.who)
        self.peers[0] = peer
        threading.Thread(target=self._listen_to, args=(peer,), daemon=True).start()
        peer.who = json.loads(self._next(peer, _WELCOME))["who"]

    # ---- while the run lasts

    def broadcast(self, values: np.ndarray | None) -> np.ndarray:
        """Return process 0's integers in every process, int64 in one dimension; the others' `values` count for nothing."""
        if self.process:
            return np.frombuffer(self._next(self.peers[0], _INTEGERS), "<i8")
        values = np.ascontiguousarray(values, "<i8").reshape(-1)
        for peer in self.peers.values():
            peer.send(_INTEGERS, values.tobytes())
        return values

    def agree(self, fault: str, facts: Said) -> tuple[int, str]:
        """Meet the others; process 0 gets the exit code and the text of what is wrong: 0 if nobody has a fault and all have its facts.

        Everywhere else it returns if all is well, and raises Ended otherwise: process 0 says what it was.
        """
        if self.process:
            self.peers[0].tell(_STATUS, code=2 if fault else 0, text=fault, facts=facts)
            self._next(self.peers[0], _WELCOME)
            return 0, ""
        faults: dict[str, list[Peer]] = {}
        codes = [2] if fault else []
        for peer in self.peers.values():
            status = json.loads(self._next(peer, _STATUS))
            what = status["text"] or _difference(facts, status["facts"])
            if what:
                codes.append(status["code"] or 2)
                faults.setdefault(what, []).append(peer)
        fault = fault or "; ".join(f"{', '.join(p.name for p in peers)}: {what}" for what, peers in faults.items())
        if not fault:
            for peer in self.peers.values():
                peer.tell(_WELCOME)
        return min(codes, default=0), fault

    def end(self, code: int, text: str = "") -> None:
        """Tell the others that the run is over, and wait until they have left, GRACE_S and a little at most.

        From any other process than 0: tell process 0, which ends all, that this one has failed; code 0 waits for process 0's word.
        """
        with self._lock:
            first, self._ended = self._ended is None, self._ended or (code, text)
        if self.process and first:
            if code:
                self.peers[0].tell(_STATUS, code=code, text=text, facts={})
                self.peers[0].gone.wait(2 * GRACE_S)
            else:
                self.peers[0].gone.wait()
        if not self.process:
            for peer in self.peers.values():
                peer.tell(_END, code=code, text=text)
            until = time.monotonic() + GRACE_S + 1
            for peer in self.peers.values():
                peer.gone.wait(max(0.0, until - time.monotonic()))

    def fail(self, code: int, text: str) -> None:
        """End the run in every process, this one included, for a reason that each of them says."""
        self.end(code, text)
        self._die(code, text)
        raise Ended(code)  # where die is a test's

    def settles(self, seconds: float) -> None:
        """Give a loss that may have caused an error of the devices time to be noticed; then this does not return."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._ended is None:
            time.sleep(0.05)
        if self._ended is not None:
            time.sleep(GRACE_S + 1)

    def _next(self, peer: Peer, kind: bytes) -> bytes:
        got, content = peer.inbox.get()
        if got is None:
            raise Ended(self._ended[0] if self._ended else LOST)
        if got == _STATUS and self.process == 0 and kind != _STATUS:
            raise Ended(LOST)
        assert got == kind, f"process {self.process} waited for {kind!r} and got {got!r}: the processes are out of step"
        return content

    def _listen_to(self, peer: Peer) -> None:
        """The reader's thread of one connection."""
        while (frame := peer.read()) is not None:
            if frame[0] == _END:
                end = json.loads(frame[1])
                with self._lock:
                    waiting, self._ended = self._ended is not None, (end["code"], end["text"])
                peer.gone.set()
                peer.inbox.put((None, b""))
                if not waiting:  # the main thread leaves by itself, unless it waits for devices that will not answer
                    if not end["text"]:
                        time.sleep(GRACE_S)
                    self._die(end["code"], end["text"])
                return
            peer.inbox.put(frame)
            if frame[0] == _STATUS and json.loads(frame[1])["code"]:
                threading.Thread(target=self._expect, args=(peer, frame[1]), daemon=True).start()
        peer.gone.set()
        with self._lock:
            known = self._ended is not None
        if not known:
            text = f"{peer.name} was lost: it was killed, has crashed or cannot be reached any more; its own output may say why"
            peer.inbox.put((None, b""))
            if self.process:
                self._ended = (LOST, text)
                self._die(LOST, text)
            else:
                with contextlib.suppress(SystemExit):
                    self.fail(LOST, text)

    def _expect(self, peer: Peer, status: bytes) -> None:
        """End the run for a process that has failed, if process 0 does not meet it or fail itself within GRACE_S."""
        time.sleep(GRACE_S)
        said = json.loads(status)
        if self._ended is None:
            with contextlib.suppress(SystemExit):
                self.fail(said["code"], f"{peer.name}: {said['text']}")

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()


def _difference(ours: Said, theirs: Said) -> str:
    """What process 0 and another do not have in common, in one clause, or ''."""
    for name in ours:
        if theirs.get(name) != ours[name]:
            return f"{name} is {theirs.get(name, 'missing')} there and {ours[name]} in process 0; start all with the same flags and files"
    return ""


def _processes(numbers: list[int]) -> str:
    """'process 3' or 'processes 3, 5', the first ones of many."""
    shown = ", ".join(map(str, numbers[:12])) + (f" and {len(numbers) - 12} more" if len(numbers) > 12 else "")
    return f"process{'es' if len(numbers) > 1 else ''} {shown}"
