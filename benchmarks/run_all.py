"""Run every speed benchmark, one after the other, and write ``benchmarks/README.md``.

    python benchmarks/run_all.py --data-dir DATA --kvpress-python VENV/bin/python

Takes about 50 minutes on two cores; nothing else should run meanwhile. Every measurement is kept
in ``benchmarks/measurements.jsonl``; ``--render`` makes the page from that file again. Without
``--kvpress-python`` (see against_kvpress.py) its rows are missing, and said to be.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILE = HERE / "measurements.jsonl"
PAGE = HERE / "README.md"
WORDS = {">=": "at least", "<=": "at most"}
WHOLE = "hf / kvacc full, whole set"
SCRIPTS: tuple[tuple[str, ...], ...] = (
    ("against_hf.py", "--shots", "0", "--limit", "66", "--blocks", "3"),
    ("against_hf.py", "--shots", "5", "--limit", "16", "--blocks", "2"),
    ("against_hf.py", "--shots", "5", "--sampler", "first_n", "--limit", "60", "--blocks", "1"),
    ("strategies.py", "--strategies", "h2o,infinigen", "--limit", "12", "--repeats", "2"),
    ("step_path.py", "--repeats", "3"),
    ("long_prompts.py", "--repeats", "2", "--only", "prefill"),
    ("long_prompts.py", "--repeats", "1", "--only", "8,000"),
    ("long_prompts.py", "--repeats", "1", "--only", "32,000"),
    ("chunked_prefill.py",),
    ("against_kvpress.py", "--items", "2", "--repeats", "2"),
)
TARGETS: tuple[tuple[str, str, dict[str, Any], str, str, float | None], ...] = (
    # (what, measurement, other fields, the field that counts, comparison, target)
    ("six benchmarks, 0-shot: `hf` time / kvacc time", WHOLE, {"shots": 0}, "ratio", ">=", 2.2),
    (
        "the same, 5-shot, lm-eval's sampler",
        WHOLE, {"shots": 5, "sampler": "default"}, "ratio", ">=", 2.8,
    ),
    (
        "the same, 5-shot, fixed examples (`first_n`)",
        WHOLE, {"shots": 5, "sampler": "first_n"}, "ratio", ">=", 6,
    ),
    ("`h2o` / `full`, 0-shot", "h2o / full, stream, piqa 0-shot", {}, "ratio", "<=", 1.3),
    ("`h2o` / `full`, 5-shot", "h2o / full, stream, piqa 5-shot", {}, "ratio", "<=", 1.6),
    ("`h2o` / `full`, retention", "h2o / full, stream, passkey of 1,024 tokens", {}, "ratio", "<=", 2),
    ("`infinigen` / `full`, 0-shot", "infinigen / full, stream, piqa 0-shot", {}, "ratio", "<=", 1.5),
    ("`infinigen` / `full`, 5-shot", "infinigen / full, stream, piqa 5-shot", {}, "ratio", "<=", 1.5),
    (
        "`infinigen` / `full`, retention",
        "infinigen / full, stream, passkey of 1,024 tokens", {}, "ratio", "<=", 1.5,
    ),
    (
        "`h2o`: step path / parallel path, batch 1",
        "step path / parallel path, h2o 0.2 stream, batch 1", {}, "ratio", ">=", 6,
    ),
    (
        "the same, batch 16",
        "step path / parallel path, h2o 0.2 stream, batch 16", {}, "ratio", ">=", 6,
    ),
    (
        "kvpress (SnapKV) / kvacc (`h2o`), 2,000 tokens, one question",
        "kvpress / kvacc, SnapKV / h2o at half, one question", {}, "ratio", ">=", 1.3,
    ),
    (
        "kvpress (H2O-like) / kvacc (`h2o`), one question",
        "kvpress / kvacc, H2O-like / h2o at half, one question", {}, "ratio", ">=", 2.5,
    ),
    (
        "kvpress (SnapKV) / kvacc (`h2o`), four questions on a haystack",
        "kvpress / kvacc, SnapKV / h2o at half, four questions", {}, "ratio", ">=", 3,
    ),
    (
        "kvpress (H2O-like) / kvacc (`h2o`), four questions on a haystack",
        "kvpress / kvacc, H2O-like / h2o at half, four questions", {}, "ratio", ">=", 3,
    ),
    (
        "`h2o` / `full`, prompt of 3,800 tokens, `context`: time",
        "h2o / full: prefill of 3,800 tokens, then compress", {}, "ratio", "<=", 1.5,
    ),
    (
        "the same: peak memory",
        "h2o / full: prefill of 3,800 tokens, then compress", {}, "memory_ratio", "<=", 1.5,
    ),
    (
        "six budgets / one budget, each sweep with `full`",
        "six budgets / one budget, h2o, stream, piqa 5-shot, full in both", {}, "ratio", "<=", 4,
    ),
    (
        "six budgets / one budget, without `full`",
        "six budgets / one budget, h2o, stream, piqa 5-shot", {}, "ratio", "<=", 4,
    ),
    ("share of the floor, `full`, 0-shot", WHOLE, {"shots": 0}, "share_of_floor", ">=", 0.8),
    (
        "share of the floor, `full`, 5-shot",
        WHOLE, {"shots": 5, "sampler": "default"}, "share_of_floor", ">=", 0.8,
    ),
    (
        "share of the floor by prepacked weights, 0-shot",
        WHOLE, {"shots": 0}, "share_of_prepacked_floor", ">=", None,
    ),
    (
        "share of the floor by prepacked weights, 5-shot",
        WHOLE, {"shots": 5, "sampler": "default"}, "share_of_prepacked_floor", ">=", None,
    ),
    (
        "`h2o` / `full`, document of 8,000 tokens, `stream`: peak memory",
        "h2o / full: 8,000 tokens, stream", {}, "memory_ratio", "<=", 1.5,
    ),
    (
        "the same, 32,000 tokens, a model of four layers",
        "h2o / full: 32,000 tokens, stream, four layers", {}, "memory_ratio", "<=", 1.5,
    ),
    (
        "prefill peak, `eager`, 8,000 tokens: at once / in chunks of 512",
        "prefill peak, eager, 8000 tokens: at once / in chunks", {}, "memory_ratio", ">=", 2,
    ),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--kvpress-python", default=None)
    parser.add_argument("--only", default="", help="part of a script's command line; others keep their lines")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    known = [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.exists() else []
    commands = {" ".join(command) for command in SCRIPTS}
    known = [record for record in known if record["command"] in commands]  # of samples no longer taken
    if not arguments.render:
        for command in SCRIPTS:
            words = " ".join(command)
            if arguments.only not in words:
                continue
            if command[0] == "against_kvpress.py" and not arguments.kvpress_python:
                print("without --kvpress-python there is nothing to compare kvpress with", file=sys.stderr)
                continue
            found = measure(command, arguments)
            known = [record for record in known if record["command"] != words] + found
            write(known)
    write(known)
    PAGE.write_text(page(known))
    print(f"written: {PAGE}")


def write(records: list[dict[str, Any]]) -> None:
    FILE.write_text("".join(json.dumps(record) + "\n" for record in records))


def measure(command: tuple[str, ...], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What one script printed, with the words of its command."""
    words = [sys.executable, str(HERE / command[0]), *command[1:]]
    if command[0] in ("against_hf.py", "strategies.py") and arguments.data_dir:
        words += ["--data-dir", arguments.data_dir]
    if command[0] == "against_kvpress.py":
        words += ["--kvpress-python", arguments.kvpress_python]
    found = []
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("{"):
                found.append({"command": " ".join(command), **json.loads(line)})
    if process.returncode:
        sys.exit(f"{command[0]} stopped with exit code {process.returncode}: see its message above")
    return found


