"""A run's folder: what is to be measured, what has been, and the launch's own files.

spec.json       what is to be measured
corpus/         the text
samples.jsonl   what has been measured (`records`)
turns_done      all turns have been taken
report.*        made from the above

The files through which whoever launched and process 0 talk lie there, too: `hosts.heartbeat`.
"""

from __future__ import annotations

from pathlib import Path

from ds_ckpt.harness import corpus
from ds_ckpt.harness.experiment.plan import Spec
from ds_ckpt.harness.experiment.records import Store


class Folder:
    """One run's folder, for both sides."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = Store(path / "samples.jsonl")
        self.spec = path / "spec.json"
        self.turns_done = path / "turns_done"

    def handout(self) -> tuple[Spec, corpus.Corpus, set[tuple[object, ...]]]:
        """What the launched processes have to know: plan, text, keys of what is there."""
        done = {sample.key for sample in self.store.read()}
        if self.turns_done.exists():
            done.add(("turns done",))
        return Spec.load(self.spec), corpus.load_corpus(self.path / "corpus"), done
