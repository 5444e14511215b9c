"""Many results at once: DuckDB over the samples of every cell, and over the cells themselves.

    store = Store.open(["runs/paper", "runs/paradigms"])
    store.select(task=["piqa"], where="kept_fraction < 0.3").rows("cells")
    store.aggregate(["strategy", "budget"])
    store.sql("SELECT cell_id, count(*) FROM documents WHERE acted GROUP BY cell_id")

The files stay the truth: nothing is copied or written, and every file is checked
when the store is opened, so that what is damaged is named and never averaged in.

Views
-----
``cells``      one row per cell (:func:`kvacc.store.tables.cells_table`)
``scores``     one row per cell and metric
``samples``    one row per request: ``cell_id`` and the columns of samples.parquet
``documents``  one row per cell and document. A metric stands on every request of its
               document, so averages over ``samples`` count a document with four options
               four times: average over ``documents``. ``value`` is the cell's primary metric.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvacc.budget import Budget
from kvacc.errors import KvaccError, unknown
from kvacc.records import SELECTION
from kvacc.results import METRIC_PREFIX, SAMPLE_COLUMNS, SAMPLES_FILE, Cell
from kvacc.store.check import Damage, examine, examine_samples
from kvacc.store.tables import cell_columns, cells_table, scores_table

if TYPE_CHECKING:
    import duckdb
    import pyarrow

VIEWS = ("cells", "scores", "samples", "documents")
DEFAULT_GROUPS = (
    "model", "strategy", "options", "budget", "budget_of", "protocol", "task", "shots", "fewshot_sampler",
)  # fmt: skip
_ORDER = {
    # As people compare them: full first, then larger budgets before smaller ones.
    "cells": "model, dtype, kind, task, shots, fewshot_sampler, item_limit, protocol, strategy <> 'full', "
    "strategy, options, budget_of, TRY_CAST(budget AS DOUBLE) DESC, budget, cell_id",
    "scores": "cell_id, metric",
    "samples": "cell_id, doc_id, option",
    "documents": "cell_id, doc_id, doc_hash",
}
_DECIMALS = 9
NEVER_MIXED = ("protocol", "metric")
"""Columns that every aggregate is split by: figures of two protocols or metrics have no common average."""
_COLUMNS = (
    "see the columns with: kvacc results sql 'FROM (DESCRIBE cells)' RUNS (or samples, documents, scores)"
)
_SETTINGS = {
    # Nothing is fetched, and Python's variables are no tables.
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
}


@dataclass
class Store:
    """Checked cells, and a database over them.

    Args:
        cells: from :func:`kvacc.results.read_cells`; :meth:`open` reads and checks them.
        damaged: what was left out of ``cells``, and why.
    """

    cells: list[Cell]
    damaged: list[Damage] = field(default_factory=list)
    _connection: duckdb.DuckDBPyConnection | None = field(default=None, init=False, repr=False)
    _has_documents: bool = field(default=False, init=False, repr=False)

    @classmethod
    def open(cls, paths: Iterable[str | Path] | str | Path, *, skip_damaged: bool = False) -> Store:
        """Read and check every cell below the given run folders.

        Args:
            paths: run folders, or folders of cells.
            skip_damaged: leave damaged cells out, and say so in ``damaged``.

        Raises:
            KvaccError: a folder does not exist or holds no cell; or a cell is damaged,
                unless ``skip_damaged``.
        """
        cells, damaged = examine([paths] if isinstance(paths, (str, Path)) else list(paths))
        if damaged and not skip_damaged:
            raise KvaccError(_refusal(damaged))
        store = cls(cells, damaged)
        bad = {damage.cell_id: damage for damage in examine_samples(store)} if cells else {}
        if not bad:
            return store
        if not skip_damaged:
            raise KvaccError(_refusal(list(bad.values())))
        return cls([cell for cell in cells if cell.cell_id not in bad], [*damaged, *bad.values()])

    def select(self, where: str | None = None, **values: Sequence[Any]) -> Store:
        """The cells that have one of the given values in each of the named columns.

        Args:
            where: a condition in SQL over the columns of ``cells``.
            values: column of ``cells`` = the values allowed; budgets as a person writes
                them (``"20%"`` is ``"0.2"``).

        Raises:
            KvaccError: a column or value that no cell has, a condition that is no SQL, or
                no cell is left.
        """
        chosen = {name: list(given) for name, given in values.items() if given}
        conditions, parameters = [], []
        for name, given in chosen.items():
            known = self._known(name)
            keys = [str(Budget.parse(value)) if name == "budget" else str(value) for value in given]
            for key, value in zip(keys, given, strict=True):
                if key not in known:
                    raise unknown(name.replace("_", " "), str(value), known)
            conditions.append(f"list_contains(?, CAST({_name(name)} AS VARCHAR))")
            parameters.append(keys)
        if where is not None:
            # On lines of its own: a comment in it must not swallow the closing bracket.
            conditions.append(f"(\n{where}\n)")
        if not conditions:
            return self
        text = "SELECT cell_id FROM cells WHERE " + " AND ".join(conditions)
        ids = {cell_id for (cell_id,) in self.fetch(text, parameters, "condition")}
        if not ids:
            asked = [f"{name} {' or '.join(map(str, given))}" for name, given in chosen.items()]
            asked += [where] if where else []
            raise KvaccError(
                f"none of the {len(self.cells)} cells has {', '.join(asked)}; "
                "see what there is with: kvacc results list RUNS"
            )
        return Store([cell for cell in self.cells if cell.cell_id in ids], self.damaged)

    def sql(self, query: str) -> pyarrow.Table:
        """The answer to one SELECT over the views.

        Raises:
            KvaccError: it is not one SELECT, or DuckDB refuses it.
        """
        return self._ask(query, None, "query").to_arrow_table()

    def table(self, view: str) -> pyarrow.Table:
        """A whole view, in an order that depends on the results only."""
        if view not in VIEWS:
            raise unknown("table", view, VIEWS)
        return self.sql(f"SELECT * FROM {view} ORDER BY {_ORDER[view]}")

    def rows(self, view: str) -> list[dict[str, Any]]:
        """:meth:`table` as plain dictionaries."""
        return self.table(view).to_pylist()

    def aggregate(
        self, by: Sequence[str] = DEFAULT_GROUPS, metric: str | None = None
    ) -> list[dict[str, Any]]:
        """Averages over the documents of each group of cells.

        Groups are split by protocol and metric too, whatever ``by`` says. In a group of
        several cells each cell counts once, however many documents it has.

        Args:
            by: columns of ``cells``.
            metric: a metric of the samples (``acc_norm``); None takes each cell's primary one.

        Returns:
            One dictionary per group, sorted: the columns of ``by`` and :data:`NEVER_MIXED`,
            ``cells``, ``documents`` and ``requests`` (numbers), ``mean`` of the metric (null
            when no document has it), ``kept_fraction`` weighted by scored tokens within a
            cell, and ``acted_share``.

        Raises:
            KvaccError: a column or metric that there is not.
        """
        for name in by:
            if name not in cell_columns():
                raise unknown("column", name, cell_columns())
        value = "d.value"
        if metric is not None:
            metrics = [name.removeprefix(METRIC_PREFIX) for name in self._metric_columns()]
            if metric not in metrics:
                raise unknown("metric", metric, metrics)
            value = "d." + _name(METRIC_PREFIX + metric)
        groups = list(dict.fromkeys([*by, *NEVER_MIXED]))
        shown = ", ".join(
            f"{_text(metric)} AS metric"
            if name == "metric" and metric is not None
            else f"cells.{_name(name)}"
            for name in groups
        )
        kept = "sum(d.kept_fraction * d.scored_tokens) / nullif(sum(d.scored_tokens), 0)"
        query = f"""
            WITH per_cell AS (
                SELECT d.cell_id, count(*) AS documents, sum(d.requests) AS requests, avg({value}) AS mean,
                    coalesce({kept}, 1) AS kept,
                    avg(CAST(d.acted AS DOUBLE)) AS acted
                FROM documents AS d GROUP BY d.cell_id
            )
            SELECT {shown}, count(*) AS cells, CAST(sum(documents) AS BIGINT) AS documents,
                CAST(sum(requests) AS BIGINT) AS requests, round(avg(mean), {_DECIMALS}) AS mean,
                round(avg(kept), {_DECIMALS}) AS kept_fraction,
                round(avg(acted), {_DECIMALS}) AS acted_share
            FROM cells JOIN per_cell USING (cell_id)
            GROUP BY {", ".join(str(index + 1) for index in range(len(groups)))}
            ORDER BY {", ".join(f"{index + 1} NULLS FIRST" for index in range(len(groups)))}
        """
        return self.sql(query).to_pylist()

    def fetch(
        self, query: str, parameters: Sequence[Any] | None = None, what: str = "query"
    ) -> list[tuple[Any, ...]]:
        """The answer to one SELECT as tuples; ``?`` in it stands for a parameter.

        Raises:
            KvaccError: as :meth:`sql`; ``what`` is what the message calls the query.
        """
        return self._ask(query, parameters, what).fetchall()

    def columns(self, view: str) -> dict[str, str]:
        """Columns of a view with DuckDB's types."""
        return {name: kind for name, kind, *_ in self.fetch(f"SELECT * FROM (DESCRIBE {view})")}

    def _ask(self, query: str, parameters: Sequence[Any] | None, what: str) -> duckdb.DuckDBPyRelation:
        import duckdb

        connection = self._connected("documents" in query.lower())
        try:
            statements = connection.extract_statements(query)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise KvaccError(
                    f"the {what} must be one SELECT over {', '.join(VIEWS)}; results are never changed"
                )
            return connection.sql(query, params=parameters)
        except duckdb.Error as error:
            raise KvaccError(
                f"DuckDB refuses the {what}: {' '.join(str(error).split())}; {_COLUMNS}"
            ) from None

    def _connected(self, with_documents: bool) -> duckdb.DuckDBPyConnection:
        """The database in memory. Documents are grouped once, when something first asks for them."""
        import duckdb

        if self._connection is None:
            # What does not fit into memory goes there, and not into the folder one happens to work in.
            settings = {**_SETTINGS, "temp_directory": tempfile.gettempdir()}
            self._connection = connection = duckdb.connect(config=settings)
            connection.register("cells", cells_table(self.cells))
            connection.register("scores", scores_table(self.cells))
            rows = _samples_query(self.cells)
            columns = [name for name, *_ in connection.execute(f"DESCRIBE {rows}").fetchall()]
            # Columns that are younger than all of these files are null, as where some have them.
            younger = {name: kind for name, kind in SAMPLE_COLUMNS.items() if name not in columns}
            nulls = "".join(f", CAST(NULL AS {_SQL_TYPES[kind]}) AS {name}" for name, kind in younger.items())
            connection.execute(f"CREATE VIEW samples AS SELECT *{nulls} FROM ({rows})")
        if with_documents and not self._has_documents:
            self._has_documents = True
            names = [name for name, *_ in self._connection.execute("DESCRIBE samples").fetchall()]
            self._connection.execute(_documents_table(names, self.cells))
        return self._connection

    def _known(self, column: str) -> list[str]:
        if column not in cell_columns():
            raise unknown("column", column, cell_columns())
        query = f"SELECT DISTINCT CAST({_name(column)} AS VARCHAR) AS known FROM cells ORDER BY 1"
        return [value for (value,) in self.fetch(query) if value is not None]

    def _metric_columns(self) -> list[str]:
        return [name for name in self.columns("samples") if name.startswith(METRIC_PREFIX)]


