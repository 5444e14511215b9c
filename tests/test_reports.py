"""What has gone wrong for users of other tools: each kind of fault must be impossible here.

Rows by their number in the collection of reports. Where another file tests a row exactly,
it is named here instead of being written twice.

===  ==========================================  ====================================================
row  what went wrong elsewhere                   tested
===  ==========================================  ====================================================
1    compressed, yet accuracy never changes      here
3    only the first sample compressed            here
5    lengths add up across requests              test_backend: order_of_options_and_requests,
                                                 switched_without_a_trace; engine/test_generation:
                                                 nothing_is_left
7    outputs equal full's byte for byte          test_leaderboard: identical_loglikelihoods,
                                                 never_acted
9    a cache serves another strategy's answers   here; test_backend: result_cache_is_refused
11   every method "equal" at chance              test_leaderboard: full_at_chance
13   kept and removed fractions confused         here
15   fraction while decoding                     here
17   recent = 0 keeps the newest all the same    here
19   unequal settings ranked together            test_leaderboard: every_hyper_parameter,
                                                 unequal_kept_fractions_are_not_ranked
21   early tokens' scores freeze the set         here (the documented choice, ties)
23   chunked prefill exceeds the budget          here
25   cropping leaves stale rows                  engine/test_generation: assisted_decoding_is_refused;
                                                 test_backend: one_option_is_scored_as_among_others
27   broken by a release of transformers         later (version matrix)
29   the question was not in what is compressed  here; test_leaderboard: protocols_are_ranked_apart
31   one method saw the question, one did not    as 29
33   keys repeated before they are stored        here
35   how do query heads share a score?           here; strategies/test_h2o
37   a simulation sold as memory saved           here; test_leaderboard: kinds_of_rows_are_marked
39   slow quantised cache                        later (latency probes)
41   whole attention matrix: out of memory       here (bounded blocks); speed later
43   code differs from its paper                 here; strategies/test_h2o
45   a curve of 100 items                        test_statistics: copa_sized_stderr, Tango's interval
47   near chance, unsaid                         test_task_catalog: chance; test_leaderboard
49   noise read as a curve                       test_leaderboard: significant_loss_is_not_marked_ns
51   another template, unsaid                    here; test_leaderboard: unequal_questions
53   scores change with the batch size           here
55   standard error printed as 0.0               test_statistics: stderr_is_zero_only; test_evaluation
57   no resuming                                 test_sweep: killed_in_a_cell
59   beginning-of-sequence missing or doubled    here
61   a method that fails one model silently      later (gates)
63   no way to choose a cache per task           test_backend: simple_evaluate_finds_the_backend
65   left padding                                engine/test_generation: padding_and_neighbours
67   servers wait for eviction                   nothing to test
===  ==========================================  ====================================================
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from lm_eval.api.instance import Instance
from naive import sharp

import kvacc
from kvacc.engine import attention
from kvacc.engine.plan import Request, build_rows, make_plan
from kvacc.engine.scoring import score_documents, step_forward
from kvacc.engine.stepping import RowReading
from kvacc.strategy import make_strategy, strategy_classes

LLAMA = {"layers": 2, "kv_heads": 2, "dimension": 8}
TOKENS = [3 + (11 * i + i * i) % 120 for i in range(48)]


def ask(context, continuation, doc_id=0, option=0, doc=None):
    return Instance("loglikelihood", doc or {}, (context, continuation), option, metadata=("task", doc_id, 1))


def read(strategy, tokens=TOKENS, dense=0, chunk=1, padding=0):
    """The session after reading ``tokens`` on the step path, in chunks."""
    model = sharp()
    session = model.step(strategy, [RowReading(padding, dense, dense or len(tokens))])
    columns = torch.tensor([[0] * padding + list(tokens)])
    with attention.active(session), torch.inference_mode():
        for first in range(0, columns.shape[1], chunk):
            step_forward(model, session, columns[:, first : first + chunk], first)
    return session


def kept(session) -> list[list[list[int]]]:
    """Positions kept, by layer and KV head."""
    return [
        [
            sorted(p[a].tolist())
            for p, a in zip(layer.entries.position[0], layer.entries.alive[0], strict=True)
        ]
        for layer in session.cache.layers
    ]


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_folder)


@pytest.fixture(scope="module")
def copier(tokenizer):
    """A Llama, written by hand, that copies the one capital letter of its prompt.

    One layer, one head. Embeddings are one-hot. Every query looks for capital letters (in a
    dimension that hardly rotates), values name the letter, and the output repeats it.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    size, head = len(tokenizer) + 1, 64
    config = LlamaConfig(
        vocab_size=size, hidden_size=size, head_dim=head, num_attention_heads=1, num_key_value_heads=1,
        num_hidden_layers=1, intermediate_size=4, max_position_embeddings=2048, rms_norm_eps=1e-12,
        rope_parameters={"rope_type": "default", "rope_theta": 1e10},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    letters = [tokenizer.convert_tokens_to_ids(chr(ord("A") + i)) for i in range(26)]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(torch.eye(size))
        layer = model.model.layers[0].self_attn
        slow = head // 2 - 1
        layer.q_proj.weight[slow] = 1
        for i, letter in enumerate(letters):
            layer.k_proj.weight[slow, letter] = 1
            layer.v_proj.weight[i, letter] = 1
            layer.o_proj.weight[letter, i] = 1
    return kvacc.KvaccLM(pretrained=model, tokenizer=tokenizer)


def copy_task(items: int = 24):
    """Documents with one capital letter early in the prompt; which one was it?"""
    requests, labels = [], []
    for n in range(items):
        filler = [chr(ord("a") + (7 * i + n) % 26) for i in range(63)]
        options = [chr(ord("A") + (3 * n) % 26), chr(ord("A") + (3 * n + 11) % 26)]
        labels.append(n % 2)
        filler[5 + n] = options[labels[-1]]
        requests += [ask("".join(filler) + ":", option, n, i) for i, option in enumerate(options)]
    return requests, labels


def accuracy(lm, strategy, protocol):
    requests, labels = copy_task()
    lm.use(strategy, protocol)
    lm.clear_records()
    found = [value for value, _ in lm.loglikelihood(requests)]
    pairs = list(zip(found[::2], found[1::2], strict=True))
    return sum((b > a) == bool(label) for (a, b), label in zip(pairs, labels, strict=True)) / len(labels)


@pytest.mark.parametrize("protocol", ["stream", "context"])
def test_row_1_random_eviction_lowers_the_score_of_a_copy_task(protocol, copier):
    assert accuracy(copier, make_strategy("full"), protocol) == 1.0
    assert not any(r.acted for r in copier.records)
    for name in ("random", "recent"):
        assert accuracy(copier, make_strategy(name, 0.1), protocol) < 0.8, name
        assert all(r.acted and r.kept_fraction < 0.6 for r in copier.records)
    # What attention has singled out, H2O keeps.
    assert accuracy(copier, make_strategy("h2o", 0.1), protocol) == 1.0
    assert all(r.acted for r in copier.records)


def test_row_1_where_compression_cannot_reach_the_answer_it_is_said(copier):
    assert accuracy(copier, make_strategy("random", 0.1), "serve") == 1.0
    assert {(r.acted, r.unreachable_tokens, r.scored_tokens) for r in copier.records} == {(False, 1, 1)}


def test_row_3_every_sample_is_compressed_alike():
    strategy = make_strategy("h2o", 0.4)
    request = Request(tuple(TOKENS), (5, 6, 7), 0, 45)
    model = sharp()
    scores = [
        s for _ in range(2) for [s] in score_documents(model, [[request]] * 3, strategy, batch_tokens=48)
    ]
    assert len(set(scores)) == 1 and scores[0].hidden
    plan = make_plan([row for _ in range(3) for row in build_rows([(0, request)])], strategy)
    _, session = model.parallel(plan, strategy, record=True)
    for decisions in session.decisions.values():
        assert torch.equal(decisions[0], decisions[1]) and torch.equal(decisions[0], decisions[2])
        assert int(decisions[0, 0, -1].sum()) == 18 + 1
    assert kept(read(strategy)) == kept(read(strategy))


def test_row_9_another_strategy_is_another_cell():
    from kvacc.config import config_from, plan_cells

    def cell_id(strategy, **changes):
        settings = {"models": ["m"], "protocols": ["stream"], "tasks": ["kvacc_mini_copa"], **changes}
        return plan_cells(config_from({**settings, "strategies": [strategy]}))[0].cell_id

    h2o = {"name": "h2o", "budget": 0.2}
    ids = [
        cell_id("full"),
        cell_id(h2o),
        cell_id({**h2o, "budget": 0.3}),
        cell_id({**h2o, "budget_of": "seen"}),
        cell_id({**h2o, "recent_fraction": 0.25}),
        cell_id({**h2o, "aggregate": "max"}),
        cell_id({**h2o, "name": "random"}),
        cell_id({**h2o, "name": "recent"}),
        cell_id(h2o, protocols=["serve"]),
        cell_id(h2o, models=[{"pretrained": "m", "dtype": "bfloat16"}]),
        cell_id(h2o, models=["another"]),
        cell_id(h2o, shots=[1]),
        cell_id(h2o, seed=5),
    ]
    assert len(set(ids)) == len(ids)
    assert cell_id(h2o) == ids[1]


@pytest.mark.parametrize("budget", [0.1, 0.25, 0.5, 0.9, 7, 1.0])
@pytest.mark.parametrize(
    "name", [n for n, c in strategy_classes().items() if c.has_budget and not c.offloads]
)
def test_row_13_what_is_kept_is_counted_and_is_what_was_asked_for(name, budget):
    strategy = make_strategy(name, budget)
    asked = budget if isinstance(budget, int) else math.ceil(round(budget * 48, 9))
    session = read(strategy)
    assert {len(positions) for layer in kept(session) for positions in layer} == {asked}
    # The last query read the entries kept before it, and itself.
    visible = min(48, asked + 1)
    assert float(session.passes[-1][0]) == pytest.approx(visible / 48)
    request = Request(tuple(TOKENS), (5,), 0, 48)
    [[score]] = score_documents(sharp(), [[request]], strategy)
    assert score.kept_fraction == pytest.approx(visible / 48)
    assert score.hidden == (visible < 48)


SELECTING = {
    "infinigen": {"alpha": math.inf, "dense_layers": 0, "speculate_from": "current"},
    "quest": {"page_size": 1, "dense_layers": 0},
    "infllm": {"block": 1},
}


@pytest.mark.parametrize("budget", [0.1, 0.25, 0.5, 0.9, 7, 1.0])
@pytest.mark.parametrize("name", [n for n, c in strategy_classes().items() if c.offloads])
def test_row_13_what_is_read_is_counted_and_is_what_was_asked_for(name, budget):
    strategy = make_strategy(name, budget, **SELECTING[name])
    asked = budget if isinstance(budget, int) else math.ceil(round(budget * 48, 9))
    session = read(strategy)
    assert float(session.passes[-1][0]) == pytest.approx(asked / 48)  # its own entry is one of them
    [[score]] = score_documents(sharp(), [[Request(tuple(TOKENS), (5,), 0, 48)]], strategy)
    assert score.kept_fraction == pytest.approx(asked / 48)
    assert score.hidden == (asked < 48)


def test_row_15_a_fraction_of_the_tokens_seen_grows_with_them():
    strategy = make_strategy("h2o", 0.3, "seen")
    for length in range(1, 48, 5):
        sizes = {len(p) for layer in kept(read(strategy, TOKENS[:length])) for p in layer}
        assert sizes == {math.ceil(0.3 * length)}


def test_row_17_recent_zero_means_zero():
    none, some = make_strategy("h2o", 6, recent_fraction=0.0), make_strategy("h2o", 6, recent_fraction=0.5)
    assert [none.recent_count(6), some.recent_count(6)] == [0, 3]
    lengths = (12, 26, 48)
    newest = [(n, ps[-1]) for n in lengths for layer in kept(read(none, TOKENS[:n])) for ps in layer]
    assert any(last < n - 1 for n, last in newest)
    for n in lengths:
        for layer in kept(read(some, TOKENS[:n])):
            for positions in layer:
                assert positions[-3:] == [n - 3, n - 2, n - 1]
    assert kept(read(make_strategy("recent", 6))) == [[[42, 43, 44, 45, 46, 47]] * 2] * 2


def test_row_21_scores_are_sums_and_the_earlier_of_equals_stays():
    """The paper sums attention and found that dividing by exposure hurts; the docstring says so."""
    strategy = make_strategy("h2o", 2, recent_fraction=0.0)
    position = torch.arange(4)[None, None]
    alive = torch.ones(1, 1, 4, dtype=torch.bool)
    limits = [torch.tensor([n]) for n in (4, 2, 0, 0)]
    equal, _ = strategy.keep(torch.full((1, 1, 4), 0.5), position, alive, *limits)
    assert equal.tolist() == [[[True, True, False, False]]]
    late, _ = strategy.keep(torch.tensor([[[0.5, 0.4, 0.5, 0.6]]]), position, alive, *limits)
    assert late.tolist() == [[[True, False, False, True]]]
    attention_row = torch.full((1, 1, 2, 4), 0.25)
    assert strategy.observe(torch.ones(1, 1, 4), attention_row).tolist() == [[[1.25] * 4]]
    import kvacc.strategies.h2o as module

    assert "dividing it by the number of queries hurts" in " ".join(module.__doc__.split())


@pytest.mark.parametrize("dense", [0, 30, 48])
@pytest.mark.parametrize("name", ["h2o", "streaming_llm", "random"])
def test_row_23_chunks_of_a_prompt_keep_to_the_budget(name, dense):
    strategy = make_strategy(name, 0.25)
    expected = kept(read(strategy, dense=dense))
    assert {len(p) for layer in expected for p in layer} == {math.ceil((dense or 48) / 4)}
    for chunk in (5, 16, 48):
        assert kept(read(strategy, dense=dense, chunk=chunk)) == expected, chunk


def test_row_29_the_question_in_or_out_of_what_is_compressed_makes_a_difference(copier):
    strategy = make_strategy("h2o", 12, recent_fraction=0.25)
    requests = [Request(tuple(TOKENS), (5, 6, 7), dense, 45) for dense in (0, 30, 46)]
    scores = [score_documents(sharp(), [[request]], strategy)[0][0] for request in requests]
    assert len({round(score.loglikelihood, 3) for score in scores}) == 3
    # The letter stands in the passage; the question behind it is long enough to push it out.
    passage = "abcdeQfghijklmnopqrstuvwxyz"
    questions = [
        ask(f"{passage}\nwhich letter is it:", option, 0, i, {"passage": passage})
        for i, option in enumerate("QR")
    ]
    found = {}
    for protocol in ("stream", "context", "serve"):
        copier.use(make_strategy("recent", 8), protocol)
        copier.clear_records()
        right, wrong = copier.loglikelihood(questions)
        info = copier.get_model_info()
        found[info["kvacc_protocol"]] = (right[0] > wrong[0] + 1, copier.records[0].unreachable_tokens)
    assert found == {"stream": (False, 0), "context": (False, 0), "serve": (True, 1)}


@pytest.mark.parametrize("dense", [0, 48])
@pytest.mark.parametrize("budget", [5, 0.5])
def test_row_33_bytes_are_counted_per_kv_head(budget, dense):
    session = read(make_strategy("h2o", budget), dense=dense)
    entries = {5: 5, 0.5: 24}[budget]
    one = LLAMA["dimension"] * 4  # float32
    assert session.measured_bytes() == 2 * LLAMA["layers"] * LLAMA["kv_heads"] * entries * one
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in session.cache.layers)
    # Read token by token, one slot of the last evicted entries waits for the next token.
    free = 0 if dense else 2 * LLAMA["layers"] * LLAMA["kv_heads"] * one
    assert held == session.measured_bytes() + free, "what is evicted is freed"
    full = read(make_strategy("full"))
    assert full.measured_bytes() == 2 * LLAMA["layers"] * LLAMA["kv_heads"] * 48 * one


