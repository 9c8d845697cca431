"""Which process this is, of how many, and where process 0 waits: from flags, torchrun's variables, Open MPI or SLURM.

Nothing here starts anything: `from_environment` and `from_flags` are functions of what they are given.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import re
import zlib
from collections.abc import Mapping

LAST_PORT = 65534  # JAX's own service listens on the port after the one that is named


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of one run, as one of them sees them.

    host and port: where process 0 waits for the others; JAX's service takes the next port. local_device_ids: the GPUs of this host that
    this process takes, None for all that it sees. hosts: on how many machines the processes run, None if nobody said.
    """

    host: str
    port: int
    count: int
    process: int
    local_device_ids: tuple[int, ...] | None = None
    hosts: int | None = None

    @property
    def address(self) -> str:
        return _join(self.host, self.port)

    @property
    def service(self) -> str:
        """Where JAX's coordination service listens."""
        return _join(self.host, self.port + 1)

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of one machine can reach process 0."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host in ("localhost", "ip6-localhost") or self.host.endswith((".localhost", ".localdomain"))

    def checked(self) -> Cluster:
        """Return self; raises ValueError for what cannot be meant."""
        if not self.host:
            raise ValueError(f"coordinator_address = {self.address!r}: names no host; write HOST:PORT of process 0")
        if not 1 <= self.port <= LAST_PORT:
            raise ValueError(f"coordinator_address = {self.address!r}: the port must be from 1 to {LAST_PORT} (the next one is used too)")
        if not 0 <= self.process < self.count:
            raise ValueError(f"process_id = {self.process}: must be from 0 to {self.count - 1}, as num_processes = {self.count}")
        if self.is_loopback and (self.hosts or 1) > 1:
            raise ValueError(
                f"coordinator_address = {self.address!r}: is a loopback address, and the {self.count} processes run on {self.hosts} hosts, "
                "each of which would look for process 0 in itself; give a name or address of process 0's host that the others can reach"
            )
        return self


def from_environment(env: Mapping[str, str]) -> Cluster | None:
    """Return what a launcher has set in `env`, or None where none has, or where it started a single process.

    torchrun's MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK and LOCAL_RANK come first, then Open MPI, then SLURM: mpirun runs inside SLURM
    jobs, and whoever sets RANK by hand means it. Raises ValueError, naming the variable, for one that is missing or is no number.
    """
    for launcher in (_torchrun, _open_mpi, _slurm):
        found = launcher(env)
        if found is not None:
            return found if found.count > 1 else None
    return None


def from_flags(
    env: Mapping[str, str],
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: str | None = None,
) -> Cluster | None:
    """Return the cluster that flags describe, completed from `env`; None for one process. num_processes=1 ignores the environment.

    Raises ValueError for a description that is incomplete or contradicts itself.
    """
    ids = None if local_device_ids is None else _ids(local_device_ids)
    if num_processes == 1:
        return None
    # With an address of the user's own, a launcher that does not tell one will do.
    found = from_environment(env if coordinator_address is None else {**env, "JAX_COORDINATOR_ADDRESS": coordinator_address})
    given = {"--coordinator_address": coordinator_address, "--num_processes": num_processes, "--process_id": process_id}
    if found is None:
        missing = [name for name, value in given.items() if value is None]
        if len(missing) == len(given):
            if ids is not None:
                raise ValueError("--local_device_ids: goes with several processes; CUDA_VISIBLE_DEVICES chooses the GPUs of one")
            return None
        if missing:
            raise ValueError(f"{' and '.join(missing)}: missing; several processes need {', '.join(given)}, or SLURM, mpirun or torchrun")
    host, port = (found.host, found.port) if coordinator_address is None and found else _split(coordinator_address or "")
    merged = Cluster(
        host,
        port,
        num_processes or (found.count if found else 0),
        process_id if process_id is not None else found.process if found else 0,
        ids or (found.local_device_ids if found else None),
        found.hosts if found else None,
    )
    return merged.checked()


