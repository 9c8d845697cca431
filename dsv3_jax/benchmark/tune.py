"""Times tiles for kernels/tuned/<GPU>.json: candidates of one shape after the other, each checked before it counts."""

from __future__ import annotations

import contextlib
import json
import pathlib
import time
from collections.abc import Iterator

from dsv3_jax import cli
from dsv3_jax.benchmark import candidates, cases, kernels, pool
from dsv3_jax.kernels import tiles
from dsv3_jax.kernels.quantize import BLOCK

# (N, K, cut) of weights, cut being what tensor parallelism divides: rows of the weight (n), columns (k) or nothing. DeepSeek-V3's in FP8
# are those that benchmarks know, and the dense layers' down_proj.
V3 = (*((*weight, cut) for weight, cut in zip(kernels.GEMM, ("", "n", "n", "k", "n", "k", "n"), strict=True)), (7168, 18432, "k"))
V2_LITE = (
    (3072, 2048, "n"),
    (576, 2048, ""),
    (4096, 512, "n"),
    (2048, 2048, "k"),
    (21888, 2048, "n"),
    (5632, 2048, "n"),
    (2048, 2816, "k"),
)
# Experts, (P * N, K, P, what is cut) of their weights: gate and up, and down.
V3_EXPERTS = (32, ((4096, 7168, 2, "n"), (7168, 2048, 1, "k")))
V2_LITE_EXPERTS = (64, ((2816, 2048, 2, "n"), (2048, 1408, 1, "k")))
WHAT = ("gemm", "grouped")
BETTER = 0.99  # of the time of the tiles in use, which a candidate must stay below: the clock is no better than that
RUN_US, REPEATS = 8e3, 3


def main(
    *, what: str = "gemm,grouped", tokens: str = "8,16,32,64,128,512,4096", rows: str = "1,4,8,16,64,256", shapes: str = "v3",
    shards: str = "1", out: str | None = None, deadline_s: float | None = None, processes: int | None = None, seed: int = 0,
) -> int:  # fmt: skip
    """Write the fastest tiles of each shape to `out`, by default the table of the GPU at hand; its other entries stay.

    tokens: the M of gemm; rows: those of a group for grouped. shapes: 'v3', 'v2_lite' or weights such as '4096x7168', for gemm; the
    experts of a model named here are what grouped tunes. shards: widths of tensor parallelism, whose shares of V3's and V2-Lite's
    weights are shapes too. The table is written after each shape; every candidate is a JSON line on standard output.
    Returns 1 if nothing was measured. Raises ValueError for wrong arguments before devices are touched.
    """
    began = time.monotonic()
    kinds = [kind.strip() for kind in what.split(",")]
    if wrong := [kind for kind in kinds if kind not in WHAT]:
        raise ValueError(f"--what={what}: {', '.join(wrong)} must be among {', '.join(WHAT)}")
    if deadline_s is not None and not deadline_s > 0:
        raise ValueError(f"--deadline_s={deadline_s}: must be a positive number of seconds")
    units = _units(kinds, tokens, rows, shapes, shards, seed)
    path = None if out is None else pathlib.Path(cli.resolve(out, "out"))
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"--out={out}: there is no folder {path.parent}")
    if path is not None:
        tiles.read(path)
    processes = pool.default_processes() if processes is None else processes
    pool.progress(began, f"{len(units)} shapes in {processes} processes")
    measured: dict[tuple, list[dict]] = {}
    deadline = None if deadline_s is None else began + deadline_s
    for unit, row in pool.run(measure_unit, units, processes, deadline):
        print(json.dumps(row), flush=True)
        if "us" not in row:
            pool.progress(began, f"{unit[:-1]}: {row['error']}")
            continue
        rows_so_far = measured.setdefault(unit, [])
        rows_so_far.append(row)
        best = fastest(rows_so_far)
        pool.progress(began, f"{row['table']} {row['key']}: {row['us']:.2f} us, best {best['us']:.2f} of {len(rows_so_far)}")
        if best is row or len(rows_so_far) == 1:
            path = path or _default_path(row["device"])
            _save(path, best)
    pool.progress(began, f"{len(measured)} of {len(units)} shapes have an entry in {path or 'the table'}")
    return 0 if measured else 1


def fastest(rows: list[dict]) -> dict:
    """The fastest of the rows of a shape; the first, which is in use, unless another is clearly faster."""
    best = min(rows, key=lambda row: row["us"])
    return best if best["us"] < BETTER * rows[0]["us"] else rows[0]


