"""The kernels in Triton and Gluon; nothing here is imported before one of them is about to run."""

import os

_cache_dir = os.environ.get("TRITON_CACHE_DIR")

import jax_triton as _jax_triton  # noqa: E402, F401

if _cache_dir is not None:  # jax-triton 0.4 takes it out of the environment when it is imported
    os.environ["TRITON_CACHE_DIR"] = _cache_dir
