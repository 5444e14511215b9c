"""Filler: no answers in it, the user's own texts, and what is said when there is too little."""

from __future__ import annotations

import re

import pytest
from kvacc.tasks.retention import filler
from kvacc.tasks.retention.documents import documents
from kvacc.tasks.retention.draws import Draws
from kvacc.tasks.retention.filler import TextFiller, Unwanted, bank_sentence, filler_of, sentences_of
from kvacc.tasks.retention.kinds import KINDS
from kvacc.tasks.retention.measure import Measure
from kvacc.tasks.retention.settings import Settings
from kvacc.tasks.retention.words import CITIES, FRUITS, JOBS, NAMES, NOUNS, PEOPLE, ROOMS

from kvacc.errors import KvaccError

WORDS = Measure(lambda text: len(text.split()))
SLOTS = (filler.SUBJECTS, filler.ACTIONS, filler.PLACES, filler.TIMES, filler.SHORT)
NUMBER_WORDS = "one two three four five six seven eight nine ten first second third last"


def test_generated_filler_has_no_number_and_no_answer():
    words = set(re.findall(r"\w+", " ".join(text for slot in SLOTS for text in slot).lower()))
    assert not any(re.search(r"\d", word) for word in words)
    assert not words & set(f"{NUMBER_WORDS} passkey code value balance update rule".split())
    for pool in (PEOPLE, NAMES, CITIES, FRUITS, JOBS, ROOMS, NOUNS):
        assert not words & {word.lower() for word in pool}
    for slot in SLOTS:
        assert len(set(slot)) == len(slot)


def test_bank_is_the_same_everywhere():
    assert bank_sentence(0) == "An apprentice rolled a barrel along in the courtyard."
    assert bank_sentence(2**14 - 1) == "An old sailor fed the sparrows by the harbor."
    units = filler_of(None).units(Draws("test"), frozenset())
    made = [units.get(index) for index in range(2**14)]
    assert sorted(made) == sorted(map(bank_sentence, range(2**14)))
    with pytest.raises(filler.NoMoreFiller):
        units.get(2**14)


@pytest.mark.parametrize(
    ("sentence", "unwanted"),
    [
        ("He went to Oslo.", True),
        ("He went to oslo, alone.", True),
        ("The Oslofjord was calm.", False),  # another word
        ("It cost 48,213 crowns.", True),
        ("It cost 48213.", True),
        ("Call 0048213.", True),  # holds the digits
        ("It cost 4821.", False),
        ("The red-fox ran.", True),
        ("The red fox ran.", False),
        ("A red baker swept.", True),
        ("Nothing here.", False),
    ],
)
def test_unwanted_sentences(sentence, unwanted):
    forbidden = frozenset({"Oslo", "48213", "red-fox", "A red baker"})
    assert Unwanted(forbidden).in_(sentence) is unwanted


def test_sentences_of_a_text():
    assert sentences_of("One.  Two\nlines!\n\nA title\n\nLast?") == ["One.", "Two lines!", "A title", "Last?"]
    assert sentences_of("  \n") == []
    assert [len(part.split()) for part in sentences_of("word " * 100)] == [40, 40, 20]


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    lines = [f"Sentence {word} of the book is here, and it says little." for word in (*NOUNS, *CITIES)]
    path.write_text(" ".join(lines) + " The number 1234 and Oslo were seen.\n", encoding="utf-8")
    return path


def test_documents_in_a_text_of_the_user(book):
    for kind in KINDS.values():
        if not kind.takes_filler:
            continue
        made = documents(kind, Settings(length=512, items=2, filler=str(book)), WORDS)
        for doc in made:
            assert (
                "of the book is here" in doc["context"]
                and "The baker" not in doc["context"].split("Passage")[0]
            )
            if kind.form == "word":
                # A city or noun that is an option must not be read in the book.
                for option in doc["options"]:
                    assert f"Sentence {option} " not in doc["context"]


def test_each_document_starts_elsewhere_in_the_text(book):
    made = documents(KINDS["passkey"], Settings(length=256, items=4, filler=str(book), depths=(0.9,)), WORDS)
    assert len({doc["context"].split("\n")[1][:40] for doc in made}) == 4


def test_folder_of_texts(tmp_path, book):
    (tmp_path / "a.txt").write_text("An earlier file.")
    (tmp_path / "notes.md").write_text("No text file.")
    sentences = TextFiller(tmp_path).sentences
    assert sentences[0] == "An earlier file." and "No text file." not in sentences


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: p / "none.txt", "none.txt' does not exist"),
        (lambda p: p, "has no .txt file"),
        (lambda p: _written(p / "empty.txt", b" \n"), "holds no text"),
        (lambda p: _written(p / "latin.txt", "caf\xe9".encode("latin-1")), "byte 3 is not UTF-8"),
    ],
)
def test_unusable_filler_is_one_line(make, says, tmp_path):
    with pytest.raises(KvaccError, match=says) as caught:
        documents(KINDS["passkey"], Settings(filler=str(make(tmp_path))))
    assert "\n" not in str(caught.value)


def _written(path, content):
    path.write_bytes(content)
    return path


def test_too_little_filler_says_what_would_do(book):
    settings = Settings(length=4096, items=1, filler=str(book))
    with pytest.raises(KvaccError, match=r"has 14\d\d usable tokens, .* at most (\d+)$") as caught:
        documents(KINDS["passkey"], settings, WORDS)
    most = int(str(caught.value).split()[-1])
    for length, fits in ((most, True), (most + 200, False)):
        settings = Settings(length=length, items=1, depths=(0.1,), filler=str(book))
        if fits:
            assert documents(KINDS["passkey"], settings, WORDS)
        else:
            with pytest.raises(KvaccError, match="usable tokens"):
                documents(KINDS["passkey"], settings, WORDS)


def test_a_changed_file_is_read_anew(book):
    before = filler_of(book)
    assert filler_of(book) is before
    book.write_text("Another book.")
    assert filler_of(book).sentences == ["Another book."]
