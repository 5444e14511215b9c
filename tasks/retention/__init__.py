"""Retention tasks with generated data: what does a strategy forget, and where?

One file per task kind says what is told and what is asked (its ``KIND``); the rest is shared:

===================  =======================================================================
``settings``         the options: length, depths, facts, items, data_seed, filler
``sketch``           what a kind draws: facts with their places, a question, four options
``filler``           what surrounds the facts; never an answer
``fitting``          as much filler as meets the length, by the tokens of ``measure``
``documents``        the documents of a task, one list for both of its forms
``scoring``          exact and graded scores, whole and per depth
``task``             lm-eval's task object for all of them
===================  =======================================================================

Every item is drawn from a seed with :class:`kvacc.tasks.retention.draws.Draws`, so the
same seed gives the same bytes on every machine and Python version. ``docs/retention.md`` is
the manual.
"""
