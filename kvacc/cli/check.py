"""``kvacc check``."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kvacc.gate.verdicts import Limits, Report


@click.command()
@click.option("--baseline", required=True, type=click.Path(), help="Baseline file (kvacc baseline create).")
@click.option("--config", help="Configuration to run afresh: a YAML file, or ci.")
@click.option("--results", multiple=True, type=click.Path(), help="Judge these results; may be repeated.")
@click.option("--margin", default="1", show_default=True, help="Largest drop accepted, in points.")
@click.option("--confidence", type=float, default=0.95, show_default=True, help="Of every verdict.")
@click.option(
    "--inconclusive",
    type=click.Choice(["3", "pass", "fail"]),
    default="3",
    show_default=True,
    help="Exit code when there are too few items: 3, 0 (pass) or 1 (fail).",
)
@click.option("--max-kl", type=float, help="Largest mean KL divergence from full, in nats per token.")
@click.option("--min-agreement", type=float, help="Smallest share of tokens with full's first choice.")
@click.option("--kl-margin", type=float, help="Largest rise of the divergence over the baseline's, in nats.")
@click.option("--agreement-margin", help="Largest drop of the agreement below the baseline's, in points.")
@click.option("--noise", type=float, help="Log-likelihoods this close count as unchanged, in nats.")
@click.option(
    "--compare-as",
    multiple=True,
    metavar="NEW=OLD",
    help="Judge strategy NEW by the baseline's cells of OLD; may be repeated.",
)
@click.option("--allow-new", is_flag=True, help="Cells that the baseline does not know are no mistake.")
@click.option("--junit", type=click.Path(), help="Write JUnit XML.")
@click.option("--summary", type=click.Path(), help="Write Markdown.  [default: the CI's step summary]")
@click.option("--json", "json_file", type=click.Path(), help="Write everything as JSON.")
@click.option(
    "--annotations",
    type=click.Choice(["auto", "github", "none"]),
    default="auto",
    show_default=True,
    help="Mark failures in the CI's view.",
)
@click.option("--output", type=click.Path(), help="Folder of the new run.  [default: a new runs/check]")
@click.option("--resume", is_flag=True, help="Keep finished cells of --output: the code is the same.")
@click.option("--data-dir", type=click.Path(), help="Folder with benchmark data.  [default: $KVACC_DATA_DIR]")
@click.option(
    "--include", multiple=True, metavar="FILE", help="Python file with strategies; may be repeated."
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change one value of --config; may be repeated.",
)
def check(
    baseline: str,
    config: str | None,
    results: tuple[str, ...],
    margin: str,
    confidence: float,
    inconclusive: str,
    max_kl: float | None,
    min_agreement: float | None,
    kl_margin: float | None,
    agreement_margin: str | None,
    noise: float | None,
    compare_as: tuple[str, ...],
    allow_new: bool,
    junit: str | None,
    summary: str | None,
    json_file: str | None,
    annotations: str,
    output: str | None,
    resume: bool,
    data_dir: str | None,
    include: tuple[str, ...],
    settings: tuple[str, ...],
) -> int:
    """Compare results with a committed baseline, item by item: the gate for CI.

    Exit code 0: every drop is within the margin. 1: a drop is beyond it. 3: there are too few
    items to tell; the number that would do is said. 2: something cannot be compared (another
    seed, task version, data, model, a missing cell), which is never skipped.
    """
    from kvacc.errors import KvaccError
    from kvacc.gate.baseline import read_baseline
    from kvacc.gate.check import check_results, run_for_check

    if bool(config) == bool(results):
        raise KvaccError(
            "give either --config CONFIG (it is run afresh) or --results FOLDER (results that are there)"
        )
    limits = _limits(margin, confidence, max_kl, min_agreement, kl_margin, agreement_margin, noise)
    renamed = _renamed(compare_as)
    read_baseline(baseline)  # what is wrong with it is said before anything runs
    folders = list(results)
    if config:
        overrides = [*settings, *([] if data_dir is None else [f"data_dir={json.dumps(data_dir)}"])]
        from kvacc.cli.console import make_console

        console = make_console(stderr=True)
        folders = run_for_check(
            config, output, resume=resume, overrides=overrides, include=include, console=console
        )
    elif output or resume or settings or include or data_dir:
        raise KvaccError(
            "--output, --resume, --set, --include and --data-dir go with --config, not --results"
        )
    report = check_results(folders, baseline, limits, compare_as=renamed, allow_new=allow_new)
    _write(report, junit, summary, json_file)
    _print(report, annotations)
    if report.exit_code == 3:
        return {"3": 3, "pass": 0, "fail": 1}[inconclusive]
    return report.exit_code


def points(text: str, option: str) -> float:
    """``2``, ``2pt`` or ``2 points`` as a share (0.02).

    Raises:
        KvaccError: not a number above 0 and below 100.
    """
    from kvacc.errors import KvaccError

    bare = text.strip().removesuffix("points").removesuffix("pt").strip()
    try:
        value = float(bare)
    except ValueError:
        value = float("nan")
    if not 0 < value < 100:
        raise KvaccError(f"{option} {text!r}: give points above 0 and below 100, such as 1 or 2.5")
    return value / 100


def _limits(
    margin: str,
    confidence: float,
    max_kl: float | None,
    min_agreement: float | None,
    kl_margin: float | None,
    agreement_margin: str | None,
    noise: float | None,
) -> Limits:
    from kvacc.gate.verdicts import Limits, require

    limits = Limits(
        margin=points(margin, "--margin"),
        confidence=confidence,
        max_kl=max_kl,
        min_agreement=min_agreement,
        kl_margin=kl_margin,
        agreement_margin=None if agreement_margin is None else points(agreement_margin, "--agreement-margin"),
        **({} if noise is None else {"noise": noise}),
    )
    require(limits)
    return limits


def _renamed(words: tuple[str, ...]) -> dict[str, str]:
    from kvacc.errors import KvaccError

    renamed = {}
    for word in words:
        new, equals, old = word.partition("=")
        if not (new and equals and old):
            raise KvaccError(f"--compare-as {word!r}: write NEW=OLD, such as harmed_h2o=h2o")
        if new in renamed:
            raise KvaccError(f"--compare-as {word!r}: {new} is given twice; keep one")
        renamed[new] = old
    return renamed


def _write(report: Report, junit: str | None, summary: str | None, json_file: str | None) -> None:
    from kvacc.gate import outputs

    if junit:
        outputs.write_text(junit, outputs.to_junit(report))
    if json_file:
        outputs.write_text(json_file, outputs.to_json(report))
    if summary:
        outputs.write_text(summary, outputs.to_markdown(report))
    elif os.environ.get("GITHUB_STEP_SUMMARY"):
        outputs.write_text(os.environ["GITHUB_STEP_SUMMARY"], outputs.to_markdown(report), append=True)


def _print(report: Report, annotations: str) -> None:
    from kvacc.gate import outputs

    for check in report.checks:
        click.echo(f"{str(check.verdict):<14} {outputs.sentence(check)}")
    for label in report.new:
        click.echo(f"{'not judged':<14} {label}: not in the baseline")
    for note in report.notes:
        click.echo(f"{'note':<14} {note}")
    click.echo(outputs.headline(report))
    wanted = annotations == "github" or (annotations == "auto" and os.environ.get("GITHUB_ACTIONS") == "true")
    for line in outputs.to_annotations(report) if wanted else []:
        click.echo(line)
