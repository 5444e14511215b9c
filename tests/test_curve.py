"""Perplexity by position, from a sweep over texts to the table."""

from __future__ import annotations

import csv
import io
import math

import pytest
import torch
from click.testing import CliRunner

from kvacc.cli import cli
from kvacc.config import config_from
from kvacc.curve import curves, perplexity, positions, table_lines, to_csv, to_markdown
from kvacc.errors import KvaccError
from kvacc.results import CurveRecord, read_cells
from kvacc.sweep import run_sweep

TEXTS = ("the quick brown fox jumps over the lazy dog " * 4, "and then it sleeps under an old tree " * 3)


@pytest.fixture(scope="module")
def run(tiny_folder, tmp_path_factory):
    """A sweep of the tiny model over two texts: full, and h2o at a fifth."""
    folder = tmp_path_factory.mktemp("curve")
    (folder / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    config = config_from(
        {
            "models": [str(tiny_folder)],
            "strategies": ["full", {"name": "h2o", "budget": 0.2}],
            "tasks": [{"name": "kvacc_longtext", "texts": str(folder / "texts"), "window": 64}],
            "fidelity": True,
        }
    )
    report = run_sweep(config, folder / "run")
    assert not report.failed
    return folder / "run"


def test_a_cell_of_texts_holds_its_curve(run, tiny_folder):
    cells = {cell.spec.strategy: cell for cell in read_cells(run)}
    for cell in cells.values():
        assert cell.task.primary_metric == "mean_bits_per_byte"
        table = cell.load_samples().to_pydict()
        assert sum(b.loglikelihood for b in cell.curve) == pytest.approx(sum(table["loglikelihood"]))
        assert sum(b.tokens for b in cell.curve) == sum(table["scored_tokens"]) == sum(map(len, TEXTS))
        assert max(b.end for b in cell.curve) == 64
        assert table["target"] == ["", ""], "texts themselves are not published"
    assert [b.tokens for b in cells["full"].curve] == [b.tokens for b in cells["h2o"].curve]
    found = cells["h2o"].fidelity
    assert found.tokens == sum(map(len, TEXTS)) and found.kl > 0
    assert sum(p.loglikelihood_difference * p.tokens for p in found.by_position) == pytest.approx(
        sum(b.loglikelihood for b in cells["h2o"].curve) - sum(b.loglikelihood for b in cells["full"].curve),
        abs=1e-2,
    )
    # The first positions of a window lie within the budget: nothing was hidden there.
    assert found.by_position[0].kl < 1e-9 and found.by_position[-1].kl > 0


def test_fulls_curve_is_plain_transformers(run, tiny_folder):
    """One byte is one token; lm-eval's windows are rebuilt by hand."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    sums: dict[int, float] = {}
    for text in TEXTS:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        for first in range(0, len(tokens), 64):
            target = tokens[first : first + 64]
            before = ([tokenizer.bos_token_id or tokenizer.eos_token_id] + tokens)[: first + 1]
            window = (before + target)[-65:]
            with torch.inference_mode():
                logprobs = model(torch.tensor([window[:-1]])).logits[0].double().log_softmax(-1)
            for place in range(64 - len(target) if first else 0, len(window) - 1):
                start = 0 if place == 0 else 1 << (place.bit_length() - 1)
                sums[start] = sums.get(start, 0.0) + float(logprobs[place, window[place + 1]])
    [full] = [cell for cell in read_cells(run) if cell.spec.strategy == "full"]
    assert {b.start: b.loglikelihood for b in full.curve} == pytest.approx(sums, abs=1e-2)


def test_the_table_puts_full_beside_the_strategy(run):
    [table] = curves(read_cells(run))
    titles, *lines = table_lines(table)
    assert titles == ["positions", "tokens", "full", "h2o 0.2"]
    assert [line[0] for line in lines] == ["0", "1", "2-3", "4-7", "8-15", "16-31", "32-63"]
    full = table[0].buckets
    assert float(lines[-1][2]) == pytest.approx(math.exp(-full[-1].loglikelihood / full[-1].tokens), abs=0.01)


def test_perplexity_by_hand():
    bucket = CurveRecord(start=4, end=8, tokens=2, loglikelihood=-2 * math.log(8))
    assert perplexity(bucket) == pytest.approx(8)
    assert positions(bucket) == "4-7"
    assert perplexity(bucket.model_copy(update={"loglikelihood": -1e9})) == math.inf


@pytest.mark.parametrize("form", ["table", "markdown", "csv"])
def test_the_command_prints_it(run, form):
    done = CliRunner().invoke(cli, ["curve", str(run), "--format", form])
    assert done.exit_code == 0, done.output
    assert "h2o" in done.output
    if form == "csv":
        lines = list(csv.DictReader(io.StringIO(done.output)))
        assert len(lines) == 14 and {line["strategy"] for line in lines} == {"full", "h2o"}
        assert float(lines[0]["perplexity"]) == pytest.approx(
            math.exp(-float(lines[0]["loglikelihood"]) / int(lines[0]["tokens"]))
        )


def test_the_same_cells_give_the_same_bytes(run):
    tables = curves(read_cells(run))
    assert to_csv(tables) == to_csv(curves(read_cells(run)))
    assert to_markdown(tables).splitlines()[2:4] == [
        "| positions | tokens | full | h2o 0.2 |",
        "| --: | --: | --: | --: |",
    ]


def test_cells_of_other_tasks_have_no_curve():
    with pytest.raises(KvaccError, match="run the task kvacc_longtext first"):
        curves([])
