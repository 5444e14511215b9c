"""Retention tasks: the same bytes everywhere, one right option, no leaks, scores per depth."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter

import pytest
from kvacc.tasks.retention import filler, keyvalue, passkey, scoring
from kvacc.tasks.retention.draws import Draws

from kvacc.errors import KvaccError

GENERATORS = pytest.mark.parametrize("generator", [passkey, keyvalue])
# A change here changes every published score of the task: raise `version` in its YAML files.
FINGERPRINTS = {
    passkey: "8d0a1d985ebf3206104cf1d8ea4543c35653144667411f87fda59f74a7e2a90d",
    keyvalue: "1241a5f514d9111ebdfff96defbc334907f11684d637fea3042f71e1efd3b40c",
}


def fingerprint(documents: list[dict]) -> str:
    return hashlib.sha256(json.dumps(documents, sort_keys=True).encode()).hexdigest()


@GENERATORS
def test_same_seed_same_bytes(generator):
    assert fingerprint(generator.documents()) == FINGERPRINTS[generator]
    assert fingerprint(generator.documents(seed=2)) != FINGERPRINTS[generator]


@GENERATORS
def test_documents_are_balanced(generator):
    documents = generator.documents()
    assert len(documents) == 60
    assert Counter(d["depth"] for d in documents) == {0.1: 20, 0.5: 20, 0.9: 20}
    # A limited run covers all depths.
    assert [d["depth"] for d in documents[:6]] == [0.1, 0.5, 0.9] * 2
    assert Counter(d["label"] for d in documents) == {0: 15, 1: 15, 2: 15, 3: 15}
    assert len({d["context"] for d in documents}) == 60


@GENERATORS
def test_one_option_is_right(generator):
    for document in generator.documents(items=200, seed=7):
        assert len(set(document["options"])) == 4
        assert document["options"][document["label"]] == document["answer"]
        assert len({len(option) for option in document["options"]}) == 1
        assert not any(option in document["question"] for option in document["options"])


def test_passkey_is_the_only_number_and_lies_at_its_depth():
    for document in passkey.documents(items=100, seed=7):
        assert set(re.findall(r"\d+", document["context"])) == {document["answer"]}
        place = document["context"].index(document["answer"]) / len(document["context"])
        assert place == pytest.approx(document["depth"], abs=0.06)


@pytest.mark.parametrize("depth", [0.0, 1.0])
def test_passkey_at_the_ends(depth):
    text = passkey.documents(depths=(depth,), items=1)[0]["context"].split("\n")[1]
    assert text.startswith("The passkey is") if depth == 0 else text.endswith("is the passkey.")


@pytest.mark.parametrize("words", [50, 410, 3000])
def test_passkey_has_the_length_that_was_asked_for(words):
    for document in passkey.documents(words=words, items=2):
        assert words <= len(document["context"].split()) < words + 45


def test_filler_has_no_numbers():
    number_words = "one two three four five six seven eight nine ten number passkey key value first second"
    for sentence in filler.SENTENCES:
        assert not re.search(r"\d", sentence)
        assert not set(re.findall(r"[a-z]+", sentence.lower())) & set(number_words.split())
    assert len(set(filler.SENTENCES)) == len(filler.SENTENCES)


def test_filler_repeats_no_sentence_before_all_were_used():
    sentences = filler.filler(Draws("test"), 2000)
    size = len(filler.SENTENCES)
    assert set(sentences[:size]) == set(filler.SENTENCES) == set(sentences[size : 2 * size])


def test_keyvalue_options_are_values_of_near_duplicate_keys():
    for document in keyvalue.documents(items=100, seed=7):
        records = dict(re.findall(r"^(\S+) = (\d{4})$", document["context"], re.MULTILINE))
        assert len(records) == 32 and len(set(records.values())) == 32
        asked = document["question"].splitlines()[-1].split()[-2]
        assert records[asked] == document["answer"]
        key_of = {value: key for key, value in records.items()}
        color, animal = asked.split("-")
        colors_animals = [key_of[option].split("-") for option in document["options"]]
        others = [pair for pair in colors_animals if pair != [color, animal]]
        assert sorted(((c == color), (a == animal)) for c, a in others) == [
            (False, False),
            (False, True),
            (True, False),
        ]
        place = list(records).index(asked) / (len(records) - 1)
        assert place == pytest.approx(document["depth"], abs=0.02)


def test_keyvalue_refuses_more_records_than_it_has_keys():
    assert len(keyvalue.documents(blocks=64, items=1)[0]["context"].splitlines()) == 257
    for blocks in (0, 65):
        with pytest.raises(KvaccError, match=f"blocks={blocks} .* 1 to 64"):
            keyvalue.documents(blocks=blocks)


def test_words_of_keys_are_distinct():
    assert len({*keyvalue.COLORS, *keyvalue.ANIMALS}) == len(keyvalue.COLORS) + len(keyvalue.ANIMALS)


def test_multiple_choice_reports_its_own_depth():
    document = {"label": 2, "depth": 0.9}
    right = [(-3.0, False), (-2.0, False), (-1.0, True), (-4.0, False)]
    assert scoring.multiple_choice(document, right) == {"acc": 1.0, "acc_depth_90": 1.0}
    assert scoring.multiple_choice(document, right[::-1]) == {"acc": 0.0, "acc_depth_90": 0.0}
    # A tie counts for the first option only, as in lm-eval.
    assert scoring.multiple_choice(document, [(-1.0, False)] * 4)["acc"] == 0.0


@pytest.mark.parametrize(
    ("response", "value"),
    [
        (" 48213.", 1.0),
        ("48,213", 1.0),
        (" 48213 and 11111", 1.0),
        (" 4821", 0.0),
        (" 148213", 0.0),
        ("", 0.0),
    ],
)
def test_generated_compares_the_first_number(response, value):
    document = {"answer": "48213", "depth": 0.5}
    assert scoring.generated(document, [response]) == {"exact_match": value, "exact_match_depth_50": value}


def test_draws_are_uniform_and_reproducible():
    draws = Draws("uniform", 1)
    counts = Counter(draws.below(4) for _ in range(4000))
    assert all(900 < counts[value] < 1100 for value in range(4))
    assert [Draws("a", 1).below(10**9), Draws("a", 2).below(10**9)] == [435532380, 387561951]
    assert sorted(Draws("b").shuffled(range(50))) == list(range(50))
    numbers = Draws("c").numbers(500, digits=3)
    assert len(set(numbers)) == 500 and all(100 <= int(n) <= 999 for n in numbers)
