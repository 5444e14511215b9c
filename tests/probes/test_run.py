"""A probe run on a tiny model: records, resuming, failures, and what the rows say of them."""

import csv
import io
import json

import pytest
import torch
from tiny import tiny_llama

from kvacc.errors import KvaccError
from kvacc.kv_size import kv_bytes_of
from kvacc.probes import measuring, run
from kvacc.probes.config import probe_config_from
from kvacc.probes.probed_model import ProbedModel
from kvacc.probes.records import Distribution
from kvacc.probes.report import capacities_to_csv, to_csv, to_json, to_markdown
from kvacc.probes.rows import TIMED_APART, build_rows
from kvacc.probes.run import run_probes
from kvacc.probes.store import find_probe, read_probes, write_probe
from kvacc.strategy import make_strategy

CONFIG = {
    "models": ["tiny"],
    "strategies": ["full", {"name": "h2o", "budget": 0.25}, {"name": "infinigen", "budget": 0.5}],
    "kernels": ["kvacc", "sdpa"],
    "prompts": [40],
    "outputs": [4],
    "repeats": 3,
}
QUICK = {"measures": ["latency"], "repeats": 2, "warmup": 0, "strategies": ["full"], "kernels": ["kvacc"]}


def encode(text):
    return [3 + ord(letter) % 100 for letter in text]


@pytest.fixture(scope="module")
def load(skewing_folder):
    model = ProbedModel(tiny_llama(), encode, "tiny")
    return lambda entry: model


def probe(folder, load, **changes):
    return run_probes(probe_config_from({**CONFIG, **changes}), folder, load_model=load)


@pytest.fixture(scope="module")
def done(tmp_path_factory, load):
    folder = tmp_path_factory.mktemp("probes")
    return probe(folder, load)


def by_label(report):
    return {row.label: row for row in build_rows(report.records)}


def test_every_case_has_its_record(done):
    assert len(done.records) == done.planned == 4 and not done.failures
    for record in done.records:
        assert find_probe(done.folder, record.case_id) == record
        assert record.path == "step"
        latency = record.latency
        assert latency.time_to_first_token.count == 3
        assert latency.time_per_output_token.count == 3 * 3
        assert latency.clock == "time.perf_counter" and latency.warmup == 1
        assert record.environment.torch == torch.__version__
    assert len({record.started for record in done.records}) == 1
    assert {path.name for path in (done.folder / "probes").iterdir()} == {r.case_id for r in done.records}


def test_bytes_by_hand_and_by_the_formula(done):
    rows = by_label(done)
    entry = 2 * 2 * (8 + 8) * 4  # layers x KV heads x numbers of a key and a value x bytes
    assert rows["full"].kv_device == rows["full sdpa"].kv_device == 40 * entry
    assert rows["h2o 0.25 serve"].kv_device == 10 * entry
    assert rows["h2o 0.25 serve"].kv_share == 0.25
    # Its first layer has nothing to guess from, so it stays on the device.
    assert (rows["infinigen 0.5 serve"].kv_device, rows["infinigen 0.5 serve"].kv_host) == (
        40 * entry / 2,
        40 * entry / 2,
    )
    for record in done.records:
        memory = record.memory
        assert (memory.kv_device, memory.kv_host) == (memory.predicted_device, memory.predicted_host)
        assert (memory.kv_device_end, memory.kv_host_end) == (
            memory.predicted_device_end,
            memory.predicted_host_end,
        )
        assert " off the formula" not in memory.formula
        weights = sum(p.numel() for p in tiny_llama().parameters()) * 4
        assert weights <= memory.weights < memory.decode_peak <= memory.prefill_peak
        on_device = memory.kv_device + memory.summaries
        assert memory.prefill_activations == memory.prefill_peak - memory.weights - on_device


