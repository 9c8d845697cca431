"""The tile sizes that scripts/tune_kernels.py has measured: tuned/<device kind>.json, one table of entries for each op.

    {"fp8_gemm": {"8,2112,7168": {"kernel": "decode", "BN": 64, "SPLIT": 4, "GROUPS": 2, "STAGES": 10}, ...},
     "grouped_gemm.fp8": {"16,4096,7168": {"BM": 16, ...}, ...}}

A key is "M,N,K". M is a bucket: the number of rows (of a group, for grouped_gemm) rounded up to a power of two within the op's limits;
more rows than the limit share its entry. N and K are the weight's rows and columns, all weights side by side.
"""

from __future__ import annotations

import functools
import json
import pathlib

import jax

from dsv3_jax.kernels import dispatch

FOLDER = pathlib.Path(__file__).parent / "tuned"
HOPPER = "nvidia_h200"  # what kernels are compiled for without a device: the Hopper GPU that was measured
BUCKETS = {"fp8_gemm": (8, 4096), "grouped_gemm": (1, 4096)}  # the smallest and the largest
DECODE_ROWS = 128  # the most rows that fp8_gemm's decode kernel takes
_GROUPED = {"BM": int, "BN": int, "STAGES": int, "SWAP": bool, "CONSUMERS": int, "PARTS": int, "COALESCE": bool}
# Op, and kernel or kind -> the names and types of an entry's values.
FIELDS: dict[str, dict[str, dict[str, type]]] = {
    "fp8_gemm": {"decode": dict.fromkeys(("BN", "SPLIT", "GROUPS", "STAGES"), int), "large": dict.fromkeys(("BN", "STAGES", "GROUP"), int)},
    "grouped_gemm": {"bf16": _GROUPED, "fp8": _GROUPED, "w8": _GROUPED},
}


def lookup(op: str, m: int, n: int, k: int, kind: str | None = None, *, default: dict) -> dict:
    """The measured entry for an op at this many rows and this weight, or `default`, the heuristic's answer, where none was measured.

    An entry of fp8_gemm names its kernel: 'decode' or 'large'. kind: of grouped_gemm, 'bf16', 'fp8' or 'w8'.
    Raises ValueError for a table that does not hold what this file's first lines say.
    """
    name = device_name()
    found = {} if name is None else read(FOLDER / f"{name}.json").get(table_of(op, kind), {})
    return dict(found.get(key(op, m, n, k), default))


def table_of(op: str, kind: str | None) -> str:
    return op if kind is None else f"{op}.{kind}"


def bucket(op: str, m: int) -> int:
    """m rounded up to a power of two, within the op's limits."""
    low, high = BUCKETS[op]
    return min(high, max(low, 1 << (m - 1).bit_length()))


def key(op: str, m: int, n: int, k: int) -> str:
    return f"{bucket(op, m)},{n},{k}"


def device_name() -> str | None:
    """The name of the table for the GPU at hand, or of the one that dispatch.compile_only stands for; None without a GPU."""
    if jax.default_backend() == "gpu":
        return name_of(jax.local_devices()[0].device_kind)
    return HOPPER if dispatch.compute_capability() == dispatch.HOPPER else None


def name_of(device_kind: str) -> str:
    """'NVIDIA H200' -> 'nvidia_h200'."""
    return device_kind.lower().replace(" ", "_")


@functools.cache
def read(path: pathlib.Path) -> dict[str, dict[str, dict]]:
    """A table, checked; empty if there is no such file. Raises ValueError that names the file and the key."""
    try:
        tables = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as e:
        raise ValueError(f"{path}: is not JSON: {e}") from e
    if not isinstance(tables, dict):
        raise ValueError(f"{path}: must hold an object whose keys are ops, not {type(tables).__name__}")
    for table, entries in tables.items():
        if not isinstance(entries, dict):
            raise ValueError(f"{path}: {table}: must be an object of entries, not {type(entries).__name__}")
        for name, entry in entries.items():
            if problem := _problem(table, name, entry):
                raise ValueError(f"{path}: {table}: {name}: {problem}; make the table with scripts/tune_kernels.py")
    return tables


def _problem(table: str, name: str, entry) -> str | None:
    """What is wrong with one entry, if anything."""
    op, _, kind = table.partition(".")
    if op not in FIELDS:
        return f"{op} is no op with a table; there are {', '.join(FIELDS)}"
    parts = name.split(",")
    if len(parts) != 3 or not all(p.isascii() and p.isdigit() and int(p) > 0 for p in parts):
        return "the key must be 'M,N,K', three positive integers"
    if bucket(op, int(parts[0])) != int(parts[0]):
        return "M must be a power of two from {} to {}".format(*BUCKETS[op])
    if not isinstance(entry, dict):
        return f"must be an object, not {type(entry).__name__}"
    values = dict(entry)
    kind = kind or values.pop("kernel", None)
    fields = FIELDS[op].get(kind) if isinstance(kind, str) else None
    if fields is None:
        return f"kernel or kind {kind!r} must be one of {', '.join(FIELDS[op])}"
    if values.keys() != fields.keys() or any(type(values[f]) is not t for f, t in fields.items()):
        return f"must hold {', '.join(f'{f} ({t.__name__})' for f, t in fields.items())}, not {values}"
    if any(type(v) is int and v < 1 for v in values.values()):
        return f"every number must be positive: {values}"
    if op == "fp8_gemm" and (values["BN"] not in (64, 128) or values.get("GROUPS", 1) not in (1, 2, 4)):
        return f"BN must be 64 or 128, and GROUPS 1, 2 or 4: {values}"
    if kind == "decode" and values["STAGES"] % values["GROUPS"]:
        return f"STAGES must be a multiple of GROUPS: {values}"
    if kind == "decode" and int(parts[0]) > DECODE_ROWS:
        return f"the decode kernel takes {DECODE_ROWS} rows at most"
    return None


def write(path: pathlib.Path, tables: dict[str, dict[str, dict]]) -> None:
    """Replace a table at once, sorted by weight and bucket, one entry a line."""

    def order(item: tuple[str, dict]) -> list[int]:
        m, n, k = map(int, item[0].split(","))
        return [n, k, m]

    blocks = []
    for table, entries in sorted(tables.items()):
        lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(entries.items(), key=order)]
        blocks.append(f" {json.dumps(table)}: {{\n" + ",\n".join(lines) + "\n }")
    new = path.with_name(path.name + ".new")
    new.write_text("{\n" + ",\n".join(blocks) + "\n}\n", "utf-8")
    new.replace(path)
