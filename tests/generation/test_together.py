"""Several processes that answer as one: the same output, one who prints, and an end for all when one is missing or lost."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from dsv3_jax import Sampling
from dsv3_jax.checkpoint.convert import convert
from dsv3_jax.generation import together
from tests.golden import load
from tests.test_project import ROOT

CHAT = "hi\n/clear\nhow are you\n/exit\n"
# Joins, meets the others, and waits for integers that never come, as a process does between two prompts.
WAITS = """
import os, sys
from dsv3_jax import cluster, distributed
found = cluster.from_flags({}, sys.argv[1], 2, int(sys.argv[2]))
distributed.join(found, float(sys.argv[3]))
print("joined", flush=True)
if sys.argv[2] == "0":
    sys.stdin.read()
else:
    distributed.broadcast()
"""


def test_a_call_becomes_integers_and_comes_back():
    sampling = [Sampling(), Sampling(temperature=0.1, top_k=5, top_p=0.3, seed=2**32 - 1), Sampling(seed=0)]
    call = ([[1, 2, 3], [2**31 - 1], [4] * 10], sampling, 77, [0, 5])
    message = together.encode(*call[:2], call[2], call[3])
    assert message.dtype == np.int64 and message.ndim == 1
    assert together.decode(message) == call


def free_port() -> int:
    """One of which the next is free too, most likely."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1] - 1


def start(*arguments: str) -> subprocess.Popen:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, text=True, **pipes)


def test_a_process_that_does_not_come():
    """Process 0 says within five seconds whom it waits for, and ends at the time-out with exit code 3; so does one without process 0."""
    began = time.monotonic()
    first, second = (start("-c", WAITS, f"127.0.0.1:{free_port()}", process, "5") for process in ("0", "1"))
    assert first.stderr is not None and second.stderr is not None
    for said, missing in ((first.stderr, 1), (second.stderr, 0)):
        line = said.readline()
        assert f"waiting for process {missing} of 2 at 127.0.0.1" in line and re.search(r"\(\d s\)", line)
    assert time.monotonic() - began < 5 + 3  # Python's own start
    assert first.wait(20) == second.wait(20) == 3
    assert "process 1 of 2" in (err := first.stderr.read()) and "did not come within 5 s (--init_timeout_s)" in err
    assert "process 0 of 2 was not found" in second.stderr.read()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_lost_ends_the_others(victim):
    address = f"127.0.0.1:{free_port()}"
    processes = [start("-c", WAITS, address, str(i), "60") for i in range(2)]
    for p in processes:
        assert p.stdout is not None and p.stdout.readline() == "joined\n"
    processes[victim].send_signal(signal.SIGKILL)
    other = processes[1 - victim]
    assert other.wait(10) == 3
    assert other.stderr is not None and re.search(rf"error: process {victim} \(host .*\) was lost: it was killed", other.stderr.read())
    processes[victim].wait()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    root = tmp_path_factory.mktemp("together")
    convert(load.checkpoint("tiny", root), root / "converted")
    return str(root / "converted")


def starting(checkpoint: str, mesh: str, processes: int, *more: str) -> subprocess.Popen:
    """scripts/generate.py on eight fake devices, of one process or of several."""
    flags = [f"--ckpt_path={checkpoint}", "--max_new_tokens=12", "--max_seq_len=128", "--temperature=0", f"--mesh={mesh}", *more]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "DSV3_PYTHON": sys.executable}
    if processes > 1:
        env["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\d+", "", env.get("XLA_FLAGS", ""))
        launcher = ["scripts/launch_local.sh", f"--processes={processes}", f"--cpu_devices={8 // processes}", "generate"]
    else:
        launcher = [sys.executable, "scripts/generate.py"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*launcher, *flags], cwd=ROOT, env=env, text=True, **pipes)


def generate(*arguments, text: str = "") -> tuple[int, str, str]:
    """Exit code, output and errors of `starting`, once it has ended."""
    process = starting(*arguments)
    out, err = process.communicate(text, timeout=300)
    return process.returncode, out, err


def test_two_processes_talk_as_one(checkpoint):
    one, two = (generate(checkpoint, "data=2,model=4", n, "--interactive", text=CHAT) for n in (1, 2))
    assert one[:2] == two[:2] and one[0] == 0 and len(one[1]) > 60
    assert "2 processes on 1 host, 8 devices" in two[2]


def test_two_processes_complete_a_file_as_one(checkpoint, tmp_path):
    """Attention by rows, and experts over all devices of both."""
    (tmp_path / "prompts.txt").write_text("one\ntwo words\nthree of them\n")
    more = ("--expert_axes=data,model", f"--input_file={tmp_path / 'prompts.txt'}")
    one, two = (generate(checkpoint, "data=8,model=1", n, *more) for n in (1, 2))
    assert one[:2] == two[:2] and one[0] == 0 and len(one[1]) > 30
    missing = generate(checkpoint, "data=2,model=4", 2, f"--input_file={tmp_path / 'none.txt'}")
    assert missing[0] == 2 and missing[2].count("none.txt: No such file or directory") == 1


def test_a_rank_that_is_killed_in_the_middle_of_an_answer(checkpoint):
    """The other ends within seconds, with a sentence, and the launcher with the code of the one that was killed first."""
    process = starting(checkpoint, "data=2,model=4", 2, "--interactive", "--max_new_tokens=100")
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write("hi\n")
    process.stdin.flush()
    while ">>> hi" not in process.stdout.readline():
        pass
    assert process.stdout.read(1)  # the first token's text
    found = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "process_id=1"], capture_output=True, text=True, check=True)
    os.kill(int(found.stdout.split()[0]), signal.SIGKILL)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 20 and process.returncode in (3, 137)
    assert re.search(r"error: process 1 \(host .*\) was lost", err)


@pytest.mark.parametrize("name", ["launch_local.sh", "launch_slurm.sh", "launch_ssh.sh", "launch_common.sh"])
def test_launchers_are_well_formed(name):
    subprocess.run(["bash", "-n", ROOT / "scripts" / name], check=True)
    if name != "launch_common.sh":
        done = subprocess.run([ROOT / "scripts" / name, "--help"], capture_output=True, text=True, check=True)
        assert "Run one of the scripts" in done.stdout and "--log_dir" in done.stdout
        wrong = subprocess.run([ROOT / "scripts" / name, "--nonsense", "x"], capture_output=True, text=True, check=False)
        assert wrong.returncode == 2 and "error: unknown option --nonsense" in wrong.stderr
