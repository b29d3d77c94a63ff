"""Tickets labelled by a head on a loaded engine: fast in batches, and slowly by the reference."""

from collections.abc import Sequence

import numpy as np
import torch

from ticket_engine.engine import Engine
from ticket_engine.errors import ModelError
from ticket_engine.heads import LAST, MEAN, Block, Head, apply_head
from ticket_engine.lexical import lexical_features
from ticket_engine.scoring import Batch, decoder
from ticket_engine.staged_pass import StagedModel, staged_model, staged_pass


class HeadScorer:
    """A head on an engine: knows which layers to run. Nothing in it changes after it is made."""

    def __init__(self, engine: Engine, head: Head) -> None:
        """Cut the engine's packed view into the head's segments.

        Raises:
            ModelError: The engine's execution is not packed.
            HeadError: The head needs more layers than the model has.
        """
        if engine._view is None:
            raise ModelError(f"A head needs execution packed; this model runs {engine.spec.execution}.")
        self.head = head
        self._engine = engine
        self._model: StagedModel = staged_model(engine._view, head)

    def score(self, tickets: Sequence[np.ndarray], texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities and deciding stage of tickets that stage 0 left open, in one packed pass.

        Args:
            tickets: Token ids of each ticket, without prompt, longest first.
            texts: Of the same tickets.

        Returns:
            float32 ``(tickets, labels)`` and int32 ``(tickets,)``, an index into ``head.stages``.

        Raises:
            ScoringError: A score is not finite.
        """
        spec, prefix = self._engine.spec, self._engine.prefix
        front = () if prefix.length else spec.prompt.prefix_ids
        suffixes = [np.concatenate([front, ids, spec.prompt.ending_ids]).astype(np.int64) for ids in tickets]
        batch = Batch(np.concatenate(suffixes), np.array([len(ids) for ids in suffixes], dtype=np.int64))
        count = np.array([len(ids) for ids in tickets], dtype=np.int64)
        lexical = lexical_features(texts, self.head.lexicon)
        torch.set_num_threads(spec.threads)
        with torch.inference_mode():
            return staged_pass(
                self._model, batch, (np.full_like(count, len(front)), count), prefix=prefix, lexical=lexical
            )

    def reference(self, ids: np.ndarray, text: str) -> tuple[np.ndarray, int]:
        """The slow answer for one ticket: whole prompt, stock model, every hidden state, then the head.

        Returns:
            float32 ``(labels,)`` and the deciding stage; stage 0 if the text alone was sure enough.
        """
        prompt = self._engine.spec.prompt
        whole = [*prompt.prefix_ids, *np.asarray(ids).tolist(), *prompt.ending_ids]
        own = slice(len(prompt.prefix_ids), len(prompt.prefix_ids) + len(ids))
        with torch.inference_mode():
            states = decoder(self._engine._stock)(
                torch.tensor([whole]), use_cache=False, output_hidden_states=True
            ).hidden_states
        hidden = {block: _pooled(states[block.depth][0], own, block) for block in self.head.blocks}
        log_probs, stage_of = apply_head(self.head, lexical_features([text], self.head.lexicon), hidden)
        return log_probs[0], int(stage_of[0])


def _pooled(state: torch.Tensor, own: slice, block: Block) -> np.ndarray:
    poolings = {MEAN: lambda: state[own].float().mean(0), LAST: lambda: state[-1].float()}
    return poolings[block.pooling]().numpy()[None]