def test_a_wrong_formula_is_said(load, monkeypatch, tmp_path):
    from kvacc.probes import memory_pass

    def wrong(config, strategy, prompt, generated, *rest, **options):
        return kv_bytes_of(config, strategy, prompt + 1, generated, *rest, **options)

    monkeypatch.setattr(memory_pass, "kv_bytes_of", wrong)
    report = probe(tmp_path, load, strategies=["full"], kernels=["kvacc"], measures=["memory"])
    assert "device after the prompt is -256 bytes off the formula" in report.records[0].memory.formula


def test_only_what_offloads_has_transfers(done):
    moved = {record.case.strategy: record.transfers for record in done.records}
    assert moved["full"] is None and moved["h2o"] is None
    assert moved["infinigen"].prefetched_share == 1.0
    assert moved["infinigen"].bytes_to_host == 2 * (8 + 8) * 4


def test_ratios_are_of_runs_in_turns_with_full(done):
    rows = by_label(done)
    assert rows["full"].per_token_ratio is None
    for label in ("full sdpa", "h2o 0.25 serve", "infinigen 0.5 serve"):
        row = rows[label]
        assert row.per_token_ratio_low <= row.per_token_ratio <= row.per_token_ratio_high
        assert row.first_token_ratio > 0
    one, full = (
        next(r for r in done.records if r.case.strategy == name and r.case.kernel == "kvacc").latency
        for name in ("h2o", "full")
    )
    pairs = zip(one.time_to_first_token.values, full.time_to_first_token.values, strict=True)
    assert rows["h2o 0.25 serve"].first_token_ratio == sorted(a / b for a, b in pairs)[1]


def test_finished_cases_are_skipped(done, load):
    def no_model(entry):
        raise AssertionError("nothing is left to measure")

    again = probe(done.folder, no_model)
    assert again.records == done.records and again.measured == []
    assert len(again.skipped) == 4


def test_a_strategy_added_later_has_no_ratio(load, tmp_path):
    probe(tmp_path, load, **QUICK)
    report = probe(tmp_path, load, **{**QUICK, "strategies": ["full", {"name": "h2o", "budget": 8}]})
    assert (len(report.skipped), len(report.measured)) == (1, 1)
    row = by_label(report)["h2o 8 serve"]
    assert row.first_token_ratio is None and row.note == TIMED_APART


def test_too_long_is_a_result_and_the_rest_goes_on(load, tmp_path):
    report = probe(tmp_path, load, **{**QUICK, "prompts": [252, 253]})
    assert len(report.records) == 2
    # 252 + 4 tokens, of which the last is not read, take 255 of 256 positions; 253 take 256.
    assert not report.failures
    report = probe(tmp_path, load, **{**QUICK, "prompts": [254]})
    assert list(report.failures.values()) == [
        "a prompt of 254 with 4 tokens after it exceeds the model's 256 positions"
    ]
    assert "could not run: a prompt of 254" in to_markdown(build_rows(report.records))
    assert probe(tmp_path, load, **{**QUICK, "prompts": [254]}).skipped == [report.records[0].case_id]


def test_out_of_memory_is_a_result(load, tmp_path, monkeypatch):
    def runs_out(*arguments):
        raise torch.OutOfMemoryError("tried to allocate 7 GiB\nlong story")

    monkeypatch.setattr(measuring, "measure_memory", runs_out)
    report = probe(tmp_path, load, **{**QUICK, "measures": ["latency", "memory"]})
    (record,) = report.records
    assert record.failure == "memory: out of memory: tried to allocate 7 GiB"
    assert record.latency is not None and record.memory is None


