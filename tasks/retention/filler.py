"""What surrounds the facts: generated prose without a digit, or sentences of the user's own texts.

A filler gives every document its own :class:`Units`: sentences in an order that the
document's draws decide, without those that hold one of the document's answers.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from kvacc.tasks.retention.draws import Draws

from kvacc.errors import KvaccError

SUBJECTS = (
    "The baker", "A gardener", "The teacher", "An old sailor", "The carpenter", "A painter",
    "The miller", "A young shepherd", "The potter", "A tired traveler", "The blacksmith", "A weaver",
    "The ferryman", "A quiet neighbor", "The tailor", "An apprentice", "The beekeeper", "A musician",
    "The clockmaker", "A fisherman", "The innkeeper", "A stonemason", "The lighthouse keeper", "A student",
    "The cobbler", "A cheerful cook", "The forester", "A visiting uncle", "The glassblower", "A postman",
    "The bookbinder", "A patient grandmother", "The stable boy", "A street sweeper", "The candle maker",
    "A wandering poet", "The basket maker", "A curious child", "The watchman", "A retired captain",
    "The charcoal burner", "A careful printer", "The rope maker", "A small choir", "The goose girl",
    "A friendly grocer", "The organ builder", "A sleepy guard",
)  # fmt: skip
ACTIONS = (
    "swept the steps", "mended a torn net", "hummed a slow tune", "watered the flowers",
    "repaired a wooden chair", "waited for the rain to stop", "fed the sparrows", "polished a brass bell",
    "carried a sack of flour", "told a long story", "sharpened the tools", "looked at the clouds",
    "stacked the firewood", "washed the dishes", "drank a bowl of soup", "folded the linen",
    "painted the shutters", "sat on a low wall", "picked ripe plums", "wrote a short letter",
    "leaned a ladder against the wall", "chopped some onions", "greeted the passers-by",
    "swam against the current", "tied up a little boat", "laughed at an old joke", "rested in the shade",
    "gathered fallen leaves", "listened to the wind", "lit the lanterns", "stirred a pot of porridge",
    "brushed a gray pony", "planted a row of beans", "hung out the washing", "carved a toy horse",
    "warmed both hands by the fire", "sorted a box of buttons", "shook the dust from a rug",
    "walked up and down", "baked a loaf of rye bread", "counted on good weather", "closed the heavy gate",
    "rolled a barrel along", "watched the swallows", "hummed and whittled", "patched a pair of trousers",
    "opened a cupboard", "built a small fire",
)  # fmt: skip
PLACES = (
    "near the old canal", "behind the mill", "under the willows", "beside the fountain",
    "in front of the town hall", "at the edge of the forest", "on the village green", "by the harbor",
    "along the river bank", "below the castle", "in a narrow street", "next to the bakery",
    "outside the station", "on the stone bridge", "among the apple trees", "at the foot of the hill",
    "close to the vineyard", "in the courtyard", "beyond the meadow", "under a striped awning",
    "at the end of the pier", "by the open hearth", "between the barns", "on the sunny side of the square",
    "in the walled garden", "opposite the theater", "past the orchard", "at the crossroads",
    "inside the greenhouse", "by the frozen pond", "over at the market", "not far from the chapel",
    "down in the valley", "on the top floor", "in the shadow of the tower", "around the corner",
)  # fmt: skip
TIMES = (
    "before sunrise", "in the early morning", "after breakfast", "around noon", "all afternoon",
    "toward evening", "until it grew dark", "after the storm", "during the harvest", "while it snowed",
    "in the soft light of dusk", "on a foggy day", "as the bells rang", "when the ferry had left",
    "for quite a while", "as usual",
)  # fmt: skip
SHORT = (
    "And so it went on.", "Nobody was in a hurry.", "The day was mild.", "It was quiet.",
    "Time went by.", "Birds sang.", "A breeze rose over the fields, and then it was still again.",
    "Smoke rose.", "So it was.", "All was well there.", "The shadows grew longer.", "Ah.",
)  # fmt: skip
"""Sentences of 1 to 12 words, to meet a length exactly."""

BANK = 2**14
"""Generated sentences: more than 131,072 tokens hold, so that none comes back in one document."""

_WORD = re.compile(r"\w+")
_LONGEST_UNIT_WORDS = 40


class NoMoreFiller(Exception):
    """A document needs more sentences than its filler has; the message names the filler."""


class Units:
    """A document's filler sentences, made as they are needed.

    Args:
        source: the sentences in their order.
        short: shorter ones, to fill what is left of a length.
        name: of the filler, for errors.
    """

    def __init__(self, source: Iterator[str], short: tuple[str, ...] = SHORT, name: str = "filler") -> None:
        self._source, self.short, self.name = source, short, name
        self._made: list[str] = []

    def get(self, index: int) -> str:
        """The sentence number ``index``.

        Raises:
            NoMoreFiller: there are not so many.
        """
        while len(self._made) <= index:
            unit = next(self._source, None)
            if unit is None:
                raise NoMoreFiller(self.name)
            self._made.append(unit)
        return self._made[index]


@functools.cache
def bank_sentence(index: int) -> str:
    """Sentence ``index`` of the generated bank, the same on every machine."""
    draws = Draws("filler bank", index)
    opening = f"{draws.choice(SUBJECTS)} {draws.choice(ACTIONS)} {draws.choice(PLACES)}"
    return f"{opening} {draws.choice(TIMES)}." if draws.below(2) else f"{opening}."


class GeneratedFiller:
    """Prose from a bank of sentences, each at most once in a document."""

    def units(self, draws: Draws, forbidden: frozenset[str]) -> Units:
        """Sentences without any of ``forbidden`` (words, phrases or numbers)."""
        # An odd step visits every place of the bank, whose size is a power of two.
        start, step = draws.below(BANK), 2 * draws.below(BANK // 2) + 1
        order = ((start + step * number) % BANK for number in range(BANK))
        unwanted = Unwanted(forbidden)
        return Units(
            (text for index in order if not unwanted.in_(text := bank_sentence(index))),
            name="the generated filler",
        )


class TextFiller:
    """Sentences of a text file, or of the ``.txt`` files of a folder in order of their names.

    Each document starts at a sentence of its own and goes on in order, once around.

    Raises:
        KvaccError: no such file or folder, no ``.txt`` file in it, no text, or not UTF-8.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.sentences = [s for file in _files(self.path) for s in sentences_of(_read(file))]
        if not self.sentences:
            raise KvaccError(f"filler {str(self.path)!r} holds no text; name a text file with some")

    def units(self, draws: Draws, forbidden: frozenset[str]) -> Units:
        """Sentences without any of ``forbidden``."""
        start = draws.below(len(self.sentences))
        unwanted = Unwanted(forbidden)
        around = itertools.chain(self.sentences[start:], self.sentences[:start])
        usable = (text for text in around if not unwanted.in_(text))
        return Units(usable, name=f"filler {str(self.path)!r}")


