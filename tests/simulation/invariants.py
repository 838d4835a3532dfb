"""The rules of docs/invariants.md, recomputed from the steps in flight and from first principles after each transition.

No cached sum is trusted. The checker records what cannot be recomputed later: the blocks that a step in flight may
write, and the hashes of known tokens. Each failure names its rule.
"""

from collections import Counter
from collections.abc import Collection
from hashlib import sha256
from itertools import pairwise

from protocol.kv_groups import NO_BLOCK, KVGroup, num_states
from protocol.media import contents
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.epoch import EpochState
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import Request, RequestStatus
from services.scheduler.core.slots import DELIVER, DROP, FREE, LIVE, MOST_LATE
from services.scheduler.core.waiting import WaitingQueue
from tests.simulation.grammar import Automaton
from tests.simulation.hashing import ROOT, distinct_tokens, extend, in_group

WINDOW = "blocks behind the window"


class InvariantError(AssertionError):
    """A rule does not hold."""


def demand(holds: bool, rule: str, detail: object = "", *values: object) -> None:
    """`values` fill the braces of `detail`: its text is made only if the rule does not hold."""
    if not holds:
        raise InvariantError(f"{rule}: {str(detail).format(*values) if values else detail}")


def in_group_name(name: bytes, group: int) -> bytes:
    return bytes((name[0] ^ group,)) + name[1:]


class _Chain:
    """Independent hash chain over the known tokens of one request."""

    def __init__(self, salt: str) -> None:
        self.blocks = 0
        self.digest = sha256(salt.encode()).digest()
        self.prefix = ROOT


