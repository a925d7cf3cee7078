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


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def labelled(path: Path, count: int = 60) -> Path:
    words = {"up": "high above the sky", "down": "low under the ground"}
    rows = [
        {"text": f"{words[label]} {i}", "label": label} for i in range(count) for label in words
    ]
    return lines(path, rows)


def characters(text: str) -> list[int]:
    return list(text.encode())


def texts(side: dict[str, torch.Tensor]) -> list[str]:
    kept = zip(side["input_ids"], side["attention_mask"], strict=True)
    return [bytes(ids[mask.bool()].tolist()).decode() for ids, mask in kept]


# drawing


def toy(count: int = 10) -> Examples:
    rows = {"x": torch.arange(count), "labels": torch.arange(count)}
    return Examples(rows, rows, count, "toy")


class Toy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))


def test_an_epoch_has_every_example_once_dealt_out_to_the_workers() -> None:
    learner = Task(TaskSpec(world=2, batch=5), toy(), lambda _: Toy())
    epochs = []
    for seed in (0, 1):
        learner.begin(seed)
        for step in range(2):
            drawn = [learner.inputs(step, 0, worker)["x"] for worker in range(2)]
            epochs.append(torch.cat(drawn).tolist())
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    learner.begin(0)
    again = torch.cat([learner.inputs(1, 0, worker)["x"] for worker in range(2)]).tolist()
    assert again == epochs[1]


# a user's data


