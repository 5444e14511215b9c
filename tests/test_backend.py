"""The lm-eval backend: the same questions as lm-eval's own, answered under a strategy."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools

import pytest
import torch
from lm_eval.api.instance import Instance

import kvacc
from kvacc.errors import KvaccError
from kvacc.records import SELECTION, SELECTION_BY_LAYER, RequestRecord
from kvacc.strategy import make_strategy

WORDS = "the quick brown fox jumps over a lazy dog and then it sleeps under some old tree near water".split()
FULL = make_strategy("full")


def text(words: int, first: int = 0) -> str:
    return " ".join(WORDS[(first + i * i) % len(WORDS)] for i in range(words))


def ask(context, continuation, doc_id=0, option=0, task="task", doc=None):
    return Instance("loglikelihood", doc or {}, (context, continuation), option, metadata=(task, doc_id, 1))


def complete(prompt, doc_id=0, **arguments):
    return Instance("generate_until", {}, (prompt, arguments), 0, metadata=("task", doc_id, 1))


def roll(words, doc_id=0):
    return Instance("loglikelihood_rolling", {}, (words,), 0, metadata=("task", doc_id, 1))


@pytest.fixture(scope="module")
def parts(tiny_folder):
    """The tiny model with weights so wide that attention is far from uniform, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.35 * torch.randn(parameter.shape, generator=draw))
    return model, AutoTokenizer.from_pretrained(tiny_folder)


@pytest.fixture(scope="module")
def hf(parts):
    """lm-eval's own backend."""
    from lm_eval.models.huggingface import HFLM

    def make(**arguments):
        model, tokenizer = copy.deepcopy(parts)
        return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3, **arguments)

    return make


@pytest.fixture(scope="module")
def ours(parts):
    def make(**arguments):
        model, tokenizer = copy.deepcopy(parts)
        return kvacc.KvaccLM(pretrained=model, tokenizer=tokenizer, **arguments)

    return make


@pytest.fixture(scope="module")
def shared(ours):
    return ours()


@pytest.fixture
def lm(shared):
    """One loaded model for the tests that do not change it; as new for each."""
    shared.use(FULL, "stream")
    shared.clear_records()
    shared.progress = None
    shared.num_fewshot = None
    return shared


QUESTIONS = [
    ask(text(30), " fox", 0, 0),
    ask(text(30), " lazy dogs", 0, 1),
    ask(text(5, 3), " " + text(12), 1, 0),
    # One token: the byte-level tokenizer has one per letter.
    ask("Is it?", "y", 2, 0),
    ask("Is it?", "n", 2, 1),
    ask("", "Once upon a time", 3, 0),
    ask("", "x", 3, 1),
    ask("It ends in spaces   ", "and goes on", 4, 0),
    ask("It ends in a line\n", " and goes on", 4, 1),
    # WinoGrande: options stand in the context.
    ask("Ann thanked Bo because Ann", " was helped.", 5, 0),
    ask("Ann thanked Bo because the other one", " was helped.", 5, 1),
    ask("ümläut € 漢字", " ñandú", 6, 0),
    ask(text(60, 7), " " + text(3), 7, 0),
]


# As lm-eval's own backend


def assert_equal_answers(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-3)
        assert one[1] == other[1]


def test_full_equals_hf_on_loglikelihood(lm, hf):
    found = lm.loglikelihood(QUESTIONS)
    assert_equal_answers(found, hf().loglikelihood(QUESTIONS))
    assert len({round(value) for value, _ in found}) > 5


def test_questions_on_one_haystack_are_answered_as_each_alone(ours, monkeypatch):
    from kvacc.engine import generation, prefix, shared_prompt

    monkeypatch.setattr(prefix, "LEAST_SAVED", 1)
    monkeypatch.setattr(shared_prompt, "PASS_WORTH", 0)
    begun = []
    original = shared_prompt.Beginning.continue_in
    monkeypatch.setattr(
        shared_prompt.Beginning,
        "continue_in",
        lambda self, session: (begun.append(len(session.rows)), original(self, session))[1],
    )
    assert generation.Beginning is shared_prompt.Beginning
    haystack = text(30, 2)
    questions = [
        Instance(
            "generate_until",
            {"context": haystack},
            (haystack + tail, {"until": [], "max_gen_toks": 6}),
            0,
            metadata=("task", n, 1),
        )
        for n, tail in enumerate((" old tree", " quick fox", " it", " near water and"))
    ]
    for strategy in ("full", "h2o"):
        lm = ours(strategy=strategy, budget=None if strategy == "full" else 0.3, protocol="context")
        together = lm.generate_until(questions)
        records, lm.records = lm.records, []
        assert sum(begun) == len(questions), "the haystack was not shared"
        begun.clear()
        alone = [lm.generate_until([question])[0] for question in questions]
        assert not begun
        assert together == alone
        assert [r.kept_fraction for r in records] == pytest.approx([r.kept_fraction for r in lm.records])
        assert [r.acted for r in records] == [r.acted for r in lm.records] == [strategy == "h2o"] * 4


def test_a_generation_out_of_memory_goes_on_smaller_and_loses_nothing(ours, monkeypatch):
    lm = ours(strategy="h2o", budget=0.4, batch_size=4)
    questions = [complete(text(4, n), n, until=[], max_gen_toks=3) for n in range(10)]
    expected = lm.generate_until(questions)
    original, sizes = lm._generate_batch, []

    def generate(instances, beginning=None):
        sizes.append(len(instances))
        if len(instances) > 2:
            raise torch.OutOfMemoryError("no room")
        return original(instances, beginning)

    monkeypatch.setattr(lm, "_generate_batch", generate)
    assert lm.generate_until(questions) == expected
    assert sizes == [4, 2, 2, 2, 2, 2], "those that wait are made smaller before they fail"
    monkeypatch.setattr(lm, "_generate_batch", lambda *_: (_ for _ in ()).throw(MemoryError("none")))
    with pytest.raises(MemoryError):
        lm.generate_until(questions)


