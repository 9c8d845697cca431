"""convert.py and verify.py as people run them: paths as they are typed, and what a long job shows meanwhile."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from dsv3_jax.checkpoint import store

ROOT = Path(__file__).parents[2]
# 12% of bytes, bytes so far and in all, time gone and left (ETA), bytes a second.
PROGRESS = r"{}: +\d+%\|[^|]*\| [\d.]+[kMG]?/[\d.]+[kMG] \[\d\d:\d\d<(\d\d:\d\d|\?), +([\d.]+[kMG]?|\?)B/s\]"


def run(script: str, home: Path, cwd: Path, *flags: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(home)}
    command = [sys.executable, str(ROOT / "scripts" / f"{script}.py"), *flags]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_progress_with_rate_and_eta_and_paths_as_people_type_them(v2_source, tmp_path):
    """Reports of users: "Long job, no progress" and "Paths must be absolute"."""
    (here := tmp_path / "here").mkdir()
    shutil.copytree(v2_source, tmp_path / "home" / "hf")
    done = run("convert", tmp_path / "home", here, "--hf_ckpt_path=~/hf", "--save_path=../saved")
    assert done.returncode == 0, done.stderr
    bars = [m[0] for m in re.finditer(PROGRESS.format("convert"), done.stderr)]
    assert bars and re.search(r"100%.*<00:00, +[\d.]+[kMG]B/s", bars[-1]), done.stderr
    assert "memory budget 4.0 GB" in done.stdout + done.stderr
    assert store.read_config(tmp_path / "saved").model_type == "deepseek_v2"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here", "home", "saved"] and not any(here.iterdir())
    done = run("verify", tmp_path / "home", here, "--hf_ckpt_path=../home/hf", "--ckpt_path=~/../saved")
    assert done.returncode == 0 and "equal bit for bit" in done.stdout, done.stderr
    assert re.search(PROGRESS.format("verify"), done.stderr), done.stderr