def test_row_35_how_query_heads_share_a_score_is_named_and_in_the_row():
    scores = torch.zeros(1, 1, 3)
    attention_rows = torch.tensor([[[[0.6, 0.2, 0.2], [0.0, 0.5, 0.5]]]])
    mean, largest = (make_strategy("h2o", 2, aggregate=a) for a in ("mean", "max"))
    assert mean.observe(scores, attention_rows).flatten().tolist() == pytest.approx([0.3, 0.35, 0.35])
    assert largest.observe(scores, attention_rows).flatten().tolist() == pytest.approx([0.6, 0.5, 0.5])
    assert [s.options()["aggregate"] for s in (mean, largest)] == ["mean", "max"]
    sets = [kept(read(dataclasses.replace(s, budget=24, recent_fraction=0.0))) for s in (mean, largest)]
    assert sets[0] != sets[1]


def test_row_37_a_simulation_says_so_and_frees_nothing():
    for name, cls in strategy_classes().items():
        strategy = cls() if not cls.has_budget else make_strategy(name, 8)
        assert strategy.physical_eviction or strategy.offloads, name
    simulated = make_strategy("h2o", 8, scores="full_row")
    assert not simulated.physical_eviction and not make_strategy("h2o", 8, scores="global").physical_eviction
    held = [
        sum(layer.keys.nbytes for layer in read(s).cache.layers) for s in (simulated, make_strategy("full"))
    ]
    assert held[0] == held[1]
    # 8 of 48 entries, and the slot of the next token.
    assert sum(layer.keys.nbytes for layer in read(make_strategy("h2o", 8)).cache.layers) == held[1] * 9 // 48


