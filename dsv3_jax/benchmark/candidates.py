"""Which tiles are worth trying for a shape: the choice so far first, then the most promising by a rough model of the time.

M tokens (or rows of a group), N rows of the weight, K columns.
"""

from __future__ import annotations

import math

SMS = 132
SHARED = 220_000  # bytes of shared memory that the programs on a multiprocessor may fill
REGISTERS = 64 * 1024  # of a multiprocessor
MOST_GEMM, MOST_GROUPED = 14, 8


def fp8_gemm(m: int, n: int, k: int) -> list[dict]:
    """Entries for kernels/tiles.py: of the decode kernel up to 128 tokens, of the large one from 64 on; the first is in use now."""
    from dsv3_jax.kernels import fp8_gemm
    from dsv3_jax.kernels.triton_impl import fp8_gemm_decode, fp8_gemm_large

    found = [fp8_gemm.choose(m, n, k)]
    if m <= 128:
        found.append({"kernel": "decode"} | fp8_gemm_decode.likely(m, n, k))
    if m >= 64:
        found.append({"kernel": "large"} | fp8_gemm_large.likely(m, n, k))
        found += [{"kernel": "large", "BN": bn, "STAGES": 6 if bn == 128 else 8, "GROUP": group} for bn in (128, 64) for group in (8, 16)]
    if m <= 128:
        found += [{"kernel": "decode"} | c for c in _decode(m, n, k)]
    return _distinct(found)[:MOST_GEMM]


def _decode(m: int, n: int, k: int) -> list[dict]:
    """The likely fastest first."""
    from dsv3_jax.kernels.triton_impl import fp8_gemm_decode

    height, blocks = max(8, 1 << (m - 1).bit_length()), -(-k // 128)
    found = []
    for bn in (64, 128):
        tiles = -(-n // bn)
        for split in (1, 2, 3, 4, 6, 8):
            steps = -(-blocks // split)
            if split > 1 and not (split * 4 <= blocks and 100 <= tiles * split <= 600 and (split - 1) * steps < blocks):
                continue
            for groups in (1, 2, 4):
                if (groups == 4 and (k > 2048 or m > 8 or bn == 128)) or groups > steps:
                    continue
                for stages in _stages(bn, height, steps, groups, tiles * split):
                    config = {"BN": bn, "SPLIT": split, "GROUPS": groups, "STAGES": stages}
                    if fp8_gemm_decode.registers(config, height) > REGISTERS:
                        continue
                    found.append((_decode_us(m, n, k, height, config), len(found), config))
    return [config for *_, config in sorted(found, key=lambda f: f[:2])]


def _stages(bn: int, height: int, steps: int, groups: int, programs: int) -> list[int]:
    """The longest rings with which as many programs as there are, up to three, share a multiprocessor, or one fewer."""
    together = min(3, -(-programs // SMS))
    table = math.ceil(math.ceil(steps / groups) / 16) * 16 * groups * height * 4 + (groups - 1) * bn * height * 4 + 1024
    found = []
    for share in (together, together - 1):
        if share and (slots := (SHARED // share - table) // ((bn + height) * 128)) >= 3:
            found.append(max(2, min(slots, steps, 16)) // groups * groups or groups)
    return list(dict.fromkeys(found))


def _decode_us(m: int, n: int, k: int, height: int, config: dict) -> float:
    """Memory, with the waves' last one partly idle, or the chain of products of a program, whichever is longer."""
    bn, split, groups, stages = (config[name] for name in ("BN", "SPLIT", "GROUPS", "STAGES"))
    programs, steps = math.ceil(n / bn) * split, math.ceil(math.ceil(k / 128) / split)
    together = max(1, min(3, SHARED // (stages * (bn + height) * 128)))
    waves = -(-programs // (SMS * together))
    idle = waves * SMS * together / programs if waves > 1 else max(1.0, SMS / programs)
    read = n * k + (2 * split * m * n * 4 if split > 1 else 2 * m * n) + programs * steps * height * 128 / 4
    ring = min(together, -(-programs // SMS)) * stages * (bn + height) * 128
    memory = read / 4.2e6 * idle * max(1.0, 64_000 / ring)
    return max(memory, waves * steps / groups * 0.2) + (2.0 if split > 1 else 0.0)


def grouped(kind: str, rows: int, pn: int, k: int) -> list[dict]:
    """Neighbours of the choice in use now, which comes first: other heights and widths of a tile, with rings as long as fit."""
    from dsv3_jax.kernels.triton_impl import grouped_gemm

    now, likely = grouped_gemm.choose(kind, rows, pn, k), grouped_gemm.configure(kind, rows)
    found = [now, likely]
    for bm in (likely["BM"], likely["BM"] * 2, likely["BM"] // 2):
        for bn in (128, 256):
            for consumers in (2, 1):
                for swap in (True, False) if rows >= 48 else (True,):
                    config = {"BM": bm, "BN": bn, "STAGES": min(11, SHARED // ((bm + bn) * 128)), "SWAP": swap, "CONSUMERS": consumers}
                    config |= {"PARTS": 1, "COALESCE": bm > 16}
                    if _fits(kind, config):
                        found.append(config)
        found.append(likely | {"BM": bm, "STAGES": max(3, likely["STAGES"] - 2)})
    return [c for c in _distinct(found) if c == now or _fits(kind, c)][:MOST_GROUPED]


def _fits(kind: str, config: dict) -> bool:
    """Whether wgmma has such a tile, its sums fit the registers of a consumer, and a ring of three the shared memory."""
    bm, bn = config["BM"], config["BN"]
    left, right = (bn, bm) if config["SWAP"] else (bm, bn)
    per = left // (config["CONSUMERS"] * config["PARTS"])
    sums = per * right // 128 * (1 if kind == "bf16" else 2)  # registers a thread: a product waits to be scaled
    return (
        per % 64 == 0 and 64 <= per <= 128 and 8 <= right <= 256 and 8 <= bm <= 256 and sums <= 136
        and 3 <= config["STAGES"] <= SHARED // ((bm + bn) * 128)
    )  # fmt: skip


def _distinct(configs: list[dict]) -> list[dict]:
    found: list[dict] = []
    for config in configs:
        if config not in found:
            found.append(config)
    return found
