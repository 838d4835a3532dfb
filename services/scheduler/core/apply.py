"""Applying a result. Confirmed tokens enter here and nowhere else (result application, docs/invariants.md).

The applier has no state; it acts on the `RequestStore` and the `EpochState`. Its public methods are the parts of
`apply`, in the order in which it calls them. Tests override single ones to inject faults (parts.py).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.requests import Embedding, Finish, FinishReason
from protocol.rows import LogprobRows, ProgressRows
from protocol.sampling import Pooling
from services.scheduler.core.drafting import Drafting
from services.scheduler.core.epoch import EpochState
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.request import Request, RequestKey
from services.scheduler.core.results import DecodedResult, UnknownResult
from services.scheduler.core.slots import DELIVER, DROP, LIVE, Column, Mask, SlotIds
from services.scheduler.core.store import RequestStore

_MISMATCH = "the output could not be kept within what was asked for; simplify the grammar or schema"


class NewTokens(NamedTuple):
    """New tokens of live rows."""

    rows: SlotIds
    ids: Column
    """int32[rows, widest row]; undefined from `counts` on."""
    counts: Column
    ends: Mask
    """bool[rows]: the row's last token ends its request."""
    stops: Mask
    """bool[rows]: the row's last token is a stop token."""


class AppliedResult(NamedTuple):
    """Effect of a result."""

    states: NDArray[np.int8]
    """int8[sampling rows]: state of the row's slot before; DROP if the row was ignored."""
    counts: Column
    """int32[sampling rows]: tokens that were appended to the row's request."""
    ended: tuple[RequestKey, ...]


