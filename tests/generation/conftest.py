"""Engines on the golden checkpoints, converted once a session."""

from __future__ import annotations

import functools
import os

import pytest

from dsv3_jax import Engine
from dsv3_jax.checkpoint.convert import convert
from tests.golden import load


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """converted(family): the folder of that golden family's converted checkpoint."""
    root = tmp_path_factory.mktemp("golden")

    @functools.cache
    def make(family: str) -> str:
        path = os.path.join(root, family + "-converted")
        convert(load.checkpoint(family, root), path)
        return path

    return make


@pytest.fixture(scope="session")
def engine(converted):
    """engine(family, **arguments): an Engine on that family's checkpoint, in float32 and kept for the session unless told otherwise."""

    @functools.cache
    def make(family: str, **arguments) -> Engine:
        settings = {"dtype": "float32", "gemm_impl": "bf16", "max_seq_len": 256, **arguments}
        return Engine.from_checkpoint(converted(family), **settings)

    return make
