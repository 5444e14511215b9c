"""Do KL divergence and agreement show a budget change that accuracy cannot show?

Scores the first documents of one task under ``full`` and under a strategy at two pairs of
budgets that lie one per cent of the cache apart, and states each pair's difference in accuracy,
divergence and agreement, on the same documents, with 95 % intervals. A Markdown table.

    python benchmarks/fidelity_detects.py [--task kvacc_passkey] [--limit 50] [--output FOLDER]
    python benchmarks/fidelity_detects.py --task piqa --shots 5 --data-dir DATA

``--output`` keeps the cells: run again, only what is missing is computed.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections import defaultdict

PAIRS = "1.0:0.99,0.21:0.2"
MEASURES = ("acc", "kl", "agreement")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--task", default="kvacc_passkey")
    parser.add_argument("--shots", type=int, default=0)
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--strategy", default="h2o")
    parser.add_argument("--protocol", default="stream")
    parser.add_argument("--pairs", default=PAIRS, help="larger:smaller, comma-separated; 1.0 is full")
    parser.add_argument("--output", default=None, help="where cells go; a temporary folder by default")
    arguments = parser.parse_args()
    pairs = [tuple(map(float, pair.split(":"))) for pair in arguments.pairs.split(",")]

    with tempfile.TemporaryDirectory(prefix="kvacc-fidelity-") as temporary:
        cells = run(arguments, pairs, arguments.output or temporary)
        table = {budget: documents(cell) for budget, cell in cells.items()}
    print(f"{arguments.strategy}, {arguments.protocol}, {arguments.task}, {arguments.shots}-shot, ", end="")
    print(f"{len(table[1.0])} documents, {arguments.model} ({arguments.dtype})\n")
    print(
        "| budget | entries | measure | at the larger | at the smaller | difference | 95 % interval | shown |"
    )
    print("| --- | --- | --- | ---: | ---: | ---: | --- | --- |")
    seen = [line for pair in pairs for line in compare(*pair, table, cells)]
    return 0 if all(seen) else 1


def run(arguments, pairs: list[tuple[float, float]], folder: str) -> dict:
    """The cells by budget; ``full`` is 1.0."""
    from kvacc.config import config_from
    from kvacc.results import read_cells
    from kvacc.sweep import run_sweep

    budgets = sorted({budget for pair in pairs for budget in pair if budget != 1.0}, reverse=True)
    config = config_from(
        {
            "models": [{"pretrained": arguments.model, "dtype": arguments.dtype}],
            "strategies": ["full", {"name": arguments.strategy, "budgets": budgets}],
            "protocols": [arguments.protocol],
            "tasks": [arguments.task],
            "shots": [arguments.shots],
            "limit": arguments.limit,
            "data_dir": arguments.data_dir,
            "fidelity": True,
        }
    )
    report = run_sweep(config, folder)
    if report.failed:
        raise SystemExit("\n".join(f"{label}: {reason}" for label, reason in report.failed.items()))
    found = read_cells(folder)
    return {1.0 if cell.spec.strategy == "full" else float(cell.spec.budget): cell for cell in found}


def documents(cell) -> dict:
    """document -> {measure: value, "cluster": its cluster}; measures are means over its scored tokens."""
    rows = defaultdict(list)
    for row in cell.load_samples().to_pylist():
        rows[row["doc_id"]].append(row)
    found = {}
    for number, parts in rows.items():
        tokens = sum(row["scored_tokens"] for row in parts)
        values = {"acc": parts[0]["metric_acc"], "cluster": parts[0]["cluster"]}
        for name, of_full in (("kl", 0.0), ("agreement", 1.0)):
            each = [of_full if row[name] is None else row[name] for row in parts]
            values[name] = (
                math.fsum(v * row["scored_tokens"] for v, row in zip(each, parts, strict=True)) / tokens
            )
        found[number] = values
    return found


def compare(larger: float, smaller: float, table: dict, cells: dict):
    """Print a line for each measure; yield whether it came out as fidelity is for."""
    from kvacc.statistics import paired_difference

    one, other = table[larger], table[smaller]
    clusters = [one[number]["cluster"] for number in one]
    entries = " to ".join(
        "all" if budget == 1.0 else f"{cells[budget].measured.budget_entries_median:g}"
        for budget in (larger, smaller)
    )
    for name in MEASURES:
        before, after = ([side[number][name] for number in one] for side in (one, other))
        found = paired_difference(before, after, clusters)
        shown = not found.spans_zero
        means = (math.fsum(values) / len(values) for values in (before, after))
        cells_of_line = [
            f"{larger:g} to {smaller:g}", entries, name, *(f"{mean:.4g}" for mean in means),
            f"{found.value:+.3g}", f"{found.low:+.3g} to {found.high:+.3g}", "yes" if shown else "no",
        ]  # fmt: skip
        print("| " + " | ".join(cells_of_line) + " |")
        yield shown == (name != "acc")


if __name__ == "__main__":
    sys.exit(main())
