"""kvacc against NVIDIA's kvpress on the same haystacks and questions.

    python benchmarks/against_kvpress.py --kvpress-python VENV/bin/python

kvpress needs an older transformers, so it runs in an environment of its own::

    python -m venv VENV && VENV/bin/pip install torch==2.13.0 kvpress==0.5.5

Passkeys in texts of about 2,000 tokens, protocol ``context`` (the question is not seen by the
compression), half of the entries kept, answers generated. Without compression both must give
the same answers, or nothing is reported.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from common import emit, machine, paired, quiet

TOKENS = 8
QUESTION = "\nQuestion: What is the passkey?"
PREFIX = "Answer: The passkey is"
"""kvpress puts a new line between a question and the beginning of its answer."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kvpress-python", required=True, help="an interpreter with kvpress installed")
    parser.add_argument("--items", type=int, default=4)
    parser.add_argument("--length", type=int, default=2000, help="tokens of the haystack")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    quiet()

    from kvacc.backend import KvaccLM
    from kvacc.models import resolve
    from kvacc.strategy import make_strategy

    lm = KvaccLM(arguments.model)
    peer = Peer(arguments.kvpress_python, resolve(arguments.model))
    items = haystacks(lm, arguments.items, arguments.length)
    emit(measurement="machine", **machine())
    one = [{"context": context, "questions": [QUESTION]} for context in items]
    four = [
        {
            "context": context,
            "questions": [QUESTION, *(f"\nSay {word}." + QUESTION for word in ("a", "b", "c"))],
        }
        for context in items
    ]
    cases = (
        ("full, one question", None, make_strategy("full"), one, same),
        ("SnapKV / h2o at half, one question", "snapkv", make_strategy("h2o", 0.5), one, as_many),
        (
            "H2O-like / h2o at half, one question",
            "observed_attention",
            make_strategy("h2o", 0.5),
            one,
            as_many,
        ),
        ("SnapKV / h2o at half, four questions", "snapkv", make_strategy("h2o", 0.5), four, as_many),
        (
            "H2O-like / h2o at half, four questions",
            "observed_attention",
            make_strategy("h2o", 0.5),
            four,
            as_many,
        ),
    )
    for label, press, strategy, asked, check in cases:
        lm.use(strategy, "context")
        times = paired(
            lambda press=press, asked=asked: peer.answer(press, asked),
            lambda asked=asked: answer(lm, asked),
            arguments.repeats,
            check,
        )
        emit(measurement=f"kvpress / kvacc, {label}", items=len(asked), length=arguments.length, **times)


class Peer:
    """kvpress in a process of its own."""

    def __init__(self, python: str, folder: str) -> None:
        worker = __file__.replace("against_kvpress.py", "kvpress_worker.py")
        self.process = subprocess.Popen(
            [python, worker, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def answer(self, press: str | None, items: list[dict]) -> list[list[str]]:
        request = {"press": press, "ratio": 0.5, "items": items, "prefix": PREFIX, "tokens": TOKENS}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._read()["answers"]

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            sys.exit("kvpress stopped; see its message above")
        return json.loads(line)


def answer(lm, items: list[dict]) -> list[list[str]]:
    """The same questions through lm-eval's interface."""
    from lm_eval.api.instance import Instance

    requests = [
        Instance(
            "generate_until",
            {"context": item["context"], "question": question},
            (
                f"{item['context']}{question}\n{PREFIX}",
                {"until": ["\n"], "max_gen_toks": TOKENS, "do_sample": False},
            ),
            0,
            metadata=("passkey", number, 1),
        )
        for number, item in enumerate(items)
        for question in item["questions"]
    ]
    texts = iter(lm.generate_until(requests, disable_tqdm=True))
    return [[next(texts) for _ in item["questions"]] for item in items]


def haystacks(lm, count: int, tokens: int) -> list[str]:
    """Texts of about ``tokens`` tokens with a passkey in the middle."""
    from kvacc.calibration import calibration_text

    text = calibration_text("prose").split(". ")
    found = []
    for number in range(count):
        sentences: list[str] = []
        while len(lm.tok_encode(". ".join(sentences))) < tokens:
            sentences.append(text[(7 * number + len(sentences)) % len(text)])
        passkey = 10007 + 7919 * number
        sentences.insert(len(sentences) // 2, f"The passkey is {passkey}. Remember it")
        found.append(". ".join(sentences) + ".")
    return found


def same(theirs, ours) -> None:
    """Exit unless the first words of all answers are equal."""
    first = [[text.split()[:1] for text in texts] for texts in theirs]
    second = [[text.split()[:1] for text in texts] for texts in ours]
    if first != second:
        sys.exit(f"different answers without compression: {theirs} and {ours}")


def as_many(theirs, ours) -> None:
    """Exit unless both gave an answer to every question."""
    if [len(texts) for texts in theirs] != [len(texts) for texts in ours]:
        sys.exit("different numbers of answers")


if __name__ == "__main__":
    main()
