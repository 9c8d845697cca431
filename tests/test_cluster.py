"""Which process of how many, read from what each launcher sets; wrong descriptions are refused before anything starts."""

from __future__ import annotations

import pytest

from dsv3_jax.cluster import Cluster, from_environment, from_flags

TORCHRUN = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "WORLD_SIZE": "16", "RANK": "9", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "rack[1,3]node[07-08],other",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
}


def test_torchrun():
    assert from_environment(TORCHRUN) == Cluster("node0", 29500, 16, 9, (1,), 2)
    alone = {**TORCHRUN, "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "RANK": "1"}
    assert from_environment(alone) == Cluster("node0", 29500, 2, 1, None, 2)  # one process a host has all of its GPUs
    assert from_environment({**TORCHRUN, "CUDA_VISIBLE_DEVICES": "3"}) == Cluster("node0", 29500, 16, 9, None, 2)  # it sees no other GPU
    assert from_environment({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}) is None


def test_open_mpi():
    found = from_environment(OPEN_MPI)
    assert found is not None and (found.host, found.count, found.process) == ("10.96.0.1", 4, 2)
    assert (found.local_device_ids, found.hosts) == ((0,), 2)
    newer = {k: v for k, v in OPEN_MPI.items() if "uri" not in k}
    with pytest.raises(ValueError, match="do not tell where rank 0 runs: give --coordinator_address"):
        from_environment(newer)
    assert from_environment({**newer, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).host == "127.0.0.1"  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize(
    ("nodes", "host"), [("node001", "node001"), ("a,b", "a"), ("node[001-015],x", "node001"), ("rack[1,3]node[07-08]", "rack1node07")]
)
def test_slurm(nodes, host):
    found = from_environment({**SLURM, "SLURM_STEP_NODELIST": nodes})
    assert found is not None and (found.host, found.count, found.process, found.local_device_ids, found.hosts) == (host, 3, 1, None, 3)
    assert 61440 <= found.port <= 65534 and found.service == f"{host}:{found.port + 1}"
    batch_script = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}  # around srun, not within
    assert from_environment(batch_script) is None


def test_flags():
    assert from_flags({}) is None
    assert from_flags(TORCHRUN, num_processes=1) is None
    assert from_flags({}, "[fd00::1]:1234", 2, 1, "2,3") == Cluster("fd00::1", 1234, 2, 1, (2, 3), None)
    assert from_flags(TORCHRUN, "node7:4000") == Cluster("node7", 4000, 16, 9, (1,), 2)
    assert from_flags({k: v for k, v in OPEN_MPI.items() if "uri" not in k}, "node7:4000").host == "node7"  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize(
    ("env", "flags", "message"),
    [
        ({}, ("node0:1234", 2, None), "--process_id: missing"),
        ({}, ("node0:1234", None, None), "--num_processes and --process_id: missing"),
        ({}, ("node0", 2, 0), "coordinator_address = 'node0': must be HOST:PORT"),
        ({}, ("fd00::1:1234", 2, 0), "must be HOST:PORT"),
        ({}, ("node0:65535", 2, 0), "the port must be from 1 to 65534"),
        ({}, ("node0:1234", 2, 2), "process_id = 2: must be from 0 to 1"),
        ({}, (None, None, None, "0,1"), "--local_device_ids: goes with several processes"),
        ({}, ("node0:1", 2, 0, "0,0"), "--local_device_ids=0,0: must be different numbers"),
        (TORCHRUN, ("127.0.0.1:1234", None, None), "is a loopback address, and the 16 processes run on 2 hosts"),
        ({**TORCHRUN, "MASTER_ADDR": "localhost"}, (), "is a loopback address"),
        ({**TORCHRUN, "RANK": "x"}, (), "RANK = 'x': must be a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, (), "MASTER_ADDR and MASTER_PORT: must be set"),
    ],
)
def test_descriptions_that_cannot_be_meant(env, flags, message):
    with pytest.raises(ValueError, match=message):
        from_flags(env, *flags)
