"""CTranslate2: logits of one generated token, tickets sorted by length, prefix as its static prompt."""

import json
from pathlib import Path

import ctranslate2
import numpy as np
from protocol import Answer, nothing, prompts, serve


def load(job: dict) -> tuple[Answer, object]:
    """A generator on all threads, or the logits of every position where ``way`` is ``forward``."""
    options = {"way": "generate", "tokens": 2048} | job["options"]
    generator = ctranslate2.Generator(
        job["ct2"], device="cpu", compute_type=job["dtype"], inter_threads=1, intra_threads=job["threads"]
    )
    names = json.loads((Path(job["ct2"]) / "vocabulary.json").read_text(encoding="utf-8"))
    labels = np.array(job["labels"])

    def generate(work: dict) -> list[int]:
        results = generator.generate_batch(
            [[names[token] for token in ids] for ids in work["tickets"]],
            max_batch_size=options["tokens"],
            batch_type="tokens",
            max_length=1,
            static_prompt=[names[token] for token in work["prefix"]] or None,
            cache_static_prompt=True,
            include_prompt_in_result=False,
            return_logits_vocab=True,
        )
        return [int(np.array(one.logits[0][0])[labels].argmax()) for one in results]

    def forward(work: dict) -> list[int]:
        given: list[int] = []
        whole = prompts(work)
        while len(given) < len(whole):
            some = whole[len(given) : len(given) + max(1, options["tokens"] // len(whole[len(given)]))]
            logits = np.array(generator.forward_batch(some).to_device(ctranslate2.Device.cpu))
            given += [int(row[len(ids) - 1, labels].argmax()) for row, ids in zip(logits, some, strict=True)]
        return given

    return {"generate": generate, "forward": forward}[options["way"]], nothing


if __name__ == "__main__":
    serve(load)
