"""Eight fake CPU devices for every test, set up before anything imports jax; DSV3_TEST_PLATFORM=cuda runs on the GPU at hand instead."""

from __future__ import annotations

import itertools
import os
import tempfile

_platform = os.environ.get("DSV3_TEST_PLATFORM", "cpu")
# The tests compile hundreds of programs and run each a few times: half the time goes when XLA optimises none of them.
_FLAGS = ("--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")
_given = os.environ.get("XLA_FLAGS", "")
if _platform == "cpu":
    os.environ["XLA_FLAGS"] = " ".join([_given, *(f for f in _FLAGS if f.split("=")[0] not in _given)]).strip()
os.environ["JAX_PLATFORMS"] = _platform
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# One compilation cache for the session and its subprocesses, so that a program that several tests need is compiled once.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"dsv3_jax_test_cache_{os.getuid()}"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
if _platform == "cpu":  # that kernels compile is what the tests here are to find out, not that they once did
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"

import pytest  # noqa: E402

collect_ignore = ["kernels/test_on_card.py", "generation/test_on_card.py"] if _platform == "cpu" else []


@pytest.fixture(scope="session")
def golden_checkpoint(tmp_path_factory):
    """A function from a family of tests/golden to its Hugging Face folder, which is made once a session: read it only."""
    from tests.golden import load

    folder = tmp_path_factory.mktemp("golden")
    return lambda family: load.checkpoint(family, folder)


_finished = itertools.count(1)


@pytest.fixture(autouse=True)
def _few_programs_in_memory():
    """LLVM maps memory for every program, and Linux allows a process 65,530 maps (vm.max_map_count); beyond, compiling crashes."""
    yield
    if next(_finished) % 10 == 0 and os.path.exists("/proc/self/maps"):
        with open("/proc/self/maps", "rb") as f:
            maps = f.read().count(b"\n")
        if maps > 30_000:
            import jax

            jax.clear_caches()
