"""What vLLM's drafter proposed for the next step, and how far each request really is.

The scheduler plans as if every draft were accepted, at any depth (spec 2(b) 5). On the CPU vLLM has sampled the step
before when a plan is translated, so its own states are the truth: rows are brought there, once, and filled with the
drafts that there are. vLLM sees a scheduler that waits for each of its steps.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.steps import NO_DRAFT
from services.worker.backends.vllm import names
from services.worker.batch.slots import PlanError, Rows

I32 = NDArray[np.int32]


class Drafts:
    """By vLLM's request id.

    Args:
        most: drafts of a row; 0: no speculation, and the plan's positions are the true ones
        max_model_len: tokens of a request; vLLM fails on one more
        requests: vLLM's own states
    """

    def __init__(self, most: int, max_model_len: int, requests: Mapping[str, Any]) -> None:
        self._most, self._max_model_len, self._requests = most, max_model_len, requests
        self._proposed: dict[str, list[int]] = {}
        """By the latest step. Whoever was not in it has none (S2-6)."""

    def settle(self, rows: Rows, ids: list[str]) -> tuple[Rows, dict[str, list[int]]]:
        """The rows where they really stand, with as many drafts as there are, and these drafts.

        Args:
            ids: of each row

        Raises: PlanError, when a row is planned before its request's position (S2-5), or has drafts that nobody makes.
        """
        if not self._most:
            if rows.drafts.any():
                raise PlanError("the plan has drafts, but this group was not told how they are proposed")
            return rows, {}
        states, firsts = map(self._requests.get, ids), rows.ends - rows.drafts
        known = np.array([-1 if s is None else s.num_tokens for s in states], np.int32)
        known = np.where(known < 0, firsts, known)  # who enters is where the plan says
        if (early := rows.samples & (firsts < known)).any():
            i = int(early.argmax())
            raise PlanError(
                f"slot {rows.slots[i]}: token {firsts[i]} is to be sampled, but it has {known[i]} already"
            )
        # A request that has filled the context was planned on before that was known. It computes the last token but one
        # again, which vLLM takes for a part of a prompt: nothing is sampled.
        starts = np.minimum(np.minimum(rows.starts, known - 1), self._max_model_len - 2)
        room = np.minimum(rows.drafts, self._max_model_len - 1 - known)
        drafts, tokens = np.zeros_like(rows.drafts), {}
        for row in np.flatnonzero(room > 0).tolist():
            name = ids[row]
            if there := self._proposed.get(name, [])[: room[row]]:
                drafts[row], tokens[name] = len(there), there
        self._proposed = {}
        counts = rows.counts - rows.drafts + drafts
        return Rows(rows.slots, rows.generations, starts, counts, rows.samples, drafts), tokens

    def propose(self, proposed: names.DraftTokenIds | None) -> None:
        """What vLLM's drafter said of the step that was just sampled."""
        self._proposed = (
            dict(zip(proposed.req_ids, proposed.draft_token_ids, strict=True)) if proposed else {}
        )

    def column(self, ids: list[str], width: int) -> I32:
        """int32[ids, width]: the proposed drafts of each, NO_DRAFT where there are no more."""
        column = np.full((len(ids), width), NO_DRAFT, np.int32)
        for row, name in enumerate(ids):
            tokens = self._proposed.get(name, [])[:width]
            column[row, : len(tokens)] = tokens
        return column
