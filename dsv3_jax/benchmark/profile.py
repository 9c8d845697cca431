"""Where the time of a step goes: a profiler trace of some decode steps, summed by kernel and by part of the model.

Parts are the jax.named_scope names of the model. A kernel belongs to the part of the HLO instruction that it is named after (XLA's
own fusions), or that its `hlo_op` statistic names (library and Triton kernels); inside a CUDA graph that statistic may be missing, and
then only some kernels are known by their own names. XLA_FLAGS=--xla_gpu_enable_command_buffer= runs without graphs, with all names.
"""

from __future__ import annotations

import collections
import dataclasses
import glob
import os
import re
from collections.abc import Callable, Iterable

import jax

PARTS = tuple("embedding norms attention_projections attention router experts shared_experts mlp head sampling".split())
OTHER, GAPS = "other", "gaps"

# Kernels that are ours, by the names of their functions: for those that nothing else tells about.
_OURS = (
    (re.compile(r"mla_|^_decode|^_prefill|^_combine|^_plan|^_attend"), "attention"),
    (re.compile(r"^_?route"), "router"),
    (re.compile(r"rms_norm$"), "norms"),
    (re.compile(r"grouped|sort_by_expert|^_sort|moe_"), "experts"),
)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{\s*$")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLS = re.compile(r"calls=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Event:
    """One kernel on the device: its name, times in nanoseconds, and the HLO instruction that it computes, where the trace says it."""

    name: str
    start_ns: float
    duration_ns: float
    hlo_op: str | None = None


def record(folder: str, run: Callable[[], object]) -> list[Event]:
    """Trace run() into `folder`, for a trace viewer, and return what the first device did."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 2  # on a CPU the kernels are host events
    before = set(_traces(folder))
    with jax.profiler.trace(folder, profiler_options=options):
        jax.block_until_ready(run())
    new = sorted(set(_traces(folder)) - before, key=os.path.getmtime)
    if not new:
        raise RuntimeError(f"the profiler wrote no trace under {folder}")
    return device_events(jax.profiler.ProfileData.from_file(new[-1]))


def _traces(folder: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(folder), "plugins", "profile", "*", "*.xplane.pb"))


def device_events(data) -> list[Event]:
    """The first device's kernels in a jax.profiler.ProfileData, by start; on a CPU what ran as the first device."""
    planes = sorted((p for p in data.planes if p.name.startswith("/device:")), key=lambda p: p.name)
    events = []
    if planes:
        lines = list(planes[0].lines)
        # Streams hold what ran; other lines, where there are any, tell the same again by module or by step.
        for line in [x for x in lines if x.name.startswith("Stream")] or lines:
            events += [Event(e.name, e.start_ns, e.duration_ns, _text(dict(e.stats).get("hlo_op"))) for e in line.events]
    else:
        for line in (line for plane in data.planes if plane.name == "/host:CPU" for line in plane.lines):
            for e in line.events:
                stats = dict(e.stats)
                # A loop's own event spans those of the kernels in it.
                if stats.get("device_ordinal", 0) == 0 and not re.match(r"(while|call|conditional)\b", str(stats.get("hlo_op", "call"))):
                    events.append(Event(e.name, e.start_ns, e.duration_ns, _text(stats["hlo_op"])))
    return sorted(events, key=lambda e: e.start_ns)


def _text(value) -> str | None:
    return str(value) if value else None


def part_of_scope(op_name: str) -> str | None:
    """The innermost part in an op_name such as 'jit(decode)/attention/shard_map/dot_general'."""
    return next((p for p in reversed(op_name.split("/")) if p in PARTS), None)


def parts_of_hlo(text: str) -> dict[str, str]:
    """Instruction -> part, from the text of a compiled program.

    A fusion belongs where its matrix product does, if it has one: what it ends with may be the next part's. Without either, it
    belongs where most of its content does.
    """
    parts: dict[str, str] = {}
    product: dict[str, str] = {}  # by computation, as `inside`
    inside: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    calls: dict[str, str] = {}
    computation = ""
    for line in text.splitlines():
        if (instruction := _INSTRUCTION.match(line)) is None:
            header = _COMPUTATION.match(line)
            computation = header[1] if header else computation
            continue
        if (called := _CALLS.search(line)) is not None:
            calls[instruction[1]] = called[1]
        scope = _OP_NAME.search(line)
        if scope is not None and (part := part_of_scope(scope[1])) is not None:
            parts[instruction[1]] = part
            inside[computation][part] += 1
            if " dot(" in line:
                product[computation] = part
    for instruction, called in calls.items():
        if called in product:
            parts[instruction] = product[called]
        elif instruction not in parts and inside[called]:
            parts[instruction] = inside[called].most_common(1)[0][0]
    return parts


class Namer:
    """Says to which part an event belongs, given parts_of_hlo."""

    def __init__(self, parts: dict[str, str]):
        self._by_op = parts
        self._by_kernel = {_as_kernel(op): part for op, part in parts.items()}

    def __call__(self, event: Event) -> str:
        if (part := self._by_kernel.get(_as_kernel(event.name))) is not None:
            return part
        # A command buffer is one instruction around many kernels of all parts.
        if event.hlo_op is not None and not re.match(r"command_buffer|call\b", event.hlo_op) and event.hlo_op in self._by_op:
            return self._by_op[event.hlo_op]
        return next((part for pattern, part in _OURS if pattern.search(event.name)), OTHER)


def _as_kernel(instruction: str) -> str:
    return re.sub(r"[.\-]", "_", instruction)


def by_kernel(events: Iterable[Event], steps: int) -> list[dict]:
    """Rows (kernel, per_step, us_per_step, share), longest first; share is of the sum of all kernels' times."""
    count, time = collections.Counter[str](), collections.defaultdict[str, float](float)
    for e in events:
        count[e.name] += 1
        time[e.name] += e.duration_ns
    total = sum(time.values()) or 1
    return [
        {"kernel": name, "per_step": count[name] / steps, "us_per_step": ns / steps / 1e3, "share": ns / total}
        for name, ns in sorted(time.items(), key=lambda item: -item[1])
    ]


def by_part(events: Iterable[Event], part_of: Callable[[Event], str], steps: int, step_us: float) -> list[dict]:
    """Rows (part, kernels_per_step, us_per_step, share), share being of step_us, the time of a step when nothing is traced.

    The last row, gaps, is what is left of step_us when no kernel runs. It can be below zero where tracing slows the kernels down, and
    kernels that run side by side count in full in their parts, once in the gaps.
    """
    events = list(events)
    count, time = collections.Counter[str](), collections.defaultdict[str, float](float)
    for e in events:
        part = part_of(e)
        count[part] += 1
        time[part] += e.duration_ns
    rows = [(part, count[part] / steps, time[part] / steps / 1e3) for part in (*PARTS, OTHER) if count[part]]
    rows.append((GAPS, 0.0, step_us - busy_ns(events) / steps / 1e3))
    return [{"part": part, "kernels_per_step": n, "us_per_step": us, "share": us / step_us} for part, n, us in rows]


def busy_ns(events: Iterable[Event]) -> float:
    """The time in which at least one kernel runs."""
    busy, end = 0.0, float("-inf")
    for start, stop in sorted((e.start_ns, e.start_ns + e.duration_ns) for e in events):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy


def show(kernels: list[dict], parts: list[dict], most: int = 25) -> str:
    """Both tables as text: every part, and the `most` longest kernels."""
    lines = [f"{'part':<40}{'kernels':>9}{'us/step':>11}{'share':>8}"]
    lines += [f"{r['part']:<40}{r['kernels_per_step']:>9.1f}{r['us_per_step']:>11.1f}{r['share']:>8.1%}" for r in parts]
    lines += ["", f"{'kernel':<58}{'/step':>8}{'us/step':>11}{'share':>8}"]
    lines += [f"{r['kernel'][:56]:<58}{r['per_step']:>8.1f}{r['us_per_step']:>11.1f}{r['share']:>8.1%}" for r in kernels[:most]]
    if len(rest := kernels[most:]):
        figures = (sum(r[key] for r in rest) for key in ("per_step", "us_per_step", "share"))
        lines.append("{:<58}{:>8.1f}{:>11.1f}{:>8.1%}".format(f"{len(rest)} more", *figures))
    return "\n".join(lines)
