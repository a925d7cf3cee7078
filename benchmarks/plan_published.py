"""Simulated steps beside speeds that others have published.

    python benchmarks/plan_published.py

Nothing is fitted: `hardware.json` gives the accelerators. The share of peak there is of DeepSpeed's
kind of program; where a source says which its own program reaches without recomputing, a second
column has the step with that. A point says where it was read. FSDP is simulated as ZeRO-3: it
gathers and reduces the same bytes. HYBRID_SHARD (HSDP) gathers inside a host alone, and sums
gradients inside a host and then between hosts by an all-reduce of each part. ZeRO++ is that of
`plan_tables.py`. torchtitan does not say what its links are: 400 Gbit/s is a guess.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from plan_tables import zeropp

from ds_ckpt.lab.estimate.methods import PlanMethod
from ds_ckpt.lab.estimate.model import Model
from ds_ckpt.lab.estimate.search import NEEDED, ZERO3, PlanOption, Question, Search, Setting
from ds_ckpt.lab.estimate.simulate import Weights
from ds_ckpt.lab.hosts.hardware import Hardware
from ds_ckpt.lab.subject import Sizes
from ds_ckpt.lab.workload import STOCK

FMS = "foundation-model-stack/fms-fsdp, README"
TITAN = "pytorch/torchtitan, docs/performance.md"
BLOG = "DeepSpeed, blogs/zeropp"
GPT_18B = {
    "model_type": "gpt_neox",
    "architectures": ["GPTNeoXForCausalLM"],
    "hidden_size": 6144,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "intermediate_size": 24576,
    "vocab_size": 50304,
    "max_position_embeddings": 2048,
}
"""The shape of DeepSpeed's tutorial on ZeRO++."""
CODE_LLAMA_34B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 22016,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


def hybrid(one: PlanOption) -> PlanOption:
    """PyTorch's HYBRID_SHARD."""
    machine, strategy = one.machine, one.strategy
    hosts, local, size = machine.hosts, machine.local, strategy.itemsize
    gradients = replace(
        strategy.gradients,
        link_bytes=2 * size * (hosts - 1) / hosts,
        inside_bytes=size * (local - 1) / local,
        hops=2 * (hosts - 1),
        ring=False,
    )
    changed = replace(strategy, weights=Weights(0.0), gradients=gradients)
    return replace(one, strategy=changed)


def zero3(one: PlanOption) -> PlanOption:
    return one


@dataclass(frozen=True)
class Point:
    """Tokens a second and GPU; of ZeRO++ as a multiple of ZeRO-3's.

    Attributes:
        model: by name, or its configuration.
        batch: sequences of a GPU, one micro-step.
    """

    what: str
    source: str
    cluster: str
    model: str | dict[str, Any]
    tokens: int
    batch: int
    policy: str
    way: Callable[[PlanOption], PlanOption]
    published: tuple[float, float]
    dtype: str = "bf16"


SHARES = {FMS: 0.57, TITAN: 0.611}
"""Shares of an A100's peak: the 7B without recompute (thebeat.tech on IBM and Meta: 57%), and the
13B without recompute (the page itself)."""
A100, H100 = "16 nodes x 8 A100 80 GB, 400 Gbit/s", "12 nodes x 8 H100, 800 Gbit/s"
TITANS = "8 nodes x 8 A100 80 GB, 400 Gbit/s"
V100 = "24 nodes x 16 V100, {} Gbit/s"
POINTS = (
    Point("7B, HSDP", FMS, A100, "llama-7b", 4096, 2, "none", hybrid, (3700, 3760)),
    Point("7B, HSDP, H100", FMS, H100, "llama-7b", 4096, 2, "none", hybrid, (7500, 7500)),
    Point("13B, HSDP", FMS, A100, "llama-13b", 4096, 1, "none", hybrid, (1700, 1700)),
    Point("34B, FSDP", FMS, A100, CODE_LLAMA_34B, 4096, 2, "block", zero3, (700, 700)),
    Point("70B, FSDP", FMS, A100, "llama-70b", 4096, 6, "block", zero3, (380, 380)),
    Point("13B, FSDP", TITAN, TITANS, "llama-13b", 4096, 2, "none", zero3, (2162, 2162)),
    Point("70B, FSDP", TITAN, TITANS, "llama-70b", 4096, 2, "block", zero3, (353, 353)),
    *(
        Point(
            f"18B, ZeRO++ over ZeRO-3, {words} tokens",
            BLOG,
            V100.format(rate),
            GPT_18B,
            512,
            batch,
            "block",
            zeropp,
            published,
            "fp16",
        )
        for rate, words, batch, published in (
            (400, "1k", 2, (1.28, 1.36)),
            (400, "2k", 4, (1.24, 1.29)),
            (100, "1k", 2, (2.0, 2.2)),
        )
    ),
)


def simulated(point: Point, model: Model, share: float | None = None) -> float:
    known = Hardware.load(None, "--cluster")
    cluster = known.cluster(point.cluster, NEEDED)
    inside = known.entry("links", "inside a node", ("latency_s",))
    known.raise_problems()
    assert cluster is not None
    if share is not None:
        device = cluster.device
        own = replace(device, values={**device.values, "share_of_peak": share})
        cluster = replace(cluster, device=own)
    batch = point.batch * cluster.devices
    search = Search(Question(model, cluster, inside["latency_s"], batch, "any", point.dtype))
    setting = Setting(point.batch, 1, point.policy, False, ZERO3, PlanMethod(STOCK))
    plain = search.uniform(setting, point.policy)
    found = point.way(plain)
    if point.way is zeropp:
        return plain.step.seconds / found.step.seconds
    return point.batch * point.tokens / found.step.seconds


def main() -> None:
    print(
        "| | read in | cluster | published | simulated | off | with its own share of peak | off |"
        "\n|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    models: dict[str, Model] = {}
    for point in POINTS:
        key = json.dumps([point.model, point.tokens, point.dtype])
        if key not in models:
            sizes = Sizes(point.tokens, torch.float16 if point.dtype == "fp16" else torch.bfloat16)
            with tempfile.TemporaryDirectory() as folder:
                name = point.model
                if isinstance(name, dict):
                    path = Path(folder) / "config.json"
                    path.write_text(json.dumps(name))
                    name = str(path)
                models[key] = Model(name, sizes)
        low, high = point.published
        ratio = point.way is zeropp
        cells = [f"{low:g}" if low == high else f"{low:g} to {high:g}"]
        own = SHARES.get(point.source)
        for share in (None, own if "A100" in point.cluster else None):
            if share is None and len(cells) > 1:
                cells += ["", ""]
                continue
            found = simulated(point, models[key], share)
            nearest = min(max(found, low), high)
            cells += [f"{found:.{2 if ratio else 0}f}", f"{found / nearest - 1:+.0%}"]
        cells = [point.what, point.source, point.cluster, *cells]
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
