"""Times one batch at one context through an engine's own compiled steps, and counts the bytes that a step has to read.

B rows, L MoE layers, K num_experts_per_tok, E n_routed_experts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from dsv3_jax.generation import sampling as sampling_lib
from dsv3_jax.generation import steps as steps_lib
from dsv3_jax.generation.engine import Engine
from dsv3_jax.generation.requests import Request
from dsv3_jax.generation.sampling import Sampling
from dsv3_jax.model.cache import KVCache

REPEATS = 3
WARM_UP = 4  # decode steps before those that are timed
COPIED = 2 * 10**9  # bytes, far more than any cache of a GPU


@dataclasses.dataclass
class Started:
    """A batch after its first token, and the seconds that took; cache and rows are given up to the next decode step."""

    cache: KVCache
    rows: steps_lib.Rows
    prefill_s: float
    first_token_s: float


class Run:
    """`batch` random prompts of `context` tokens; each row samples at temperature 1 with a seed of its own.

    Greedy decoding of random weights soon repeats one token in every row, and with it one set of experts.
    """

    def __init__(self, engine: Engine, batch: int, context: int, steps: int, seed: int):
        assert steps % steps_lib.DECODED == 0, "a decode call makes so many steps"
        self.engine, self.batch, self.context, self.steps = engine, batch, context, steps
        tokens = np.random.default_rng((seed, batch, context)).integers(0, engine.config.vocab_size, (batch, context))
        self.requests = [Request(row, Sampling(temperature=1.0, seed=seed + i), 2**30) for i, row in enumerate(tokens.tolist())]
        self.mode = sampling_lib.mode([r.sampling for r in self.requests])

    def start(self) -> Started:
        """As Engine.generate does it: an empty cache, the prompts chunk by chunk, the first token on the host."""
        e, prompts = self.engine, [r.tokens for r in self.requests]
        began = time.perf_counter()
        cache = e._start(prompts, self.context + self.steps + WARM_UP)
        rows = e._rows(self.requests, [], cache.lengths.shape[0])
        cache, logits = e._read(prompts, cache)
        logits.block_until_ready()
        prefilled = time.perf_counter()
        rows = e._choose(logits, cache.lengths, rows, mode=self.mode)
        _check(np.asarray(rows.token))
        return Started(cache, rows, prefilled - began, time.perf_counter() - began)

    def _first_token(self) -> tuple[float, float]:
        started = self.start()  # its cache goes away with it, before the next one is made
        return started.prefill_s, started.first_token_s

    def decode(self, cache: KVCache, rows: steps_lib.Rows, steps: int) -> tuple[KVCache, steps_lib.Rows, np.ndarray]:
        """`steps` decode steps, as Engine.generate dispatches them, the host reading one call behind.

        Returns the cache, the rows, and the tokens (steps, B) that the steps appended.
        """
        e, unread, read = self.engine, [rows.token[None]], []
        for _ in range(steps // steps_lib.DECODED):
            cache, rows, tokens = e._decode(e.params, cache, rows, mode=self.mode)
            unread.append(tokens)
            read.append(np.asarray(unread.pop(0)))
        jax.block_until_ready((cache, rows))
        _check(np.asarray(rows.token))
        read.append(np.asarray(unread.pop(0)))
        return cache, rows, np.concatenate(read)[:-1]

    def rewind(self, cache: KVCache, lengths: np.ndarray) -> KVCache:
        """The cache as it was at `lengths` (B,): what lies beyond is written anew before it is read."""
        return dataclasses.replace(cache, lengths=jax.device_put(lengths, self.engine.sharding.named("batch")))

    def compile_times(self) -> tuple[float, float]:
        """Seconds until the first token and the first decode call are there: from nothing, and with the persistent cache filled so."""
        return self._first_calls(), self._first_calls()

    def _first_calls(self) -> float:
        forget_programs()
        began = time.perf_counter()
        started = self.start()
        self.decode(started.cache, started.rows, steps_lib.DECODED)
        return time.perf_counter() - began

    def measure(self) -> tuple[dict, Started]:
        """Figures of prefill and decode, medians of REPEATS, and the batch at its context again."""
        self._first_token()  # compiles
        prefills = [self._first_token() for _ in range(REPEATS)]
        started = self.start()
        cache, rows, _ = self.decode(started.cache, started.rows, WARM_UP)
        lengths, times, tokens = lengths_of(cache), [], np.zeros(0)
        for _ in range(REPEATS):
            cache = self.rewind(cache, lengths)
            jax.block_until_ready((cache, rows))
            began = time.perf_counter()
            cache, _, tokens = self.decode(cache, rows, self.steps)
            times.append(time.perf_counter() - began)
        prefill_s, first_token_s = (statistics.median(column) for column in zip(*prefills, strict=True))
        step_s = statistics.median(times) / self.steps
        cache, hit = self._experts_hit(self.rewind(cache, lengths), tokens)
        figures = {
            "prefill_ms": prefill_s * 1e3,
            "prefill_tok_s": self.batch * self.context / prefill_s,
            "prefill_tflops": prefill_flops(self.engine, self.batch * self.context) / prefill_s / 1e12,
            "time_to_first_token_ms": first_token_s * 1e3,
            "decode_ms_per_step": step_s * 1e3,
            "decode_tok_s": self.batch / step_s,
            "experts_hit": hit,
            "experts_expected": self._experts_expected() if hit is not None else None,
        }
        return figures, Started(self.rewind(cache, lengths), rows, prefill_s, first_token_s)

    @property
    def groups(self) -> int:
        """Parts of the batch that have experts of their own: data rows, unless experts are spread over them too."""
        return 1 if "data" in self.engine.sharding.expert_axes else self.engine.sharding.size("batch")

    def _experts_hit(self, cache: KVCache, tokens: np.ndarray) -> tuple[KVCache, float | None]:
        """Experts of a layer that a step reads, on average over layers and the measured steps, which are run again with these tokens."""
        e, config = self.engine, self.engine.config
        if not any(config.is_moe_layer(i) for i in range(config.num_hidden_layers)):
            return cache, None
        if tokens.shape[1] == self.groups:  # a row reads the experts that it is routed to
            return cache, float(config.num_experts_per_tok)
        real = np.arange(tokens.shape[1]) < self.batch
        by_row, new = e.sharding.named("batch", None), jax.device_put(real.astype(np.int32), e.sharding.named("batch"))
        hits = []
        for row in tokens:
            cache, _, ids, _ = e._append_all(e.params, cache, None, jax.device_put(row[:, None], by_row), new)
            hits.append(hits_of(np.asarray(ids)[:, :, 0], real, self.groups))
        return cache, float(np.mean(hits))

    def _experts_expected(self) -> float:
        e, k = self.engine.config.n_routed_experts, self.engine.config.num_experts_per_tok
        return e * (1 - (1 - k / e) ** (self.batch / self.groups))


def lengths_of(cache: KVCache) -> np.ndarray:
    """The slots in use of every row (B,), on the host; of several processes each gets all."""
    return np.asarray(jax.sharding.reshard(cache.lengths, jax.P()))


def hits_of(ids: np.ndarray, real: np.ndarray, groups: int) -> float:
    """Different experts in ids (L, B, K) among the rows that are real (B,), for each layer and group of rows: the mean."""
    parts = zip(np.split(ids, groups, axis=1), np.split(real, groups), strict=True)
    return float(np.mean([len(np.unique(layer[mine])) for part, mine in parts for layer in part]))


def _check(token: np.ndarray) -> None:
    if (token == steps_lib.BROKEN).any():
        raise RuntimeError("the model's logits are not finite: nothing that is measured here would mean anything")


def leaves(params) -> list[tuple[tuple[str, ...], jax.Array]]:
    """Every parameter with its path."""
    return [(tuple(str(k.key) for k in path), a) for path, a in jax.tree_util.tree_leaves_with_path(params)]


def bytes_here(array: jax.Array) -> int:
    """Bytes of an array on one device."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def step_bytes(run: Run, cache: KVCache, hit: float | None) -> int:
    """Bytes that one device has to read in one decode step: the weights, of experts those that are hit, and the cache in use."""
    total = 0.0
    for path, a in leaves(run.engine.params):
        if path[0] in ("embed_tokens", "rope"):
            continue  # a row a token
        total += bytes_here(a) * (hit or 0) / run.engine.config.n_routed_experts if "experts" in path else bytes_here(a)
    slots = cache.layers[0][0].shape[1]
    used = (run.context + WARM_UP + (run.steps + 1) / 2) / slots * run.batch / len(cache.lengths)
    return round(total + used * sum(bytes_here(a) for layer in cache.layers for a in layer))