class Checker:
    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self.known: dict[bytes, list[int]] = {}
        """Block hash -> content that the oracle's KV must have in a block of that hash."""
        self._chains: dict[Request, _Chain] = {}
        self._touched: dict[int, set[int]] = {}
        """step_id -> blocks of its slots' tables at dispatch."""
        self._last_sampled: dict[tuple[int, int], bool] = {}
        """(slot, generation) -> whether its last processed row sampled."""
        self._processed = 0
        self._reached: dict[tuple[int, int], set[int]] = {}
        """(slot, generation) -> items of its request that were encoded"""
        self._pinned: dict[str, list[int]] = {}
        """Pin -> its table when it was checked last."""
        self._groups: tuple[Limits, list[KVGroup]] | None = None

    @property
    def epoch(self) -> EpochState:
        return self.engine.epoch

    @property
    def groups(self) -> list[KVGroup]:
        """Groups with keys."""
        limits = self.epoch.limits
        if self._groups is None or self._groups[0] is not limits:
            self._groups = limits, [group for group in limits.groups if not group.is_state]
        return self._groups[1]

    @property
    def waiting(self) -> WaitingQueue:
        return self.engine.store.waiting

    # -- what happened -------------------------------------------------------------------------------------------

    def on_scheduled(self, step: InflightStep) -> None:
        limits = self.epoch.limits
        slots, counts = step.slots.tolist(), step.counts.tolist()
        demand(len(set(slots)) == len(slots), "one row per step", "two entries of one request in a step")
        demand(min(counts) >= 1, "step limits", "counts {}", counts)
        demand(sum(counts) <= limits.max_num_batched_tokens, "step limits", "{} tokens in a step", sum(counts))
        self._touched[step.step_id] = {
            block
            for slot, start in zip(slots, step.starts.tolist(), strict=True)
            for group in range(len(self.groups))
            for block in self._table(slot, group)[self._first_block(group, start) :]
        }
        if limits.whole_prompts:
            is_whole = bool(step.samples.all()) and not step.starts.any()
            demand(is_whole, "whole prompt", "a part of a prompt in step {}", step.step_id)
        self._touched[step.step_id].update(block for slot in slots for block in self.epoch.kv.states[slot])
        if limits.leaves_rows_out and num_states(limits.groups):
            again = step.samples & self.epoch.slots.constrained[step.slots] & (step.counts > 1)
            demand(not again.any(), "recurrent state", "step {}: more would be taken back", step.step_id)
        adapters = {lora for slot in slots if (lora := self.epoch.slots.request(slot).lora) is not None}
        demand(len(adapters) <= limits.max_loras, "adapter seat", "{} adapters in a step", len(adapters))
        rows = zip(slots, step.generations.tolist(), step.starts.tolist(), counts, strict=True)
        encoded = sum(self._encoded(slot, generation, start, count) for slot, generation, start, count in rows)
        demand(encoded <= limits.encoder_budget, "encoder budget", "{} positions in step {}", encoded, step.step_id)
        demand(NO_BLOCK not in self._touched[step.step_id], WINDOW, "step {} reads no block", step.step_id)

    def _encoded(self, slot: int, generation: int, start: int, count: int) -> int:
        """Return how many positions the items have that a row encodes: those that no row of the request in this slot
        has reached."""
        if not (items := self.epoch.slots.request(slot).items):
            return 0
        reached = self._reached.setdefault((slot, generation), set())
        new = {n: i for n, i in enumerate(items) if n not in reached and i.start < start + count and start < i.end}
        reached.update(new)
        return sum(item.length for item in new.values())

    def on_processed(self, step: InflightStep) -> None:
        demand(step.step_id == self._processed + 1, "step order", "step {} after {}", step.step_id, self._processed)
        self._processed = step.step_id
        del self._touched[step.step_id]
        names = zip(step.slots.tolist(), step.generations.tolist(), strict=True)
        self._last_sampled.update(zip(names, step.samples.tolist(), strict=True))

    def on_idle(self, order: list[int]) -> None:
        """Work conservation: nothing was scheduled although the queue has room, so nothing could be computed. A running
        request waits for its sampled id, its rows in flight whose masks will be late, its certain end or, with all
        behind it in `order`, for blocks; a waiting one for a seat or for blocks."""
        epoch, limits = self.epoch, self.epoch.limits
        s, pool, size = epoch.slots, epoch.kv.pool, limits.block_size
        sampled: dict[int, list[int]] = {}
        drafts: Counter[int] = Counter()
        for step in self.engine.queue.steps:
            drafts.update(dict(zip(step.slots.tolist(), step.drafts.tolist(), strict=True)))
            for slot in step.slots[step.samples].tolist():
                sampled.setdefault(slot, []).append(step.step_id)
        for slot in order:
            promised = int(s.tokens[slot]) + len(sampled.get(slot, ()))
            want = promised + drafts[slot] - int(s.computed[slot])
            on_its_way = slot in sampled and epoch.next_step - sampled[slot][-1] < limits.stages
            full = int(s.computed[slot]) >= limits.max_model_len
            is_late = slot in sampled and s.late_masks[slot] >= MOST_LATE
            if want < 1 or promised >= int(s.limit[slot]) or on_its_way or full or is_late:
                continue
            want += int(s.proposed[slot])
            most = int(s.computed[slot]) + min(want, limits.max_num_batched_tokens) + limits.lookahead
            most = min(most, limits.max_model_len)
            if len(self.groups) * -(-most // size) - len(epoch.kv.tables[slot]) > pool.num_free:
                return
            demand(False, "work conservation", "slot {} is ready, but step {} is empty", slot, epoch.next_step)
        if len(epoch.running) >= limits.max_num_seqs or not s.free:
            return
        tenants = [request for request in s.owner if request is not None and request.lora is not None]
        seated, oldest = {request.lora for request in tenants}, min((r.order_key for r in tenants), default=0)
        passed = oldest
        for request in self.waiting:
            adapters, is_plain = {*seated, request.lora} - {None}, request.lora is None
            if not is_plain and len(adapters) > max(limits.max_loras, len(seated)):
                passed = min(passed, request.order_key)
            elif not request.stale_rows and (is_plain or passed >= oldest):
                most = min(len(request.token_ids) + limits.lookahead, limits.max_model_len)
                fits = num_states(limits.groups) + len(self.groups) * -(-most // size) <= pool.num_free
                demand(not fits, "work conservation", "{} fits, but step {} is empty", request.number, epoch.next_step)
                return

    def on_void(self) -> None:
        """Epoch void: nothing is in flight, held, fenced, cached or gated."""
        epoch = self.epoch
        self._touched.clear()
        self._reached.clear()
        self.on_blocks_forgotten()
        self._processed = epoch.next_step - 1
        demand(not len(epoch.running), "epoch void", "requests are running")
        demand(not self.engine.queue and not epoch.fences, "epoch void", "steps or fences remain")
        demand(not epoch.kv.pool.by_hash, "epoch void", "blocks of lost workers can be hit")
        demand(epoch.kv.num_free == epoch.limits.num_blocks, "epoch void", "blocks are held")
        demand(len(epoch.slots.free) == epoch.limits.num_slots, "epoch void", "slots are held")
        demand(not self.engine.store.loading.under_way, "epoch void", "loads remain")
        demand(not epoch.released, "epoch void", "lost workers would be notified of slots")
        gated = [request.number for request in self.waiting if request.stale_rows]
        demand(not gated, "resume gate", "{} wait for rows that will never come", gated)

    def on_blocks_forgotten(self) -> None:
        """Pins may lose blocks now."""
        self._pinned.clear()

    def on_new_epoch(self) -> None:
        """Step ids begin at 1 and the cache is empty. Known tokens stay known."""
        self._touched.clear()
        self._reached.clear()
        self._last_sampled.clear()
        self._processed = 0
        demand(not self.epoch.kv.pool.by_hash, "epoch void", "a new epoch begins with cached blocks")

    def learn(self, requests: list[Request]) -> None:
        """Record the hashes of full blocks of known tokens."""
        size, history, known = self.epoch.limits.block_size, self.epoch.slots.history, self.epoch.slots.tokens.tolist()
        for request in requests:
            slot = request.slot
            total = known[slot] if slot >= 0 else len(request.token_ids)
            chain = self._chains.get(request)
            if chain is None:
                chain = self._chains[request] = _Chain(request.cache_salt)
                demand(
                    request.lora is None or request.lora.digest in request.cache_salt,
                    "adapter in the salt",
                    request.number,
                )
            while (chain.blocks + 1) * size <= total:
                tokens = history[slot] if slot >= 0 else request.token_ids
                span = slice(chain.blocks * size, (chain.blocks + 1) * size)
                seen = contents(request.items, span.start, span.stop)
                chain.digest = sha256(chain.digest + tokens[span].tobytes() + seen).digest()
                content = []
                for token in distinct_tokens(tokens[: span.stop], request.media)[span].tolist():
                    chain.prefix = extend(chain.prefix, token)
                    content.append(chain.prefix)
                for group in range(len(self.groups)):
                    name = in_group_name(chain.digest, group)
                    self.known[name] = [in_group(prefix, group) for prefix in content]
                chain.blocks += 1

    # -- what must hold ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check everything. Called after every transition."""
        waiting = list(self.waiting)
        self._check_ledger(waiting)
        self._check_slots()
        self._check_waiting(waiting)
        self._check_blocks()

    def check_grammar(self, request: Request, fresh: Automaton) -> None:
        """Emitted tokens only: the grammar's state is that of a fresh one that accepted the output tokens."""
        s, slot = self.epoch.slots, request.slot
        known = s.history[slot, : s.tokens[slot]] if slot >= 0 else request.token_ids
        for token in known[request.num_prompt_tokens :].tolist():
            demand(fresh.accept(token), "emitted tokens only", "{}: token {} does not match", request.number, token)
        demand(
            isinstance(request.grammar, Automaton) and request.grammar.state == fresh.state,
            "emitted tokens only",
            f"{request.number}: the grammar is in another state than after the {len(known)} tokens known",
        )

    def _steps_in_flight(self) -> list[InflightStep]:
        return list(self.engine.queue.steps)

    def _check_ledger(self, waiting: list[Request]) -> None:
        s, steps, depth = self.epoch.slots, self._steps_in_flight(), self.engine.queue.depth
        demand(len(steps) <= depth, "one row per step", "{} steps in flight at depth {}", len(steps), depth)
        f: Counter[int] = Counter()
        h: Counter[int] = Counter()
        sampling: Counter[int] = Counter()
        stale: Counter[Request] = Counter()
        newest: dict[int, int] = {}
        state, generations = s.state.tolist(), s.generation.tolist()
        for step in steps:
            columns = (
                step.slots.tolist(),
                step.generations.tolist(),
                step.counts.tolist(),
                step.samples.tolist(),
                step.drafts.tolist(),
            )
            for slot, generation, count, samples, drafts in zip(*columns, strict=True):
                demand((drafts > 0) <= samples and drafts < count, "optimistic drafts", "slot {}: {}", slot, drafts)
                demand(state[slot] != FREE, "fence", "step {} names the free slot {}", step.step_id, slot)
                demand(generations[slot] == generation, "generation", "slot {} was given away in flight", slot)
                newest[slot] = step.step_id
                if state[slot] == LIVE:
                    f[slot] += count
                    h[slot] += samples + drafts
                    sampling[slot] += samples
                elif state[slot] == DELIVER:
                    stale[s.request(slot)] += samples
        inflight, placeholders = s.inflight.tolist(), s.placeholders.tolist()
        tokens, computed, promised = s.tokens.tolist(), s.computed.tolist(), s.sampling.tolist()
        for slot in [i for i, value in enumerate(state) if value == LIVE]:
            T, P, F, H = tokens[slot], computed[slot], f[slot], h[slot]
            demand(inflight[slot] == F, "ledger", "slot {}: column {}, ledger {}", slot, inflight[slot], F)
            demand(placeholders[slot] == H, "output placeholder", "slot {}: {}, ledger {}", slot, placeholders[slot], H)
            demand(promised[slot] == sampling[slot], "ledger", "slot {}: {} sampling rows", slot, promised[slot])
            demand(0 <= F <= P, "ledger", "slot {}: F={} P={}", slot, F, P)
            demand(0 <= P - F <= T, "committed position", "slot {}: C={} T={}", slot, P - F, T)
            demand(not H or P == T + H - 1, "position identity", "slot {}: P={} T={} H={}", slot, P, T, H)
            if not F and self._last_sampled.get((slot, generations[slot])):
                demand(P == T - 1, "position identity", "slot {}: P={} T={}", slot, P, T)
        fences = {slot: step for step, slots in self.epoch.fences.items() for slot in slots}
        demand(sum(map(len, self.epoch.fences.values())) == len(fences), "fence", "a slot behind two fences")
        retired = {slot for slot, value in enumerate(state) if value in (DELIVER, DROP)}
        demand(set(fences) == retired, "fence", "fenced {}, retired {}", fences, retired)
        for slot, fence in fences.items():
            demand(newest.get(slot) == fence, "fence", "slot {}: fence {}, last {}", slot, fence, newest.get(slot))
        for slot in retired:
            request = s.request(slot)
            if state[slot] == DELIVER and request.status is RequestStatus.RUNNING:
                demand(not stale[request], "resume gate", "{} resumed before its stale rows arrived", request.number)
        for request in {s.request(slot) for slot in retired} | set(waiting):
            rows = request.stale_rows
            demand(rows == stale.get(request, 0), "resume gate", "{}: {} stale rows", request.number, rows)

    def _check_slots(self) -> None:
        s, limits, running = self.epoch.slots, self.epoch.limits, self.epoch.running.tolist()
        tables, states = self.epoch.kv.tables, self.epoch.kv.states
        state, order_keys, stop_ids = s.state.tolist(), s.order_key.tolist(), s.stop_ids.tolist()
        tokens, ends = s.tokens.tolist(), s.limit.tolist()
        demand(len(running) <= limits.max_num_seqs, "step limits", "{} running", len(running))
        demand(
            sorted(running) == [i for i, value in enumerate(state) if value == LIVE], "running", "not the live slots"
        )
        order = [order_keys[slot] for slot in running]
        demand(all(a < b for a, b in pairwise(order)), "running", "order keys {}", order)
        free = list(s.free)
        demand(len(set(free)) == len(free), "slots", "a slot is free twice")
        demand(set(free) == {i for i, value in enumerate(state) if value == FREE}, "slots", "free list and states")
        for slot in free:
            is_empty = s.owner[slot] is None and not tables[slot] and not states[slot]
            demand(is_empty, "slots", "{} is not empty", slot)
        special = (s.constrained | s.pooling) & (s.state != FREE)
        demand(s.num_special == special.sum(), "slots", "{} of {} are special", s.num_special, special.sum())
        for slot in running:
            request = s.request(slot)
            params, prompt = request.params, request.num_prompt_tokens
            demand(request.slot == slot and request.status is RequestStatus.RUNNING, "slots", "owner of {}", slot)
            demand(order_keys[slot] == request.order_key, "slots", "order key of {}", slot)
            demand(ends[slot] == min(prompt + params.max_tokens, limits.max_model_len), "certain end", "limit")
            stops = set(stop_ids[slot]) - {-1}
            demand(stops == set(params.eos_token_ids + params.stop_token_ids), "slots", "stop ids of {}", slot)
            demand(tokens[slot] < ends[slot], "certain end", "slot {} runs past its limit", slot)

    def _check_waiting(self, waiting: list[Request]) -> None:
        demand(len(waiting) == len(self.waiting), "waiting", "length")
        demand(all(request.slot == -1 for request in waiting), "waiting", "a request has a slot")
        statuses = {request.status for request in waiting}
        demand(statuses <= {RequestStatus.WAITING, RequestStatus.PREEMPTED}, "waiting", statuses)
        total = sum(len(request.token_ids) for request in waiting)
        demand(total == self.waiting.num_tokens, "waiting", "num_tokens")
        order_keys = [request.order_key for request in waiting]
        demand(order_keys == sorted(order_keys), "waiting", "order")
        head = self.waiting.head()
        demand((head.order_key if head else None) == (order_keys[0] if order_keys else None), "waiting", "head")

    def _check_blocks(self) -> None:
        kv, s, size = self.epoch.kv, self.epoch.slots, self.epoch.limits.block_size
        pool, groups, states_each = kv.pool, len(self.groups), num_states(self.epoch.limits.groups)
        holders: Counter[int] = Counter()
        capacity, computed, inflight = s.capacity.tolist(), s.computed.tolist(), s.inflight.tolist()
        for slot, (table, states) in enumerate(zip(kv.tables, kv.states, strict=True)):
            if table:
                held = [block for block in states + table if block != NO_BLOCK]
                demand(len(states) == states_each, "recurrent state", "slot {}", slot)
                demand(len(set(held)) == len(held), "block accounting", "slot {} holds a block twice", slot)
                demand(capacity[slot] * groups == len(table) * size, "block accounting", "capacity of slot {}", slot)
                for group in range(groups):
                    self._check_window(slot, group, computed[slot] - inflight[slot])
                demand(computed[slot] <= capacity[slot], "block accounting", "slot {} computes beyond its blocks", slot)
                holders.update(held)
        for load in self.engine.store.loading:
            elsewhere = any(request.slot >= 0 or request in list(self.waiting) for request in load.requests)
            waits = bool(load.requests) or load.is_ahead
            demand(waits and not elsewhere, "loaded block", "a request is in two places")
            holders.update(load.prefix + load.blocks)
        holders.update(self._check_pins())
        taken = {b: refs for b, refs in enumerate(pool.refs) if refs}
        demand(taken == dict(holders), "block accounting", "reference counts are not the holders")
        for load in self.engine.store.loading:
            demand(
                not any(pool.hash_of[b] for b in load.blocks), "loaded block", "a block is found before its load ends"
            )
        blank, cached = pool.blank, list(pool.cached)
        free = set(range(pool.num_blocks)).difference(taken)
        demand(
            len(blank) + len(cached) == len(free) == pool.num_free, "block accounting", "free + held is not the pool"
        )
        demand(set(blank) | set(cached) == free, "block accounting", "a held block is in a free list")
        hash_of, by_hash = pool.hash_of, pool.by_hash
        demand(not any(map(hash_of.__getitem__, blank)), "prefix-cache content", "a blank block has a hash")
        demand(all(map(hash_of.__getitem__, cached)), "prefix-cache content", "a cached block has no hash")
        is_found = len(by_hash) == len(hash_of) - hash_of.count(None)
        is_found = is_found and all(hash_of[b] == name for name, b in by_hash.items())
        demand(is_found, "prefix-cache content", "hash map is not a bijection")
        for step, blocks in self._touched.items():
            demand(blocks.isdisjoint(free), "fence", "step {} may still write a free block", step)

    def _check_pins(self) -> list[int]:
        """Return the blocks that pins hold, each as often as it is held."""
        if not self.engine.store.pins:
            self._pinned.clear()
            return []
        epoch, pins = self.epoch, {pin.id: pin for pin in self.engine.store.pins}
        groups, hash_of = len(self.groups), epoch.kv.pool.hash_of
        for pin in pins.values():
            for at, block in enumerate(pin.table):
                name = in_group_name(pin.names[at // groups], at % groups)
                demand(block == NO_BLOCK or hash_of[block] == name, "pinned block", "{} lost block {}", pin.id, at)
            before = len(self._pinned.get(pin.id, ()))
            demand(len(pin.table) >= before, "pinned block", "{} has fewer blocks than before", pin.id)
        blocks = [block for pin in pins.values() for block in pin.blocks]
        names = {name for pin in pins.values() for name in pin.names}
        demand(len(names) * groups <= epoch.limits.most_pinned, "pinned block", "the longest request does not fit")
        self._pinned = {pin.id: pin.table for pin in pins.values()}
        return blocks

    def _table(self, slot: int, group: int) -> list[int]:
        return self.epoch.kv.tables[slot][group :: len(self.groups)]

    def _first_block(self, group: int, position: int) -> int:
        """First block that a query at `position` reads."""
        kind, span = (own := self.groups[group]).kind, own.size
        if kind == "full_attention":
            return 0
        first = max(0, position - span + 1) if kind == "sliding_window" else position - position % span
        return first // self.epoch.limits.block_size

    def _check_window(self, slot: int, group: int, committed: int) -> None:
        """Blocks behind the window: a live slot has no others, and a table keeps all that a query may read."""
        table, first = self._table(slot, group), self._first_block(group, committed)
        missing = table.count(NO_BLOCK)
        demand(NO_BLOCK not in table[missing:], WINDOW, "slot {} has gaps in group {}", slot, group)
        demand(missing <= first, WINDOW, "slot {}: block {} of group {} may be read", slot, first, group)
        if self.epoch.slots.state[slot] == LIVE and self.epoch.slots.inflight[slot] == 0:
            demand(missing == first, WINDOW, "slot {} keeps blocks of group {} behind it", slot, group)

    def check_cache(self, kv: list[list[int | None]], tainted: Collection[int] = ()) -> None:
        """Prefix-cache content, when every dispatched plan has reached the oracle: each cached block holds what its
        hash stands for, but `tainted` ones."""
        for block_hash, block in self.epoch.kv.pool.by_hash.items():
            if kv[block] != self.known.get(block_hash) and block not in tainted:
                has_known = block_hash in self.known
                demand(has_known, "prefix-cache content", "block {} has a hash of no known tokens", block)
                demand(False, "prefix-cache content", "block {} does not hold what its hash promises", block)

    @property
    def confirmed(self) -> int:
        """The last step whose result was applied."""
        return self._processed

    def check_drained(self) -> None:
        """Clean drain."""
        epoch = self.epoch
        demand(not self.engine.queue and not epoch.fences, "clean drain", "steps or fences")
        demand(not len(epoch.running) and not len(self.waiting), "clean drain", "requests")
        pinned = {block for pin in self.engine.store.pins for block in pin.blocks}
        demand(epoch.kv.num_free == epoch.limits.num_blocks - len(pinned), "clean drain", "blocks")
        demand(len(epoch.slots.free) == epoch.limits.num_slots, "clean drain", "slots")
        demand(not epoch.released, "clean drain", "releases that no worker was notified of")
