"""Applying a result. Confirmed tokens enter here and nowhere else (result application, docs/invariants.md).

The applier has no state; it acts on the `RequestStore` and the `EpochState`. Its public methods are the parts of
`apply`, in the order in which it calls them. Tests override single ones to inject faults (tests/simulation/faults.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from protocol.columns import has_all, has_any, indices
from protocol.kv_groups import name_in_group
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

_ALL = slice(None)
_MISMATCH = "the output could not be kept within what was asked for; simplify the grammar or schema"
_NOT_LOADED = "the workers cannot load the adapter of this model; their log has the reason"

RequestEnd = tuple[Request, Finish]


class NewTokens(NamedTuple):
    """New tokens of rows that are used."""

    rows: SlotIds
    ids: Column
    """int32[rows, widest row]; undefined from `counts` on."""
    counts: Column
    ends: Mask
    """bool[rows]: the row's last token ends its request."""
    stops: Mask
    """bool[rows]: the row's last token is a stop token."""


class AppliedResult(NamedTuple):
    states: NDArray[np.int8]
    """int8[sampling rows]: state of the row's slot before; DROP if the row was ignored."""
    counts: Column
    """int32[sampling rows]: tokens that were appended to the row's request."""
    stops: Mask
    """bool[sampling rows]: the last of them is a stop token."""
    ended: tuple[RequestKey, ...]


