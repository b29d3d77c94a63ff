"""vLLM for CPU: all prompts at once, one output token out of the labels', automatic prefix caching."""

import os

from protocol import Answer, prompts, serve


def load(job: dict) -> tuple[Answer, object]:
    """An offline engine. Its prefix cache is emptied before each run, or it would know whole prompts."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{job['threads'] - 1}" if job["threads"] > 1 else "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["model_v4"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        max_model_len=2048,
        enable_prefix_caching=True,
        seed=0,
        **job["options"],
    )
    params = SamplingParams(max_tokens=1, temperature=0, allowed_token_ids=job["labels"], detokenize=False)

    def answer(work: dict) -> list[int]:
        asked = [{"prompt_token_ids": ids} for ids in prompts(work)]
        given = llm.generate(asked, params, use_tqdm=False)
        return [job["labels"].index(one.outputs[0].token_ids[0]) for one in given]

    return answer, llm.reset_prefix_cache


if __name__ == "__main__":
    serve(load)