def test_full_equals_hf_when_a_greedy_continuation_is_asked_for(lm, hf):
    starts = [text(3, n) for n in range(20)]
    best = lm.generate_until([complete(start, until=[], max_gen_toks=1) for start in starts])
    start, letter = next((s, b) for s, b in zip(starts, best, strict=True) if len(b) == 1 and b.isascii())
    questions = [ask(start, letter), ask(start, "~" if letter != "~" else "|", 1)]
    found = lm.loglikelihood(questions)
    assert_equal_answers(found, hf().loglikelihood(questions))
    assert found[0][1] and not found[1][1]


def test_full_equals_hf_on_truncated_prompts(ours, hf):
    lm = ours(max_length=40)
    questions = [
        ask(text(30), " fox", 0),
        ask(text(30), " " + "x" * 39, 1),
        ask("short", " " + "y" * 35, 2),
        ask(text(8), "z", 3),
        ask("abc", "d" * 39, 4),
        ask("abcd", "d" * 36, 5),
    ]
    assert_equal_answers(lm.loglikelihood(questions), hf(max_length=40).loglikelihood(questions))
    # The model reads at most 40 tokens, the continuation's last not among them.
    lengths = [len(context) + len(continuation) - 1 for context, continuation in (q.args for q in questions)]
    assert [r.truncated_tokens for r in lm.records] == [max(0, length - 40) for length in lengths]
    assert lm.records[0].prompt_tokens == 40 - 3
    assert lm.get_model_info()["kvacc_truncated_requests"] == sum(length > 40 for length in lengths) == 3


@pytest.mark.parametrize("max_length", [24, 2000])
def test_full_equals_hf_on_rolling_loglikelihood(max_length, ours, hf):
    texts = [roll(text(n, n), n) for n in (1, 6, 14)] + [roll("x", 90), roll("a" * 24, 91), roll("a" * 25, 92)]
    lm = ours(max_length=max_length)
    found = lm.loglikelihood_rolling(texts)
    assert found == pytest.approx(hf(max_length=max_length).loglikelihood_rolling(texts), abs=1e-3)
    assert [r.scored_tokens for r in lm.records] == [len(t.args[0]) for t in texts]
    assert {r.kind for r in lm.records} == {"loglikelihood_rolling"}


def prompts(**arguments):
    return [complete(words, n, **arguments) for n, words in enumerate(["go", text(9), text(4, 2), "", text(20)][:3])]


@pytest.mark.parametrize("batch_size", [1, 2, "auto"])
def test_full_equals_hf_on_generation(batch_size, ours, hf):
    lm = ours(batch_size=batch_size)
    questions = prompts(until=[], max_gen_toks=12)
    found = lm.generate_until(questions)
    assert found == hf().generate_until(questions)
    assert len(set(found)) == len(found) and all(found)


def test_full_equals_hf_on_stop_strings_and_their_absence(lm, hf):
    free = lm.generate_until(prompts(until=[], max_gen_toks=12))
    stop = free[0][3:5]
    questions = [*prompts(until=[stop, "\n\n"], max_gen_toks=12), complete("go", 9, until=stop, max_gen_toks=4)]
    found = lm.generate_until(questions)
    assert found == hf().generate_until(questions)
    assert found[0] == free[0].split(stop)[0] != free[0]


def test_full_equals_hf_on_generation_from_truncated_prompts(ours, hf):
    questions = [complete(text(30), 0, until=[], max_gen_toks=8), complete("go", 1, until=[], max_gen_toks=8)]
    lm = ours(max_length=40)
    assert lm.generate_until(questions) == hf(max_length=40).generate_until(questions)
    assert [r.truncated_tokens for r in lm.records] == [len(text(30)) - 32, 0]
    assert lm.records[0].prompt_tokens == 32


def test_no_room_to_generate_is_one_clear_line(ours):
    with pytest.raises(KvaccError, match="max_gen_toks 40 leaves no room for a prompt in a context of 40 tokens"):
        ours(max_length=40).generate_until(prompts(until=[], max_gen_toks=40))


def test_an_empty_prompt_is_the_prefix_token(lm):
    [made] = lm.generate_until([complete("", until=[], max_gen_toks=5)])
    assert made == lm.generate_until([complete("<s>" * (lm.prefix_token_id == 1) or "</s>", until=[], max_gen_toks=5)])[0]
    assert lm.records[0].prompt_tokens == 1


def test_an_empty_continuation_is_one_clear_line(lm):
    for question in (ask("context", ""), ask("", "", 8, 1)):
        with pytest.raises(KvaccError, match="has an empty continuation after tokenisation: ''") as raised:
            lm.loglikelihood([ask("fine", " yes"), question])
        assert "\n" not in str(raised.value) and "'task'" in str(raised.value)


def test_a_continuation_longer_than_the_context_is_one_clear_line(ours):
    with pytest.raises(KvaccError, match="a continuation of 41 tokens is longer than the model's context of 40"):
        ours(max_length=40).loglikelihood([ask("context", "x" * 41)])


def test_tokens_are_scored_as_text_is(lm):
    lm.use(make_strategy("h2o", 0.3), "stream")
    pairs = [(q.args, *lm._prompts().with_continuation(q)) for q in QUESTIONS[:3]]
    alone = [lm.loglikelihood([q])[0] for q in QUESTIONS[:3]]
    assert_equal_answers(lm._loglikelihood_tokens(pairs), alone)