@dataclass(eq=False)
class ResultApplier:
    store: RequestStore
    epoch: EpochState
    lifecycle: Lifecycle
    drafting: Drafting

    def apply(self, step: InflightStep, result: DecodedResult) -> AppliedResult:
        """Apply the result of the oldest step.

        Raises: UnknownResult, if the step is not the oldest in flight, a row is missing or has more tokens than its
            drafts and one (row width), or a report of progress is impossible.
        """
        epoch, s, counts, one_each = self.epoch, self.epoch.slots, result.counts, result.one_each
        failed = self._end_failed(step, result.failed) if result.failed else ()
        if result.progress is not None:
            self.apply_progress(step, result.progress)
        sampling = _ALL if has_all(step.samples) else step.samples
        rows, drafts = step.slots[sampling], step.drafts[sampling]
        all_current = epoch.ledger.current(step)
        current, states = all_current[sampling], s.state[rows]
        live = current & (states == LIVE)
        self.check(step, result, rows)
        if not one_each:
            self.check_counts(step, result, rows, drafts, live)
        all_used = has_all(live if one_each else live & (counts > 0))
        if s.num_special:
            self.check_masks(step, rows if all_used else rows[(counts > 0) & current & (states != DROP)])
        epoch.ledger.remove(step, all_current)
        if not all_used or len(rows) < len(step.slots):
            self._count_wasted(step, all_current)
        self.drafting.observe(step, result.drafted, counts, result.sampled)
        if has_any(step.drafts) or not all_used:
            self.settle(rows, drafts, result, live)
        logprobs = None if result.logprobs is None else self.wanted_logprobs(result.logprobs)
        used: Mask | slice = _ALL
        if not all_used:
            states[~current] = DROP
            used = (states != DROP) & (counts > 0)
        ids = result.token_ids[used, None] if one_each else result.ids_by_row(used)
        tokens = self.cut(rows[used], ids, counts[used])
        tokens, ends = self._take_special(tokens, result) if s.num_special else (tokens, [])
        self.append(tokens)
        appended, stops = tokens.counts, tokens.stops
        if not all_used:
            self.deliver_stale(rows[states == DELIVER])
            appended, stops = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.bool_)
            appended[used], stops[used] = tokens.counts, tokens.stops
        if result.draft_ids is not None:
            self.keep_drafts(tokens.rows, result.draft_ids[used])
        if logprobs is not None:
            self.publish_logprobs(logprobs)
        all_sampled = len(rows) == len(step.slots)
        epoch.kv.commit(rows if all_used and all_sampled else step.slots[s.state[step.slots] == LIVE])
        ends = self._ends(tokens) + ends
        for request, finish in ends:
            self.lifecycle.finish(request, finish)
        epoch.open_fence(step)
        return AppliedResult(states, appended, stops, (*failed, *[request.key for request, _ in ends]))

    def _end_failed(self, step: InflightStep, failed: Sequence[int]) -> tuple[RequestKey, ...]:
        """End the requests whose adapter the workers cannot load, and all others with it. Their blocks, which were
        computed without the adapter, leave the prefix cache; so do those of requests that have ended in flight, which
        may have found such blocks."""
        slots, groups = self.epoch.slots, range(self.epoch.kv.num_groups)
        rows = step.slots[self.epoch.ledger.current(step) & np.isin(step.slots, failed)].tolist()
        digests = {lora.digest for slot in rows if (lora := slots.request(slot).lora) is not None}
        known = dict.fromkeys((*self.store.requests.values(), *filter(None, slots.owner)))
        alike = [r for r in known if r.lora is not None and r.lora.digest in digests]
        names = dict.fromkeys(name for request in alike for name in request.block_hashes)
        self.lifecycle.drop_blocks([name_in_group(name, group) for name in names for group in groups])
        ended = [request for request in alike if not request.finished]
        for request in ended:
            finish = request.finish_message(FinishReason.ERROR, message=_NOT_LOADED)
            self.lifecycle.finish(request, replace(finish, by_settings=True))
        return tuple(request.key for request in ended)

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
                self.store.counters["rollbacks_total"] += 1

    def check(self, step: InflightStep, result: DecodedResult, rows: SlotIds) -> None:
        """Check the result against the ledger. Nothing has changed if it raises.

        Raises: UnknownResult
        """
        counts, oldest = result.counts, self.epoch.ledger.oldest
        if step.step_id != oldest or len(counts) != len(rows):
            raise UnknownResult(
                f"result of step {step.step_id} with {len(counts)} rows, expected step {oldest} with {len(rows)} rows"
            )

    def check_counts(
        self, step: InflightStep, result: DecodedResult, rows: SlotIds, drafts: Column, live: Mask
    ) -> None:
        """`check` for a result whose rows do not have one token each."""
        counts = result.counts
        missing = live & (counts < 1)
        if has_any(missing) and has_any(missing := missing & ~self.may_be_left_out(rows)):
            slot = rows[missing][0]
            raise UnknownResult(f"step {step.step_id} has no token for slot {slot} and no reason for it")
        if has_any(wrong := np.maximum(counts - 1, result.drafted) > drafts):
            row = int(wrong.argmax())
            raise UnknownResult(
                f"step {step.step_id} has {counts[row]} tokens for slot {rows[row]}, which had {drafts[row]} drafts"
            )

    def may_be_left_out(self, rows: SlotIds) -> Mask:
        """bool[rows]: whether the workers may sample the step without the row (left-out row)."""
        constrained = self.epoch.slots.constrained[rows]
        return constrained if self.epoch.limits.leaves_rows_out else np.zeros_like(constrained)

    def check_masks(self, step: InflightStep, rows: SlotIds) -> None:
        """Check that the masks of constrained rows with used tokens were made (masks of confirmed tokens).

        Args:
            rows: slots whose tokens are used.

        Raises: UnknownResult
        """
        s = self.epoch.slots
        for slot in rows[s.constrained[rows]].tolist():
            if s.request(slot).masks is None:
                raise UnknownResult(f"step {step.step_id} has a token for slot {slot}, whose masks were not made")

    def settle(self, rows: SlotIds, drafts: Column, result: DecodedResult, live: Mask) -> None:
        """Lower the optimistic position by the rejected drafts, and by one more for a row that was left out (settle).
        Count what became of drafts, and rows whose masks were late."""
        s, counts, counters = self.epoch.slots, result.counts, self.store.counters
        accepted, sampled, left_out = np.maximum(counts - 1, 0), live & (counts > 0), live & (counts == 0)
        s.computed[rows[live]] -= (drafts + 1 - counts)[live]
        s.drafted[rows] += result.drafted
        s.accepted[rows] += accepted
        late = [slot for slot in rows[left_out].tolist() if s.request(slot).masks is not None]
        s.late_masks[late] += 1
        counters["left_out_rows_total"] += int(np.count_nonzero(left_out))
        counters["wasted_tokens_total:left_out_row"] += int((drafts + 1)[left_out].sum())
        counters["spec_decode_num_drafts"] += int(np.count_nonzero(result.drafted))
        counters["spec_decode_num_draft_tokens"] += int(result.drafted.sum())
        counters["spec_decode_num_accepted_tokens"] += int(accepted.sum())
        counters["wasted_tokens_total:rejected_draft"] += int((drafts - accepted)[sampled].sum())
        for position in range(int(accepted.max(initial=0))):
            count = int(np.count_nonzero(accepted > position))
            counters[f"spec_decode_num_accepted_tokens_per_pos:{position}"] += count

    def _count_wasted(self, step: InflightStep, current: Mask) -> None:
        """Count the tokens of rows that are ignored: their request has left, or a rollback voided them."""
        ignored = ~current | (self.epoch.slots.state[step.slots] == DROP)
        self.store.counters["wasted_tokens_total:ignored_row"] += int(step.counts[ignored].sum())

    # -- tokens --------------------------------------------------------------------------------------------------

    def cut(self, rows: SlotIds, ids: Column, counts: Column) -> NewTokens:
        """Cut each row behind its first stop token or its last token by length (row cut).

        Args:
            ids: int32[rows, widest row]; undefined from `counts` on.
        """
        s, width = self.epoch.slots, ids.shape[1]
        tokens, numbers = s.tokens[rows], np.arange(1, width + 1, dtype=np.int32)
        left = s.limit[rows] - tokens
        matches = ids[:, :, None] == s.stop_ids.take(rows, axis=0)[:, None, :]
        stops = matches[:, :, 0] if matches.shape[2] == 1 else matches.any(axis=2)
        if has_any(stops):
            stops &= numbers >= (s.stops_from[rows] - tokens)[:, None]
        if width == 1:
            stops = stops[:, 0]
            return NewTokens(rows, ids, counts, stops | (left <= 1), stops)
        ends = (stops | (numbers >= left[:, None])) & (numbers <= counts[:, None])
        ended, last = ends.any(axis=1), ends.argmax(axis=1)
        counts = np.where(ended, last + 1, counts).astype(np.int32)
        return NewTokens(rows, ids, counts, ended, ended & stops[np.arange(len(rows)), last])

    def _take_special(self, tokens: NewTokens, result: DecodedResult) -> tuple[NewTokens, list[RequestEnd]]:
        """Advance grammars by the tokens (emitted tokens only) and deliver embeddings. Return the tokens without those
        that do not match and those of embeddings, and the requests that end with it."""
        s, ended = self.epoch.slots, list[RequestEnd]()
        some = indices(s.constrained[tokens.rows] | s.pooling[tokens.rows])
        if not len(some):
            return tokens, ended
        counts, ends, stops = tokens.counts.copy(), tokens.ends.copy(), tokens.stops.copy()
        columns = (some, tokens.rows[some], tokens.ids[some], counts[some])
        s.late_masks[tokens.rows[some]] = 0
        for row, slot, ids, count in zip(*(column.tolist() for column in columns), strict=True):
            request = s.request(slot)
            if request.pooling is not Pooling.NONE:
                ended.append((request, self._embed(request, result.embeddings.get(slot))))
                matched = 0
            elif (matched := request.matching(ids[:count])) < count:
                ended.append((request, request.finish_message(FinishReason.ERROR, message=_MISMATCH)))
            if matched < count:
                counts[row], ends[row], stops[row] = matched, False, False  # the request is in `ended`
        return tokens._replace(counts=counts, ends=ends, stops=stops), ended

    def _embed(self, request: Request, values: bytes | None) -> Finish:
        if values is None:
            return request.finish_message(FinishReason.ERROR, message="the workers returned no embedding")
        self.store.outputs.embedding(request.frontend, Embedding(request.number, values))
        return request.finish_message(FinishReason.STOP)

    def append(self, tokens: NewTokens) -> None:
        """Append tokens to the history of their slots and to the outputs."""
        s, (rows, ids, counts) = self.epoch.slots, tokens[:3]
        totals = s.tokens[rows]
        if has_any(entering := totals == s.entry[rows]):
            for slot in rows[entering & (counts > 0)].tolist():
                request = s.request(slot)
                if not request.first_token:
                    request.first_token = self.store.now
                    self.store.outputs.cached(*request.key, request.num_cached_tokens)
        s.tokens[rows] = totals + counts
        if ids.shape[1] == 1 and (not s.num_special or has_all(counts > 0)):
            token_ids = ids[:, 0]
        else:
            taken = np.arange(ids.shape[1]) < counts[:, None]
            which, at = np.nonzero(taken)
            rows, totals, token_ids = rows[which], totals[which] + at.astype(np.int32), ids[taken]
        s.history[rows, totals] = token_ids
        indices = totals - s.prompt[rows]
        self.store.outputs.tokens(s.frontend[rows], s.number[rows], indices, token_ids)
        self.store.counters["generation_tokens"] += len(rows)

    def deliver_stale(self, retired: SlotIds) -> None:
        """Return to preempted requests the tokens that their retired slots got since (stale delivery)."""
        slots = self.epoch.slots
        for slot in retired.tolist():
            request = slots.request(slot)
            request.stale_rows -= 1
            slots.give_draft_counts(slot)
            self.store.waiting.set_tokens(request, slots.token_ids(slot))

    def keep_drafts(self, rows: SlotIds, draft_ids: Column) -> None:
        """Keep the drafts of constrained rows: the masks of their next rows depend on them."""
        s = self.epoch.slots
        for row in indices(s.constrained[rows]).tolist():
            s.request(int(rows[row])).draft_ids = draft_ids[row]

    def wanted_logprobs(self, logprobs: LogprobRows) -> LogprobRows:
        """Select the log-probabilities of rows that are used, before this result ends any request."""
        return logprobs.select(np.isin(self.epoch.slots.state[logprobs.owners], (LIVE, DELIVER)))

    def publish_logprobs(self, logprobs: LogprobRows) -> None:
        """Publish the log-probabilities of tokens that were appended. The fence guarantees that the slot's owner has
        not changed since; a row that a rollback voided has none."""
        s = self.epoch.slots
        logprobs = logprobs.select(logprobs.positions < s.tokens[logprobs.owners])
        owners = logprobs.owners
        numbers = s.number[owners].view(np.int32)
        self.store.outputs.logprobs(s.frontend[owners], logprobs._replace(owners=numbers))

    def _ends(self, tokens: NewTokens) -> list[RequestEnd]:
        """Requests that end with their row's last token."""
        ends = []
        for row in indices(tokens.ends).tolist():
            request, stop = self.epoch.slots.request(int(tokens.rows[row])), bool(tokens.stops[row])
            last = int(tokens.ids[row, tokens.counts[row] - 1])
            reason = FinishReason.STOP if stop else FinishReason.LENGTH
            ends.append((request, request.finish_message(reason, last if stop else None)))
        return ends
