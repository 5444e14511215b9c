"""What the engine measures while transformers generates."""

from __future__ import annotations

import pytest
import torch
from naive import sharp

from kvacc.engine import attention
from kvacc.engine.generation import generate
from kvacc.engine.scoring import step_forward
from kvacc.engine.stepping import RowReading
from kvacc.errors import KvaccError
from kvacc.strategy import make_strategy

PROMPT = list(range(20, 32))
NEW = 6


def run(prompts, strategy, dense=0, end_tokens=(), copies=1, new=NEW, **settings):
    """Tokens made of each prompt by ``model.generate``, and the measurements."""
    model = sharp()
    width = max(map(len, prompts))
    padding = [width - len(p) for p in prompts]
    tokens = torch.tensor([[0] * n + p for n, p in zip(padding, prompts, strict=True)])
    mask = torch.tensor([[0] * n + [1] * len(p) for n, p in zip(padding, prompts, strict=True)])
    rows = [
        RowReading(n, min(dense, len(p)), min(dense, len(p)) or len(p))
        for n, p in zip(padding, prompts, strict=True)
    ]

    def call(cache):
        return model.model.generate(
            input_ids=tokens, attention_mask=mask, max_new_tokens=new, pad_token_id=0,
            cache=cache, **{"do_sample": False, "eos_token_id": None, **settings},
        )  # fmt: skip

    made, measured = generate(model, strategy, rows, call, width, copies, end_tokens)
    return made[:, width:].tolist(), measured


def greedy(prompt, strategy, dense=0, new=NEW):
    """The same, one token per forward pass."""
    model = sharp()
    session = model.step(strategy, [RowReading(0, dense, dense or len(prompt))])
    made = []
    with attention.active(session), torch.inference_mode():
        for column in range(len(prompt) + new - 1):
            token = prompt[column] if column < len(prompt) else made[-1]
            logits = step_forward(model, session, torch.tensor([[token]]), column)
            if column >= len(prompt) - 1:
                made.append(int(logits[0, -1].argmax()))
    return made


def test_full_keeps_everything():
    made, [measured] = run([PROMPT], make_strategy("full"))
    assert measured.tokens == NEW and measured.kept_fraction == 1.0 and not measured.hidden
    assert made == [greedy(PROMPT, make_strategy("full"))]


def test_kept_fraction_in_stream_by_hand():
    """``recent`` at 4 entries: the query at place p reads the four kept and itself."""
    _, [measured] = run([PROMPT], make_strategy("recent", 4))
    expected = sum(5 / (p + 1) for p in range(11, 11 + NEW)) / NEW
    assert measured.kept_fraction == pytest.approx(expected) and measured.hidden


def test_kept_fraction_in_serve_by_hand():
    _, [measured] = run([PROMPT], make_strategy("recent", 4), dense=12)
    expected = (1 + sum(5 / (p + 1) for p in range(12, 11 + NEW))) / NEW
    assert measured.kept_fraction == pytest.approx(expected) and measured.hidden


def test_one_token_in_serve_is_untouched():
    _, [measured] = run([PROMPT], make_strategy("recent", 4), dense=12, new=1)
    assert measured.kept_fraction == 1.0 and not measured.hidden


def test_a_budget_that_never_binds_hides_nothing():
    made, [measured] = run([PROMPT], make_strategy("h2o", 100))
    assert not measured.hidden and measured.kept_fraction == 1.0
    assert made == run([PROMPT], make_strategy("full"))[0]


@pytest.mark.parametrize("dense", [0, 7, 12])
@pytest.mark.parametrize("name", ["h2o", "streaming_llm", "random"])
def test_generate_is_a_greedy_loop_of_steps(name, dense):
    strategy = make_strategy(name, 6)
    made, _ = run([PROMPT], strategy, dense)
    assert made == [greedy(PROMPT, strategy, dense)]
    assert made[0] != greedy(PROMPT, make_strategy("full"))


@pytest.mark.parametrize("dense", [0, 4])
def test_padding_and_neighbours_change_nothing(dense):
    strategy = make_strategy("h2o", 0.5)
    prompts = [PROMPT, PROMPT[:5], PROMPT[2:10]]
    made, measured = run(prompts, strategy, dense)
    for prompt, tokens, one in zip(prompts, made, measured, strict=True):
        alone, [expected] = run([prompt], strategy, dense)
        assert [tokens] == alone
        assert one.kept_fraction == pytest.approx(expected.kept_fraction, abs=1e-12)
        assert (one.tokens, one.hidden) == (expected.tokens, expected.hidden)