def test_nothing_to_do(lm):
    assert lm.loglikelihood([]) == lm.loglikelihood_rolling([]) == lm.generate_until([]) == []
    assert lm.records == []


# Through lm-eval


@pytest.fixture(scope="module")
def evaluate(tiny_folder, tmp_path_factory):
    """``lm_eval.simple_evaluate`` on embedded tasks, without lm-eval's own 14,000."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from kvacc.task_catalog import write_task_yamls

    folder = write_task_yamls(tmp_path_factory.mktemp("tasks"))

    def run(tasks, arguments="", model="kvacc", limit=3, **settings):
        manager = TaskManager(include_defaults=False, include_path=str(folder))
        return lm_eval.simple_evaluate(
            model=model, model_args=f"pretrained={tiny_folder}{arguments and ','}{arguments}", tasks=tasks,
            limit=limit, task_manager=manager, bootstrap_iters=0, device="cpu", **settings,
        )  # fmt: skip

    return run


def answers(results, task):
    return [s["resps"] for s in results["samples"][task]]


def values(results, task):
    return [float(resp[0][0]) for s in results["samples"][task] for resp in s["resps"]]


def test_simple_evaluate_finds_the_backend(evaluate):
    task = "kvacc_mini_piqa"
    results = evaluate([task], "strategy=h2o,budget=0.2,protocol=stream,recent_fraction=0.25")
    assert results["n-samples"][task]["effective"] == 3
    assert 0 <= results["results"][task]["acc,none"] <= 1
    config = results["config"]
    assert config["kvacc_strategy"] == repr(make_strategy("h2o", 0.2, recent_fraction=0.25))
    assert config["kvacc_requests"] == config["kvacc_requests_acted_on"] == 6
    assert 0.15 < config["kvacc_kept_fraction"] < 0.4
    full = evaluate([task], "strategy=full")
    assert values(full, task) != pytest.approx(values(results, task), abs=1e-6)
    assert full["config"]["kvacc_requests_acted_on"] == 0 and full["config"]["kvacc_kept_fraction"] == 1.0


def test_full_equals_hf_on_every_embedded_format(evaluate):
    tasks = [f"kvacc_mini_{name}" for name in ("piqa", "hellaswag", "copa", "winogrande", "openbookqa", "boolq")]
    ours = evaluate(tasks, limit=2)
    theirs = evaluate(tasks, "dtype=float32", model="hf", limit=2)
    for task in tasks:
        assert values(ours, task) == pytest.approx(values(theirs, task), abs=1e-3)
        assert ours["results"][task] == pytest.approx(theirs["results"][task], nan_ok=True)


def test_few_shot_prompts_are_lm_evals(evaluate):
    task = "kvacc_mini_copa"
    ours = evaluate([task], num_fewshot=2)
    theirs = evaluate([task], "dtype=float32", model="hf", num_fewshot=2)
    assert [s["prompt_hash"] for s in ours["samples"][task]] == [s["prompt_hash"] for s in theirs["samples"][task]]
    assert values(ours, task) == pytest.approx(values(theirs, task), abs=1e-3)
    assert ours["n-shot"][task] == 2
    lengths = [len(s["arguments"][0][0]) for s in ours["samples"][task]]
    alone = [len(s["arguments"][0][0]) for s in evaluate([task])["samples"][task]]
    assert all(length > 2 * short for length, short in zip(lengths, alone, strict=True))


def test_retention_tasks_generate(evaluate):
    task = "kvacc_passkey_generate"
    results = evaluate([task], "strategy=streaming_llm,budget=64,max_length=4096", limit=1)
    [[answer]] = answers(results, task)[0]
    assert isinstance(answer, str)
    assert results["config"]["kvacc_requests_acted_on"] == 1


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[/]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_chat_templates_are_applied(evaluate, tiny_folder, tmp_path):
    import lm_eval
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvacc.task_catalog import write_task_yamls

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = TEMPLATE
    lm = kvacc.KvaccLM(AutoModelForCausalLM.from_pretrained(tiny_folder), tokenizer=tokenizer)
    task = "kvacc_mini_boolq"
    results = lm_eval.simple_evaluate(
        model=lm, tasks=[task], limit=2, num_fewshot=1, apply_chat_template=True, fewshot_as_multiturn=True,
        system_instruction="Be brief.", bootstrap_iters=0,
        task_manager=TaskManager(include_defaults=False, include_path=str(write_task_yamls(tmp_path))),
    )  # fmt: skip
    prompt = results["samples"][task][0]["arguments"][0][0]
    assert prompt.startswith("<s>[system]Be brief.") and prompt.endswith("[assistant]")
    assert prompt.count("[user]") == 2
    # The template's own beginning-of-sequence token is the only one.
    assert {r.bos_tokens for r in lm.records} == {1}


def test_the_result_cache_is_refused(evaluate, tmp_path):
    with pytest.raises(KvaccError, match="--use_cache answers one strategy's requests with another's") as raised:
        evaluate(["kvacc_mini_copa"], use_cache=str(tmp_path / "cache"))
    assert "\n" not in str(raised.value)


def test_model_info_names_the_run(tiny_folder):
    lm = kvacc.KvaccLM(str(tiny_folder), "h2o", 0.25, protocol="context", tail_tokens=4)
    info = lm.get_model_info()
    assert info["kvacc_kept_fraction"] is None and info["kvacc_requests"] == 0
    lm.loglikelihood([ask(text(20), " fox"), ask("ab", "c", 1)])
    info = lm.get_model_info()
    assert info["kvacc_strategy"] == repr(make_strategy("h2o", 0.25))
    assert info["kvacc_protocol"] == "context" and info["kvacc_causal"] is True
    assert info["kvacc_requests"] == 2 and info["kvacc_requests_acted_on"] >= 1
    mean = sum(r.kept_fraction * r.scored_tokens for r in lm.records) / sum(r.scored_tokens for r in lm.records)
    assert info["kvacc_kept_fraction"] == pytest.approx(mean)
    assert info["kvacc_truncated_requests"] == 0
    assert info["model_dtype"] and info["model_num_parameters"] > 0, "lm-eval's own fields stay"
    lm.use(make_strategy("h2o", 8, scores="global"), "stream")
    assert lm.get_model_info()["kvacc_causal"] is False


def test_model_info_speaks_of_the_strategy_in_use(lm):
    lm.use(make_strategy("recent", 3), "stream")
    lm.loglikelihood([ask(text(20), " fox")])
    lm.use(FULL, "stream")
    lm.loglikelihood([ask(text(20), " fox", 1)])
    info = lm.get_model_info()
    assert (info["kvacc_requests"], info["kvacc_requests_acted_on"], info["kvacc_kept_fraction"]) == (1, 0, 1.0)


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "h20", "budget": 0.2}, r"unknown strategy 'h20' \(did you mean 'h2o'\?\)"),
        ({"strategy": "h2o"}, "strategy 'h2o' needs a budget"),
        ({"strategy": "h2o", "budget": 0.2, "recent_fracton": 0.5}, "did you mean 'recent_fraction'"),
        ({"strategy": "full", "max_lenght": 50}, "or the backend argument.*did you mean 'max_length'"),
        ({"strategy": "full", "protcol": "serve"}, "or the backend argument.*did you mean 'protocol'"),
        ({"strategy": "h2o", "budget": 0.2, "max_batch_token": 9}, "did you mean 'max_batch_tokens'"),
        ({"strategy": "full", "protocol": "steam"}, r"unknown protocol 'steam' \(did you mean 'stream'\?\)"),
        ({"strategy": "h2o", "budget": 4, "scores": "global", "protocol": "serve"}, "'serve'; it supports: stream"),
        ({"strategy": "h2o", "budget": 0}, "budget 0 keeps nothing"),
        ({"strategy": "h2o", "budget": 1.5}, "above 1"),
        ({"strategy": FULL, "budget_of": "prompt", "sinks": 4}, "unknown option 'sinks'"),
        ({"tail_tokens": -1}, "tail_tokens -1"),
        ({"tail_tokens": "many"}, "tail_tokens 'many'"),
    ],
)
def test_mistakes_are_answered_before_the_model_loads(arguments, message):
    with pytest.raises(KvaccError, match=message) as raised:
        kvacc.KvaccLM("/no/such/folder", **arguments)
    assert "\n" not in str(raised.value)


def test_a_loaded_model_needs_its_tokenizer(parts):
    with pytest.raises(KvaccError, match="give tokenizer="):
        kvacc.KvaccLM(pretrained=parts[0])


@pytest.mark.parametrize(
    "arguments", [{"batch_size": "many"}, {"batch_size": -2}, {"max_batch_tokens": -5}, {"max_batch_tokens": "x"}]
)
def test_batch_sizes_that_are_none(arguments, ours):
    with pytest.raises(KvaccError, match=next(iter(arguments))):
        ours(**arguments)


@pytest.mark.parametrize("protocol", ["context", "serve"])
def test_rolling_has_no_prompt_to_compress(protocol, lm):
    lm.use(make_strategy("h2o", 8), protocol)
    with pytest.raises(KvaccError, match=f"protocol '{protocol}' means nothing for it; use protocol=stream") as raised:
        lm.loglikelihood_rolling([roll("some words")])
    assert "\n" not in str(raised.value)


# Switching strategies


def test_strategies_are_switched_without_a_trace(lm):
    def scored(strategy, protocol):
        lm.use(strategy, protocol)
        lm.clear_records()
        return lm.loglikelihood(QUESTIONS), list(lm.records)

    model = lm.model
    before = [p.clone() for p in lm.model.parameters()]
    first = scored(FULL, "stream")
    h2o = scored(make_strategy("h2o", 0.3), "stream")
    lm.generate_until(prompts(until=[], max_gen_toks=4))
    llm = scored(make_strategy("streaming_llm", 8), "serve")
    again = scored(FULL, "stream")
    assert again == first, "bitwise"
    assert scored(make_strategy("h2o", 0.3), "stream") == h2o
    assert h2o[0] != first[0] != llm[0]
    assert lm.model is model
    assert all(torch.equal(a, b) for a, b in zip(before, lm.model.parameters(), strict=True))


def test_one_switch_that_is_refused_changes_nothing(lm):
    strategy = make_strategy("h2o", 4)
    lm.use(strategy, "serve", 7)
    for arguments in ((strategy, "steam"), (make_strategy("h2o", 4, scores="global"), "serve"), (FULL, "serve", -1)):
        with pytest.raises(KvaccError):
            lm.use(*arguments)
        assert (lm.strategy, lm.protocol, lm.tail_tokens) == (strategy, "serve", 7)


def test_nothing_of_a_run_stays_in_memory(lm):
    lm.use(make_strategy("h2o", 0.3), "stream")

    def tensors():
        gc.collect()
        return sum(torch.is_tensor(thing) for thing in gc.get_objects())

    lm.loglikelihood(QUESTIONS)
    before = tensors()
    lm.loglikelihood(QUESTIONS)
    lm.generate_until(prompts(until=[], max_gen_toks=4))
    assert tensors() <= before + 2


# Records


def test_every_field_of_a_record(lm):
    lm.use(make_strategy("recent", 5), "serve")
    context, options = text(6), ["y", " fox"]
    found = lm.loglikelihood([ask(context, o, 3, i, "quiz") for i, o in enumerate(options)])
    length = len(context)
    # The first token is read with everything; then five entries and the token itself.
    kept = [1.0, (1 + sum(6 / (length + i + 1) for i in range(3))) / 4]
    expected = [
        RequestRecord(
            task="quiz", doc_id=3, option=i, kind="loglikelihood", prompt_tokens=length,
            scored_tokens=len(options[i]), truncated_tokens=0, budget_entries=5,
            kept_fraction=pytest.approx(kept[i]), acted=bool(i), unreachable_tokens=1, bos_tokens=0,
            loglikelihood=found[i][0], greedy=found[i][1],
        )
        for i in range(2)
    ]  # fmt: skip
    assert [dataclasses.asdict(r) for r in lm.records] == [dataclasses.asdict(r) for r in expected]


def test_every_field_of_a_generated_record(lm):
    lm.use(make_strategy("recent", 5), "serve")
    prompt = text(6)
    lm.generate_until([complete(prompt, 4, until=[], max_gen_toks=7)])
    length = len(prompt)
    kept = (1 + sum(6 / (length + i + 1) for i in range(6))) / 7
    expected = RequestRecord(
        task="task", doc_id=4, option=0, kind="generate_until", prompt_tokens=length, scored_tokens=7,
        truncated_tokens=0, budget_entries=5, kept_fraction=pytest.approx(kept), acted=True,
        unreachable_tokens=1, bos_tokens=0, loglikelihood=None, greedy=None,
    )  # fmt: skip
    assert [dataclasses.asdict(r) for r in lm.records] == [dataclasses.asdict(expected)]


def test_every_field_of_a_rolling_record(ours):
    lm = ours(strategy="recent", budget=5, max_length=16)
    [total] = lm.loglikelihood_rolling([roll("a" * 30, 6)])
    [record] = lm.records
    # Two windows of 16 tokens; the second scores 14, its context the rest. Five entries and itself.
    first = [min(1.0, 6 / (p + 1)) for p in range(16)]
    second = [min(1.0, 6 / (p + 1)) for p in range(2, 16)]
    assert record.kept_fraction == pytest.approx(sum(first + second) / 30)
    assert (record.scored_tokens, record.truncated_tokens, record.unreachable_tokens) == (30, 0, 0)
    assert record.budget_entries == 5 and record.acted and record.loglikelihood == total
    assert (record.task, record.doc_id, record.kind) == ("task", 6, "loglikelihood_rolling")


SELECTED = {
    "moved_bytes": 1536.0, "attention_mass": 0.9, "recall": 0.8,
    "mass_by_layer": (None, 0.9), "recall_by_layer": (None, 0.8),
}  # fmt: skip


@pytest.fixture
def selecting(monkeypatch):
    """Scores as those of a strategy that selects: 1 / n of ``SELECTED`` for the n-th request."""
    import kvacc.backend.lm as module

    score_documents = module.score_documents

    def parts_of_it():
        for n in itertools.count(1):
            single = {name: SELECTED[name] / n for name in SELECTION}
            by_layer = {name: (None, SELECTED[name][1] / n) for name in SELECTION_BY_LAYER}
            yield single | by_layer

    def score(*arguments, **options):
        parts = parts_of_it()
        found = score_documents(*arguments, **options)
        return [[dataclasses.replace(one, **next(parts)) for one in document] for document in found]

    monkeypatch.setattr(module, "score_documents", score)


def test_a_record_holds_what_was_selected(lm, selecting):
    lm.loglikelihood([ask("ab", "c"), ask("ab", "d", 1)])
    first, second = lm.records
    assert {name: getattr(first, name) for name in SELECTED} == SELECTED
    assert (second.moved_bytes, second.recall, second.mass_by_layer) == (768.0, 0.4, (None, 0.45))


def test_windows_of_a_text_are_averaged_by_their_tokens(ours, selecting):
    lm = ours(max_length=16)
    lm.loglikelihood_rolling([roll("a" * 30)])
    [record] = lm.records
    # Windows that score 16 and 14 tokens, the second with half of everything.
    share = (16 + 14 / 2) / 30
    assert record.moved_bytes == pytest.approx(1536 * share)
    assert record.attention_mass == pytest.approx(0.9 * share)
    assert record.recall_by_layer == (None, pytest.approx(0.8 * share))


def test_model_info_and_the_log_say_what_was_selected(lm, selecting, caplog):
    lm.loglikelihood([ask("ab", "c" * 3), ask("ab", "d", 1)])
    with caplog.at_level("INFO", "lm_eval.kvacc"):
        info = lm.get_model_info()
    # Three tokens with all of it, one with half.
    assert info["kvacc_moved_bytes_per_token"] == pytest.approx(1536 * 3.5 / 4)
    assert info["kvacc_attention_mass"] == pytest.approx(0.9 * 3.5 / 4)
    assert info["kvacc_recall"] == pytest.approx(0.8 * 3.5 / 4)
    assert info["kvacc_mass_by_layer"] == (None, pytest.approx(0.9 * 3.5 / 4))
    assert info["kvacc_recall_by_layer"] == (None, pytest.approx(0.8 * 3.5 / 4))
    said = "kept 100.0%, moved 1.3 KiB/token, attention mass 78.8%, recall 70.0%, acted on 0 of 2 requests"
    assert said in caplog.text


def test_nothing_is_said_of_selecting_where_nothing_was_selected(lm, caplog):
    lm.loglikelihood([ask("ab", "c")])
    with caplog.at_level("INFO", "lm_eval.kvacc"):
        info = lm.get_model_info()
    assert not any("moved" in name or "recall" in name or "mass" in name for name in info)
    assert "kept 100.0%, acted on 0 of 1 requests" in caplog.text


def test_records_are_in_the_order_of_the_requests(lm):
    order = [5, 12, 0, 3, 9, 1, 2, 10, 4]
    lm.loglikelihood([QUESTIONS[i] for i in order])
    assert [(r.doc_id, r.option) for r in lm.records] == [(QUESTIONS[i].doc_id, QUESTIONS[i].idx) for i in order]
    lm.clear_records()
    made = prompts(until=[], max_gen_toks=3)[::-1]
    lm.generate_until([*made, complete("other arguments", 7, until=[], max_gen_toks=2)])
    assert [r.doc_id for r in lm.records] == [2, 1, 0, 7]
    lm.clear_records()
    lm.loglikelihood_rolling([roll("ab", 1), roll("a longer text", 0)])
    assert [r.doc_id for r in lm.records] == [1, 0]
    lm.loglikelihood([ask("a", "b", 9)])
    assert [r.doc_id for r in lm.records] == [1, 0, 9], "records add up until cleared"


def test_every_rolling_request_has_a_record(lm):
    assert lm.loglikelihood_rolling([roll("ab", 0), roll("", 1), roll("c", 2)])[1] == 0
    assert [r.doc_id for r in lm.records] == [0, 1, 2]


@pytest.mark.parametrize("kind", ["loglikelihood", "generate_until"])
@pytest.mark.parametrize(("protocol", "expected"), [("stream", 0), ("context", 0), ("serve", 1)])
def test_tokens_out_of_reach(kind, protocol, expected, lm):
    lm.use(make_strategy("recent", 3), protocol)
    if kind == "loglikelihood":
        lm.loglikelihood([ask(text(6), " fox"), ask(text(6), "y", 0, 1)])
    else:
        lm.generate_until([complete(text(6), 0, until=[], max_gen_toks=4), complete(text(3), 1, until=[], max_gen_toks=1)])
    assert [r.unreachable_tokens for r in lm.records] == [expected, expected]
    # A one-token answer in `serve` is read with the full cache.
    assert [r.acted for r in lm.records] == [True, protocol != "serve"]


@pytest.mark.parametrize("protocol", ["stream", "context", "serve"])
def test_full_keeps_everything_and_nothing_is_out_of_its_reach(protocol, lm):
    lm.use(FULL, protocol)
    found = lm.loglikelihood(QUESTIONS)
    lm.generate_until(prompts(until=[], max_gen_toks=3))
    assert {(r.kept_fraction, r.acted, r.unreachable_tokens, r.budget_entries) for r in lm.records} == {
        (1.0, False, 0, None)
    }
    lm.use(FULL, "stream")
    assert_equal_answers(found, lm.loglikelihood(QUESTIONS))


@pytest.mark.parametrize("protocol", ["stream", "context", "serve"])
def test_a_budget_that_never_binds_equals_full_and_did_not_act(protocol, lm):
    expected = lm.loglikelihood(QUESTIONS)
    lm.clear_records()
    lm.use(make_strategy("h2o", 1000), protocol)
    assert_equal_answers(lm.loglikelihood(QUESTIONS), expected)
    assert not any(r.acted for r in lm.records) and {r.kept_fraction for r in lm.records} == {1.0}


def test_progress_is_told(lm):
    calls = []
    lm.progress = lambda done, total: calls.append((done, total))
    lm.loglikelihood(QUESTIONS)
    assert calls[-1] == (13, 13) and [d for d, _ in calls] == sorted({d for d, _ in calls})
    calls.clear()
    lm.generate_until(prompts(until=[], max_gen_toks=2))
    assert calls[-1] == (3, 3)


# One document, one budget


WINOGRANDE = [
    ask("Ann thanked Bo because Ann", " was helped.", 5, 0),
    ask("Ann thanked Bo because the other one of them", " was helped.", 5, 1),
]


@pytest.mark.parametrize("protocol", ["stream", "serve"])
def test_options_share_the_budget_of_the_shortest(protocol, lm):
    lm.use(make_strategy("h2o", 0.5), protocol)
    lm.loglikelihood(WINOGRANDE)
    shortest = len(WINOGRANDE[0].args[0])
    assert [r.budget_entries for r in lm.records] == [shortest // 2] * 2


def test_unconditional_options_do_not_set_the_budget(lm):
    """lm-eval's ``acc_mutual_info`` scores every option once more, without any context."""
    lm.use(make_strategy("h2o", 0.5), "stream")
    conditional = [ask(text(10), f" {o}", 0, i) for i, o in enumerate(("fox", "dog"))]
    alone = lm.loglikelihood(conditional)
    unconditional = [ask("", f" {o}", 0, i + 2) for i, o in enumerate(("fox", "dog"))]
    lm.clear_records()
    assert_equal_answers(lm.loglikelihood([*conditional, *unconditional])[:2], alone)
    assert [r.budget_entries for r in lm.records[:2]] == [len(text(10)) // 2] * 2


@pytest.mark.parametrize("protocol", ["stream", "context", "serve"])
@pytest.mark.parametrize("name", ["h2o", "random", "streaming_llm"])
def test_order_of_options_and_requests_changes_nothing(name, protocol, lm):
    lm.use(make_strategy(name, 0.3), protocol)
    found = lm.loglikelihood(QUESTIONS)
    records = lm.records
    lm.clear_records()
    assert_equal_answers(lm.loglikelihood(QUESTIONS[::-1])[::-1], found)
    for one, other in zip(lm.records[::-1], records, strict=True):
        assert (one.doc_id, one.option, one.budget_entries, one.acted) == (
            other.doc_id, other.option, other.budget_entries, other.acted
        )  # fmt: skip
        assert one.kept_fraction == pytest.approx(other.kept_fraction, abs=1e-12)


@pytest.mark.parametrize("protocol", ["stream", "context", "serve"])
def test_one_option_is_scored_as_among_others(protocol, lm):
    lm.use(make_strategy("h2o", 0.3), protocol)
    options = [ask(text(20), o, 0, i) for i, o in enumerate((" fox", " fox and", "", " a")[::3])]
    together = lm.loglikelihood(options)
    assert_equal_answers([lm.loglikelihood([o])[0] for o in options], together)


@pytest.mark.parametrize("tokens", [1, 64, 10_000])
def test_batches_change_nothing(tokens, ours, lm):
    strategy = make_strategy("h2o", 0.3)
    lm.use(strategy, "context", 32)
    expected = lm.loglikelihood(QUESTIONS)
    assert_equal_answers(ours(strategy=strategy, protocol="context", max_batch_tokens=tokens).loglikelihood(QUESTIONS), expected)


def test_equal_requests_keep_equal_sets(lm):
    lm.use(make_strategy("random", 0.3), "stream")
    question = ask(text(12), " fox", 0)
    found = lm.loglikelihood([question, ask(text(12), " fox", 1), question])
    assert found[0] == found[1] == found[2]
    assert all(r.acted for r in lm.records) and len({r.kept_fraction for r in lm.records}) == 1


def test_documents_of_two_tasks_are_two(lm):
    lm.use(make_strategy("h2o", 0.5), "stream")
    lm.loglikelihood([ask(text(12), " fox", 0, 0, "one"), ask(text(4), " fox", 0, 0, "two")])
    assert [r.budget_entries for r in lm.records] == [-(-len(text(n)) // 2) for n in (12, 4)]


# Where the context segment ends


def dense_tokens(lm, question):
    """Tokens compressed in the protocol ``context``: nearly all of them, rounded up, is that many."""
    lm.use(make_strategy("recent", 0.999999), "context", lm.tail_tokens)
    lm.clear_records()
    lm.loglikelihood([question])
    return lm.records[0].budget_entries


SHOTS = "Question: One?\nAnswer: Yes\n\nQuestion: Two?\nAnswer: No\n\n"


@pytest.mark.parametrize(
    ("doc", "prompt", "compressed"),
    [
        ({"passage": "A passage."}, "A passage.\nQuestion: is it?\nAnswer:", "A passage."),
        ({"passage": "A passage."}, "Other.\nQuestion: o?\nAnswer: no\n\nA passage.\nQuestion: is it?\nAnswer:",
         "Other.\nQuestion: o?\nAnswer: no\n\nA passage."),
        ({"context": "Hay. The key is 5. Hay."}, "Hay. The key is 5. Hay. What is the key?", "Hay. The key is 5. Hay."),
        ({"goal": "Boil it"}, SHOTS + "Question: Boil it\nAnswer:", SHOTS),
        ({"query": "Cooking: She stirs"}, "Sports: He runs fast.\n\nCooking: She stirs", "Sports: He runs fast.\n\n"),
        ({"premise": "It rained.", "question": "effect"}, "It shone because x.\n\nIt rained therefore",
         "It shone because x.\n\n"),
        ({"question_stem": "Ice is"}, "Fire is\nhot\n\nIce is", "Fire is\nhot\n\n"),
        ({"sentence": "Ann met Bo as _ came.", "option1": "Ann", "option2": "Bo"}, "A b c.\n\nAnn met Bo as Bo",
         "A b c.\n\n"),
    ],
)  # fmt: skip
def test_context_ends_as_the_task_says(doc, prompt, compressed, lm):
    # A space at the end of the segment is written with the token behind it or with its own.
    assert dense_tokens(lm, ask(prompt, " yes", doc=doc)) == len(compressed)


@pytest.mark.parametrize(
    ("length", "tail", "compressed"),
    [(100, 32, 68), (100, 0, 100), (100, 50, 50), (100, 80, 50), (10, 32, 5), (11, 32, 6), (2, 32, 1), (1, 32, 1)],
)
def test_otherwise_all_but_the_tail_and_at_least_half(length, tail, compressed, lm):
    lm.tail_tokens = tail
    assert dense_tokens(lm, ask("x" * length, "yes")) == compressed


def test_the_caller_may_know_the_number_of_examples(lm):
    prompt = "One.\n\nTwo.\n\nA question that\n\nhas a blank line"
    assert dense_tokens(lm, ask(prompt, " yes", doc={"x": "y"})) == prompt.rindex("\n\n") + 2
    lm.num_fewshot = 0
    assert dense_tokens(lm, ask(prompt, " yes", doc={"x": "y"})) == len(prompt) - min(32, len(prompt) // 2)


def test_the_boundary_moves_with_truncation(ours):
    lm = ours(max_length=40)
    passage = "A passage of some words that is quite long."
    question = ask(f"{passage}\nIs it?", " y", doc={"passage": passage})
    cut = len(question.args[0]) + 2 - 1 - 40
    assert dense_tokens(lm, question) == len(passage) - cut
    # Nothing of the context left: one token, for compression has to act somewhere.
    long = ask(f"{passage}\n{'x' * 60}", " y", doc={"passage": passage})
    assert dense_tokens(lm, long) == 1


def test_the_question_reads_the_compressed_context(lm):
    """What is behind the boundary is scored against what was kept of the part before it."""
    passage = text(10)
    question = ask(f"{passage}\nIs it?", " y", doc={"passage": passage})
    lm.use(make_strategy("recent", 3), "context")
    lm.loglikelihood([question])
    [record] = lm.records
    length = len(question.args[0])
    assert record.acted and record.unreachable_tokens == 0
    # Three kept entries and the token itself, at the last token of the prompt and the space.
    assert record.kept_fraction == pytest.approx((4 / length + 4 / (length + 1)) / 2)


# Generation


@pytest.mark.parametrize("protocol", ["stream", "context", "serve"])
@pytest.mark.parametrize("name", ["h2o", "streaming_llm"])
def test_generation_is_a_loop_of_greedy_steps(name, protocol, lm):
    from kvacc.engine import attention
    from kvacc.engine.scoring import step_forward
    from kvacc.engine.stepping import RowReading

    strategy = make_strategy(name, 0.4)
    lm.use(strategy, protocol)
    questions = prompts(until=[], max_gen_toks=6)
    found = lm.generate_until(questions)
    for question, made in zip(questions, found, strict=True):
        prompt = lm.tok_encode(question.args[0])
        dense = {"stream": 0, "serve": len(prompt), "context": max(1, len(prompt) - min(32, len(prompt) // 2))}[protocol]
        session = lm.wrapped.step(strategy, [RowReading(0, dense, dense or len(prompt))])
        tokens = list(prompt)
        with attention.active(session), torch.inference_mode():
            for column in range(len(prompt) + 5):
                logits = step_forward(lm.wrapped, session, torch.tensor([[tokens[column]]]), column)
                if column >= len(prompt) - 1:
                    tokens.append(int(logits[0, -1].argmax()))
        assert made == lm.tok_decode(tokens[len(prompt) :])
        assert lm.generate_until([question]) == [made]
    lm.use(FULL, "stream")
    assert lm.generate_until(questions) != found


def test_a_row_that_met_its_stop_string_is_measured_to_there(lm):
    """Its neighbours go on; what happens meanwhile in its row is not its answer."""
    lm.use(make_strategy("recent", 4), "stream")
    starts = [text(3, n) for n in range(6)]
    free = lm.generate_until([complete(start, until=[], max_gen_toks=14) for start in starts])
    # A row that makes a letter early on that another row never makes.
    first, second, stop = next(
        (a, b, letter)
        for a, made in enumerate(free)
        for b, other in enumerate(free)
        for letter in made[1:6]
        if letter.isascii() and letter.isprintable() and letter not in other
    )
    questions = [complete(starts[n], n, until=[stop], max_gen_toks=14) for n in (first, second)]
    lm.clear_records()
    lm.generate_until(questions)
    together = lm.records
    lm.clear_records()
    lm.generate_until(questions[:1])
    assert together[0].scored_tokens == lm.records[0].scored_tokens < 14 == together[1].scored_tokens
    assert together[0].kept_fraction == pytest.approx(lm.records[0].kept_fraction)


def test_beams_and_returned_sequences(lm):
    lm.use(make_strategy("h2o", 0.4), "stream")
    for settings in ({"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}):
        questions = prompts(until=[], max_gen_toks=5, **settings)
        together = lm.generate_until(questions)
        assert together == [lm.generate_until([q])[0] for q in questions]
    assert together != lm.generate_until(prompts(until=[], max_gen_toks=5))


@pytest.mark.parametrize(
    "settings", [{"do_sample": True, "temperature": 1.0}, {"temperature": 0.7}, {"do_sample": True, "top_p": 0.9, "temperature": 1.0, "num_return_sequences": 2}]
)
def test_sampling_follows_the_seed(settings, lm):
    lm.use(make_strategy("h2o", 0.4), "serve")
    questions = prompts(until=[], max_gen_toks=8, **settings)

    def sample(seed):
        torch.manual_seed(seed)
        return lm.generate_until(questions)

    assert sample(1) == sample(1) != sample(2)


def test_a_strategy_that_reads_the_future_cannot_generate(lm):
    lm.use(make_strategy("h2o", 8, scores="global"), "stream")
    with pytest.raises(KvaccError, match="reads future tokens, so it cannot decode"):
        lm.generate_until(prompts(until=[], max_gen_toks=2))


# The embedded model


@pytest.mark.slow
def test_smollm2_equals_hf(smollm2_folder):
    from lm_eval.models.huggingface import HFLM

    expected = HFLM(pretrained=str(smollm2_folder), dtype="float32", device="cpu", batch_size=4).loglikelihood(QUESTIONS)
    assert_equal_answers(kvacc.KvaccLM(str(smollm2_folder)).loglikelihood(QUESTIONS), expected)


def test_everything_is_everything_even_for_an_answer_longer_than_its_prompt(tiny_folder):
    requests = [ask("ab", "cdefghijklmnop" * 2)]
    lm = kvacc.KvaccLM(str(tiny_folder))
    ((full, _),) = lm.loglikelihood(requests, disable_tqdm=True)
    for name in ("h2o", "streaming_llm", "recent", "random"):
        for protocol in ("stream", "serve"):
            lm.use(make_strategy(name, 1.0), protocol)
            ((found, _),) = lm.loglikelihood(requests, disable_tqdm=True)
            assert found == pytest.approx(full, abs=1e-4)
            assert not lm.records[0].acted and lm.records[0].budget_entries is None
