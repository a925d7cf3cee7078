"""Tasks and data: a user's files and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_ckpt.errors import ConfigError, UnsupportedError
from ds_ckpt.lab.validate.data import Examples, has_labels, read_labelled, read_text
from ds_ckpt.lab.validate.task import Task, TaskSpec, make_spec, open_task

pytest.importorskip("transformers")


def lines(path: Path, rows: list[Any], end: str = "\n") -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + end for row in rows))
    return path


def labelled(path: Path, count: int = 60) -> Path:
    words = {"up": "high above the sky", "down": "low under the ground"}
    rows = [
        {"text": f"{words[label]} {i}", "label": label} for i in range(count) for label in words
    ]
    return lines(path, rows)


def texts(side: dict[str, torch.Tensor]) -> list[str]:
    kept = zip(side["input_ids"], side["attention_mask"], strict=True)
    return [bytes(ids[mask.bool()].tolist()).decode() for ids, mask in kept]


def read(path: Path) -> Examples:
    return read_labelled(path, lambda text: list(text.encode()), 64)


def test_json_lines_are_texts_and_examples(tmp_path: Path) -> None:
    source = labelled(tmp_path / "d.jsonl")
    assert has_labels(source)
    found = read(source)
    assert found.classes == 2
    assert len(found.train["labels"]) + len(found.heldout["labels"]) == 120
    train, heldout = texts(found.train), texts(found.heldout)
    assert not set(train) & set(heldout)
    labels = zip(train, found.train["labels"].tolist(), strict=True)
    assert {label for text, label in labels if "sky" in text} == {1}
    corpus = read_text(source)
    assert b"low under the ground 7" in corpus.train + corpus.heldout
    assert not has_labels(lines(tmp_path / "p.jsonl", [{"text": "x"}]))
    rows = [{"text": f"one\u2028line {i}", "label": i % 2} for i in range(60)]
    found = read(lines(tmp_path / "other.jsonl", rows, "\r\n"))
    assert len(found.train["labels"]) + len(found.heldout["labels"]) == 60


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"not json", ":1"),
        (b'{"label": 1}', "KeyError: 'text'"),
        (b"[1, 2]", "not an object"),
        (b'{"text": "a", "label": 1}', "two classes"),
        (b'{"text": "a"}', "no label"),
        (b'{"text": "caf\xe9", "label": 1}\n', "UTF-8"),
    ],
)
def test_wrong_examples_are_named_by_their_line(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(content + b"\n")
    with pytest.raises(ConfigError, match=words) as caught:
        read(path)
    assert "d.jsonl" in str(caught.value)


def test_too_short_a_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("\n \n".join("words " * 500 for _ in range(40)))  # about 12 kB are held out
    with pytest.raises(ConfigError, match="shorter sequence length"):
        open_task(make_spec("language", data=path, length=16_000))
    path.write_text("short")
    with pytest.raises(ConfigError, match="20 of about 2 kB"):
        read_text(path)


def save_checkpoint(folder: Path) -> None:
    """A tiny Llama with a tokenizer of words, as `save_pretrained` leaves them."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "sky": 1, "ground": 2, "word": 3}, "[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[UNK]"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=24, max_position_embeddings=32,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def test_a_checkpoint_is_tuned_on_texts_and_on_examples(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_checkpoint(model)
    text = tmp_path / "t.txt"
    text.write_text("\n\n".join("sky ground word " * 60 + str(i) for i in range(80)))
    spec = make_spec("language", data=text, model=str(model), batch=2, length=8)
    assert spec.learning_rate == 5e-5
    task = open_task(spec)
    first, again = (task.initial(seed).state_dict() for seed in (0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert task.inputs(0, 0, 0)["input_ids"].max() <= 3
    assert torch.isfinite(task.loss(0, 0, 0))

    source = labelled(tmp_path / "d.jsonl")
    spec = make_spec("labelled", data=source, model=str(model), batch=4, length=8)
    task = open_task(spec)
    inputs = task.inputs(0, 0, 1)
    assert inputs["input_ids"].shape == (4, 8)
    assert inputs["attention_mask"].sum() < 32
    heads = [task.initial(seed).score.weight for seed in (0, 1, 0)]  # type: ignore[union-attr]
    assert not torch.equal(heads[0], heads[1])  # type: ignore[arg-type]
    assert torch.equal(heads[0], heads[2])  # type: ignore[arg-type]
    assert torch.isfinite(task.loss(0, 0, 0))

    # one that was trained on is another task
    assert open_task(spec).digest == task.digest
    transformers = pytest.importorskip("transformers")
    trained = transformers.LlamaForCausalLM.from_pretrained(model)
    with torch.no_grad():
        trained.model.norm.weight.add_(1)
    trained.save_pretrained(model)
    assert open_task(spec).digest != task.digest
    with pytest.raises(UnsupportedError, match="--model"):
        open_task(make_spec("language", data=text, model=str(tmp_path / "nothing")))


def test_own_examples_without_a_checkpoint_and_their_digest(tmp_path: Path) -> None:
    def opened(name: str = "d.jsonl", device: str = "cpu", **sizes: Any) -> Task:
        given = {"data": tmp_path / name, "batch": 4, "length": 8, **sizes}
        return open_task(make_spec("labelled", **given), device=device)

    labelled(tmp_path / "d.jsonl")
    task = opened()
    assert torch.isfinite(task.loss(0, 0, 0))
    assert 0 <= task.evaluate(task.model) <= 1
    labelled(tmp_path / "moved.jsonl")
    assert opened().digest == opened("moved.jsonl").digest == task.digest
    for other in ({"length": 9}, {"betas": (0.7, 0.95)}, {"dense_correction": 0.3}):
        assert opened(**other).digest != task.digest  # type: ignore[arg-type]
    assert opened(device="cpu:0").digest != task.digest
    labelled(tmp_path / "d.jsonl", 70)
    assert opened().digest != task.digest


def test_runs_of_one_seed_draw_and_drop_out_the_same() -> None:
    class Dropping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor, **_: Any) -> Any:
            kept = torch.nn.functional.dropout(self.weight + torch.ones(64), 0.5, self.training)
            return SimpleNamespace(loss=(kept * torch.arange(64)).sum() + x.float().std())

    rows = {"x": torch.arange(50), "labels": torch.arange(50)}
    learner = Task(
        TaskSpec(world=2, batch=2), Examples(rows, rows, 50, "toy"), lambda _: Dropping()
    )
    places = [(0, 0, 0), (0, 0, 1), (1, 0, 0)]

    def losses(seed: int) -> list[float]:
        learner.begin(seed)
        return [learner.loss(*place).item() for place in places]

    first, other = losses(1), losses(2)
    assert losses(1) == first
    assert len({*first, *other}) == 6
    learner.begin(1)
    assert learner.loss(*places[2]).item() == first[2]  # independent of earlier steps
