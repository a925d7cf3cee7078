"""Samples of an invented experiment with known figures.

At a rate of r Mbit/s a step of P/C takes COMPUTE + RECOMPUTE (block alone) + WEIGHTS * 8 / r +
gradient bytes * 8 / r + PACKING (lossy alone) seconds; repetition n adds n * `drift` to compute.
Weights that are not ZeRO-3's are not gathered; CHANGED is sent in the update.
"""

from ds_ckpt.lab.measure.samples import PARTS, Memory, Sample, StepTime, Trial
from ds_ckpt.lab.measure.spec import Configuration, Spec

COMPUTE_S, RECOMPUTE_S, PACKING_S = 0.4, 0.1, 0.02
WEIGHTS_MB = 20.0
GRADIENTS_MB = {"stock": 20.0, "dense": 10.0, "4bit": 1.25, "no_comm": 0.0}
GRADIENTS_MB |= {"topk": 0.2, "powersgd": 0.5, "3bit": 1.0}
CHANGED_MB = {"whole": 8.0, "lossless": 2.0, "zero2": 8.0}
STORED_MB = {"stock": 1.0, "whole": 2.0, "lossless": 2.0, "zero2": 1.5}
SPEC = Spec(methods=("4bit",), rates=(100.0, 400.0, 1600.0), repetitions=5)


def seconds(mb: float, rate_mbit: float) -> float:
    return 8 * mb / rate_mbit


def step(name: str, rate_mbit: float, more_s: float = 0.0) -> StepTime:
    one = Configuration.of(name)
    half = WEIGHTS_MB / 2 if one.weights == "stock" else 0.0
    parts = dict.fromkeys(PARTS, 0.0)
    parts["compute_forward"] = (COMPUTE_S + more_s) / 4
    parts["compute_backward"] = (COMPUTE_S + more_s) / 2
    parts["compute_update"] = (COMPUTE_S + more_s) / 4
    parts["network_forward"] = seconds(half, rate_mbit)
    parts["network_backward"] = seconds(GRADIENTS_MB[one.method], rate_mbit)
    parts["network_update"] = seconds(CHANGED_MB.get(one.weights, 0.0), rate_mbit)
    if one.policy == "block":
        parts["recompute"] = RECOMPUTE_S
        parts["network_recompute"] = seconds(half, rate_mbit)
    else:
        parts["network_backward"] += seconds(half, rate_mbit)
    if one.method == "4bit":
        parts["compression"] = PACKING_S
    return StepTime(step_s=sum(parts.values()), parts_s=parts)


def trial(spec: Spec, name: str, rate: float | None, repetition: int, drift: float) -> Trial:
    one = Configuration.of(name)
    gathers = WEIGHTS_MB if one.weights == "stock" else 0.0
    changed, gradients = CHANGED_MB.get(one.weights, 0.0), GRADIENTS_MB[one.method]
    mb = gathers + changed + gradients
    far = {"gather_forward": gathers, "weights": changed, "reduce": gradients}
    return Trial(
        configuration=name,
        rate_mbit=rate,
        repetition=repetition,
        steps=(step(name, rate or 1e4, repetition * drift),) * spec.steps,
        far_bytes={purpose: 2e6 * n for purpose, n in far.items()},
        interface_bytes=(mb * 1e6, mb * 1e6 - 5),
        stored_weight_bytes=STORED_MB[one.weights] * 1e6,
    )


def samples(spec: Spec = SPEC, drift: float = 0.0) -> list[Sample]:
    found: list[Sample] = []
    for one in spec.configurations:
        for rate in spec.rates:
            found += [trial(spec, one.name, rate, n, drift) for n in range(spec.repetitions)]
        if one.exchange == "dense":  # measured with every policy
            peak = 1_000_000 * (4 if one.policy == "none" else 2)
            found.append(Memory(policy=one.policy, peak_bytes=peak))
    return found