@pytest.mark.parametrize("name", ["h2o", "streaming_llm", "random"])
def test_row_41_attention_is_held_in_blocks(name, monkeypatch):
    from kvacc.engine import parallel

    strategy = make_strategy(name, 0.3)
    requests = [[Request(tuple(TOKENS), (5, 6, 7), 0, 45), Request((*TOKENS[:-1], 9), (5, 6, 8), 0, 45)]]
    whole = score_documents(sharp(), requests, strategy)[0]
    sizes = []
    original = parallel.attention_logits

    def logits(*arguments):
        out = original(*arguments)
        sizes.append(out.nbytes)
        return out

    monkeypatch.setattr(parallel, "attention_logits", logits)
    monkeypatch.setattr(parallel, "BLOCK_BYTES", 4096)
    blocks = score_documents(sharp(), requests, strategy)[0]
    assert max(sizes, default=0) <= 4096
    assert len(sizes) > 10 or name == "random"
    for one, other in zip(blocks, whole, strict=True):
        assert one.loglikelihood == pytest.approx(other.loglikelihood, abs=1e-4)
        assert one.kept_fraction == pytest.approx(other.kept_fraction, abs=1e-12)


def test_row_43_variants_are_named_differ_and_have_a_source():
    assert all(cls.source and cls.summary for cls in strategy_classes().values())
    variants = [make_strategy("h2o", 8, scores=scores) for scores in ("renormalised", "full_row", "global")]
    assert len({repr(v) for v in variants}) == 3
    request = Request(tuple(TOKENS), (5, 6, 7), 0, 45)
    found = [score_documents(sharp(), [[request]], v)[0][0].loglikelihood for v in variants]
    assert len({round(value, 4) for value in found}) == 3
    assert [v.causal for v in variants] == [True, True, False]


