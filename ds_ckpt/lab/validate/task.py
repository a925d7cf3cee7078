"""The task of a comparison: its sizes, its data and its model, initialized for every seed.

A `TaskSpec` is plain JSON, so that launched ranks open the same task as the command.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.lab import workload
from ds_ckpt.lab.validate import data
from ds_ckpt.lab.validate.data import Examples, Inputs, Text
from ds_ckpt.lab.validate.world import Recipe, digest_of
from ds_ckpt.lab.workload import hugging_face, seeded

Kind = Literal["language", "labelled"]
BETAS = (0.9, 0.95)
_LONGEST_WARM_UP = 0.25
"""Share of a run: a longer uncompressed start would leave little to judge."""

Build = Callable[[int], torch.nn.Module]
"""seed -> a model whose output has `loss`, and `logits` if it is a classifier."""


@dataclass(frozen=True)
class TaskSpec:
    """Kind and sizes of a task.

    Attributes:
        kind: `language` (held-out loss) or `labelled` (accuracy of a classifier).
        data: a file; None is the embedded corpus.
        model: name or folder of a checkpoint; None is a small new model.
        world: number of workers or ranks. A rank's own part of a gradient is exact in every
            method, so a few of them lose less than many.
        batch: sequences or examples of a micro-batch.
        length: of a sequence, in tokens.
        accumulation: micro-batches of a step.
        steps: of each run.
        learning_rate: maximum of the schedule.
        evaluations: of the held-out data in a run.
        hidden_size: of the new language model.
        layers: of the new language model.
        attention: of the new language model. Eager attention is faster on a CPU; selective
            checkpointing names the operators of sdpa.
        betas: of AdamW.
    """

    kind: Kind = "language"
    data: str | None = None
    model: str | None = None
    world: int = 4
    batch: int = 2
    length: int = 64
    accumulation: int = 1
    steps: int = 300
    learning_rate: float = 3e-3
    evaluations: int = 6
    hidden_size: int = 128
    layers: int = 2
    attention: Literal["eager", "sdpa"] = "eager"
    betas: tuple[float, float] = BETAS

    @property
    def metric(self) -> Literal["loss", "accuracy"]:
        """Return the metric of verdicts: relative held-out loss, or accuracy."""
        return "loss" if self.kind == "language" else "accuracy"

    @property
    def longest_warm_up(self) -> int:
        """Return the largest number of uncompressed steps at the beginning of a run."""
        return int(_LONGEST_WARM_UP * self.steps)

    def recipe(self) -> Recipe:
        """Return optimizer and schedule."""
        return Recipe(self.steps, self.learning_rate, (self.betas[0], self.betas[1]))

    def describe(self) -> str:
        """Describe the task in a few words."""
        default = make_spec(self.kind, model=self.model)
        more = f", {self.accumulation} micro-batches a step" if self.accumulation > 1 else ""
        if self.learning_rate != default.learning_rate:
            more += f", learning rate {self.learning_rate:g}"
        if tuple(self.betas) != BETAS:
            more += f", betas {self.betas[0]:g}, {self.betas[1]:g}"
        name = Path(self.data).name if self.data else "the embedded corpus"
        verb = "language modelling" if self.kind == "language" else "fine-tuning"
        return f"{verb} on {name}{more}"


_DEFAULTS: dict[Kind, dict[str, Any]] = {
    "language": {},
    "labelled": {"batch": 8, "learning_rate": 2e-3, "length": 128},
}


def make_spec(kind: Kind, **given: Any) -> TaskSpec:
    """Return the default sizes of a kind, overridden by all that is given and not None."""
    wanted = {name: value for name, value in given.items() if value is not None}
    if wanted.get("model") and "learning_rate" not in wanted:
        wanted["learning_rate"] = 5e-5  # for fine-tuning
    return TaskSpec(kind, **{**_DEFAULTS[kind], **wanted})


class Task:
    """A model and its data, for one seed at a time.

    Weights, data and their order are functions of the seed, so runs of one seed form pairs.

    Args:
        spec: kind and sizes.
        data: to train on and to evaluate with.
        build: creates the model of a seed.
        device: of the model and its inputs.

    Attributes:
        model: trained in place by virtual workers.
        forward: called for training in the model's place.
        shapes: names and shapes of the trainable parameters.
        digest: of data and sizes; runs of equal digests are comparable.
    """

    def __init__(
        self, spec: TaskSpec, data: Text | Examples, build: Build, *, device: str = "cpu"
    ) -> None:
        self.spec, self.data, self._build, self._device = spec, data, build, device
        self.model = self.initial(0).to(device)
        self.forward: Callable[..., Any] = self.model
        trainable = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self.shapes = [(name, parameter.shape) for name, parameter in trainable]
        self.digest = self._digest()
        self.begin(0)

    def _digest(self) -> str:
        spec, sizes = self.spec, dataclasses.asdict(self.spec)
        del sizes["betas"]  # part of each run's key, see `experiment.Plan.key`
        if spec.data:  # the path may change
            sizes["data"] = "as its digest says"
        if spec.model:  # a folder's content may change
            sizes["weights"] = digest_of(self.model)
        text = json.dumps([self.data.sha256, sizes, self._device], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe_model(self) -> str:
        """Return class, size and origin of the model."""
        parameters = sum(shape.numel() for _, shape in self.shapes)
        origin = f" ({self.spec.model})" if self.spec.model else ""
        return f"{type(self.model).__name__}, {parameters:,} parameters{origin}"

    def begin(self, seed: int) -> None:
        """Reset weights and data to the start of `seed`."""
        self.model.load_state_dict(self.initial(seed).state_dict())
        self._seed = seed

    def initial(self, seed: int) -> torch.nn.Module:
        """Return a new model with the weights of `seed`, in training mode."""
        return self._build(seed).train()

    def inputs(self, step: int, micro: int, worker: int) -> Inputs:
        """Return a micro-batch of a worker and seed torch's random numbers for it.

        Runs of one seed then drop out the same entries, resumed or not.
        """
        (number,) = np.random.SeedSequence([self._seed, step, micro, worker]).generate_state(1)
        torch.manual_seed(int(number))
        spec, drawn = self.spec, step * self.spec.accumulation + micro
        return self._moved(self.data.batch(self._seed, drawn, worker, spec.world, spec.batch))

    def _moved(self, inputs: Inputs) -> Inputs:
        return {name: tensor.to(self._device) for name, tensor in inputs.items()}

    def loss(self, step: int, micro: int, worker: int) -> Tensor:
        """Implement `world.Loss`."""
        loss: Tensor = self.forward(**self.inputs(step, micro, worker)).loss
        return loss

    @torch.no_grad()
    def evaluate(self, model: torch.nn.Module | None = None) -> tuple[float, float | None]:
        """Evaluate this model, or an engine, on the held-out data.

        Returns:
            Mean loss in nats, and accuracy (None for language modelling).
        """
        model = self.model if model is None else model
        losses, right, rows = [], 0, 0
        model.eval()
        try:
            for inputs in map(self._moved, self.data.evaluation()):
                output = model(**inputs)
                losses.append(output.loss.double())
                if isinstance(self.data, Examples):
                    right += int((output.logits.argmax(-1) == inputs["labels"]).sum())
                    rows += len(inputs["labels"])
        finally:
            model.train()
        return float(torch.stack(losses).mean()), right / rows if rows else None


def open_task(spec: TaskSpec, *, device: str = "cpu") -> Task:
    """Load the data and build the model.

    Raises:
        ConfigError: the data cannot be used.
        UnsupportedError: transformers or the checkpoint is missing.
    """
    data, build = _language(spec) if spec.kind == "language" else _labelled(spec)
    return Task(spec, data, build, device=device)


def _language(spec: TaskSpec) -> tuple[Text, Build]:
    corpus = data.read_text(Path(spec.data)) if spec.data else workload.embedded_corpus()
    if spec.model is None:
        build = small_llama(
            length=spec.length,
            attention=spec.attention,
            hidden_size=spec.hidden_size,
            layers=spec.layers,
            intermediate_size=8 * round(spec.hidden_size / 3),
            heads=4,
        )
        return Text.of_bytes(corpus, spec.length), build
    transformers = hugging_face()
    tokenizer = _load(transformers.AutoTokenizer, spec.model)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    text = Text.of_tokens(corpus, spec.length, encode)
    return text, _checkpoint(transformers.AutoModelForCausalLM, spec.model)


def _labelled(spec: TaskSpec) -> tuple[Examples, Build]:
    path = Path(spec.data or "")
    if spec.model is None:
        found = data.read_labelled(path, data.word_ids, spec.length)
        return found, small_classifier(found.classes, spec.length)
    transformers = hugging_face()
    tokenizer = _load(transformers.AutoTokenizer, spec.model)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    found = data.read_labelled(path, lambda t: tokenizer(t)["input_ids"], spec.length, padding)
    auto = transformers.AutoModelForSequenceClassification
    return found, _checkpoint(auto, spec.model, num_labels=found.classes, pad_token_id=padding)


def small_llama(*, length: int, attention: str = "eager", **sizes: int) -> Build:
    """Return a builder of `workload.llama` for sequences of `length` bytes.

    Attention is eager unless another kind is given: on a CPU the backward of torch's fused kernel
    takes longer than all matrix products together at these lengths.
    """

    def build(seed: int) -> torch.nn.Module:
        model = workload.llama(seed=seed, max_positions=length, **sizes)
        model.set_attn_implementation(attention)  # type: ignore[operator]
        return model

    return build


def small_classifier(classes: int, length: int) -> Build:
    """Return a builder of a small Llama on word ids with a classification head."""
    transformers = hugging_face()

    def build(seed: int) -> torch.nn.Module:
        config = transformers.LlamaConfig(
            vocab_size=data.VOCABULARY,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=344,
            max_position_embeddings=length,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
            attn_implementation="eager",
            num_labels=classes,
        )
        return seeded(seed, lambda: transformers.LlamaForSequenceClassification(config))

    return build


def _checkpoint(auto: Any, name: str, **options: Any) -> Build:
    """Return a builder of a checkpoint's model; weights that it lacks are drawn by the seed."""

    def build(seed: int) -> torch.nn.Module:
        return seeded(seed, lambda: _load(auto, name, dtype=torch.float32, **options))

    return build


def _load(auto: Any, name: str, **options: Any) -> Any:
    """Call `auto.from_pretrained(name)`. Raises UnsupportedError if there is no checkpoint."""
    try:
        return auto.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            Problem(
                where="--model",
                found=name,
                why=f"{auto.__name__} cannot load it: {error}",
                remedy="give a checkpoint's folder, or a name that transformers finds",
            )
        ) from error