def prefill_flops(engine: Engine, tokens: int) -> float:
    """Operations of the products with weights, per device: twice each weight and token, of experts those that a token is routed to."""
    share = engine.config.num_experts_per_tok / engine.config.n_routed_experts
    weights = 0.0
    for path, a in leaves(engine.params):
        if path[0] not in ("embed_tokens", "rope", "lm_head") and path[-1] != "weight_scale_inv" and a.ndim > 1:
            weights += a.size * (share if "experts" in path else 1)
    return 2 * weights * tokens / engine.sharding.mesh.size


def copy_rate(devices, size: int = COPIED, repeats: int = 20) -> float:
    """Bytes per second, read and written, at which the first device of `devices` copies an array of `size` bytes."""
    x = jnp.zeros(size // 4, jnp.uint32, device=devices[0])
    copy = jax.jit(lambda a: a ^ 1)  # a kernel that touches every byte; a plain copy can be left to the copy engine, or left out
    times = []
    for n in (1, *(repeats,) * REPEATS):
        x = copy(x).block_until_ready()
        began = time.perf_counter()
        for _ in range(n):
            x = copy(x)
        x.block_until_ready()
        times.append((time.perf_counter() - began) / n)
    return 2 * x.nbytes / statistics.median(times[1:])


@contextlib.contextmanager
def own_compilation_cache():
    """Within it, compiled programs and Triton's kernels are kept in an empty folder, which is removed at the end."""
    before, triton_before = jax.config.jax_compilation_cache_dir, os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        try:
            jax.config.update("jax_compilation_cache_dir", folder)
            os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
            compilation_cache.reset_cache()
            yield
        finally:
            jax.config.update("jax_compilation_cache_dir", before)
            os.environ.pop("TRITON_CACHE_DIR", None)
            os.environ.update({} if triton_before is None else {"TRITON_CACHE_DIR": triton_before})
            compilation_cache.reset_cache()


def forget_programs() -> None:
    """Forget what this process has compiled, jax_triton's kernels too."""
    jax.clear_caches()
    for name, module in list(sys.modules.items()):
        if name.startswith("dsv3_jax.kernels.triton_impl"):
            for value in vars(module).values():
                getattr(value, "_jT_kernel_cache", {}).clear()