Filler = GeneratedFiller | TextFiller


@functools.lru_cache(maxsize=4)
def _text_filler(path: str, stamp: tuple) -> TextFiller:
    return TextFiller(path)


def filler_of(path: str | Path | None) -> Filler:
    """Generated prose for None, else the text at ``path``; errors as :class:`TextFiller`."""
    if path is None:
        return GeneratedFiller()
    return _text_filler(str(path), filler_stamp(path))


def filler_stamp(path: str | Path | None) -> tuple:
    """Changes when the files of a filler do, so that what was made of them is made anew."""
    files = [] if path is None else _files(Path(path))
    return tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files)


class Unwanted:
    """Tells sentences that hold one of a document's answers, options or keys."""

    def __init__(self, texts: frozenset[str]) -> None:
        lowered = {text.casefold() for text in texts if text}
        self.numbers = {number for text in lowered if (number := text.replace(",", "")).isdecimal()}
        plain = lowered - self.numbers
        self.words = {text for text in plain if _WORD.fullmatch(text)}
        self.phrases = plain - self.words

    def in_(self, sentence: str) -> bool:
        """True when the sentence holds one, whole words and numbers of any notation counted."""
        text, words, has_digit = _prepared(sentence)
        if not self.words.isdisjoint(words) or any(phrase in text for phrase in self.phrases):
            return True
        if not has_digit:
            return False
        # 48,213 and 48213 are one number; a longer number that holds it gives it away as well.
        digits = text.replace(",", "")
        return any(number in digits for number in self.numbers)


@functools.lru_cache(maxsize=2 * BANK)
def _prepared(sentence: str) -> tuple[str, frozenset[str], bool]:
    text = sentence.casefold()
    return text, frozenset(_WORD.findall(text)), any(map(str.isdecimal, text))


def sentences_of(text: str) -> list[str]:
    """The sentences of a text, blanks and line breaks evened out; very long ones are cut.

    Example:
        >>> sentences_of("It rained.  The street\\nwas empty!")
        ['It rained.', 'The street was empty!']
    """
    found = []
    for sentence in re.split(r"(?<=[.!?])\s+|\n\s*\n", text):
        words = sentence.split()
        for start in range(0, len(words), _LONGEST_UNIT_WORDS):
            found.append(" ".join(words[start : start + _LONGEST_UNIT_WORDS]))
    return found


def _files(path: Path) -> list[Path]:
    path = path.expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
        if not files:
            raise KvaccError(f"filler folder {str(path)!r} has no .txt file; add one, or name a file")
        return files
    if not path.is_file():
        raise KvaccError(f"filler {str(path)!r} does not exist; name a text file or a folder of .txt files")
    return [path]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise KvaccError(
            f"filler {str(file)!r}: byte {error.start} is not UTF-8 text; save it as UTF-8"
        ) from None
    except OSError as error:
        raise KvaccError(f"filler {str(file)!r} cannot be read: {error.strerror}") from None
