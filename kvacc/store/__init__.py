"""Many results at once: ask, check, compare, merge and export them.

=============  =====================================================================
``database``   :class:`Store`: DuckDB over the samples of every cell, and over the cells
``tables``     cells as rows: every scalar of cell.json in a column of its own
``check``      which files are damaged, and how
``diff``       two cells, or two runs, item by item
``merge``      runs of several machines in one folder
``export``     CSV, JSON, Markdown and LaTeX
=============  =====================================================================
"""

from kvacc.store.database import DEFAULT_GROUPS, NEVER_MIXED, VIEWS, Store

__all__ = ["DEFAULT_GROUPS", "NEVER_MIXED", "VIEWS", "Store"]
