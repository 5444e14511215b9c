"""What would fit a machine that is not here, and how fast could it be: from configurations alone.

:mod:`~kvacc.planner.gpus`        a table of GPUs
:mod:`~kvacc.planner.models`      a model's configuration and its parameters, without weights
:mod:`~kvacc.planner.memory`      bytes by part
:mod:`~kvacc.planner.speed`       lower bounds of time
:mod:`~kvacc.planner.planning`    the plan: fit, longest prompt, largest batch
:mod:`~kvacc.planner.verdict`     in a sentence, and what would make it fit
:mod:`~kvacc.planner.report`      the plan in words
"""

from kvacc.planner.planning import Plan, plan

__all__ = ["Plan", "plan"]
