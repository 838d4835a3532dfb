"""What workers return enters here and nowhere else (spec 0.6). The second layer of the scheduler, over lifecycle.py."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from protocol.requests import Embedding, Finish, FinishReason
from protocol.rows import LogprobRows
from protocol.sampling import Pooling
from services.scheduler.core.drafting import Drafting
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import RequestKey
from services.scheduler.core.request import Request
from services.scheduler.core.slots import DELIVER, DROP, LIVE, Column, Rows

NO_EMBEDDINGS: Mapping[int, bytes] = MappingProxyType({})
_MISMATCH = "the output could not be kept within what was asked for; simplify the grammar or schema"


class UnknownResult(Exception):
    """A worker's result does not match the oldest step in flight: worker and scheduler have lost each other."""


class Sampled(NamedTuple):
    """What a step brought, int32[rows with samples] in plan order unless stated."""

    counts: Column
    """Tokens of the row: accepted drafts and one more; 0 where the runner voided the row."""
    token_ids: Column
    """int32[sum(counts)], row after row"""
    drafted: Column
    """Drafts that were verified."""
    draft_ids: Column | None = None
    """int32[rows with samples, proposed]: drafts for the next step, from NO_DRAFT on none; if a grammar needs them."""
    logprobs: LogprobRows | None = None
    """`owners` are slots of the step."""
    embeddings: Mapping[int, bytes] = NO_EMBEDDINGS
    """slot -> float32[hidden size], of pooling rows with samples"""
    seconds: float = 0.0
    """What the step took on the device."""

    @classmethod
    def one_each(cls, token_ids: Column) -> Self:
        """A token for every row, no drafts."""
        return cls(np.ones(len(token_ids), np.int32), token_ids, np.zeros(len(token_ids), np.int32))


class Applied(NamedTuple):
    """Effect of a step's result; rows as in `Sampled`."""

    states: NDArray[np.int8]
    """State of each row's slot before; DROP if the row was ignored."""
    counts: Column
    """Tokens that were appended to the row's request."""
    ended: tuple[RequestKey, ...]


class _Tokens(NamedTuple):
    """New tokens of live rows."""

    rows: Rows
    ids: Column
    """int32[rows, widest row]; undefined from `counts` on"""
    counts: Column
    ends: NDArray[np.bool_]
    """bool[rows]: the row's last token ends its request"""
    stops: NDArray[np.bool_]
    """bool[rows]: and is a stop token"""


