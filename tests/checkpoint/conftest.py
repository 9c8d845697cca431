"""Checkpoints that are made and converted once a session; a test that changes one takes a copy."""

import shutil
from pathlib import Path

import hf_folder
import pytest

from dsv3_jax.checkpoint.convert import convert


@pytest.fixture(scope="session")
def v3_source(tmp_path_factory) -> Path:
    return hf_folder.make(tmp_path_factory.mktemp("v3") / "hf", hf_folder.V3)


@pytest.fixture(scope="session")
def v2_source(tmp_path_factory) -> Path:
    return hf_folder.make(tmp_path_factory.mktemp("v2") / "hf", hf_folder.V2)


@pytest.fixture(scope="session")
def v3_converted(v3_source) -> Path:
    target = v3_source.parent / "converted"
    convert(str(v3_source), str(target))
    return target


@pytest.fixture(scope="session")
def v2_converted(v2_source) -> Path:
    target = v2_source.parent / "converted"
    convert(str(v2_source), str(target))
    return target


@pytest.fixture
def v3(v3_source, tmp_path) -> Path:
    """A copy of the FP8 folder, to be damaged."""
    return shutil.copytree(v3_source, tmp_path / "hf")


@pytest.fixture
def v2(v2_source, tmp_path) -> Path:
    """A copy of the bf16 folder, to be damaged."""
    return shutil.copytree(v2_source, tmp_path / "hf")
