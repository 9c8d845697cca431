"""Make the golden answers with transformers' own classes; needs torch, so it runs in an environment of its own.

    python tests/golden/make_golden.py --oracle_dir DIR [--only v3,v3_dec]

DIR holds an implementation that shares no code with this project: families.py (configs), hf_run.py (transformers with hooks),
spec_model.py (float64), ckpt.py, quant.py, make_oracle.py. The Python needs torch, transformers 5, numpy, ml_dtypes, jinja2.
Seeds are tried until no routing decision and no greedy step is a near tie, so that float32 rounding cannot change an answer.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import types

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
DECISIVE = ("v2lite", "v2", "v3", "kimi_k2", "v3_fp8", "v31_ue8m0", "kimi_k2_fp8", "tiny")
WITH_LINEARS, WITH_CHATS = ("v3_fp8", "v31_ue8m0"), ("v2lite", "v3", "v31_ue8m0", "kimi_k2")
# Positions whose logits are kept, by sequence length: the files stay small, and every position still shapes the later ones.
KEEP = {
    1: [0], 7: [*range(7)], 19: [0, 1, 2, 4, 7, 9, 12, 15, 18], 48: [0, 1, 3, 8, 13, 20, 26, 31, 37, 42, 46, 47],
    200: [0, 40, 63, 64, 65, 100, 128, 170, 198, 199],
}  # fmt: skip
KEEP_MTP = [0, 1, 9, 17]
LIN_ROWS = 4


def project_module(name: str):
    """Import one module of the project without running dsv3_jax/__init__.py, which needs jax."""
    for package in ("dsv3_jax", "dsv3_jax.checkpoint"):
        if package not in sys.modules:
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = [os.path.join(ROOT, *package.split("."))]
    return importlib.import_module(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oracle_dir", required=True)
    parser.add_argument("--only", default="", help="comma-separated families; the default is all")
    args = parser.parse_args()
    sys.path[:0] = [os.path.abspath(args.oracle_dir), HERE]
    project_module("dsv3_jax.checkpoint.tiny")
    os.makedirs(os.path.join(HERE, "data"), exist_ok=True)
    index, chats = _read("families.json"), _read("chats.json")
    for name in ("families.json", "chats.json"):
        _write(name, _read(name))  # load.py reads the first when it is imported
    import families

    with open(os.path.join(ROOT, "configs", "tiny.json"), encoding="utf-8") as f:
        configs = {**families.FAMILIES, "tiny": json.load(f)}
    todo = [*configs, *(f"{name}_dec" for name in DECISIVE)]
    for family in todo:
        if args.only and family not in args.only.split(","):
            continue
        with tempfile.TemporaryDirectory() as folder:
            index[family] = answer(family, configs[family.removesuffix("_dec")], folder, chats)
        _write("families.json", {name: index[name] for name in todo if name in index})
        _write("chats.json", chats)


def answer(family: str, config: dict, folder: str, chats: dict) -> dict:
    """Find a well separated checkpoint, write its answers to data/FAMILY.npz and return its entry in families.json."""
    import ckpt
    import hf_run
    import load
    import make_oracle
    import numpy as np
    import spec_model
    import torch

    torch.set_num_threads(1)
    config, decisive, fp8 = json.loads(json.dumps(config)), family.endswith("_dec"), "quantization_config" in config
    long = family.endswith("_long") or family in ("v3_mscale", "tiny")
    entry = {
        "config": config, "seed": 0, "decisive": decisive, "dtype": "bfloat16" if fp8 or decisive else "float32",
        # A negative mean makes biased scores negative, where masking dropped groups with 0 instead of -inf would show.
        "bias_mean": -1.0 if family.startswith("v3") else 3.0,
    }  # fmt: skip
    need = (0.02 if config["topk_method"] == "noaux_tc" else 0.006) if decisive else make_oracle.MIN_ROUTE_MARGIN
    sequences, prompts = make_oracle.sequences(config, 0, long)
    for seed in range(1000):
        entry["seed"], path = seed, os.path.join(folder, str(seed))
        load.make(path, entry)
        if seed == 0:
            rendered = [render(path, messages) for messages in MESSAGES]
            prompts = prompts + [chat["ids"] for chat in rendered]
            if family in WITH_CHATS:
                chats[family] = rendered
        spec = spec_model.Spec(config, ckpt.dequantise(ckpt.load_ckpt(path)[1]))
        truth = [[spec.main(row) for row in s] for s in sequences]
        margin = min(float(min(r[2].min(), r[3].min())) for rows in truth for row in rows for r in row["router"].values())
        if margin <= need:
            continue
        model = hf_run.load(path)
        greedy = [hf_run.greedy(model, p) for p in prompts]
        if min(min(g[1]) for g in greedy) > make_oracle.MIN_GREEDY_MARGIN:
            break
    else:
        raise SystemExit(f"{family}: no well separated weights found")
    versions = {"torch": torch.__version__, "transformers": hf_run.transformers.__version__}
    entry |= {"sha256": load.digest(path), "route_margin": margin, "greedy_margin": min(min(g[1]) for g in greedy), "versions": versions}

    out, error, runs = {}, 0.0, []
    keep = [KEEP[s.shape[1]] for s in sequences]
    for i, s in enumerate(sequences):
        run = hf_run.run(model, s)
        runs.append(run)
        error = max(error, float((run["logits"].double() - torch.stack([row["logits"] for row in truth[i]])).abs().max()))
        out |= {f"seq{i}.input_ids": s.to(torch.int16), f"seq{i}.positions": np.uint8(keep[i]), f"seq{i}.logits": run["logits"][:, keep[i]]}
        for layer, (indices, weights, _) in run["router"].items():
            want = torch.stack([row["router"][layer][0] for row in truth[i]]).sort(-1).values
            assert torch.equal(want.view(indices.shape), indices), f"{family}: transformers and the float64 model route differently"
            out[f"seq{i}.router.{layer}.indices"] = indices.view(*s.shape, -1).to(torch.uint8)
            out[f"seq{i}.router.{layer}.weights"] = weights.view(*s.shape, -1)[:, keep[i]]
    for i, (p, g) in enumerate(zip(prompts, greedy, strict=True)):
        out |= {f"greedy{i}.prompt": np.int32(p), f"greedy{i}.tokens": np.int32(g[0])}
    if config.get("num_nextn_predict_layers"):
        mtp = make_oracle.mtp_pass(spec, sequences[2], runs[2]["final"].double(), runs[2]["hidden"][-1].double())
        out |= {"mtp.seq2.positions": np.uint8(KEEP_MTP), "mtp.seq2.router.indices": mtp["rin"].to(torch.uint8)}
        out |= {f"mtp.seq2.logits_{side}": mtp[side][:, KEEP_MTP].float() for side in ("post", "pre")}
    if fp8:
        for kind in ("absorb", "naive"):
            table = make_oracle.fmt_table(config, False, kind == "absorb")
            quantised = hf_run.act_quant_patch(hf_run.load(path), config, table)
            for i, s in enumerate(sequences):
                if s.shape[1] >= 19:
                    out[f"seq{i}.logits_actq_{kind}"] = hf_run.run(quantised, s)["logits"][:, keep[i]]
    if family in WITH_LINEARS:
        bits = make_oracle.fp8_units(model, config, sequences[1])
        fmt = config["quantization_config"].get("scale_fmt") or "f32"
        names = {"x": "x", f"codes_{fmt}": "codes", f"scale_{fmt}": "scale", f"y_{fmt}": "y"}
        for key, value in bits.items():
            stem, _, part = key.rpartition(".")
            if stem.startswith("lin.") and part in names:
                out[f"{stem}.{names[part]}"] = value[:LIN_ROWS]
        units = {k.removeprefix("unit."): v.numpy() for k, v in bits.items() if k.startswith("unit.")}
        for key in ("x", "codes_f32", "codes_ue8m0", "scale_f32", "scale_ue8m0"):  # half of the columns: blocks are independent
            value = units[f"weight.{key}"]
            units[f"weight.{key}"] = value[:, : value.shape[1] // 2]
        np.savez_compressed(os.path.join(HERE, "data", "fp8_units.npz"), **units)
    arrays = {k: v.contiguous().numpy() if isinstance(v, torch.Tensor) else v for k, v in out.items()}
    file = os.path.join(HERE, "data", f"{family}.npz")
    np.savez_compressed(file, **arrays)
    print(f"{family}: seed {entry['seed']}, route margin {margin:.1e}, greedy margin {entry['greedy_margin']:.1e}, "
          f"float32 against float64 {error:.1e}, {os.path.getsize(file) / 1e3:.0f} kB", flush=True)  # fmt: skip
    return entry


MESSAGES = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Count to 3."},
        {"role": "assistant", "content": "<think>easy</think>1 2 3"},
        {"role": "user", "content": "¿Y 42? 你好"},
    ],
]


def render(path: str, messages: list[dict]) -> dict:
    """A chat prompt as jinja2 and tokenizers make it, without transformers."""
    import jinja2
    import tokenizers

    with open(os.path.join(path, "tokenizer_config.json"), encoding="utf-8") as f:
        config = json.load(f)
    template = config.get("chat_template")
    if template is None:
        with open(os.path.join(path, "chat_template.jinja"), encoding="utf-8") as f:
            template = f.read()
    names = {key: config[key]["content"] for key in ("bos_token", "eos_token")}
    text = jinja2.Template(template, trim_blocks=True, lstrip_blocks=True).render(messages=messages, add_generation_prompt=True, **names)
    ids = tokenizers.Tokenizer.from_file(os.path.join(path, "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return {"messages": messages, "text": text, "ids": ids}


def _read(name: str) -> dict:
    path = os.path.join(HERE, "data", name)
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def _write(name: str, content: dict) -> None:
    with open(os.path.join(HERE, "data", name), "w", encoding="utf-8") as f:
        json.dump(content, f, indent=1, ensure_ascii=False)
        f.write("\n")


if __name__ == "__main__":
    main()