class Results(Lifecycle):
    def __init__(self, limits: Limits, epoch: int, before: Self | None, drafting: Drafting | None) -> None:
        super().__init__(limits, epoch, before)
        self.drafting = drafting

    def report_progress(self, step: InflightStep, slots: Column, frontiers: Column) -> None:
        """How far prefill rows of the oldest step came, int32[reports] each; before that step's `update_from_output`.

        Where that is not what was scheduled, everything in flight for the slot is void (spec 5(b) 15).

        Raises: UnknownResult, if a row is none of the step's prefills, or no chunk of it can end there.
        """
        s, current = self.slots, self.ledger.current(step)
        row_of = {slot: row for row, slot in enumerate(step.slots.tolist())}
        for slot, frontier in zip(slots.tolist(), frontiers.tolist(), strict=True):
            row = row_of.get(slot, -1)
            if row < 0 or step.starts[row] >= s.entry[slot]:
                raise UnknownResult(
                    f"step {step.step_id} reports progress of slot {slot}, which is none of its prefills"
                )
            start, end = int(step.starts[row]), int(step.starts[row] + step.counts[row])
            # The last token is always computed with a row that samples, because its logits are needed.
            most = end if step.samples[row] else int(min(s.entry[slot] - 1, s.capacity[slot]))
            if not start < frontier <= most:
                raise UnknownResult(
                    f"step {step.step_id} reports {frontier} tokens of slot {slot}: only {start + 1} to {most} can be"
                )
            if frontier != end and current[row] and s.state[slot] == LIVE:
                self.ledger.roll_back(slot, frontier)
                self.counters["rollbacks"] += 1

    def update_from_output(self, step: InflightStep, sampled: Sampled) -> Applied | None:
        """Applies the result of the oldest step. Returns what it did if an observer listens.

        Raises: UnknownResult, if the step is not the oldest in flight, a row is missing or has more tokens than its
            drafts and one (S2-3); nothing has changed then.
        """
        every = step.samples.all()
        rows = step.slots if every else step.slots[step.samples]
        drafts = step.drafts if every else step.drafts[step.samples]
        counts = sampled.counts
        if step.step_id != self.ledger.oldest or len(counts) != len(rows):
            raise UnknownResult(
                f"result of step {step.step_id} with {len(counts)} rows, expected step {self.ledger.oldest} "
                f"with {len(rows)} rows"
            )
        s, current = self.slots, self.ledger.current(step)
        state, current = s.state.take(rows), current if every else current[step.samples]
        live = current & (state == LIVE)
        if (missing := live & (counts < 1)).any():
            slot = rows[missing][0]
            raise UnknownResult(f"step {step.step_id} has no token for slot {slot} and no reason for it")
        if (wrong := (counts > drafts + 1) | (sampled.drafted > drafts)).any():
            row = int(wrong.argmax())
            raise UnknownResult(
                f"step {step.step_id} has {counts[row]} tokens for slot {rows[row]}, which had {drafts[row]} drafts"
            )
        self.ledger.remove_oldest()
        listening = bool(self.observers.listening)
        appended = np.zeros(len(rows), np.int32) if listening else counts
        self._ended.clear()
        if self.drafting is not None:
            self.drafting.observe(step, sampled.drafted, counts, sampled.seconds)
        if step.drafts.any():
            self._settle(rows, drafts, sampled, live)
        wanted = _wanted(sampled.logprobs, s.state)
        first = np.cumsum(counts, dtype=np.int32) - counts
        if not live.all():
            for row in np.flatnonzero(current & (state == DELIVER)).tolist():
                at, slot = int(first[row]), int(rows[row])
                stale = self._deliver_stale(slot, sampled.token_ids[at : at + counts[row]].tolist(), sampled)
                if listening:
                    appended[row] = stale
            rows, first, counts = rows[live], first[live], counts[live]
        finals: list[tuple[Request, Finish]] = []
        tokens = self._until_the_end(rows, sampled.token_ids, first, counts)
        special = s.constrained.take(rows) | s.pooling.take(rows)
        if special.any():
            tokens = self._take_special(tokens, special, sampled.embeddings, finals)
        self._append(tokens)
        if listening:
            appended[live] = tokens.counts
        if sampled.draft_ids is not None:
            self._remember_drafts(rows, sampled.draft_ids[live])
        if wanted is not None:
            self._publish_logprobs(wanted)
        self.kv.commit(rows if len(rows) == len(step.slots) else step.slots[s.state[step.slots] == LIVE])
        for row in np.flatnonzero(tokens.ends).tolist():
            last = int(tokens.ids[row, tokens.counts[row] - 1])
            self._complete(s.request(int(rows[row])), last, bool(tokens.stops[row]))
        for request, finish in finals:
            self.finish(request, finish)
        for slot in self._fences.pop(step.step_id, ()):
            self._free(slot)
        if not listening:
            return None
        return Applied(np.where(current, state, DROP).astype(np.int8), appended, tuple(self._ended))

    # -- drafts --------------------------------------------------------------------------------------------------

    def _settle(self, rows: Rows, drafts: Column, sampled: Sampled, live: NDArray[np.bool_]) -> None:
        """Rejected drafts count as never computed (spec 2(b) 3); what became of drafts is counted (0.6)."""
        s, accepted = self.slots, np.maximum(sampled.counts - 1, 0)
        mine = rows[live]
        s.computed[mine] -= (drafts - accepted)[live]
        s.drafted[rows] += sampled.drafted
        s.accepted[rows] += accepted
        counters = self.counters
        counters["spec_decode_num_drafts"] += int(np.count_nonzero(sampled.drafted))
        counters["spec_decode_num_draft_tokens"] += int(sampled.drafted.sum())
        counters["spec_decode_num_accepted_tokens"] += int(accepted.sum())
        for position in range(int(accepted.max(initial=0))):
            count = int(np.count_nonzero(accepted > position))
            counters[f"spec_decode_num_accepted_tokens_per_pos:{position}"] += count

    def _remember_drafts(self, rows: Rows, draft_ids: Column) -> None:
        """Those whose next mask depends on them."""
        for row in np.flatnonzero(self.slots.constrained.take(rows)).tolist():
            self.slots.request(int(rows[row])).draft_ids = draft_ids[row]

    # -- tokens --------------------------------------------------------------------------------------------------

    def _until_the_end(self, rows: Rows, token_ids: Column, first: Column, counts: Column) -> _Tokens:
        """Each row's tokens up to its first stop token or its last one by length (spec 2(b) 12)."""
        s, width = self.slots, int(counts.max(initial=1))
        offsets = np.arange(width, dtype=np.int32)
        ids = token_ids.take(first[:, None] + offsets, mode="clip")
        totals = s.tokens.take(rows)[:, None] + (offsets + 1)
        matches = ids[:, :, None] == s.stop_ids.take(rows, axis=0)[:, None, :]
        stops = matches[:, :, 0] if matches.shape[2] == 1 else matches.any(axis=2)
        stops &= totals >= s.stops_from.take(rows)[:, None]
        ends = stops | (totals >= s.limit.take(rows)[:, None])
        if width == 1:
            return _Tokens(rows, ids, counts, ends[:, 0], stops[:, 0])
        ends &= offsets < counts[:, None]
        ended, last = ends.any(axis=1), ends.argmax(axis=1)
        counts = np.where(ended, last + 1, counts).astype(np.int32)
        return _Tokens(rows, ids, counts, ended, ended & stops[np.arange(len(rows)), last])

    def _take_special(
        self,
        tokens: _Tokens,
        special: NDArray[np.bool_],
        embeddings: Mapping[int, bytes],
        finals: list[tuple[Request, Finish]],
    ) -> _Tokens:
        """Grammars take their tokens (S2-7), embeddings are delivered; `finals` gets the requests that end with it."""
        counts, ends, some = tokens.counts.copy(), tokens.ends.copy(), np.flatnonzero(special)
        columns = (some, tokens.rows[some], tokens.ids[some], counts[some])
        for row, slot, ids, count in zip(*(column.tolist() for column in columns), strict=True):
            request = self.slots.request(slot)
            if request.pooling is not Pooling.NONE:
                finals.append((request, self._embed(request, embeddings.get(slot))))
                matched = 0
            elif (matched := request.matching(ids[:count])) < count:
                finals.append((request, request.finish_message(FinishReason.ERROR, message=_MISMATCH)))
            if matched < count:
                counts[row], ends[row] = matched, False
        return tokens._replace(counts=counts, ends=ends)

    def _embed(self, request: Request, values: bytes | None) -> Finish:
        if values is None:
            message = "the workers returned no embedding"
            return request.finish_message(FinishReason.ERROR, message=message)
        self.outputs.embedding(request.client, Embedding(request.number, values))
        return request.finish_message(FinishReason.STOP)

    def _append(self, tokens: _Tokens) -> None:
        s, (rows, ids, counts) = self.slots, tokens[:3]
        totals = s.tokens.take(rows)
        if (entering := totals == s.entry.take(rows)).any():
            for slot in rows[entering & (counts > 0)].tolist():
                self._note_first_token(s.request(slot))
        s.tokens[rows] = totals + counts
        if ids.shape[1] == 1 and counts.all():
            token_ids = ids[:, 0]
        else:
            taken = np.arange(ids.shape[1]) < counts[:, None]
            which, at = np.nonzero(taken)
            rows, totals, token_ids = rows[which], totals[which] + at.astype(np.int32), ids[taken]
        s.history[rows, totals] = token_ids
        self.outputs.tokens(s.client.take(rows), s.number.take(rows), totals - s.prompt.take(rows), token_ids)
        self.counters["generation_tokens"] += len(rows)

    def _note_first_token(self, request: Request) -> None:
        if not request.first_token:
            request.first_token = self.now

    def _publish_logprobs(self, logprobs: LogprobRows) -> None:
        """Those of tokens that were appended. A slot that the step names has not changed its owner since (fence), and
        of a row that a rollback voided there are none."""
        s = self.slots
        logprobs = logprobs.select(logprobs.positions < s.tokens.take(logprobs.owners))
        owners = logprobs.owners
        numbers = s.number.take(owners).view(np.int32)
        self.outputs.logprobs(s.client.take(owners), logprobs._replace(owners=numbers))

    def _deliver_stale(self, slot: int, token_ids: list[int], sampled: Sampled) -> int:
        """Tokens that were in flight when their request was preempted: appended while it waits (spec 0.7). Returns how
        many were."""
        s, request = self.slots, self.slots.request(slot)
        request.stale_rows -= 1
        s.give_draft_counts(slot)
        params, prompt = request.params, request.num_prompt_tokens
        before = len(request.token_ids)
        for token in token_ids:
            if request.pooling is not Pooling.NONE:
                self.finish(request, self._embed(request, sampled.embeddings.get(slot)))
            elif not request.finished and not request.matching([token]):
                self.finish(request, request.finish_message(FinishReason.ERROR, message=_MISMATCH))
            if request.finished:
                break
            self._note_first_token(request)
            self.waiting.append_token(request, token)
            s.tokens[slot] = total = len(request.token_ids)
            self.outputs.token(request, total - prompt - 1, token)
            self.counters["generation_tokens"] += 1
            stop = token in params.eos_token_ids + params.stop_token_ids and total >= request.stops_from
            if stop or total >= min(prompt + params.max_tokens, self.limits.max_model_len):
                self._complete(request, token, stop)
        return len(request.token_ids) - before

    def _complete(self, request: Request, token: int, stop: bool) -> None:
        reason = FinishReason.STOP if stop else FinishReason.LENGTH
        self.finish(request, request.finish_message(reason, token if stop else None))


def _wanted(logprobs: LogprobRows | None, state: NDArray[np.int8]) -> LogprobRows | None:
    """Those of requests that want them still, before this step ends any."""
    return (
        None if logprobs is None else logprobs.select(np.isin(state.take(logprobs.owners), (LIVE, DELIVER)))
    )
