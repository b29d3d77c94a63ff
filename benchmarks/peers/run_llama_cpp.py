"""llama.cpp through its C interface: several tickets a decode, prefix copied between sequences, last rows only."""

import llama_cpp as lib
import numpy as np
from protocol import Answer, nothing, serve

SEQUENCES = 64


def load(job: dict) -> tuple[Answer, object]:
    """A context whose cells are shared by all sequences (``kv_unified``), cleared between batches."""
    options = {"ubatch": 512, "flash": True} | job["options"]
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(job["gguf"][job["dtype"]].encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 4096, 2048, options["ubatch"]
    params.n_seq_max, params.kv_unified = SEQUENCES, True
    params.n_threads = params.n_threads_batch = job["threads"]
    params.flash_attn_type = 1 if options["flash"] else 0
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama_init_from_model gave no context")
    memory = lib.llama_get_memory(context)
    vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    labels = np.array(job["labels"])

    def answer(work: dict) -> list[int]:
        lib.llama_memory_clear(memory, False)
        front = len(work["prefix"])
        if front:
            decode(context, [(0, 0, work["prefix"])])
        given = []
        for tickets in cut(work["tickets"], options["ubatch"]):
            for sequence in range(1, len(tickets) + 1):
                lib.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
            ends = decode(context, [(sequence, front, ids) for sequence, ids in enumerate(tickets, 1)])
            for end in ends:
                row = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, end), (vocabulary,))
                given.append(int(row[labels].argmax()))
            for sequence in range(1, len(tickets) + 1):
                lib.llama_memory_seq_rm(memory, sequence, -1, -1)
        return given

    return answer, nothing


def cut(tickets: list[list[int]], budget: int) -> list[list[list[int]]]:
    """Neighbours in batches of at most so many tokens and one less than the sequences."""
    batches: list[list[list[int]]] = []
    used = 0
    for ids in tickets:
        if not batches or used + len(ids) > budget or len(batches[-1]) == SEQUENCES - 1:
            batches.append([])
            used = 0
        batches[-1].append(ids)
        used += len(ids)
    return batches


def decode(context: object, rows: list[tuple[int, int, list[int]]]) -> list[int]:
    """One pass over ``(sequence, first position, token ids)``; indices of the last tokens, the only rows with logits."""
    total = sum(len(ids) for _, _, ids in rows)
    batch = lib.llama_batch_init(total, 0, 1)
    ends, at = [], 0
    for sequence, first, ids in rows:
        size = len(ids)
        for offset, token in enumerate(ids):
            batch.token[at + offset] = token
            batch.pos[at + offset] = first + offset
            batch.n_seq_id[at + offset] = 1
            batch.seq_id[at + offset][0] = sequence
            batch.logits[at + offset] = offset == size - 1
        at += size
        ends.append(at - 1)
    batch.n_tokens = total
    code = lib.llama_decode(context, batch)
    lib.llama_batch_free(batch)
    if code:
        raise RuntimeError(f"llama_decode gave {code}")
    return ends


if __name__ == "__main__":
    serve(load)