class ResultApplier:
    def __init__(
        self, store: RequestStore, epoch: EpochState, lifecycle: Lifecycle, drafting: Drafting | None
    ) -> None:
        """`drafting` None: no speculation."""
        self.store = store
        self.epoch = epoch
        self.lifecycle = lifecycle
        self.drafting = drafting

    def apply(self, step: InflightStep, result: DecodedResult) -> AppliedResult:
        """Apply the result of the oldest step.

        Raises: UnknownResult, if the step is not the oldest in flight, a row is missing or has more tokens than its
            drafts and one (row width), or a report of progress is impossible.
        """
        epoch, s, counts = self.epoch, self.epoch.slots, result.counts
        if result.progress is not None:
            self.apply_progress(step, result.progress)
        every = step.samples.all()
        rows = step.slots if every else step.slots[step.samples]
        drafts = step.drafts if every else step.drafts[step.samples]
        current = epoch.ledger.current(step)
        current = current if every else current[step.samples]
        states = s.state.take(rows)
        live = current & (states == LIVE)
        all_live = bool(live.all())
        self.check(step, result, rows, drafts, live)
        epoch.ledger.remove_oldest()
        if self.drafting is not None:
            self.drafting.observe(step, result.drafted, counts, result.seconds)
        if step.drafts.any():
            self.settle(rows, drafts, result, live)
        logprobs = self.wanted_logprobs(result.logprobs)
        first = np.cumsum(counts, dtype=np.int32) - counts
        appended, ended = counts, []
        if not all_live:
            appended = np.zeros(len(rows), np.int32)
            states[~current] = DROP
            for row in np.flatnonzero(states == DELIVER).tolist():
                slot, token_ids = int(rows[row]), result.token_ids[first[row] : first[row] + counts[row]]
                request = s.request(slot)
                appended[row] = self.deliver_stale(slot, token_ids.tolist(), result.embeddings.get(slot))
                if request.finished:
                    ended.append(request.key)
            rows, first, counts = rows[live], first[live], counts[live]
        tokens = self.cut(rows, result.token_ids, first, counts)
        failures: list[tuple[Request, Finish]] = []
        special = s.constrained.take(rows) | s.pooling.take(rows)
        if special.any():
            tokens = self._take_special(tokens, special, result, failures)
        self.append(tokens)
        if all_live:
            appended = tokens.counts
        else:
            appended[live] = tokens.counts
        if result.draft_ids is not None:
            self.keep_drafts(rows, result.draft_ids[live])
        if logprobs is not None:
            self.publish_logprobs(logprobs)
        epoch.kv.commit(rows if len(rows) == len(step.slots) else step.slots[s.state[step.slots] == LIVE])
        for request, finish in [*self._ends(tokens), *failures]:
            self.lifecycle.finish(request, finish)
            ended.append(request.key)
        epoch.open_fence(step)
        return AppliedResult(states, appended, tuple(ended))

    # -- checks and corrections of the plan ----------------------------------------------------------------------

    def apply_progress(self, step: InflightStep, progress: ProgressRows) -> None:
        """Take the positions that prefill rows reached (runner-reported progress). Where that is not the plan's end,
        everything in flight for the slot is void (rollback).

        Raises: UnknownResult, if a row is none of the step's prefills, or no chunk of it can end there.
        """
        s, current = self.epoch.slots, self.epoch.ledger.current(step)
        row_of = {slot: row for row, slot in enumerate(step.slots.tolist())}
        for slot, frontier in zip(progress.slots.tolist(), progress.frontiers.tolist(), strict=True):
            row = row_of.get(slot, -1)
            if row < 0 or step.starts[row] >= s.entry[slot]:
                raise UnknownResult(
                    f"step {step.step_id} reports progress of slot {slot}, which is none of its prefills"
                )
            start, end = int(step.starts[row]), int(step.starts[row] + step.counts[row])
            # The last token is always computed by a row that samples, because its logits are needed.
            most = end if step.samples[row] else int(min(s.entry[slot] - 1, s.capacity[slot]))
            if not start < frontier <= most:
                raise UnknownResult(
                    f"step {step.step_id} reports {frontier} tokens of slot {slot}: only {start + 1} to {most} are "
                    "possible"
                )
            if frontier != end and current[row] and s.state[slot] == LIVE:
                self.epoch.ledger.roll_back(slot, frontier)
                self.store.counters["rollbacks"] += 1

    def check(
        self, step: InflightStep, result: DecodedResult, rows: SlotIds, drafts: Column, live: Mask
    ) -> None:
        """Check the result against the ledger. Nothing has changed if it raises.

        Raises: UnknownResult
        """
        counts, oldest = result.counts, self.epoch.ledger.oldest
        if step.step_id != oldest or len(counts) != len(rows):
            raise UnknownResult(
                f"result of step {step.step_id} with {len(counts)} rows, expected step {oldest} with {len(rows)} rows"
            )
        if (missing := live & (counts < 1)).any():
            slot = rows[missing][0]
            raise UnknownResult(f"step {step.step_id} has no token for slot {slot} and no reason for it")
        if (wrong := (counts > drafts + 1) | (result.drafted > drafts)).any():
            row = int(wrong.argmax())
            raise UnknownResult(
                f"step {step.step_id} has {counts[row]} tokens for slot {rows[row]}, which had {drafts[row]} drafts"
            )

    def settle(self, rows: SlotIds, drafts: Column, result: DecodedResult, live: Mask) -> None:
        """Lower the optimistic position by the rejected drafts (settle), and count what became of drafts."""
        s, accepted = self.epoch.slots, np.maximum(result.counts - 1, 0)
        s.computed[rows[live]] -= (drafts - accepted)[live]
        s.drafted[rows] += result.drafted
        s.accepted[rows] += accepted
        counters = self.store.counters
        counters["spec_decode_num_drafts"] += int(np.count_nonzero(result.drafted))
        counters["spec_decode_num_draft_tokens"] += int(result.drafted.sum())
        counters["spec_decode_num_accepted_tokens"] += int(accepted.sum())
        for position in range(int(accepted.max(initial=0))):
            count = int(np.count_nonzero(accepted > position))
            counters[f"spec_decode_num_accepted_tokens_per_pos:{position}"] += count

    # -- tokens --------------------------------------------------------------------------------------------------

    def deliver_stale(self, slot: int, token_ids: list[int], embedding: bytes | None) -> int:
        """Append tokens that were in flight when their request was preempted (stale delivery). Return their number."""
        s, request = self.epoch.slots, self.epoch.slots.request(slot)
        request.stale_rows -= 1
        s.give_draft_counts(slot)
        params, prompt, before = request.params, request.num_prompt_tokens, len(request.token_ids)
        for token in token_ids:
            if request.pooling is not Pooling.NONE:
                self.lifecycle.finish(request, self._embed(request, embedding))
            elif not request.finished and not request.matching([token]):
                self.lifecycle.finish(request, _mismatch(request))
            if request.finished:
                break
            self.store.record_first_token(request)
            self.store.waiting.append_token(request, token)
            s.tokens[slot] = total = len(request.token_ids)
            self.store.outputs.token(request, total - prompt - 1, token)
            self.store.counters["generation_tokens"] += 1
            stop = token in params.eos_token_ids + params.stop_token_ids and total >= request.stops_from
            if stop or total >= min(prompt + params.max_tokens, self.epoch.limits.max_model_len):
                self.lifecycle.finish(request, _complete(request, token, stop))
        return len(request.token_ids) - before

    def cut(self, rows: SlotIds, token_ids: Column, first: Column, counts: Column) -> NewTokens:
        """Cut each row behind its first stop token or its last token by length (row cut).

        Args:
            first: int32[rows], index of the row's first token in `token_ids`.
        """
        s, width = self.epoch.slots, int(counts.max(initial=1))
        offsets = np.arange(width, dtype=np.int32)
        ids = token_ids.take(first[:, None] + offsets, mode="clip")
        totals = s.tokens.take(rows)[:, None] + (offsets + 1)
        matches = ids[:, :, None] == s.stop_ids.take(rows, axis=0)[:, None, :]
        stops = matches[:, :, 0] if matches.shape[2] == 1 else matches.any(axis=2)
        stops &= totals >= s.stops_from.take(rows)[:, None]
        ends = stops | (totals >= s.limit.take(rows)[:, None])
        if width == 1:
            return NewTokens(rows, ids, counts, ends[:, 0], stops[:, 0])
        ends &= offsets < counts[:, None]
        ended, last = ends.any(axis=1), ends.argmax(axis=1)
        counts = np.where(ended, last + 1, counts).astype(np.int32)
        return NewTokens(rows, ids, counts, ended, ended & stops[np.arange(len(rows)), last])

    def _take_special(
        self, tokens: NewTokens, special: Mask, result: DecodedResult, ends: list[tuple[Request, Finish]]
    ) -> NewTokens:
        """Advance grammars by the tokens (emitted tokens only) and deliver embeddings. Appends the requests that end
        with it to `ends`; these rows get no token that does not match, and embeddings no token at all."""
        counts, goes_on, some = tokens.counts.copy(), tokens.ends.copy(), np.flatnonzero(special)
        columns = (some, tokens.rows[some], tokens.ids[some], counts[some])
        for row, slot, ids, count in zip(*(column.tolist() for column in columns), strict=True):
            request = self.epoch.slots.request(slot)
            if request.pooling is not Pooling.NONE:
                ends.append((request, self._embed(request, result.embeddings.get(slot))))
                matched = 0
            elif (matched := request.matching(ids[:count])) < count:
                ends.append((request, _mismatch(request)))
            if matched < count:
                counts[row], goes_on[row] = matched, False
        return tokens._replace(counts=counts, ends=goes_on)

    def _embed(self, request: Request, values: bytes | None) -> Finish:
        if values is None:
            return request.finish_message(FinishReason.ERROR, message="the workers returned no embedding")
        self.store.outputs.embedding(request.frontend, Embedding(request.number, values))
        return request.finish_message(FinishReason.STOP)

    def append(self, tokens: NewTokens) -> None:
        """Append tokens to the history of their slots and to the outputs."""
        s, (rows, ids, counts) = self.epoch.slots, tokens[:3]
        totals = s.tokens.take(rows)
        if (entering := totals == s.entry.take(rows)).any():
            for slot in rows[entering & (counts > 0)].tolist():
                self.store.record_first_token(s.request(slot))
        s.tokens[rows] = totals + counts
        if ids.shape[1] == 1 and counts.all():
            token_ids = ids[:, 0]
        else:
            taken = np.arange(ids.shape[1]) < counts[:, None]
            which, at = np.nonzero(taken)
            rows, totals, token_ids = rows[which], totals[which] + at.astype(np.int32), ids[taken]
        s.history[rows, totals] = token_ids
        indices = totals - s.prompt.take(rows)
        self.store.outputs.tokens(s.frontend.take(rows), s.number.take(rows), indices, token_ids)
        self.store.counters["generation_tokens"] += len(rows)

    def keep_drafts(self, rows: SlotIds, draft_ids: Column) -> None:
        """Keep the drafts of constrained rows: the masks of their next rows depend on them."""
        s = self.epoch.slots
        for row in np.flatnonzero(s.constrained.take(rows)).tolist():
            s.request(int(rows[row])).draft_ids = draft_ids[row]

    def wanted_logprobs(self, logprobs: LogprobRows | None) -> LogprobRows | None:
        """Select the log-probabilities of rows that are used, before this result ends any request."""
        if logprobs is None:
            return None
        return logprobs.select(np.isin(self.epoch.slots.state.take(logprobs.owners), (LIVE, DELIVER)))

    def publish_logprobs(self, logprobs: LogprobRows) -> None:
        """Publish the log-probabilities of tokens that were appended. The fence guarantees that the slot's owner has
        not changed since; a row that a rollback voided has none."""
        s = self.epoch.slots
        logprobs = logprobs.select(logprobs.positions < s.tokens.take(logprobs.owners))
        owners = logprobs.owners
        numbers = s.number.take(owners).view(np.int32)
        self.store.outputs.logprobs(s.frontend.take(owners), logprobs._replace(owners=numbers))

    def _ends(self, tokens: NewTokens) -> list[tuple[Request, Finish]]:
        """Requests that end with their row's last token."""
        ends = []
        for row in np.flatnonzero(tokens.ends).tolist():
            request = self.epoch.slots.request(int(tokens.rows[row]))
            last = int(tokens.ids[row, tokens.counts[row] - 1])
            ends.append((request, _complete(request, last, bool(tokens.stops[row]))))
        return ends


def _complete(request: Request, token: int, stop: bool) -> Finish:
    reason = FinishReason.STOP if stop else FinishReason.LENGTH
    return request.finish_message(reason, token if stop else None)


def _mismatch(request: Request) -> Finish:
    return request.finish_message(FinishReason.ERROR, message=_MISMATCH)