def _samples_query(cells: Sequence[Cell]) -> str:
    """The samples of all cells; columns that only some files have are null elsewhere."""
    folders = [cell.folder for cell in cells if cell.folder is not None]
    if not folders:
        return "SELECT CAST(NULL AS VARCHAR) AS cell_id LIMIT 0"
    # A checked cell's folder is named by its id.
    files = ", ".join(_text(_verbatim(str(folder.resolve() / SAMPLES_FILE))) for folder in folders)
    return f"""
        SELECT parse_path(kvacc_file)[-2] AS cell_id, * EXCLUDE (kvacc_file)
        FROM read_parquet([{files}], union_by_name = true, filename = 'kvacc_file', hive_partitioning = false)
    """


_SQL_TYPES = {"int64": "BIGINT", "string": "VARCHAR", "float64": "DOUBLE", "bool": "BOOLEAN"}


def _documents_table(columns: Sequence[str], cells: Sequence[Cell]) -> str:
    metrics = [name for name in columns if name.startswith(METRIC_PREFIX)]
    of_document = [name for name in ("depth", "length") if name in columns]
    averaged = [name for name in (*SELECTION, "kl", "agreement") if name in columns]
    parts = [
        "cell_id",
        "doc_id",
        "doc_hash",
        "any_value(cluster) AS cluster",
        "count(*) AS requests",
        "bool_or(acted) AS acted",
        "CAST(sum(scored_tokens) AS BIGINT) AS scored_tokens",
        f"{_weighted('kept_fraction')} AS kept_fraction",
        *(f"{_weighted(name)} AS {name}" for name in averaged),
        *(f"any_value({_name(name)}) AS {_name(name)}" for name in [*of_document, *metrics]),
    ]
    primary = {cell.task.primary_metric for cell in cells}
    # As kvacc.pairing: ``acc,none`` is in metric_acc, ``exact_match,strict`` in the column of that name.
    choices = []
    for metric in sorted(primary):
        names = dict.fromkeys([METRIC_PREFIX + metric.split(",")[0], METRIC_PREFIX + metric])
        found = [f"g.{_name(name)}" for name in names if name in metrics]
        if found:
            choices.append(f"WHEN {_text(metric)} THEN coalesce({', '.join(found)})")
    value = f"CASE c.metric {' '.join(choices)} END" if choices else "CAST(NULL AS DOUBLE)"
    return f"""
        CREATE TABLE documents AS
        SELECT g.*, {value} AS value
        FROM (SELECT {", ".join(parts)} FROM samples GROUP BY cell_id, doc_id, doc_hash) AS g
        JOIN cells AS c USING (cell_id)
    """


def _weighted(name: str) -> str:
    """An average over the scored tokens of the requests that know it.

    Rounded, because threads add in any order and the same results shall give the same digits.
    """
    known = f"FILTER ({name} IS NOT NULL)"
    return f"round(sum({name} * scored_tokens) / nullif(sum(scored_tokens) {known}, 0), {_DECIMALS})"


def _verbatim(path: str) -> str:
    """A path in which DuckDB finds no wildcard."""
    return re.sub(r"([*?\[])", r"[\1]", path)


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _name(value: str) -> str:
    return '"' + value.replace('"', '""') + '"'


def _refusal(damaged: Sequence[Damage]) -> str:
    more = f" ({len(damaged) - 1} more: kvacc results check RUNS)" if len(damaged) > 1 else ""
    return damaged[0].message + more


__all__ = ["DEFAULT_GROUPS", "NEVER_MIXED", "VIEWS", "Store"]
