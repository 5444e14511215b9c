"""The command line.

Each command lives in a module of its own, imported when the command is used, so that
``kvacc --help`` answers at once.
"""

from __future__ import annotations

import click

from kvacc import __version__
from kvacc.cli.lazy import LazyGroup

COMMANDS = {
    "run": ("kvacc.cli.run:run", "Run a sweep of models, strategies, budgets and tasks."),
    "leaderboard": ("kvacc.cli.leaderboard:leaderboard", "Compare results, paired with the full cache."),
    "plot": ("kvacc.cli.plot:plot", "Draw results: budget, pareto, heatmap, fidelity, kept entries."),
    "curve": ("kvacc.cli.curve:curve", "Perplexity by position over long texts, beside full."),
    "probe": ("kvacc.cli.probe:probe", "Measure what strategies buy: time, memory, transfers, capacity."),
    "check": ("kvacc.cli.check:check", "Gate for CI: compare results with a committed baseline."),
    "recommend": ("kvacc.cli.recommend:recommend", "Pick a strategy by accuracy, memory and time."),
    "baseline": ("kvacc.cli.baseline:baseline", "Make, change or show a baseline for kvacc check."),
    "calibrate": ("kvacc.cli.calibrate:calibrate", "Find the smallest budget that stays within a margin."),
    "plan": ("kvacc.cli.plan:plan", "Say what fits a GPU, and how fast it could be."),
    "results": ("kvacc.cli.results:results", "List, compare, export, merge and check results."),
    "strategies": ("kvacc.cli.strategies:strategies", "List the strategies, or show one with its options."),
    "verify": ("kvacc.cli.verify:verify", "Check a strategy, your own included, against ten invariants."),
    "tasks": ("kvacc.cli.tasks:tasks", "List the tasks, or show one and whether its data is here."),
    "models": ("kvacc.cli.models:models", "List example models; find the embedded model's folder."),
    "doctor": ("kvacc.cli.doctor:doctor", "Show what is installed and what can be reached."),
    "lm-eval": ("kvacc.cli.lm_eval:lm_eval", "Run lm-eval's own command line with kvacc in it."),
}


@click.group(
    cls=LazyGroup,
    commands_table=COMMANDS,
    resumable=["run", "probe", "calibrate"],
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: kvacc run quickstart",
)
@click.version_option(__version__, prog_name="kvacc")
@click.option("--debug", is_flag=True, help="Show the traceback of errors.")
def cli(debug: bool) -> None:
    """What a KV-cache strategy costs in accuracy, on your model."""


def main() -> None:
    """The console script."""
    cli(prog_name="kvacc")


__all__ = ["COMMANDS", "cli", "main"]