def _torchrun(env: Mapping[str, str]) -> Cluster | None:
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    count, local_count = _number(env, "WORLD_SIZE"), _number(env, "LOCAL_WORLD_SIZE", 0)
    hosts = _number(env, "GROUP_WORLD_SIZE", math.ceil(count / local_count) if local_count else 0) or None
    if count == 1:
        return Cluster("localhost", 1, 1, 0)
    if own := env.get("JAX_COORDINATOR_ADDRESS"):
        host, port = _split(own)
    elif "MASTER_ADDR" in env and "MASTER_PORT" in env:
        # torchrun's own agent listens on MASTER_PORT.
        host, port = env["MASTER_ADDR"], _number(env, "MASTER_PORT") + bool(env.get("TORCHELASTIC_RUN_ID"))
    else:
        raise ValueError("MASTER_ADDR and MASTER_PORT: must be set beside RANK and WORLD_SIZE; or give --coordinator_address=HOST:PORT")
    # Without LOCAL_WORLD_SIZE, a LOCAL_RANK above 0 is the sign of one process per GPU.
    local = _number(env, "LOCAL_RANK", 0)
    several = local_count > 1 or (not local_count and "LOCAL_RANK" in env)
    return Cluster(host, port, count, _number(env, "RANK"), _one_each(env, local, several), hosts).checked()


def _open_mpi(env: Mapping[str, str]) -> Cluster | None:
    if "OMPI_COMM_WORLD_SIZE" not in env or "OMPI_COMM_WORLD_RANK" not in env:
        return None
    count, local = _number(env, "OMPI_COMM_WORLD_SIZE"), _number(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0)
    local_count = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    if count == 1:
        return Cluster("localhost", 1, 1, 0)
    uri = env.get("OMPI_MCA_orte_hnp_uri", "")  # such as 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
    job = uri.partition(".")[0] or str(zlib.crc32(env.get("PMIX_NAMESPACE", "").encode()))
    port = _port(env, int(job) // 2**12 if uri else int(job))
    launcher = re.search(r"tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]", uri)
    if own := env.get("JAX_COORDINATOR_ADDRESS"):
        host, port = _split(own)
    elif local_count == count:
        host = "127.0.0.1"
    elif launcher:
        host = launcher[1] or launcher[2]  # mpirun's host, on which rank 0 runs unless a host file says otherwise; as JAX has it
    else:
        raise ValueError("Open MPI 5 and newer do not tell where rank 0 runs: give --coordinator_address=HOST:PORT with a free port of it")
    hosts = math.ceil(count / local_count)
    return Cluster(host, port, count, _number(env, "OMPI_COMM_WORLD_RANK"), _one_each(env, local, local_count > 1), hosts).checked()


def _slurm(env: Mapping[str, str]) -> Cluster | None:
    # SLURM_STEP_NODELIST is set in what srun starts, and not in the batch script around it.
    if not {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"} <= env.keys():
        return None
    count = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS"))
    hosts = _number(env, "SLURM_STEP_NUM_NODES", _number(env, "SLURM_NNODES", 1))
    nodes = env["SLURM_STEP_NODELIST"]
    # The first of 'node001', 'node001,host2', 'node[001-015],host2' or 'rack[1,3]node[07-08]'.
    host = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])
    port = _port(env, _number(env, "SLURM_JOB_ID"))
    if own := env.get("JAX_COORDINATOR_ADDRESS"):
        host, port = _split(own)
    here = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "1"  # such as 8(x2)
    several = int(re.split(r"\D", here)[0] or 1) > 1
    local = _number(env, "SLURM_LOCALID")
    return Cluster(host, port, count, _number(env, "SLURM_PROCID"), _one_each(env, local, several), hosts).checked()


def _one_each(env: Mapping[str, str], local: int, several: bool) -> tuple[int, ...] | None:
    """This process's GPU where a host runs several processes; None where it runs one, or where each sees no GPU but its own."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    return (local,) if several and (visible is None or visible.count(",") > 0) else None


def _port(env: Mapping[str, str], job: int) -> int:
    """A port in JAX's own range for jobs, two of them each, so that jobs on one machine rarely meet."""
    return _number(env, "JAX_COORDINATOR_PORT", 61440 + 2 * (job % 2047))


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    if not text.strip().isdecimal():
        raise ValueError(f"{name} = {text!r}: must be a whole number; the launcher sets it, or --num_processes=1 runs without one")
    return int(text)


def _ids(text: str) -> tuple[int, ...]:
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isascii() and p.isdigit() for p in parts) or len(set(parts)) != len(parts):
        raise ValueError(f"--local_device_ids={text}: must be different numbers of GPUs of this host, such as 0,1,2,3")
    return tuple(map(int, parts))


def _split(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isascii() or not port.isdigit() or (":" in host and f"[{host}]" not in address):
        raise ValueError(f"coordinator_address = {address!r}: must be HOST:PORT, such as node0:12345 or [fd00::1]:12345")
    return host, int(port)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