def _units(kinds: list[str], tokens: str, rows: str, shapes: str, shards: str, seed: int) -> list[tuple]:
    """(kind, M, N, K, P, experts, seed), the likely most useful first: by M, then in the order of the shapes."""
    widths, found = cli.numbers("shards", shards), []
    gemm, experts = _shapes(shapes, widths)
    for kind in kinds:
        if kind == "gemm":
            found += [("gemm", m, n, k, 1, 1, seed) for m in _buckets("fp8_gemm", "tokens", tokens) for n, k in gemm]
        else:
            found += [(kind, r, n, k, p, g, seed) for r in _buckets("grouped_gemm", "rows", rows) for kind, g, n, k, p in experts]
    if not found:
        raise ValueError(f"--shapes={shapes}: names no shape for --what={','.join(kinds)}; the experts are those of v3 and v2_lite")
    return list(dict.fromkeys(found))


def _buckets(op: str, flag: str, text: str) -> list[int]:
    """An entry is measured with as many rows as it stands for."""
    return [tiles.bucket(op, m) for m in cli.numbers(flag, text)]


def _shapes(text: str, widths: list[int]) -> tuple[list[tuple], list[tuple]]:
    """(N, K) for gemm, and (kind, experts, P * N, K, P) for grouped."""
    gemm, experts = [], []
    for name in (part.strip() for part in text.split(",")):
        if name in ("v3", "v2_lite"):
            gemm += [share for n, k, cut in (V3 if name == "v3" else V2_LITE) for width in widths if (share := _share(n, k, cut, width))]
            kind, (groups, weights) = ("fp8", V3_EXPERTS) if name == "v3" else ("bf16", V2_LITE_EXPERTS)
            block = BLOCK if kind == "fp8" else 1
            shares = [(p, share) for n, k, p, cut in weights for width in widths if (share := _share(n, k, cut, width, p * block))]
            experts += [(kind, groups, *share, p) for p, share in shares]
            continue
        n, x, k = name.partition("x")
        if not (x and n.isdigit() and k.isdigit() and int(n) > 0 and int(k) > 0 and int(k) % 16 == 0):
            raise ValueError(f"--shapes={text}: {name!r} must be v3, v2_lite or a weight such as 4096x7168, with K a multiple of 16")
        gemm.append((int(n), int(k)))
    return list(dict.fromkeys(gemm)), list(dict.fromkeys(experts))


def _share(n: int, k: int, cut: str, width: int, rows: int = 1) -> tuple[int, int] | None:
    """One device's share of a weight, None where it does not divide: columns in whole blocks, rows in multiples of `rows`."""
    if cut == "n":
        return (n // width, k) if n % (width * rows) == 0 else None
    if cut == "k":
        return (n, k // width) if width == 1 or k % (width * BLOCK) == 0 else None
    return n, k


def measure_unit(unit: tuple, skip: int, lock: contextlib.AbstractContextManager) -> Iterator[dict]:
    """A row for each candidate of a shape; runs in a process of its own."""
    kind, m, n, k, parts, experts, seed = unit
    if kind == "gemm":
        op, table, found = "fp8_gemm", "fp8_gemm", candidates.fp8_gemm(m, n, k)
    else:
        op, table, found = "grouped_gemm", tiles.table_of("grouped_gemm", kind), candidates.grouped(kind, m, n, k)
    held: dict = {}
    for config in found[skip:]:
        if kind == "gemm":
            case = cases.Gemm(m, n, k, implementation="triton", config=config)
        else:
            case = cases.Grouped(experts, m, n, k, parts, kind == "fp8", implementation="triton", config=config)
        about = {"table": table, "key": tiles.key(op, m, n, k), "m": m, "config": config}
        run = {"run_us": RUN_US, "repeats": REPEATS, "held": held}
        yield about | pool.attempt(lambda case=case, run=run: kernels.measure(case, lock, seed, **run))


def _default_path(device_kind: str) -> pathlib.Path:
    return tiles.FOLDER / f"{tiles.name_of(device_kind)}.json"


def _save(path: pathlib.Path, row: dict) -> None:
    """Put one entry into the table at `path`, which is read again: it may hold entries of other shapes."""
    tiles.read.cache_clear()
    tables = tiles.read(path)
    tables.setdefault(row["table"], {})[row["key"]] = row["config"]
    tiles.write(path, tables)
