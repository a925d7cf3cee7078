"""Results, the words computed from them, the table and the page, on made-up numbers."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from ds_ckpt.errors import StateError
from ds_ckpt.harness.cells import CELLS, deepspeed_config
from ds_ckpt.harness.report import rows, terminal_table, write_html
from ds_ckpt.harness.results import CellResult, Machine, Results, RunInfo, Traffic
from ds_ckpt.harness.summary import Share, StepRecord, summarise
from ds_ckpt.harness.words import caveats, findings, megabytes
from ds_ckpt.telemetry import Purpose

VOID = {"meta", "br", "hr", "img", "link", "input"}


def _cell(index: int, *, gradient_bytes: float, heldout_loss: float | None) -> CellResult:
    cell = CELLS[index]
    steps = 4 if cell.reference else 12
    return CellResult(
        name=cell.name,
        title=cell.title,
        method=cell.method,
        checkpointing=cell.checkpointing,
        reference=cell.reference,
        config_file=f"configs/{cell.file_name}",
        steps=steps,
        timed_from_step=1 if cell.reference else 5,
        step_time_median_s=0.5 + index / 10,
        step_times_s=tuple(0.5 + index / 10 + i / 1000 for i in range(steps)),
        held_activation_bytes=4_100_000 if cell.checkpointing else 61_700_000,
        traffic=Traffic(
            gather_forward_bytes=9.7e6,
            gather_recompute_bytes=7.4e6 if cell.checkpointing else 0,
            gather_backward_bytes=2.3e6 if cell.checkpointing else 9.7e6,
            reduce_bytes=gradient_bytes,
            other_bytes=32,
        ),
        warmup_traffic=Traffic(reduce_bytes=19.4e6) if cell.method == "topk" else None,
        interface_bytes=40.3e6 if index == 0 else 20.1e6,
        heldout_loss=heldout_loss,
        train_losses=tuple(5.5 - i / (10 if cell.method == "dense" else 11) for i in range(steps)),
        weights_sha256=cell.method,
    )


@pytest.fixture
def results() -> Results:
    return Results(
        run=RunInfo(
            started_utc="2026-01-02T03:04:05+00:00",
            command="python -m ds_ckpt.harness.demo --steps 12 <&>",
            seed=17,
            steps=12,
            topk_start_step=4,
            processes=2,
            sequences_per_process=4,
            sequence_length=128,
            parameters=4_877_568,
            text="made up",
            train_bytes=1_000_001,
            heldout_bytes=100_002,
            corpus_sha256="ab" * 32,
            versions={"python": "3.11.0", "torch": "2.13.0"},
            machine=Machine(
                cpu_model="A processor",
                cpu_cores=2,
                memory_gib=15.6,
                accelerator="cpu",
                system="Linux x86_64",
            ),
            wall_time_s=201.4,
        ),
        cells=(
            _cell(0, gradient_bytes=19.4e6, heldout_loss=2.1234),
            _cell(1, gradient_bytes=19.4e6, heldout_loss=2.1234),
            _cell(2, gradient_bytes=61_500, heldout_loss=2.3456),
            _cell(3, gradient_bytes=61_500, heldout_loss=2.3456),
            _cell(4, gradient_bytes=9.7e6, heldout_loss=None),
        ),
    )


class _Page(HTMLParser):
    """Text of the page; asserts that every tag is closed where it was opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def _page(results: Results, folder: Path) -> _Page:
    path = folder / "report.html"
    write_html(results, path)
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    return page


def test_saved_and_loaded(results: Results, tmp_path: Path) -> None:
    results.save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json") == results