def test_a_defect_is_no_result(load, tmp_path, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("a defect")

    monkeypatch.setattr(measuring, "measure_memory", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        probe(tmp_path, load, **{**QUICK, "measures": ["memory"]})
    assert not list(tmp_path.rglob("probe.json"))


def test_interrupted_it_loses_the_group_in_flight(load, tmp_path, monkeypatch):
    real, calls = measuring.measure_group, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(measuring, "measure_group", interrupted)
    changes = {**QUICK, "prompts": [8, 12, 16]}
    with pytest.raises(KeyboardInterrupt):
        probe(tmp_path, load, **changes)
    assert [record.case.prompt_tokens for record in read_probes(tmp_path)] == [8]
    report = probe(tmp_path, load, **changes)
    assert (len(report.skipped), len(report.measured)) == (1, 2)


def test_a_damaged_record(load, tmp_path):
    report = probe(tmp_path, load, **QUICK)
    file = tmp_path / "probes" / report.records[0].case_id / "probe.json"
    whole = file.read_text()
    file.write_text(whole[:100])
    with pytest.raises(KvaccError, match=r"probe\.json is damaged .*measures the case again") as caught:
        read_probes(tmp_path)
    assert "\n" not in str(caught.value)
    again = probe(tmp_path, load, **QUICK)
    assert again.damaged == [str(caught.value)] and again.measured == [report.records[0].case_id]
    file.write_text(json.dumps({**json.loads(file.read_text()), "path": "parallel"}))
    with pytest.raises(KvaccError, match="path"):
        read_probes(tmp_path)


def test_another_version_and_another_model_are_refused(load, tmp_path, monkeypatch):
    report = probe(tmp_path, load, **QUICK)
    other = ProbedModel(tiny_llama(num_hidden_layers=1), encode, "tiny")
    with pytest.raises(KvaccError, match="has changed since case"):
        probe(tmp_path, lambda entry: other, **{**QUICK, "prompts": [40, 9]})
    record = report.records[0]
    older = record.model_copy(
        update={"environment": record.environment.model_copy(update={"kvacc": "0.0.1"})}
    )
    write_probe(tmp_path, older)
    with pytest.raises(KvaccError, match=r"holds probes of kvacc 0\.0\.1"):
        probe(tmp_path, load, **QUICK)


def test_where_it_cannot_write(load, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KvaccError, match="it is a file; choose another --output"):
        probe(tmp_path / "file", load, **QUICK)


def test_reading_nothing(tmp_path):
    with pytest.raises(KvaccError, match="no folder"):
        read_probes(tmp_path / "missing")
    with pytest.raises(KvaccError, match=r"no probe\.json in"):
        read_probes(tmp_path)


def test_prompts_are_text_that_differs_between_rows(load):
    prompts = load(None).prompts(20_000, 2)
    assert prompts.shape == (2, 20_000) and not torch.equal(prompts[0], prompts[1])
    text = encode(measuring_text())
    assert prompts[0, : len(text)].tolist() == text
    assert torch.equal(prompts[0, len(text) : 2 * len(text)], prompts[0, : len(text)])


def measuring_text():
    from kvacc.calibration import calibration_text

    return calibration_text()


def test_reports_say_the_same_and_do_not_depend_on_the_order(done):
    rows = build_rows(done.records)
    assert [row.label for row in rows] == ["full", "full sdpa", "h2o 0.25 serve", "infinigen 0.5 serve"]
    assert build_rows(done.records[::-1]) == rows
    text = to_markdown(rows)
    assert text.count("\n## ") == 1 and "| h2o | 0.25 | serve | kvacc |" in text
    assert "25.0%" in text and "| full | - | any | sdpa |" in text
    content = json.loads(to_json(rows))
    assert [row["case_id"] for row in content["rows"]] == [row.case_id for row in rows]
    assert len(to_csv(rows).splitlines()) == 5


def test_ratio_uses_only_the_same_prefill_chunk(done):
    records = [
        record.model_copy(update={"case": record.case.model_copy(update={"prefill_chunk": 16})})
        if record.case.strategy == "h2o"
        else record
        for record in done.records
    ]
    row = next(row for row in build_rows(records) if row.strategy == "h2o")
    assert row.label == "h2o 0.25 serve chunk 16"
    assert row.first_token_ratio is None and row.note is None


def test_the_device_is_part_of_a_group(done):
    record = done.records[0]
    elsewhere = record.model_copy(
        update={"environment": record.environment.model_copy(update={"device": "cuda (A100)"})}
    )
    assert len({row.group for row in build_rows([record, elsewhere])}) == 2


def test_distribution_is_finite():
    with pytest.raises(ValueError, match="finite"):
        Distribution(median=float("nan"), low=0, high=0, p95=0, p99=0, count=1, values=[0])


def test_strategies_by_hand():
    # The sizes above rest on this: a quarter of 40 is 10.
    assert make_strategy("h2o", 0.25).budget.entries(40, 40) == 10
    assert run.OF_A_CASE == ("latency", "memory", "transfers")


def capacity(folder, load, limit, **changes):
    searches = {"limit": limit, "search": ["prompt_tokens", "batch"], "most": 200}
    return probe(folder, load, **{**QUICK, "measures": ["capacity"], "capacity": searches, **changes})


def test_capacity_is_searched_kept_and_not_searched_again(load, tmp_path):
    weights = sum(p.numel() for p in tiny_llama().parameters()) * 4
    small = capacity(tmp_path, load, weights + 300_000)
    longest, largest = small.capacities
    assert (longest.searched, longest.case.batch, largest.searched) == ("prompt_tokens", 1, "batch")
    assert longest.case.prompt_tokens == longest.fits < longest.fails <= 200
    assert largest.case.prompt_tokens == 40 and largest.case.batch == largest.fits
    assert longest.peak_of_fits <= weights + 300_000
    again = capacity(tmp_path, lambda entry: pytest.fail("nothing is left"), weights + 300_000)
    assert again.capacities == small.capacities and len(again.skipped) == 2
    wide = capacity(tmp_path, load, 10**9).capacities[0]
    assert (wide.fits, wide.fails, wide.bound_by) == (200, None, "search")
    assert "| 200 |" in to_markdown([], [wide])
    (line,) = csv.DictReader(io.StringIO(capacities_to_csv([wide])))
    assert (line["fits"], line["fails"], line["strategy"], line["limit"]) == ("200", "", "full", "1000000000")


def test_a_search_that_cannot_be_made(load, tmp_path):
    report = capacity(tmp_path, load, None)
    assert len(report.refused) == 2 and not report.capacities
    assert "give a memory limit" in report.refused["tiny full, longest prompt of batch 1"]
    assert not list(tmp_path.rglob("capacity.json"))


def test_a_prompt_in_chunks_stores_the_same_and_needs_less_at_once(load, tmp_path):
    changes = {
        "strategies": ["full", {"name": "h2o", "budget": 0.25}],
        "kernels": ["kvacc"],
        "prompts": [200],
    }
    report = probe(tmp_path, load, **changes, measures=["memory"], prefill_chunks=[None, 25])
    rows = by_label(report)
    for label in ("full", "h2o 0.25 serve"):
        whole, chunked = rows[label], rows[f"{label} chunk 25"]
        assert whole.kv_device == chunked.kv_device
        assert chunked.prefill_peak < whole.prefill_peak


def test_a_recurrent_model_has_a_state_and_no_strategies(tmp_path):
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    mamba = MambaForCausalLM(MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, state_size=4))
    changes = {"strategies": ["full"], "kernels": ["kvacc", "eager"], "prompts": [12], "repeats": 2}
    report = probe(tmp_path, lambda entry: ProbedModel(mamba, encode, "mamba"), **changes)
    own, eager = report.records
    assert "has no attention in which a strategy could act" in own.failure
    # By hand, of each layer: 64 inner numbers, 4 of convolution each and a state of 4, in float32.
    assert (eager.memory.state, eager.memory.kv_device) == (2 * 64 * (4 + 4) * 4, 0)
    assert eager.latency.time_to_first_token.count == 2
    assert " off the formula" not in eager.memory.formula
