"""Retention tasks with generated data: what does a strategy forget, and where?

Every item is drawn from a seed with :class:`kvacc.tasks.retention.draws.Draws`, so the
same seed gives the same bytes on every machine and Python version. Each document has

==============  ============================================================
``context``     the haystack: what the protocol ``context`` compresses
``question``    read after the haystack; ends where the answer continues
``options``     four answers, one right; ``label`` is its index
``answer``      the right answer, digits only
``depth``       where the fact lies in the haystack, 0 (start) to 1 (end)
==============  ============================================================
"""