def test_a_wrong_file_is_refused_with_the_place(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(results.model_dump_json().replace('"seed":17', '"seed":"many"'))
    with pytest.raises(StateError, match=r"\$\.run\.seed") as caught:
        Results.load(path)
    assert "many" in str(caught.value)


def test_the_page_is_whole_and_loads_nothing(results: Results, tmp_path: Path) -> None:
    page = _page(results, tmp_path)
    assert page.open == []
    assert page.tags.count("svg") == 2
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    # What is left refers to a place in the page itself.
    assert all(address.startswith("#") for address in page.addresses)


def test_the_page_has_every_figure(results: Results, tmp_path: Path) -> None:
    words = "".join(_page(results, tmp_path).words)
    for row in rows(results):
        for text in row:
            assert text in words
    for text in (*caveats(results), *(f.partition(": ")[2][1:] for f in findings(results))):
        assert text in words
    for text in ("17", "4,877,568", "1,000,001", "100,002", "A processor", "torch 2.13.0", "<&>"):
        assert text in words
    for cell in results.cells:
        assert cell.config_file in words


def test_two_pages_of_equal_results_are_equal(results: Results, tmp_path: Path) -> None:
    write_html(results, tmp_path / "a.html")
    write_html(results, tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_the_table_fits_80_columns(results: Results) -> None:
    console = Console(width=80, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(terminal_table(results))
    text = capture.get()
    assert "…" not in text
    for figure in ("61.7", "4.10", "19.4", "0.061", "9.70 + 7.40 + 2.30", "2.3456"):
        assert figure in text


def test_the_words_say_where_compression_loses(results: Results) -> None:
    said = {text.partition(":")[0]: text for text in findings(results)}
    assert "15.0x less" in said["Memory"]
    assert "equal with and without" in said["Exactness"]
    assert "That flatters it" in said["Gradients"]
    assert "158x less" in said["Gradients"]
    assert "at most 1.50x faster" in said["The ceiling"]
    assert "Top-K loses: its step takes 39% longer" in said["Time"]
    assert "Top-K loses: 2.346 against 2.123 (10.5% worse)" in said["Held-out loss"]


def test_times_that_overlap_are_not_called_a_difference(results: Results) -> None:
    dense, topk = results.cell("dense"), results.cell("topk")
    uneven = tuple(t * (1.2 if i % 2 else 0.8) for i, t in enumerate(dense.step_times_s))
    cells = tuple(
        topk.model_copy(update={"step_times_s": uneven}) if cell is topk else cell
        for cell in results.cells
    )
    said = findings(results.model_copy(update={"cells": cells}))
    assert any("no difference that stands out of the spread" in text for text in said)


def test_the_words_know_the_link(results: Results) -> None:
    """On emulated hosts a step takes what it takes at a rate; on loopback that is not known."""
    loopback = " ".join(findings(results) + caveats(results))
    assert "link is not shaped" in loopback
    assert "count of the loopback interface" in loopback
    run = results.run.model_copy(update={"rate_mbit": 200.0})
    hosts = results.model_copy(update={"run": run})
    words = " ".join(findings(hosts) + caveats(hosts))
    assert "Time: on a link of 200 Mbit/s Top-K's step is" in words
    # the all-to-all's median step is 0.9 s, Top-K's 0.7 s
    assert "1.29x as long as Top-K's" in words
    assert "hosts are emulated" in words
    assert "count of the hosts' interfaces" in words
    assert "only a slower network" not in words
    assert "only a slower network" in loopback


def test_a_host_counts_for_itself_and_loopback_for_all_processes() -> None:
    step = StepRecord(1.0, 1.0, {p.value: 8 for p in Purpose}, interface_bytes=400)
    shares = [Share(1, 2.0, "a", (step,) * 12)] * 2
    on_loopback = summarise(CELLS[0], shares, 12)
    on_hosts = summarise(CELLS[0], shares, 12, shaped_steps=3)
    assert (on_loopback.interface_bytes, on_hosts.interface_bytes) == (200, 400)
    assert (on_loopback.timed_from_step, on_hosts.timed_from_step) == (5, 9)
    assert summarise(CELLS[4], shares, 12, shaped_steps=3).timed_from_step == 1


def test_a_broken_promise_is_not_hidden(results: Results) -> None:
    cells = list(results.cells)
    cells[1] = cells[1].model_copy(update={"weights_sha256": "another"})
    said = findings(results.model_copy(update={"cells": tuple(cells)}))
    assert any("NOT met in dense + checkpointing" in text for text in said)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (61_200, "0.061"), (4_880_000, "4.88"), (39_200_000, "39.2"), (135e6, "135")],
)
def test_megabytes(number: float, text: str) -> None:
    assert megabytes(number) == text


def test_cells_differ_in_our_section_alone() -> None:
    configs = [deepspeed_config(cell, steps=30) for cell in CELLS]
    sections = [config.pop("ds_ckpt") for config in configs]
    assert all(config == configs[0] for config in configs)
    assert len({str(section) for section in sections}) == len(CELLS)
