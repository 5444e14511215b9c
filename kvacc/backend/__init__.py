"""The lm-eval backend ``kvacc``: any Hugging Face decoder under a KV-cache strategy.

    lm_eval.simple_evaluate(model="kvacc",
        model_args="pretrained=smollm2-135m,strategy=h2o,budget=0.2,protocol=stream", ...)

Tokenisation, chat templates and stop sequences are those of lm-eval's own ``hf``
backend, which :class:`KvaccLM` extends; how a continuation is scored and how text is
generated is the engine's. The requests of one document are scored together, so its
options share one budget and one pass over their common tokens.

:mod:`~kvacc.backend.lm`                    the class: what lm-eval calls
:mod:`~kvacc.backend.arguments`             the checks of its arguments
:mod:`~kvacc.backend.loading`               the model and its tokenizer
:mod:`~kvacc.backend.prompts`               prompts as tokens, and how many are read before compression
:mod:`~kvacc.backend.requests`              log-likelihood requests as the engine's
:mod:`~kvacc.backend.generation_arguments`  what a task asks of a generation
:mod:`~kvacc.backend.generation`            one batch of prompts, generated from
:mod:`~kvacc.backend.batches`               many prompts in batches that fit the memory
:mod:`~kvacc.backend.comparison`            generations compared with ``full``'s own answers
:mod:`~kvacc.backend.recording`             a record of each request
:mod:`~kvacc.backend.summary`               what the records say together
:mod:`~kvacc.backend.progress`              the bar, and whoever else wants to know
"""

from kvacc.backend.lm import KvaccLM

__all__ = ["KvaccLM"]
