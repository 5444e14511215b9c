"""Configurations of probes: what they plan, and how mistakes are said."""

import pytest

from kvacc.config import packaged_configs
from kvacc.errors import KvaccError
from kvacc.probes.cases import case_id, case_label, plan_groups
from kvacc.probes.config import load_probe_config, packaged_probe_configs, probe_config_from

MINIMAL = {"models": ["some/model"], "strategies": ["full", {"name": "h2o", "budgets": [0.5, 0.2]}]}


def error_of(**changes):
    with pytest.raises(KvaccError) as caught:
        probe_config_from({**MINIMAL, **changes})
    return str(caught.value)


def test_defaults():
    config = probe_config_from(MINIMAL)
    assert (config.protocols, config.kernels, config.prompts) == (["serve"], ["kvacc"], [512, 2048])
    assert (config.batches, config.outputs, config.prefill_chunks) == ([1], [32], [None])
    assert (config.repeats, config.warmup) == (5, 1)
    assert config.measures == ["latency", "memory", "transfers"]


def test_one_entry_needs_no_list():
    config = probe_config_from({**MINIMAL, "prompts": 64, "prefill_chunks": 16, "kernels": "kvacc"})
    assert (config.prompts, config.prefill_chunks, config.kernels) == ([64], [16], ["kvacc"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": [512, 0]}, "prompts.1: 0 is refused: input should be greater than or equal to 1"),
        ({"prompts": [64, 64]}, "prompts.1: 64 is listed twice; keep one"),
        ({"repeats": 1}, "repeats: 1 is refused"),
        ({"kernels": ["kvaac"]}, "kernels.0: unknown kernel 'kvaac' (did you mean 'kvacc'?)"),
        ({"kernels": ["eager"]}, "strategies.1: h2o runs in kernel kvacc only; add it to kernels"),
        ({"strategies": ["streaming_lm"]}, "did you mean 'streaming_llm'?"),
        ({"measures": ["capacity"]}, "is measured under a limit; add capacity: {limit: 4GB}"),
        ({"capacity": {"limit": "4 apples"}}, "size '4 apples': the unit 'apples' is unknown"),
        ({"capacity": {"limit": 0}}, "is nothing"),
        ({"capacity": {"limits": "4GB"}}, "unknown key (did you mean 'limit'?)"),
        ({"tasks": ["piqa"]}, "tasks: unknown key"),
        ({"protocols": ["serv"]}, "did you mean 'serve'?"),
    ],
)
def test_mistakes_name_the_value_and_the_mend(changes, message):
    assert message in error_of(**changes)


def test_a_stock_kernel_needs_full():
    said = error_of(strategies=[{"name": "h2o", "budget": 0.2}], kernels=["kvacc", "sdpa"])
    assert "kernels.1: sdpa serves strategy full alone; add full to strategies" in said


def test_a_strategy_that_reads_the_future_cannot_decode():
    future = {"name": "h2o", "budget": 0.2, "scores": "global"}
    said = error_of(strategies=["full", future], protocols=["stream"])
    assert "strategies.1: h2o with these options reads future tokens" in said and "\n" not in said


def test_mistakes_have_their_place(tmp_path):
    path = tmp_path / "cfg.yaml"
    path.write_text("models: [m]\nstrategies: [full]\nprompts: [512,\n  0]\n")
    with pytest.raises(KvaccError, match=r"cfg\.yaml:4:3: prompts\.1: 0 is refused"):
        load_probe_config(path)
    with pytest.raises(KvaccError, match=r"--set prompts\.1=x: prompts\.1: 'x' is refused"):
        load_probe_config(path, ["prompts.1=x"])
    assert load_probe_config(path, ["prompts.1=7"]).prompts == [512, 7]


def test_packaged_configurations_are_valid_and_no_sweeps():
    assert "probe" in packaged_probe_configs()
    assert not set(packaged_probe_configs()) & set(packaged_configs())
    for name in packaged_probe_configs():
        assert load_probe_config(name).name == name


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GB", 4 * 10**9), ("1.5 GiB", 3 * 2**29), ("512mib", 2**29), (4096, 4096), ("7B", 7)],
)
def test_sizes(text, size):
    assert probe_config_from({**MINIMAL, "capacity": {"limit": text}}).capacity.limit == size


def test_a_group_holds_all_that_is_timed_together():
    config = probe_config_from(
        {**MINIMAL, "kernels": ["kvacc", "sdpa"], "protocols": ["serve", "stream"], "prompts": [64, 128]}
    )
    groups = plan_groups(config)
    assert [(g.prompt_tokens, g.batch, g.output_tokens) for g in groups] == [(64, 1, 32), (128, 1, 32)]
    # full is the same under every protocol; the stock kernel serves it alone.
    assert [case_label(planned.case) for planned in groups[0].cases] == [
        "full",
        "full sdpa",
        "h2o 0.5 serve",
        "h2o 0.5 stream",
        "h2o 0.2 serve",
        "h2o 0.2 stream",
    ]


def test_ids_tell_cases_devices_and_settings_apart():
    case = plan_groups(probe_config_from(MINIMAL))[0].cases[1].case
    base = case_id(case, "cpu", {"repeats": 5})
    assert base == case_id(case.model_copy(), "cpu", {"repeats": 5})
    others = [
        case_id(case.model_copy(update={"prompt_tokens": 513}), "cpu", {"repeats": 5}),
        case_id(case.model_copy(update={"kernel": "sdpa"}), "cpu", {"repeats": 5}),
        case_id(case, "cuda (A100)", {"repeats": 5}),
        case_id(case, "cpu", {"repeats": 6}),
    ]
    assert len({base, *others}) == 5
