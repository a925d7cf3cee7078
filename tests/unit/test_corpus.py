"""The corpus: split by topic, the same every time, batches a function of their place alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_ckpt.errors import ConfigError
from ds_ckpt.lab.workload import (
    HELDOUT_SHARE,
    Corpus,
    embedded_corpus,
    file_corpus,
    load_corpus,
    split_topics,
    training_batch,
)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return embedded_corpus()


@pytest.mark.slow
def test_another_process_with_another_hash_seed_gets_the_same(
    corpus: Corpus, tmp_path: Path
) -> None:
    share = len(corpus.heldout) / (len(corpus.train) + len(corpus.heldout))
    assert share == pytest.approx(HELDOUT_SHARE, rel=0.2)
    assert len(corpus.train) > 1_000_000
    code = "from ds_ckpt.lab.workload import embedded_corpus as c; print(c().sha256)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "7", "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    corpus.save(tmp_path)
    assert run.stdout.strip() == corpus.sha256 == load_corpus(tmp_path).sha256


def test_side_of_a_topic_does_not_hang_on_the_order_given() -> None:
    topics = {f"t{i}": f"<{i}>".encode() * (50 + i) for i in range(100)}
    found = split_topics(topics, source="x")
    assert found == split_topics(dict(reversed(topics.items())), source="x")
    # and no topic stands on both sides
    assert all((text in found.train) != (text in found.heldout) for text in topics.values())


def test_batches_depend_on_seed_step_and_process_only(corpus: Corpus) -> None:
    def batch(seed: int, step: int, process: int) -> torch.Tensor:
        return training_batch(corpus.train, 3, 64, seed, step, process)

    first = batch(1, 5, 0)
    assert torch.equal(first, batch(1, 5, 0))
    assert (first.shape, first.dtype) == ((3, 64), torch.int64)
    for other in (batch(1, 6, 0), batch(1, 5, 1), batch(2, 5, 0)):
        assert not torch.equal(first, other)
    with pytest.raises(ConfigError, match="a sequence takes 64"):
        training_batch(b"x" * 64, 1, 64, seed=0, step=0, process=0)


@pytest.mark.parametrize("content", [None, "", "a short text\n\n"])
def test_an_unusable_file_is_refused_with_a_message(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="--text") as caught:
        file_corpus(path)
    assert "fix:" in str(caught.value)
