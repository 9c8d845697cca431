"""The house rules that a machine can hold: who imports whom, what is in the tree, what the packages are called."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
LINKS = ("kernels", "configs", "scripts")
MODULES = sorted([*ROOT.glob("dsv3_jax/**/*.py"), *ROOT.glob("kernels/**/*.py"), *ROOT.glob("scripts/*.py")])
MODULES = [p for p in MODULES if p.relative_to(ROOT).parts[:2] not in {("dsv3_jax", link) for link in LINKS}]

# Who may import whom: the longest matching name on the left is a module's row; each name on the right allows itself and what is
# below it. "jax" stands for jax and flax, "" for dsv3_jax/__init__.py; cli is what the scripts share.
TABLE = {
    "kernels.triton_impl": "kernels jax triton",
    "kernels": "kernels jax",
    "config": "config_json",
    "config_json": "config",
    "cli": "cluster distributed jax",
    "sharding": "config jax",
    "cluster": "",
    "peer": "",
    "group": "cluster peer",
    "distributed": "cluster group peer jax",
    "plan": "config sharding model jax working_memory checkpoint.load kernels.dispatch"
    " generation.requests generation.settings generation.steps",
    "working_memory": "config sharding model.options kernels.mla_prefill generation.chunks generation.engine jax",
    "model": "config sharding kernels jax",
    "model.options": "config kernels",
    "model.rope": "config sharding jax",
    "model.cache": "config sharding jax model.options",
    "model.layers": "config sharding kernels jax model.options model.rope",
    "model.attention": "config sharding kernels jax model.options model.layers model.rope model.cache",
    "model.moe": "config sharding kernels jax model.options model.layers",
    "model.transformer": "config sharding jax model",
    "model.mtp": "config sharding jax model",
    "checkpoint": "checkpoint config sharding model jax",
    "generation": "config jax generation",
    "generation.together": "distributed generation.requests generation.sampling",
    "generation.engine": "config sharding distributed model checkpoint jax"
    " generation.answer generation.chunks generation.requests generation.sampling generation.settings generation.steps"
    " generation.stops",
    "generation.answer": "generation.requests generation.steps",
    "generation.chunks": "",
    "generation.settings": "config sharding model kernels.dispatch jax generation.requests",
    "generation.sampling": "jax",
    "generation.steps": "model jax generation.sampling",
    "generation.requests": "generation.sampling",
    "generation.stops": "config",
    "generation.batch": "generation.engine generation.sampling jax",
    "generation.speculative": "generation.engine generation.sampling model jax",
    "benchmark": "benchmark cli kernels jax",
    "benchmark.random_weights": "config sharding checkpoint model generation kernels.dispatch jax",
    "benchmark.measure": "generation model jax",
    "benchmark.profile": "jax",
    "benchmark.model": "cli config checkpoint generation benchmark jax",
    "scripts": "dsv3_jax jax",
    "": "config generation.engine generation.sampling",
}
OUTSIDE = {"jax": "jax", "jaxlib": "jax", "flax": "jax", "triton": "triton", "jax_triton": "triton"}


def name_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "dsv3_jax" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: pathlib.Path) -> set[str]:
    """Every module that a file imports, at the top or inside functions, type-checking blocks included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            source = node.module or ""
            found |= {f"{source}.{alias.name}" if is_package(source) else source for alias in node.names}
    return found


def is_package(name: str) -> bool:
    return name.startswith("dsv3_jax") and (ROOT / name.replace(".", "/")).is_dir()


def row(name: str) -> str:
    return max((key for key in TABLE if name == key or name.startswith(key + ".") or (key == "" and name == "")), key=len)


