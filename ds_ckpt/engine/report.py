"""Clauses of a run's report: activations and gradient bytes, with the plugin and without."""

from collections import Counter
from collections.abc import Sequence

from ds_ckpt.activation.planning.fake import Forward
from ds_ckpt.activation.planning.trace import trace_fake_step
from ds_ckpt.activation.policies import Unit
from ds_ckpt.config.activation import ActivationConfig
from ds_ckpt.engine.gradients import Gradients
from ds_ckpt.errors import UnsupportedError
from ds_ckpt.telemetry import Counters, Purpose
from ds_ckpt.telemetry.units import MB, number, size


class GradientBytes:
    """Counts the gradient bytes that this rank sends, by mode of the step."""

    def __init__(self, counters: Counters, gradients: Gradients) -> None:
        self._counters, self._gradients = counters, gradients
        self._seen = counters.bytes_sent[Purpose.REDUCE]
        self._bytes, self._steps = Counter[str](), Counter[str]()

    def step_ended(self, step: int) -> None:
        """Count a step."""
        mode, before = self._gradients.step.latest_mode, self._seen
        self._seen = self._counters.bytes_sent[Purpose.REDUCE]
        self._bytes[mode] += self._seen - before
        self._steps[mode] += 1

    def describe(self) -> str:
        """Return the mean of a step by mode; without a step to compare with, a computed one."""
        mean = {mode: self._bytes[mode] / n / MB for mode, n in sorted(self._steps.items())}
        facts = [f"{m} {number(mb)} MB (steps: {self._steps[m]})" for m, mb in mean.items()]
        if [*mean] == ["compressed"]:
            without = mean["compressed"] + self._gradients.sample().saved_bytes / MB
            facts.append(f"uncompressed {number(without)} MB (computed)")
        return f"gradients sent per rank and step: {', '.join(facts) or 'none yet'}"


def describe_activations(forward: Forward, units: Sequence[Unit], config: ActivationConfig) -> str:
    """Return the bytes that a forward keeps for backward, with the policy's units and without."""
    try:
        ours, none = trace_fake_step(forward, units, config), trace_fake_step(forward, ())
    except UnsupportedError as error:
        return f"activations: not computed, {error.problems[0].found}"
    words = f" ({size(ours.offloaded_bytes)} in host memory)" if ours.offloaded_bytes else ""
    words += ", before they are split between ranks" if config.partition else ""
    kept, without = size(ours.saved.bytes), size(none.saved.bytes)
    return f"activations kept per rank: {kept}{words}; {without} without the policy (computed)"