def page(records: list[dict[str, Any]]) -> str:
    """The measurements as Markdown."""
    machines = [record for record in records if record["measurement"] == "machine"]
    lines = [
        "# How fast kvacc is",
        "",
        "Written by `python benchmarks/run_all.py`; each figure is a median of paired runs in one process "
        "or one after the other, with the smallest and the largest in brackets. Equal answers are required "
        "before a ratio counts. Ratios compare programs on one machine at one time; the seconds mean "
        "nothing elsewhere.",
        "",
    ]
    if machines:
        first = machines[0]
        loads = [record["load_before"] for record in machines]
        lines += [
            f"SmolLM2-135M, float32, {first['threads']} threads of a {first['processor']}, torch "
            f"{first['torch']}, transformers {first['transformers']}; load before each script: "
            f"{min(loads)} to {max(loads)}.",
            "",
        ]
    lines += ["| measure | target | measured | reached |", "| --- | --- | --- | --- |"]
    for what, measurement, fields, key, comparison, target in TARGETS:
        record = next(
            (r for r in records if r["measurement"] == measurement and fields.items() <= r.items()), None
        )
        lines.append(row(what, record, key, comparison, target))
    lines += [
        "",
        "## Every measurement",
        "",
        "| command | measurement | ratio | seconds |",
        "| --- | --- | --- | --- |",
    ]
    for record in records:
        if record["measurement"] == "machine":
            continue
        name = " ".join(str(record[key]) for key in ("measurement", "task") if key in record)
        block = f", block {record['block'] + 1}" if "block" in record else ""
        lines.append(
            f"| `{record['command']}` | {name}{block} | {record['ratio']} "
            f"| {record['seconds_one']} / {record['seconds_other']} |"
        )
    return "\n".join(lines) + "\n" + notes()


def row(what: str, record: dict[str, Any] | None, key: str, comparison: str, target: float | None) -> str:
    aim = "none" if target is None else f"{WORDS[comparison]} {target}"
    if record is None:
        return f"| {what} | {aim} | not measured | |"
    value = record[key]
    if target is None:
        return f"| {what} | {aim} | {value} | |"
    spread = (
        f" ({record['ratio_min']} to {record['ratio_max']})"
        if key == "ratio" and "ratio_min" in record
        else ""
    )
    reached = value >= target if comparison == ">=" else value <= target
    return f"| {what} | {aim} | **{value}**{spread} | {'yes' if reached else 'no'} |"


def notes() -> str:
    """What was written by hand about the figures, kept beside the script."""
    file = HERE / "notes.md"
    return "\n" + file.read_text() if file.exists() else ""


if __name__ == "__main__":
    main()