def test_text_with_blank_lines_of_spaces_is_cut_there(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("".join(f" paragraph {i} " + "word " * 200 + "\n \n" for i in range(80)))
    corpus = read_text(path)
    assert 0.05 < len(corpus.heldout) / len(corpus.train) < 0.2
    assert corpus.source == "t.txt"
    assert read_text(path).sha256 == corpus.sha256


def test_json_lines_are_texts_and_examples(tmp_path: Path) -> None:
    source = labelled(tmp_path / "d.jsonl")
    assert has_labels(source)
    found = read_labelled(source, characters, 64)
    assert found.classes == 2
    assert len(found.train["labels"]) + len(found.heldout["labels"]) == 120
    train, heldout = texts(found.train), texts(found.heldout)
    assert not set(train) & set(heldout)
    labels = zip(train, found.train["labels"].tolist(), strict=True)
    assert {label for text, label in labels if "sky" in text} == {1}
    corpus = read_text(source)
    assert b"low under the ground 7" in corpus.train + corpus.heldout
    plain = lines(tmp_path / "p.jsonl", [{"text": "x"}])
    assert not has_labels(plain)
    assert not has_labels(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json", ":1"),
        ('{"label": 1}', "named? text|text"),
        ("[1, 2]", "not a JSON object"),
        ('{"text": "a", "label": 1}', "two classes"),
        ('{"text": "a"}', "there is no label"),
    ],
)
def test_wrong_examples_are_named_by_their_line(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(content + "\n")
    with pytest.raises(ConfigError, match=words):
        read_labelled(path, characters, 8)


def test_json_lines_are_utf_8_and_end_at_line_feeds(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    rows = [{"text": f"one\u2028line {i}", "label": i % 2} for i in range(60)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows))
    found = read_labelled(path, characters, 8)
    assert len(found.train["labels"]) + len(found.heldout["labels"]) == 60
    path.write_bytes(b'{"text": "caf\xe9", "label": 1}\n')
    with pytest.raises(ConfigError, match=r"d\.jsonl.*\n.*UTF-8"):
        read_labelled(path, characters, 8)


def test_sequences_longer_than_what_is_held_out_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("\n\n".join("words " * 500 for _ in range(40)))  # about 12 kB are held out
    with pytest.raises(ConfigError, match="shorter --length"):
        open_task(make_spec("language", data=str(text), length=16_000))


def test_too_short_a_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("short")
    with pytest.raises(ConfigError, match="20 of about 2 kB"):
        read_text(path)


# checkpoints


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
    save_checkpoint(tmp_path / "model")
    text = tmp_path / "t.txt"
    text.write_text("\n\n".join("sky ground word " * 60 + str(i) for i in range(80)))
    spec = make_spec("language", data=str(text), model=str(tmp_path / "model"), batch=2, length=8)
    assert spec.learning_rate == 5e-5
    task = open_task(spec)
    first = task.initial(0).state_dict()
    again = task.initial(1).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert task.inputs(0, 0, 0)["input_ids"].max() <= 3
    assert torch.isfinite(task.loss(0, 0, 0))

    source = labelled(tmp_path / "d.jsonl")
    spec = make_spec("labelled", data=str(source), model=str(tmp_path / "model"), batch=4, length=8)
    task = open_task(spec)
    inputs = task.inputs(0, 0, 1)
    assert inputs["input_ids"].shape == (4, 8)
    assert inputs["attention_mask"].sum() < 32
    heads = [task.initial(seed).score.weight for seed in (0, 1, 0)]  # type: ignore[union-attr]
    assert not torch.equal(heads[0], heads[1])  # type: ignore[arg-type]
    assert torch.equal(heads[0], heads[2])  # type: ignore[arg-type]
    assert torch.isfinite(task.loss(0, 0, 0))


def test_a_checkpoint_that_is_not_there_is_told(tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("\n\n".join("words " * 500 for _ in range(40)))
    spec = make_spec("language", data=str(text), model=str(tmp_path / "nothing"))
    with pytest.raises(UnsupportedError, match="--model"):
        open_task(spec)


def test_own_examples_without_a_checkpoint(tmp_path: Path) -> None:
    source = labelled(tmp_path / "d.jsonl")
    task = open_task(TaskSpec("labelled", data=str(source), batch=4, length=8))
    assert torch.isfinite(task.loss(0, 0, 0))
    assert task.evaluate()[1] is not None


def test_the_same_sizes_and_data_are_the_same_task(tmp_path: Path) -> None:
    source = labelled(tmp_path / "d.jsonl")
    one = open_task(TaskSpec("labelled", data=str(source), length=8)).digest
    assert open_task(TaskSpec("labelled", data=str(source), length=8)).digest == one
    assert open_task(TaskSpec("labelled", data=str(source), length=9)).digest != one
    elsewhere = labelled(tmp_path / "moved.jsonl")
    assert open_task(TaskSpec("labelled", data=str(elsewhere), length=8)).digest == one
    labelled(tmp_path / "d.jsonl", 70)
    assert open_task(TaskSpec("labelled", data=str(source), length=8)).digest != one


def test_another_device_is_another_task(tmp_path: Path) -> None:
    spec = TaskSpec("labelled", data=str(labelled(tmp_path / "d.jsonl")), length=8)
    assert open_task(spec).digest != open_task(spec, device="cpu:0").digest


def test_a_checkpoint_that_was_trained_on_is_another_task(tmp_path: Path) -> None:
    source, model = labelled(tmp_path / "d.jsonl"), tmp_path / "model"
    save_checkpoint(model)
    spec = make_spec("labelled", data=str(source), model=str(model), length=8)
    before = open_task(spec).digest
    assert open_task(spec).digest == before
    transformers = pytest.importorskip("transformers")
    trained = transformers.LlamaForCausalLM.from_pretrained(model)
    with torch.no_grad():
        trained.model.norm.weight.add_(1)
    trained.save_pretrained(model)
    assert open_task(spec).digest != before


def test_runs_of_one_seed_drop_out_the_same(tmp_path: Path) -> None:
    class Dropping(Toy):
        def forward(self, x: torch.Tensor, **_: Any) -> Any:
            kept = torch.nn.functional.dropout(self.weight + torch.ones(64), 0.5, self.training)
            return SimpleNamespace(loss=(kept * torch.arange(64)).sum())

    learner = Task(TaskSpec(world=2, batch=2), toy(), lambda _: Dropping())
    places = [(0, 0, 0), (0, 0, 1), (1, 0, 0)]

    def losses(seed: int) -> list[float]:
        learner.begin(seed)
        return [learner.loss(*place).item() for place in places]

    first, other = losses(1), losses(2)
    assert losses(1) == first
    assert len({*first, *other}) == 6
    learner.begin(1)
    assert learner.loss(*places[2]).item() == first[2]  # resumed there
