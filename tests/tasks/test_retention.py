"""Retention tasks: the same bytes everywhere, one right option, no leaks, the length asked for."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter

import pytest
from kvacc.tasks.retention.documents import documents
from kvacc.tasks.retention.draws import Draws
from kvacc.tasks.retention.fitting import TOLERANCE, prompt_of
from kvacc.tasks.retention.kinds import KINDS
from kvacc.tasks.retention.measure import Measure
from kvacc.tasks.retention.scoring import normalised, numbers_of
from kvacc.tasks.retention.settings import Settings
from kvacc.tasks.retention.words import CITIES, FRUITS, JOBS, NAMES, NOUNS, PEOPLE, ROOMS

from kvacc.errors import KvaccError

EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
WORDS = Measure(lambda text: len(text.split()))
BYTES = Measure(lambda text: len(text.encode()))

# A change here changes every published score of the task: raise `version` in its YAML files.
FINGERPRINTS = {
    "passkey": "ede50d7ff509f8fe",
    "needle": "58c063657f17ba5e",
    "multi_needle": "3f770a1a62333b80",
    "all_needles": "0f82afc877dc674e",
    "keyvalue": "f9e4a6ab700ea4bb",
    "variables": "4985b52510baabeb",
    "last_record": "6e9505bd900e381a",
    "dialogue": "e1d2afabfce76af7",
    "instructions": "06f7f344ef875e93",
    "recall": "0eee1913a53affb8",
    "word_count": "63cc67965b64bf73",
}


def fingerprint(made: list[dict]) -> str:
    return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16]


@EVERY_KIND
def test_same_seed_same_bytes(kind):
    assert fingerprint(documents(kind, Settings(items=4))) == FINGERPRINTS[kind.name]
    assert fingerprint(documents(kind, Settings(items=4, data_seed=2))) != FINGERPRINTS[kind.name]


@EVERY_KIND
def test_documents_are_balanced(kind):
    made = documents(kind, Settings(items=8, length=256))
    assert len(made) == 24
    if kind.depth == "grid":
        # A limited run covers all depths.
        assert [doc["depth"] for doc in made[:6]] == [0.1, 0.5, 0.9] * 2
        for depth in (0.1, 0.5, 0.9):
            labels = [doc["label"] for doc in made if doc["depth"] == depth]
            assert sorted(labels[:4]) == sorted(labels[4:]) == [0, 1, 2, 3]
    else:
        assert {doc["depth"] for doc in made} == {0.0 if kind.depth == "start" else None}
        assert Counter(doc["label"] for doc in made) == {0: 6, 1: 6, 2: 6, 3: 6}
    assert len({doc["context"] for doc in made}) == 24


@EVERY_KIND
def test_documents_do_not_depend_on_their_number(kind):
    few, many = (documents(kind, Settings(items=items, length=256)) for items in (2, 5))
    assert many[: len(few)] == few


@EVERY_KIND
def test_the_same_is_asked_at_every_length(kind):
    short, long = (documents(kind, Settings(items=2, length=length)) for length in (512, 2048))
    names = ("question", "options", "label", "answer", "answers", "depth", "facts")
    assert [[doc[name] for name in names] for doc in short] == [[doc[name] for name in names] for doc in long]


@EVERY_KIND
@pytest.mark.parametrize("measure", [WORDS, BYTES], ids=["words", "bytes"])
@pytest.mark.parametrize("length", [700, 1024, 3333])
def test_length_is_met(kind, measure, length):
    for doc in documents(kind, Settings(length=length, items=2), measure):
        tokens = measure.whole(prompt_of(doc["context"], doc["question"]))
        assert (1 - TOLERANCE) * length <= tokens <= length
        assert doc["length"] == length


@pytest.mark.slow
@pytest.mark.parametrize("length", [256, 1000])
@EVERY_KIND
def test_length_is_met_in_the_model_s_own_tokens(kind, length, smollm2_tokenizer):
    measure = Measure.of(smollm2_tokenizer)
    for doc in documents(kind, Settings(length=length, items=2), measure):
        tokens = len(smollm2_tokenizer.encode(f"{doc['context']}\n{doc['question']}"))
        assert (1 - TOLERANCE) * length <= tokens <= length


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_folder)


def test_a_long_haystack_repeats_no_sentence():
    (doc,) = documents(KINDS["passkey"], Settings(length=131072, items=1, depths=(0.5,)))
    assert 0.98 * 131072 <= 1.3 * len(prompt_of(doc["context"], doc["question"]).split()) <= 131073
    sentences = re.findall(r"[^.]+\.", doc["context"])
    # Of thousands of sentences drawn from 1.3 million, hardly any are equal by chance.
    assert len(sentences) > 7000 and len(set(sentences)) > 0.98 * len(sentences)


@EVERY_KIND
def test_facts_lie_at_their_depth(kind):
    if kind.depth != "grid":
        pytest.skip("has no depths")
    grid = (0.0, 0.25, 0.5, 0.75, 1.0)
    for doc in documents(kind, Settings(length=2048, depths=grid, items=3)):
        text = doc["context"].partition("\n")[2]
        # Chains and copies mention an answer early and late: the asked mention is the first.
        answer = doc["answer"].split(". ")[0]
        place = text.index(answer) / len(text)
        assert place == pytest.approx(doc["depth"], abs=0.05), doc["depth"]


@EVERY_KIND
def test_more_facts_are_more_to_remember(kind):
    if kind.facts is None:
        pytest.skip("has one fact")
    most = kind.facts.most
    for count in {kind.facts.least, most}:
        doc = documents(kind, Settings(length=8192, facts=count, items=1))[0]
        assert doc["facts"] == count
        check_options(kind, doc)


def test_defaults_shrink_where_they_have_no_room_and_asked_numbers_do_not():
    kind = KINDS["keyvalue"]
    assert {doc["facts"] for doc in documents(kind, Settings(length=256, items=1))} == {32}
    assert {doc["facts"] for doc in documents(kind, Settings(length=512, items=1), BYTES)} == {16}
    with pytest.raises(
        KvaccError,
        match=r"length=512 is too short .* with 32 records and without filler a prompt has \d+ tokens",
    ) as e:
        documents(kind, Settings(length=512, facts=32, items=1), BYTES)
    assert "fewer facts" in str(e.value) and "\n" not in str(e.value)
    with pytest.raises(KvaccError, match=r"kvacc_passkey: without filler a prompt has \d\d\d tokens already"):
        documents(KINDS["passkey"], Settings(length=256, items=1), Measure(lambda text: 2 * len(text)))


# What an item of 10,000 must not get wrong. The texts are checked as a reader would, and not
# with the generators' own code.


def check_options(kind, doc: dict) -> None:
    """One right option, all of one form, and the question gives none away."""
    options = doc["options"]
    assert len(options) == 4 and len(set(map(normalised, options))) == 4
    assert options[doc["label"]] == doc["answer"]
    if kind.form in ("number", "numbers"):
        assert len({len(option) for option in options}) == 1
    for option in options:
        parts = numbers_of(option) if kind.form == "numbers" else [option]
        assert not any(f" {normalised(part)} " in f" {normalised(doc['question'])} " for part in parts)
    for part in doc["answers"]:
        assert f" {normalised(part)} " not in f" {normalised(doc['question'])} "


def times(doc: dict, text: str) -> int:
    """How often a text stands in the haystack, as whole words."""
    return f" {normalised(doc['context'])} ".replace(" ", "  ").count(
        f" {normalised(text)} ".replace(" ", "  ")
    )


def check_passkey(doc):
    assert set(re.findall(r"\d+", doc["context"])) == {doc["answer"]}
    assert times(doc, doc["answer"]) == 2


def check_needle(doc):
    assert [times(doc, option) for option in doc["options"]] == [
        int(option == doc["answer"]) for option in doc["options"]
    ]


def check_multi_needle(doc):
    told = dict(re.findall(r"The code of the (\w+) office is (\d{4})\.", doc["context"]))
    asked = re.search(r"of the (\w+) office\?", doc["question"])[1]
    assert told[asked] == doc["answer"] and len(told) == doc["facts"]
    assert set(doc["options"]) <= set(told.values())
    assert sorted(re.findall(r"\d+", doc["context"])) == sorted(told.values())


def check_all_needles(doc):
    told = dict(re.findall(r"The code of (\w+) is (\d{4})\.", doc["context"]))
    asked = re.search(r"codes of (.*)\?", doc["question"])[1].split(", ")
    assert [told[city] for city in asked] == doc["answers"] == numbers_of(doc["answer"])
    for option in doc["options"]:
        same = sum(a == b for a, b in zip(numbers_of(option), doc["answers"], strict=True))
        assert same == len(asked) - 2 * (option != doc["answer"])
        assert sorted(numbers_of(option)) == sorted(doc["answers"])


def check_keyvalue(doc):
    records = dict(re.findall(r"^(\S+) = (\d{4})$", doc["context"], re.MULTILINE))
    assert len(records) == doc["facts"] == len(set(records.values()))
    asked = doc["question"].splitlines()[-1].split()[0]
    assert records[asked] == doc["answer"]
    key_of = {value: key for key, value in records.items()}
    color, animal = asked.split("-")
    pairs = [key_of[option].split("-") for option in doc["options"]]
    assert sorted((c == color, a == animal) for c, a in pairs) == [
        (False, False), (False, True), (True, False), (True, True)
    ]  # fmt: skip


def check_variables(doc):
    told = re.findall(r"The value of (\w+) is (?:the value of )?(\w+)\.", doc["context"])
    state: dict[str, str] = {}
    for name, source in told:
        # Read in the order of the text: what an assignment needs was told before it.
        assert source.isdecimal() or source in state
        state[name] = state.get(source, source)
    assert state[re.search(r"value of (\w+)\?", doc["question"])[1]] == doc["answer"]
    assert set(doc["options"]) == set(state.values()) and len(told) == 4 * doc["facts"]


def check_last_record(doc):
    told = re.findall(r"Update (\d+): the balance of \w+ is (\d{4})\.", doc["context"])
    assert [int(number) for number, _ in told] == list(range(1, doc["facts"] + 1))
    assert told[-1][1] == doc["answer"]
    assert set(doc["options"]) <= {value for _, value in told}


def check_dialogue(doc):
    lines = re.findall(r"^(\w+): My ([\w ]+) is called (\w+)\.$", doc["context"], re.MULTILINE)
    speaker, relation = re.search(r"(\w+): My ([\w ]+) is called$", doc["question"]).groups()
    told = {(who, what): name for who, what, name in lines}
    assert told[speaker, relation] == doc["answer"] and len(told) == doc["facts"]
    assert set(doc["options"]) <= set(told.values())
    assert all(times(doc, option) == 1 for option in doc["options"])


def check_instructions(doc):
    rules = re.findall(r"Rule (\d+): say (\w+)\.", doc["context"])
    assert [int(number) for number, _ in rules] == list(range(1, doc["facts"] + 1))
    assert [word for _, word in rules] == doc["answers"]
    for option in doc["options"]:
        said = re.findall(r"I say (\w+)", f"I say {option}")
        assert sorted(said) == sorted(doc["answers"])
        assert (said == doc["answers"]) == (option == doc["answer"])
    assert all(times(doc, word) == 1 for word in doc["answers"])


def check_recall(doc):
    title = doc["question"].split()[-1].rstrip(":")
    passage = re.search(rf"Passage {title}: (.*?) End of passage {title}\.", doc["context"], re.DOTALL)[1]
    assert passage == doc["answer"]
    assert all(doc["context"].count(option) == (option == doc["answer"]) for option in doc["options"])
    sentences = doc["answer"].rstrip(".").split(". ")
    assert all(doc["context"].count(sentence) == 1 for sentence in sentences)


def check_word_count(doc):
    words = doc["context"].split("\n", 1)[1].split()
    (first, most), (_, second), *_ = Counter(words).most_common()
    assert first == doc["answer"] and most > second
    assert set(doc["options"]) <= set(words) and len(set(words)) == doc["facts"]


CHECKS = {name: globals()[f"check_{name}"] for name in KINDS}


def check_many(kind, items: int) -> None:
    labels = Counter()
    for seed, length in ((5, 256), (6, 512)):
        settings = Settings(length=length, items=items // 6, data_seed=seed)
        for doc in documents(kind, settings, WORDS):
            check_options(kind, doc)
            CHECKS[kind.name](doc)
            labels[doc["label"]] += 1
    assert max(labels.values()) - min(labels.values()) <= 0.02 * items + 6


@EVERY_KIND
def test_items_ask_what_they_tell(kind):
    check_many(kind, 120)


@pytest.mark.slow
@EVERY_KIND
def test_ten_thousand_items_ask_what_they_tell(kind):
    check_many(kind, 10_000)


def test_answers_are_drawn_evenly():
    """No word or number is right more often than others: a model cannot learn the prior."""
    made = documents(KINDS["needle"], Settings(items=300, length=256), WORDS)
    counts = Counter(doc["answer"] for doc in made)
    # 900 answers: a quarter of them from 64 cities, the others from 16 words each.
    assert max(counts.values()) < 35 and len(counts) > 100


def test_pools_are_distinct():
    for pool in (PEOPLE, NAMES, CITIES, FRUITS, JOBS, ROOMS, NOUNS):
        assert len(set(pool)) == len(pool)
    assert not set(PEOPLE) & set(NAMES)


def test_draws_are_uniform_and_reproducible():
    draws = Draws("uniform", 1)
    counts = Counter(draws.below(4) for _ in range(4000))
    assert all(900 < counts[value] < 1100 for value in range(4))
    assert [Draws("a", 1).below(10**9), Draws("a", 2).below(10**9)] == [435532380, 387561951]
    assert sorted(Draws("b").shuffled(range(50))) == list(range(50))
    numbers = Draws("c").numbers(500, digits=3)
    assert len(set(numbers)) == 500 and all(100 <= int(n) <= 999 for n in numbers)
