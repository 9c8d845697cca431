"""`dsv3-benchmark kernels`: times single kernels, writes a JSON line for each, and joins other libraries' figures for the same work."""

from __future__ import annotations

import contextlib
import json as json_lib
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import jax

from dsv3_jax import cli
from dsv3_jax.benchmark import cases, pool, quant_cases, timing

# What two rows must agree in to be about the same work.
KEYS = ("op", "m", "n", "k", "experts", "rows", "batch", "context", "heads")
WHAT = "gemm,grouped,mla,quant"
# The sizes of DeepSeek-V3 by which other libraries' figures are known.
GEMM = ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048), (36864, 7168))  # (N, K)
TOKENS = (1, 8, 64, 128, 512, 4096)
GROUPS = ((32, 1), (32, 8), (32, 64), (32, 256), (256, 1), (256, 4), (256, 16))  # (G, R)
MLA = ((1, 4096, 128), (1, 32768, 128), (16, 4096, 128), (64, 4096, 128), (128, 4096, 128), (128, 4096, 64), (128, 4096, 16))  # (B, S, H)


def main(
    *, what: str = WHAT, json: str | None = None, peers: str | None = None, seed: int = 0, command: str = "", tokens: str | None = None,
    deadline_s: float | None = None, processes: int | None = None, units: Sequence[Sequence[cases.Base]] | None = None,
) -> int:  # fmt: skip
    """Measure the kernels named in `what`; 1 if any of them failed its check.

    json: file for the rows, one a line, written as they come. peers: file of such lines from other libraries. tokens: the M of gemm,
    such as '1,64'. deadline_s: seconds after which what has been measured must do. processes: how many compile side by side and take
    turns on the GPU; 0: this one alone. units: lists of cases in place of those that what and tokens ask for.
    Raises ValueError for a wrong argument or file before devices are touched.
    """
    began = time.monotonic()
    theirs = [] if peers is None else read_rows(cli.resolve(peers, "peers"))
    if deadline_s is not None and not deadline_s > 0:
        raise ValueError(f"--deadline_s={deadline_s}: must be a positive number of seconds")
    processes = pool.default_processes() if processes is None else processes
    if processes < 0:
        raise ValueError(f"--processes={processes}: must not be negative")
    if units is None:
        units = _units(what, tokens)
    count, ours, failed = sum(map(len, units)), [], 0
    with contextlib.ExitStack() as stack:
        file = None if json is None else stack.enter_context(open(cli.resolve(json, "json"), "w", encoding="utf-8"))
        if file is not None and command:
            print(json_lib.dumps({"op": "about", "impl": "ours", "command": command, "seed": seed}), file=file, flush=True)
        pool.progress(began, f"{count} cases in {processes} processes")
        work, done = [(i, seed, unit) for i, unit in enumerate(units)], [0] * len(units)
        deadline = None if deadline_s is None else began + deadline_s
        for (i, *_), row in pool.run(measure_unit, work, processes, deadline):
            if done[i] == len(units[i]):
                continue  # its process died after the last case
            row = about(units[i][done[i]]) | row  # a process that died has not said what it was at
            done[i] += 1
            failed += "error" in row
            ours.append(row)
            if file is not None:
                print(json_lib.dumps(row), file=file, flush=True)
            print(line(row), flush=True)
            pool.progress(began, f"{len(ours)} of {count}")
    if len(ours) < count:
        pool.progress(began, f"--deadline_s: {count - len(ours)} cases were not measured")
    if theirs:
        print("\n" + "\n".join(compare(ours, theirs)), flush=True)
    return 1 if failed else 0


def _units(what: str, tokens: str | None) -> list[Sequence[cases.Base]]:
    kinds = [kind.strip() for kind in what.split(",")]
    if wrong := [kind for kind in kinds if kind not in WHAT.split(",")]:
        raise ValueError(f"--what={what}: {', '.join(wrong)} must be among {WHAT}")
    ms = TOKENS if tokens is None else tuple(cli.numbers("tokens", tokens))
    units = [list(unit) for kind in kinds for unit in default(kind, ms)]
    return sorted(units, key=lambda unit: -sum(case.bytes + case.flops / 300 for case in unit))  # the longest first