def violations(name: str, path: pathlib.Path) -> list[str]:
    """What the file at `path` imports, as the module `name`, and may not."""
    allowed, found = TABLE[row(name)].split(), []
    for module in sorted(imports(path)):
        top, target = module.split(".")[0], module.removeprefix("dsv3_jax").lstrip(".")
        if top in OUTSIDE:
            ok = OUTSIDE[top] in allowed
        else:
            ok = top != "dsv3_jax" or "dsv3_jax" in allowed or any(target == a or target.startswith(a + ".") for a in allowed)
        if not ok:
            found.append(f"{name} may not import {module}; its row allows: {', '.join(allowed) or 'the standard library only'}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_table(path):
    assert not violations(name_of(path), path)


@pytest.mark.parametrize(
    ("name", "line", "refused"),
    [
        ("model.moe", "from dsv3_jax.model.attention import attend", "dsv3_jax.model.attention"),
        ("model.moe", "from dsv3_jax.model import layers, attention", "dsv3_jax.model.attention"),
        ("model.moe", "def f():\n    import dsv3_jax.generation.engine", "dsv3_jax.generation.engine"),
        ("kernels.fp8_gemm", "from dsv3_jax.config import ModelConfig", "dsv3_jax.config"),
        ("kernels.fp8_gemm", "import jax\nimport triton.language as tl", "triton.language"),
        ("config", "import jax.numpy as jnp", "jax.numpy"),
        ("config", "if TYPE_CHECKING:\n    from flax import nnx", "flax"),
        ("generation.steps", "from dsv3_jax.checkpoint import store", "dsv3_jax.checkpoint.store"),
        ("checkpoint.convert", "from dsv3_jax import cli", "dsv3_jax.cli"),
        ("", "from dsv3_jax.model_extra import x", "dsv3_jax.model_extra"),
    ],
)
def test_a_violation_is_refused(name, line, refused, tmp_path):
    (file := tmp_path / "module.py").write_text(f"import os\nfrom dsv3_jax.config import BLOCK\n{line}\n")
    assert any(v.startswith(f"{name} may not import {refused};") for v in violations(name, file))
    file.write_text("import os\nimport pathlib\n")
    assert not violations(name, file)


def test_the_table_can_fail():
    rows = {"model.moe": "model.moe", "checkpoint.convert": "checkpoint", "kernels.triton_impl.fp8_gemm": "kernels.triton_impl", "": ""}
    assert {name: row(name) for name in rows} == rows
    assert "dsv3_jax.model.layers" in imports(ROOT / "dsv3_jax/model/moe.py")
    assert "model.attention" not in TABLE["model.moe"].split() and "model.moe" not in TABLE["model.attention"].split()


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_torch_and_triton_only_lazily(path):
    assert not {m for m in imports(path) if m.split(".")[0] in ("torch", "tensorflow")}
    top = {a.name for n in ast.parse(path.read_text("utf-8")).body if isinstance(n, ast.Import) for a in n.names}
    top |= {n.module or "" for n in ast.parse(path.read_text("utf-8")).body if isinstance(n, ast.ImportFrom)}
    if "triton_impl" not in path.parts:
        assert not {m for m in top if m.split(".")[0] in ("triton", "jax_triton")}, "import triton inside functions"


def test_importing_the_package_needs_no_jax():
    code = "import sys, dsv3_jax; dsv3_jax.ModelConfig; print(sorted({'jax', 'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_links_are_relative_and_hold_no_package():
    for link in LINKS:
        assert os.readlink(ROOT / "dsv3_jax" / link) == f"../{link}"
        assert not (ROOT / link / "__init__.py").exists(), f"{link} would become a top-level package"


def test_console_commands_exist():
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for command, target in commands.items():
        module, function = target.split(":")
        path = ROOT / (module.replace(".", "/") + ".py")
        assert command == "dsv3-" + path.stem.replace("_", "-") and function == "run"
        tree = ast.parse(path.read_text("utf-8"))
        assert {"main", "run"} <= {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, path
    assert {p.stem for p in (ROOT / "scripts").glob("*.py")} == {c.removeprefix("dsv3-").replace("-", "_") for c in commands}


def test_files_stay_small():
    long = {str(p.relative_to(ROOT)): n for p in MODULES if (n := len(p.read_text("utf-8").splitlines())) > 300}
    assert not long, "more than 300 lines: usually two rooms"


def text_files():
    """The project's own files: what else lies in a working copy is its owner's affair."""
    tops = [ROOT / name for name in ("dsv3_jax", "kernels", "configs", "scripts", "tests", "docs", ".ci")]
    paths = [p for p in ROOT.iterdir() if p.is_file()] + [p for top in tops for p in top.rglob("*")]
    return [p for p in paths if p.is_file() and p.suffix not in (".npz", ".safetensors", ".pyc")]


def test_no_registry_host_and_no_path_of_one_machine():
    # Written so that this file does not contain what it looks for.
    registry = re.compile(r"(?<!emit-)(index-url|find-links)[ =]|https?://[^ ]*(pypi|python" + r"hosted)")
    home = re.compile(r"(^|[^A-Za-z0-9_.])/" + r"(root|work|opt|home)/[A-Za-z.]")
    for path in text_files():
        if path == pathlib.Path(__file__):
            continue
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
            where = f"{path.relative_to(ROOT)}:{number}"
            assert not registry.search(line), f"{where}: a registry host"
            assert not home.search(line), f"{where}: a path of one machine"


def test_requirements_hold_the_declared_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {}
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        name, _, version = line.split(";")[0].strip().partition("==")
        assert version, f"requirements.txt: {line!r} is not pinned"
        pinned[name.lower().replace("_", "-")] = version
    for wanted in project["dependencies"] + project["optional-dependencies"]["test"]:
        name = re.split(r"[<>=\[;]", wanted)[0].lower().replace("_", "-")
        assert name in pinned, f"{name} is missing: make requirements"
    assert "torch" not in pinned and not any(name.startswith("nvidia") for name in pinned)


def test_lock_files_are_not_tracked():
    assert not (ROOT / "uv.lock").exists()


def test_configs_are_plain_data():
    for path in (ROOT / "configs").iterdir():
        assert path.suffix == ".json", path
        assert isinstance(json.loads(path.read_text()), dict)