@pytest.mark.parametrize("chunk", [1, 5, 11])
def test_a_prompt_in_chunks_is_read_alike(chunk):
    strategy = make_strategy("h2o", 6)
    assert run([PROMPT], strategy, prefill_chunk_size=chunk)[0] == run([PROMPT], strategy)[0]


def test_tokens_are_counted_up_to_the_end_token():
    strategy = make_strategy("recent", 4)
    [made], [whole] = run([PROMPT], strategy)
    end = next(i for i, token in enumerate(made) if i and token not in made[:i])
    _, [cut] = run([PROMPT], strategy, end_tokens=[made[end]])
    assert whole.tokens == NEW and cut.tokens == end + 1 < NEW
    assert cut.kept_fraction == pytest.approx(sum(5 / (p + 1) for p in range(11, 12 + end)) / (end + 1))


def test_a_row_that_ended_early_is_measured_to_its_end():
    """Afterwards transformers pads it while its neighbour goes on."""
    strategy = make_strategy("recent", 4)
    [made], _ = run([PROMPT], strategy)
    other = PROMPT[:7]
    [neighbour], _ = run([other], strategy)
    end = next(i for i, token in enumerate(made) if i and token not in made[:i] and token not in neighbour)
    tokens, measured = run([PROMPT, other], strategy, end_tokens=[made[end]], eos_token_id=made[end])
    assert tokens[0][end + 1 :] == [0] * (NEW - end - 1)
    assert [m.tokens for m in measured] == [end + 1, NEW]
    alone = run([PROMPT], strategy, end_tokens=[made[end]], eos_token_id=made[end])[1][0]
    assert measured[0].kept_fraction == pytest.approx(alone.kept_fraction, abs=1e-12)


def test_beams_stay_in_step_with_their_rows():
    """Each row's best beam is what it is alone, and scores as the step path says."""
    strategy = make_strategy("h2o", 6)
    prompts = [PROMPT, PROMPT[4:]]
    together, measured = run(prompts, strategy, copies=3, num_beams=3)
    assert len(together) == len(measured) == 2
    for prompt, tokens in zip(prompts, together, strict=True):
        assert [tokens] == run([prompt], strategy, copies=3, num_beams=3)[0]
    one_beam = run(prompts, strategy)[0]
    assert together != one_beam, "the search found nothing better: choose another prompt"
    for prompt, found, first in zip(prompts, together, one_beam, strict=True):
        assert total(prompt, found, strategy) >= total(prompt, first, strategy) - 1e-4


def total(prompt, tokens, strategy):
    from kvacc.engine.plan import Request
    from kvacc.engine.scoring import score_by_steps

    request = Request((*prompt, *tokens[:-1]), tuple(tokens), 0, len(prompt))
    return score_by_steps(sharp(), [request], strategy)[0][0].loglikelihood


def test_several_returned_sequences():
    torch.manual_seed(0)
    made, measured = run(
        [PROMPT, PROMPT[3:]], make_strategy("h2o", 6), copies=2, num_return_sequences=2, do_sample=True
    )
    assert len(made) == 4 and len(measured) == 2
    assert made[0] != made[1]
    made, measured = run([PROMPT], make_strategy("h2o", 6), copies=3, num_beams=3, num_return_sequences=2)
    assert len(made) == 2 and len(measured) == 1 and made[0] != made[1]


def test_assisted_decoding_is_refused():
    with pytest.raises((KvaccError, ValueError)):
        run([PROMPT * 2], make_strategy("h2o", 6), prompt_lookup_num_tokens=2)
    with pytest.raises(KvaccError, match="cannot be cropped"):
        sharp().step(make_strategy("h2o", 6), [RowReading(0, 0, 12)]).cache.layers[0].crop(1)


def test_a_strategy_that_reads_the_future_cannot_generate():
    with pytest.raises(KvaccError, match="cannot decode token by token"):
        run([PROMPT], make_strategy("h2o", 6, scores="global"))


def test_nothing_is_left_for_the_next_generation():
    strategy = make_strategy("h2o", 6)
    first = run([PROMPT], strategy)
    run([PROMPT[::-1]], make_strategy("random", 5))
    assert run([PROMPT], strategy) == first