def default(kind: str, tokens: tuple[int, ...] = TOKENS) -> Sequence[Sequence[cases.Base]]:
    """The cases of one kind, in lists that share a weight's shape, for processes to take one by one; tokens: the M of gemm."""
    if kind == "gemm":
        return [[cases.Gemm(m, n, k) for m in tokens] for n, k in GEMM]
    if kind == "grouped":
        found = []
        for n, k in ((4096, 7168), (7168, 2048)):
            found += [[cases.Grouped(g, r, n, k) for g, r in GROUPS if g == experts] for experts in (256, 32)]
        for n, k, parts in ((2816, 2048, 2), (2048, 1408, 1)):  # DeepSeek-V2-Lite
            found.append([cases.Grouped(64, r, n, k, parts, fp8=False) for r in (1, 8, 64)])
        return found
    if kind == "mla":
        return [[cases.Mla(*size)] for size in MLA]
    quant = quant_cases.Quant
    return [
        [quant_cases.Copy()],
        [quant("act_quant", m, 7168) for m in (4096, 16384)],
        [quant("rms_norm_quant", m, 7168) for m in (4096, 16384)],
        [quant("swiglu_quant", 16384, 2048), quant("weight_dequant", 7168, 18432)],
    ]


def measure_unit(unit: tuple[int, int, Sequence], skip: int, lock: contextlib.AbstractContextManager) -> Iterator[dict]:
    """A row for each case; runs in a process of its own."""
    _, seed, of_unit = unit
    for case in of_unit[skip:]:
        yield about(case) | pool.attempt(lambda case=case: measure(case, lock, seed))


def about(case) -> dict:
    return {"op": case.op, "impl": "ours", **case.sizes()}


def measure(case, lock: contextlib.AbstractContextManager, seed: int = 0, **how) -> dict:
    """What a row holds beside its sizes: microseconds of a call, GB/s, TFLOP/s, error, tiles, implementation, device."""
    found = timing.measure(case, lock, seed, **how)
    us = found["us"]
    rates = {"us": us, "gbps": case.bytes / us / 1e3, "tflops": case.flops / us / 1e6, "diff": found["diff"]}
    rest = {"config": case.tiles(), "implementation": case.runs(), "calls": found["calls"], "device": jax.local_devices()[0].device_kind}
    return {key: round(value, 9) for key, value in rates.items()} | rest


def line(row: dict) -> str:
    """A row for the screen."""
    if "error" in row:
        return f"{_title(row):<40} FAILED: {row['error']}"
    tiles = " ".join(f"{key}={value}" for key, value in row["config"].items())
    rate = f"{row['tflops']:7.0f} TFLOP/s" if row["tflops"] else " " * 15
    return f"{_title(row):<40} {row['us']:9.2f} us {row['gbps']:6.0f} GB/s {rate}  {row['implementation']} {tiles}"


def _title(row: dict) -> str:
    return " ".join([row["op"], *(f"{key}={row[key]}" for key in KEYS[1:] if key in row)])


def read_rows(path: str) -> list[dict]:
    """JSON lines with op, impl and us; lines about something else are left out. Raises ValueError for a line that is not JSON."""
    rows = []
    with open(path, encoding="utf-8") as f:
        for i, text in enumerate(f, 1):
            if not text.strip():
                continue
            try:
                row = json_lib.loads(text)
            except ValueError as e:
                raise ValueError(f"{path}:{i}: is not a JSON line: {e}") from e
            if isinstance(row, dict) and isinstance(row.get("us"), int | float) and row["us"] > 0 and row.get("impl") != "ours":
                rows.append(row)
    if not rows:
        raise ValueError(f"{path}: holds no measured row of another library: JSON lines with op, impl and us are needed")
    return rows


def compare(ours: list[dict], theirs: list[dict]) -> list[str]:
    """Lines with their time over ours for rows about the same work (the fastest of theirs), and geometric means by op and M."""
    fastest: dict[tuple, dict] = {}
    for row in theirs:
        known = fastest.get(_work(row))
        if known is None or row["us"] < known["us"]:
            fastest[_work(row)] = row
    lines, groups, by_op = [], defaultdict(list), defaultdict(list)
    for row in sorted((r for r in ours if "us" in r), key=lambda r: [str(r["op"]), *(r.get(key) or 0 for key in KEYS[1:])]):
        other = fastest.get(_work(row))
        if other is None:
            continue
        ratio = other["us"] / row["us"]
        name = other.get("impl", "-")
        lines.append(f"{_title(row):<40} {row['us']:9.2f} us, {name} {other['us']:9.2f} us: {ratio:.2f} times its speed")
        groups[row["op"], row.get("m")].append(ratio)
        by_op[row["op"]].append((ratio, _title(row)))
    for (op, m), ratios in groups.items():
        lines.append(f"geometric mean, {op}{'' if m is None else f' m={m}'}: {geometric_mean(ratios):.3f} of {len(ratios)}")
    for op, ratios in by_op.items():
        lines.append(f"worst, {op}: {min(ratios)[0]:.3f} ({min(ratios)[1]})")
    return lines or ["no row of the other libraries is about the same work"]


def _work(row: dict) -> tuple:
    return tuple(row.get(key) for key in KEYS)


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
