"""The embedded items: well formed, unique, balanced, one right answer, nothing given away."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from kvacc.tasks.mini.utils import read_items

FORMATS = ("piqa", "hellaswag", "copa", "winogrande", "openbookqa", "boolq")


def text_options_label(name: str, item: dict) -> tuple[str, list[str], int]:
    match name:
        case "piqa":
            return item["goal"], [item["sol1"], item["sol2"]], item["label"]
        case "hellaswag":
            return item["ctx"], item["endings"], int(item["label"])
        case "copa":
            return item["premise"] + item["question"], [item["choice1"], item["choice2"]], item["label"]
        case "winogrande":
            return item["sentence"], [item["option1"], item["option2"]], int(item["answer"]) - 1
        case "openbookqa":
            label = item["choices"]["label"].index(item["answerKey"])
            return item["question_stem"], item["choices"]["text"], label
        case "boolq":
            return item["passage"] + item["question"], ["no", "yes"], item["label"]


@pytest.mark.parametrize("name", FORMATS)
def test_items_are_unique_and_balanced(name):
    items = [text_options_label(name, item) for item in read_items(name)]
    texts, options, labels = zip(*items, strict=True)
    assert len(items) >= 40
    assert len({text.lower() for text in texts}) == len(items)
    count = len(options[0])
    assert all(len(each) == count for each in options)
    assert all(len({option.lower() for option in each}) == count for each in options)
    assert Counter(labels) == {label: len(items) // count for label in range(count)}


@pytest.mark.parametrize("name", FORMATS)
def test_labels_follow_no_pattern(name):
    labels = [text_options_label(name, item)[2] for item in read_items(name)]
    for period in range(1, 5):
        repeats = sum(a == b for a, b in zip(labels, labels[period:], strict=False))
        assert repeats / (len(labels) - period) < 0.75, f"label {period} items later is mostly the same"


@pytest.mark.parametrize("name", ["piqa", "hellaswag", "copa", "openbookqa"])
def test_answer_does_not_stand_in_the_prompt(name):
    for item in read_items(name):
        text, options, label = text_options_label(name, item)
        assert options[label].rstrip(".").lower() not in text.lower()


@pytest.mark.parametrize("name", ["piqa", "hellaswag", "copa", "openbookqa"])
def test_length_does_not_give_the_answer_away(name):
    items = [text_options_label(name, item) for item in read_items(name)]
    longest = sum(max(range(len(o)), key=lambda i: len(o[i])) == label for _, o, label in items)
    shortest = sum(min(range(len(o)), key=lambda i: len(o[i])) == label for _, o, label in items)
    chance = len(items) / len(items[0][1])
    assert max(longest, shortest) < 1.6 * chance


@pytest.mark.parametrize("name", FORMATS)
def test_text_is_clean(name):
    for item in read_items(name):
        text, options, _ = text_options_label(name, item)
        for part in (text, *options):
            assert part == part.strip() and "  " not in part and "\n" not in part
            assert part.isascii()


def test_piqa_and_copa_are_written_as_their_prompts_expect():
    for item in read_items("piqa"):
        assert item["goal"].endswith("?") and item["sol1"].endswith(".") and item["sol2"].endswith(".")
    questions = Counter()
    for item in read_items("copa"):
        questions[item["question"], item["label"]] += 1
        # The stock prompt drops the last character of the premise.
        assert all(item[field].endswith(".") for field in ("premise", "choice1", "choice2"))
        # The stock prompt lowers the first letter of an option: a name there would be spoiled.
        assert item["choice1"].split()[0] in STARTS and item["choice2"].split()[0] in STARTS
    assert questions == {(q, label): 12 for q in ("cause", "effect") for label in (0, 1)}


STARTS = {
    *("A", "An", "The", "He", "She", "It", "Its", "His", "Her", "Deep", "Lightning", "Nobody", "Somebody"),
    *("Smoke", "Music", "Snow", "Children", "Flowers", "Apples", "Customers"),
}


def test_winogrande_twins_share_all_but_the_trigger_and_differ_in_their_answer():
    items = read_items("winogrande")
    for first, second in zip(items[::2], items[1::2], strict=True):
        assert (first["option1"], first["option2"]) == (second["option1"], second["option2"])
        assert {first["answer"], second["answer"]} == {"1", "2"}
        opening, _, ending = first["sentence"].partition("_")
        other_opening, _, other_ending = second["sentence"].partition("_")
        assert opening == other_opening and ending != other_ending
        for item in (first, second):
            assert item["sentence"].count("_") == 1
            # Scoring compares the common ending: it must not be empty, nor name an option.
            assert len(item["sentence"].partition("_")[2].split()) >= 2
            assert all(option.lower() in opening.lower() for option in (item["option1"], item["option2"]))


def test_boolq_asks_each_passage_a_yes_and_a_no_question():
    labels = defaultdict(list)
    for item in read_items("boolq"):
        labels[item["passage"]].append(item["label"])
        title, separator, text = item["passage"].partition(" -- ")
        assert title and separator and text.endswith(".")
        assert not item["question"].endswith("?") and item["question"] == item["question"].lower()
    assert all(sorted(each) == [0, 1] for each in labels.values())
    first = [item["label"] for item in read_items("boolq")[::2]]
    assert sum(first) == len(first) / 2
