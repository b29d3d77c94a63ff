"""cappr: completions scored after a prompt, its cache holding the shared prefix."""

import torch
from cappr.huggingface import classify
from protocol import Answer, nothing, serve
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast


def load(job: dict) -> tuple[Answer, object]:
    """The model with a tokenizer that reads token ids as words, so that cappr sees the very same tokens."""
    batch = {"batch": 32} | job["options"]
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model_v4"], torch_dtype=getattr(torch, job["dtype"])).eval()
    pair = (model, id_tokenizer(model.config.vocab_size))
    completions = [str(token) for token in job["labels"]]

    def answer(work: dict) -> list[int]:
        texts = [" ".join(map(str, ids)) for ids in work["tickets"]]
        asked = pair
        if work["prefix"]:
            asked = classify.cache_model(pair, " ".join(map(str, work["prefix"])), logits_all=False)
        given = classify.predict(texts, completions, asked, batch_size=batch["batch"], show_progress_bar=False)
        return [completions.index(one) for one in given]

    return answer, nothing


def id_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer for which the text ``"12 7"`` is the tokens 12 and 7."""
    words = Tokenizer(models.WordLevel({str(token): token for token in range(vocabulary)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="2", eos_token="2")


if __name__ == "__main__":
    serve(load)
