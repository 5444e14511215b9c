"""How long the leaderboard page of many rows takes to load in headless Chromium, and how large it is.

    python benchmarks/page.py --rows 500

Rows are those of real results, repeated under other model names until there are enough, so
that tables, pictures, configurations and flips have their real sizes. Prints one JSON line:
size in bytes, seconds to build, the median and slowest of the loads, in seconds until the load
event (style, tables, pictures in view and the script's own work are done then), and the
processor seconds of the page's main thread, which say the same on a busy machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))


def repeated(cells: list, rows: int) -> list:
    """At least ``rows`` cells: the given ones under as many model names as it takes, cut to the number."""
    found = []
    for number in itertools.count():
        for cell in sorted(
            cells, key=lambda c: (c.spec.task, str(c.spec.shots), c.spec.strategy != "full", c.cell_id)
        ):
            if len(found) == rows:
                return found
            name = f"{cell.model['name']}-copy-{number}"
            spec = cell.spec.model_copy(update={"model": {**cell.spec.model, "pretrained": name}})
            changes = {
                "spec": spec,
                "model": {**cell.model, "name": name},
                "cell_id": f"{number:02d}{cell.cell_id[2:]}",
            }
            found.append(cell.model_copy(update=changes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--loads", type=int, default=5)
    parser.add_argument("--runs", nargs="+", default=["leaderboard/paper/runs", "leaderboard/paradigms/runs"])
    parser.add_argument("--keep", help="write the page here instead of a temporary file")
    arguments = parser.parse_args()

    from chromium import browser, executable

    from kvacc.page import write_page
    from kvacc.results import read_cells

    if executable() is None:
        sys.exit("no Chromium found: install it, or name it in the environment variable CHROMIUM")
    cells = repeated(read_cells([ROOT / run for run in arguments.runs]), arguments.rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(arguments.keep or Path(folder) / "leaderboard.html").resolve()
        started = time.perf_counter()
        write_page(cells, path)
        built = time.perf_counter() - started
        size = path.stat().st_size
        loads = [load(browser, path.as_uri()) for _ in range(arguments.loads)]
    seconds, busy = zip(*loads, strict=True)
    result = {
        "rows": len(cells),
        "bytes": size,
        "build_s": round(built, 1),
        "load_median_s": round(statistics.median(seconds), 3),
        "load_slowest_s": round(max(seconds), 3),
        "processor_median_s": round(statistics.median(busy), 3),
    }
    print(json.dumps(result))


def load(browser, address: str) -> tuple[float, float]:
    """Seconds from navigation to the load event, and processor seconds of the page's main thread,
    which other programs do not change, in a fresh browser."""
    with browser() as page:
        page.window(1280, 900)
        page.send("Performance.enable", timeDomain="threadTicks")
        page.open(address)
        seconds = page.run("performance.getEntriesByType('navigation')[0].loadEventEnd") / 1000
        metrics = {entry["name"]: entry["value"] for entry in page.send("Performance.getMetrics")["metrics"]}
    return seconds, metrics["TaskDuration"]


if __name__ == "__main__":
    main()
