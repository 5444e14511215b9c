"""Answers retention questions with NVIDIA's kvpress; started by ``against_kvpress.py`` with an
interpreter that has kvpress installed (it needs an older transformers than kvacc).

Reads one JSON request a line, ``{"press", "ratio", "items": [{"context", "questions"}], "prefix",
"tokens"}``, and writes ``{"seconds", "answers"}``.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    import kvpress
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = sys.argv[1]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # The same prompt as in kvacc: no chat template around it.
    tokenizer.chat_template = None
    tokenizer.bos_token = ""
    pipelines = {}
    for attention in ("sdpa", "eager"):
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention
        )
        pipelines[attention] = kvpress.KVPressTextGenerationPipeline(model=model.eval(), tokenizer=tokenizer)
    presses = {"snapkv": kvpress.SnapKVPress, "observed_attention": kvpress.ObservedAttentionPress}
    print(json.dumps({"ready": kvpress.__file__ is not None}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        name = asked["press"]
        press = presses[name](compression_ratio=asked["ratio"]) if name else None
        # ObservedAttentionPress reads attention weights, which only "eager" returns.
        pipeline = pipelines["eager" if name == "observed_attention" else "sdpa"]
        start = time.perf_counter()
        answers = [
            pipeline(
                item["context"],
                questions=item["questions"],
                answer_prefix=asked["prefix"],
                press=press,
                max_new_tokens=asked["tokens"],
            )["answers"]
            for item in asked["items"]
        ]
        print(json.dumps({"seconds": time.perf_counter() - start, "answers": answers}), flush=True)


if __name__ == "__main__":
    main()
