"""Drafts that vLLM's drafter proposed for the next step, and the true position of each request.

A plan counts every draft in flight as accepted, and no row as left out: true position (docs/invariants.md). When a plan
is translated on the CPU, vLLM has already sampled the step before, so its own states show the true positions. Rows are
moved there once, and filled with the drafts that exist. To vLLM, the scheduler looks synchronous.

Without speculation only constrained rows can be elsewhere than planned, because no other row is left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from protocol.steps import NO_DRAFT
from services.worker.batch.slots import I32, PlanError, Rows


class ProposedDrafts:
    """Drafts by vLLM's request id.

    Args:
        max_drafts: of a row; 0: there is no speculation, and the positions of a plan are the true ones
        max_model_len: tokens of a request; vLLM fails on one more
        requests: vLLM's own states
    """

    def __init__(self, max_drafts: int, max_model_len: int, requests: Mapping[str, Any]) -> None:
        self._max_drafts, self._max_model_len, self._requests = max_drafts, max_model_len, requests
        self._proposed: dict[str, list[int]] = {}
        """Drafts of the latest step that sampled each request (latest drafts, docs/invariants.md)."""

    def settle_rows(self, rows: Rows, ids: list[str], masked: I32) -> tuple[Rows, dict[str, list[int]]]:
        """Return the rows at their true positions, with as many drafts as exist, and these drafts by request id.

        Args:
            ids: request id of each row
            masked: int32[constrained rows that sample], their slots

        Raises: PlanError, if a row is planned before its request's position (position bound), or has drafts although
            there is no speculation.
        """
        if self._max_drafts:
            return self._with_drafts(rows, ids)
        if rows.drafts.any():
            raise PlanError("the plan has drafts, but this group's assignment has no drafter")
        if not len(masked):
            return rows, {}
        some, starts = np.isin(rows.slots, masked), rows.starts.copy()
        known = self._known(rows.select(some), [ids[row] for row in np.flatnonzero(some).tolist()])
        starts[some] = np.minimum(starts[some], known - 1)
        return replace(rows, starts=starts), {}

    def _known(self, rows: Rows, ids: list[str]) -> I32:
        """Return int32[rows]: number of tokens that vLLM knows of each request. Raises: PlanError"""
        states, firsts = map(self._requests.get, ids), rows.ends - rows.drafts
        known = np.array([-1 if s is None else s.num_tokens for s in states], np.int32)
        known = np.where(known < 0, firsts, known)  # a request that enters is where the plan says
        if (early := rows.samples & (firsts < known)).any():
            i = int(early.argmax())
            raise PlanError(
                f"slot {rows.slots[i]}: the plan samples token {firsts[i]}, but {known[i]} tokens are known already"
            )
        return known

    def _with_drafts(self, rows: Rows, ids: list[str]) -> tuple[Rows, dict[str, list[int]]]:
        known = self._known(rows, ids)
        # A request that has filled the context is planned until the scheduler has processed its end. It computes its
        # last token but one again, which vLLM takes for a part of a prompt, so nothing is sampled.
        starts = np.minimum(np.minimum(rows.starts, known - 1), self._max_model_len - 2)
        room = np.minimum(rows.drafts, self._max_model_len - 1 - known)
        drafts, tokens = np.zeros_like(rows.drafts), {}
        for row in np.flatnonzero(room > 0).tolist():
            request_id = ids[row]
            if proposed := self._proposed.get(request_id, [])[: room[row]]:
                drafts[row], tokens[request_id] = len(proposed), proposed
        self.drop(ids)
        counts = rows.counts - rows.drafts + drafts
        return replace(rows, starts=starts, counts=counts, drafts=drafts), tokens

    def store(self, ids: Sequence[str], drafts: Sequence[list[int]]) -> None:
        """Store the drafts that vLLM proposed after a step, for the next row of each of its requests."""
        self._proposed |= zip(ids, drafts, strict=True)

    def drop(self, ids: Iterable[str]) -> None:
        for request_id in ids:
            self._proposed.pop(request_id, None)

    def column(self, ids: list[str], width: int) -> I32:
        """Return int32[ids, width]: the proposed drafts of each request, padded with NO_DRAFT."""
        column = np.full((len(ids), width), NO_DRAFT, np.int32)
        for row, request_id in enumerate(ids):
            tokens = self._proposed.get(request_id, [])[:width]
            column[row, : len(tokens)] = tokens
        return column
