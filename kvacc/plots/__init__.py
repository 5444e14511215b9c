"""Pictures of results: Altair charts, drawn without a browser, the same bytes for the same results.

One file per picture; each turns rows or cells into :class:`~kvacc.plots.figure.Figure`:

============================  ====================================================================
:mod:`~kvacc.plots.budget`    score by budget, with the paired interval of each difference to full
:mod:`~kvacc.plots.pareto`    score against what is kept, moved and, once measured, latency
:mod:`~kvacc.plots.heatmap`   retention by depth of the fact and length of the text
:mod:`~kvacc.plots.fidelity`  KL divergence and agreement with full, by position
:mod:`~kvacc.plots.perplexity`  perplexity of a long text, by position
:mod:`~kvacc.plots.kept`      which positions of one prompt each layer still holds
============================  ====================================================================

and of probes:

=======================================  =========================================================
:mod:`~kvacc.plots.time_to_first_token`  by length of the prompt, with the point of failure
:mod:`~kvacc.plots.memory_bars`          memory in parts, with the peaks of prefill and decode
:mod:`~kvacc.plots.latency_accuracy`     difference to full against the time per output token
=======================================  =========================================================

``kvacc plot`` writes them as files (:mod:`kvacc.plots.drawing`), and the leaderboard page
(:mod:`kvacc.page`) has them in it.
"""