def test_row_51_another_template_is_another_prompt(tiny_folder, tokenizer, tmp_path):
    import copy

    import lm_eval
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM

    from kvacc.task_catalog import write_task_yamls

    manager = TaskManager(include_defaults=False, include_path=str(write_task_yamls(tmp_path)))
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    task = "kvacc_mini_copa"

    def hashes(template):
        ours = copy.deepcopy(tokenizer)
        ours.chat_template = template
        lm = kvacc.KvaccLM(copy.deepcopy(model), tokenizer=ours)
        results = lm_eval.simple_evaluate(
            model=lm, tasks=[task], limit=2, task_manager=manager, bootstrap_iters=0,
            apply_chat_template=template is not None,
        )  # fmt: skip
        return [sample["prompt_hash"] for sample in results["samples"][task]]

    simple = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert len({*hashes(None), *hashes("<u>" + simple), *hashes("<user>" + simple)}) == 6


@pytest.mark.parametrize("protocol", ["stream", "context", "serve"])
@pytest.mark.parametrize("name", strategy_classes())
def test_row_53_batch_size_changes_nothing(name, protocol):
    cls = strategy_classes()[name]
    strategy = make_strategy(name, 0.3) if cls.has_budget else cls()
    documents = []
    for n, length in enumerate((40, 9, 23, 31, 16)):
        context = TOKENS[n : n + length]
        dense = {"stream": 0, "context": length // 2, "serve": length}[protocol]
        options = [(5, 6 + n, 7), (5, 8, 9, 10), (11,)]
        documents.append([Request((*context, *o[:-1]), o, dense, dense or length) for o in options])
    alone = score_documents(sharp(), documents, strategy, batch_tokens=1)
    largest = 0.0
    for size in (64, 4096):
        together = score_documents(sharp(), documents, strategy, batch_tokens=size)
        for answers, others in zip(alone, together, strict=True):
            assert [a.greedy for a in answers] == [b.greedy for b in others]
            differences = [
                abs(a.loglikelihood - b.loglikelihood) for a, b in zip(answers, others, strict=True)
            ]
            largest = max(largest, *differences)
    assert largest < 1e-3


def test_row_59_beginning_of_sequence_is_counted(copier):
    copier.use(make_strategy("full"), "stream")
    for prompt, count in (("abc", 0), ("<s>abc", 1), ("<s><s>abc", 2)):
        copier.clear_records()
        copier.loglikelihood([ask(prompt, "d")])
        copier.generate_until(
            [Instance("generate_until", {}, (prompt, {"max_gen_toks": 1}), 0, metadata=("t", 0, 1))]
        )
        assert [r.bos_tokens for r in copier.records] == [count, count]


def test_row_59_the_count_is_in_the_results(tiny_folder):
    from kvacc import task_catalog
    from kvacc.config import config_from, plan_cells
    from kvacc.evaluation import evaluate_cell

    lm = kvacc.KvaccLM(str(tiny_folder))
    settings = {"models": [str(tiny_folder)], "strategies": ["full"], "protocols": ["stream"], "limit": 1}
    [spec] = plan_cells(config_from({**settings, "tasks": ["kvacc_mini_copa"]}))
    task = task_catalog.load_tasks([spec.task], num_fewshot=0)[spec.task]
    cell = evaluate_cell(spec, lm, task, model_fingerprint={})
    assert [row["bos_tokens"] for row in cell.samples] == [0, 0]


@pytest.mark.parametrize("padding", [0, 5])
def test_row_59_the_sink_is_the_first_real_token(padding):
    for layer in kept(read(make_strategy("streaming_llm", 8, sinks=3), padding=padding)):
        for positions in layer:
            assert positions == [0, 1, 2, 43, 44, 45, 46, 47]


@pytest.mark.slow
def test_row_1_on_the_embedded_model(smollm2_folder):
    """A number that was said before is likelier than another one, until it is forgotten."""
    lm = kvacc.KvaccLM(str(smollm2_folder))
    filler = " The grass is green. The sky is blue. The sun is yellow. Here we go."
    requests = []
    for n in range(6):
        right, wrong = 38251 + 7919 * n, 51483 + 4421 * n
        prompt = f"The pass key is {right}. Remember it.{filler * 4} What is the pass key? The pass key is"
        requests += [ask(prompt, f" {number}", n, i) for i, number in enumerate((right, wrong))]

    def margin(strategy):
        lm.use(strategy, "stream")
        values = [value for value, _ in lm.loglikelihood(requests)]
        return sum(a - b for a, b in zip(values[::2], values[1::2], strict=True)) / 6

    full = margin(make_strategy("full"))
    assert full > 5 and margin(make_strategy("random", 0.1)) < full / 2
    assert all(r.acted for r in lm.records[-12:])
