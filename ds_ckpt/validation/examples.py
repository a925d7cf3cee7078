"""The two default sets for fine-tuning, and the models for them. Nothing is downloaded.

`digits`: scikit-learn's 1,797 images of 8x8 grey values, 997 to train a small ViT on.
`topics`: passages of the embedded corpus; which part of Python's library or reference a passage is
from. The classifier starts from a Llama that has been trained on the language for a while, as
fine-tuning does; every run of every seed starts from the same one.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.exchange.build import ExchangeSettings
from ds_ckpt.exchange.rules import MethodSettings
from ds_ckpt.files import replacing
from ds_ckpt.harness.corpus import python_topics
from ds_ckpt.validation.classification import Examples
from ds_ckpt.validation.language import LanguageRun, LanguageTask, Tokens
from ds_ckpt.validation.virtual_training import Recipe, VirtualTraining

DIGITS_HELD_OUT = 800
PASSAGE = 32
"""Words of a passage."""
WORDS = 2048
"""Different ids of words."""
FAMILIES = 5
PER_FAMILY = (240, 250)
"""Passages of a family to train on and held out, at most."""
PRETRAINING_STEPS = 200


def digits() -> Examples:
    """scikit-learn's digits: `pixel_values` [n, 1, 8, 8] from 0 to 1. UnsupportedError without."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UnsupportedError(
            Problem(
                where="--tasks digits",
                found="no scikit-learn",
                why="the images are part of it",
                remedy="pip install 'ds_ckpt[validation]', or --tasks language,topics",
            ),
            headline="the digits cannot be loaded",
        ) from error
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(data.images / 16.0, dtype=torch.float32).unsqueeze(1)[order]
    labels = torch.tensor(data.target, dtype=torch.int64)[order]
    return _split({"pixel_values": pixels, "labels": labels}, DIGITS_HELD_OUT, 10, "digits")


def _split(rows: dict[str, Tensor], held_out: int, classes: int, source: str) -> Examples:
    train = {name: values[held_out:] for name, values in rows.items()}
    heldout = {name: values[:held_out] for name, values in rows.items()}
    return Examples(train, heldout, classes, source)


def vit(seed: int) -> torch.nn.Module:
    """A ViT of about 270,000 parameters for the digits, fp32."""
    transformers = _transformers()
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        num_labels=10,
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = transformers.ViTForImageClassification(config)
    return model


def topics() -> Examples:
    """Passages of the library's larger packages and of the language reference, by which it is.

    `input_ids` [n, 32] are words by their hash. Every third passage of a file can be held out:
    files are on both sides, passages are not.
    """
    families: dict[str, list[Tensor]] = {}
    for name, text in sorted(python_topics().items()):
        kind, _, rest = name.partition(": ")
        family = "reference" if kind == "reference" else rest.partition("/")[0]
        families.setdefault(family, []).append(words(text))
    sizes = {f: sum(map(len, parts)) for f, parts in families.items() if len(parts) > 2}
    chosen = sorted(sizes, key=lambda f: (-sizes[f], f))[:FAMILIES]
    sides: tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]]] = ([], [])
    for label, family in enumerate(sorted(chosen)):
        passages = [p for text in families[family] for p in text.split(PASSAGE)[:-1]]
        order = torch.randperm(len(passages), generator=torch.Generator().manual_seed(label))
        parts = _thirds(passages, order.tolist())
        for side, part, most in zip(sides, parts, PER_FAMILY, strict=True):
            side += [(passage, label) for passage in part[:most]]
    train, heldout = (_rows(side) for side in sides)
    return Examples(train, heldout, len(chosen), "topics of the embedded corpus")


def words(text: bytes) -> Tensor:
    """Ids of the words and marks of a text, int64: 1 and up, by their hash, whatever the case."""
    found = re.findall(rb"[a-z_]+|[^\sa-z_]", text.lower())
    return torch.tensor([1 + zlib.crc32(word) % (WORDS - 1) for word in found], dtype=torch.int64)


def _thirds(passages: list[Tensor], order: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """In a mixed order; every third of the text's own order is on the second side."""
    train = [passages[i] for i in order if i % 3 < 2]
    return train, [passages[i] for i in order if i % 3 == 2]


def _rows(passages: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    order = torch.randperm(len(passages), generator=torch.Generator().manual_seed(0))
    ids = torch.stack([passage for passage, _ in passages])
    return {"input_ids": ids[order], "labels": torch.tensor([n for _, n in passages])[order]}


class TopicClassifier:
    """Makes the classifier of a seed: a pre-trained Llama under a new head.

    Args:
        folder: keeps the pre-trained weights; made when needed.
        steps: of the pre-training, as a language model on the train side.
    """

    def __init__(self, folder: Path, examples: Examples, *, steps: int = PRETRAINING_STEPS) -> None:
        self._examples, self._steps = examples, steps
        self._path = folder / f"pretrained-{steps}-{examples.sha256[:16]}.pt"

    def __call__(self, seed: int) -> torch.nn.Module:
        transformers = _transformers()
        config = transformers.LlamaConfig(**_LLAMA, num_labels=self._examples.classes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: torch.nn.Module = transformers.LlamaForSequenceClassification(config)
        model.model.load_state_dict(self.pretrained())  # type: ignore[operator, union-attr]
        return model

    def pretrained(self) -> dict[str, Tensor]:
        """Weights of the Llama without its head; trained at the first call."""
        if not self._path.exists():
            state = self._pretrain()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._path) as unfinished:
                torch.save(state, unfinished)
        saved: dict[str, Tensor] = torch.load(self._path, weights_only=True)
        return saved

    def _pretrain(self) -> dict[str, Tensor]:
        transformers = _transformers()

        def build(seed: int) -> torch.nn.Module:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model: torch.nn.Module = transformers.LlamaForCausalLM(
                    transformers.LlamaConfig(**_LLAMA, tie_word_embeddings=True)
                )
            return model

        text = self._examples.train["input_ids"].flatten()
        task = LanguageTask(world=1, sequences=8, sequence_length=PASSAGE, evaluation_batches=1)
        run = LanguageRun(task, Tokens(text, text), build=build)
        recipe = Recipe(steps=self._steps, learning_rate=3e-3)
        dense = ExchangeSettings(MethodSettings("dense"))
        training = VirtualTraining(run.model, run.loss, recipe, dense, world=1)
        for _ in range(self._steps):
            training.train_step()
        state: dict[str, Tensor] = run.model.model.state_dict()  # type: ignore[operator, union-attr]
        return state


def small_classifier(classes: int, length: int) -> Callable[[int], torch.nn.Module]:
    """The same Llama under a head, with nothing learnt before: for a user's own examples."""
    transformers = _transformers()
    sizes = {**_LLAMA, "max_position_embeddings": length, "num_labels": classes}

    def build(seed: int) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = transformers.LlamaConfig(**sizes)
            model: torch.nn.Module = transformers.LlamaForSequenceClassification(config)
        return model

    return build


_LLAMA = {
    "vocab_size": WORDS,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 344,
    "max_position_embeddings": PASSAGE,
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            Problem(
                where="transformers",
                found="not installed",
                why="the classifiers are Hugging Face models",
                remedy="pip install 'ds_ckpt[hf]'",
            )
        ) from error
    return transformers
