"""Random workloads: small pools, few seats, shared prefixes, every kind of stop."""

from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

from protocol.kv_groups import ONE_GROUP, KVGroup
from protocol.lora import LoRAAdapter
from protocol.media import Media, MediaItem
from protocol.sampling import Pooling, SamplingParams, StructuredOutputParams
from services.scheduler.core.limits import Limits
from tests.simulation.drafts import ACCEPTANCES, Speculating
from tests.simulation.grammar import REFUSED, structured
from tests.simulation.parameters import MATRIX, OTHERS, STRUCTURED, with_parameters
from tests.simulation.world import params

STATE = KVGroup("recurrent_state")
ADAPTERS = tuple(LoRAAdapter(name, f"/{name}", name * 64) for name in "abc")


@dataclass(frozen=True)
class Arrival:
    prompt: list[int]
    params: SamplingParams
    frontend: int
    priority: int
    salt: str
    replayed: float
    """Share of the answer that counts as delivered before, 0 to 1."""
    grammar: StructuredOutputParams | None = None
    pooling: Pooling = Pooling.NONE
    lora: LoRAAdapter | None = None
    media: Media | None = None


@dataclass(frozen=True)
class Workload:
    limits: Limits
    threshold: int
    """long_prefill_token_threshold, 0: none."""
    policy: str
    """chunked, balanced, phased, or random."""
    vocab: int
    use_priority: bool
    arrivals: list[Arrival]
    burst: float
    """Probability that another request arrives in the same round."""
    abort: float
    reset: float
    noise: float
    """Probabilities per round of an abort, of a reset, of a late or repeated result."""
    shuffle: bool
    """True: results may overtake one another."""
    epochs: float
    """Probability per round that the workers are lost and others take over."""
    uneven: bool
    """True: pipeline stages take different times."""
    mask_speed: float
    """Probability that the next masks are made in the same round; 1: they are made at once."""
    speculating: Speculating | None = None
    failing: float = 0.0
    """Probability that the adapter of a request that enters cannot be loaded."""

    @property
    def depths(self) -> tuple[int, ...]:
        """Batch queue depths to play: synchronous, ahead by one step and by more."""
        stages = self.limits.stages
        return (1, 2, 3, 5) if stages == 1 else (stages, stages + 1, 2 * stages)


def speculating(seed: int) -> Speculating:
    """Return the speculation of a workload."""
    rng = Random(f"speculation/{seed}")
    lengths = rng.choice(((1,), (2,), (3,), (5,), (0, 1, 2, 3, 5), (0, 3)))
    longest = rng.choice((0, 0, 0, 20))
    return Speculating(rng.choice(ACCEPTANCES), lengths, rng.random() < 0.4, longest)


@lru_cache(16)
def draw(seed: int, speculates: bool = False, tier: bool = False) -> Workload:
    """Return the workload of a seed. `tier`: the workers have one."""
    rng, of_group, of_masks = Random(seed), Random(f"group/{seed}"), Random(f"masks/{seed}")
    block_size = rng.choice((4, 4, 16))
    num_blocks = rng.randint(17, 33) if block_size == 4 or rng.random() < 0.5 else rng.randint(5, 12)
    longest = min(num_blocks * block_size, rng.choice((32, 48, 72)))
    contended = rng.random() < 0.3
    limits = Limits(
        max_num_seqs=rng.choice((1, 2, 2) if contended else (1, 3, 4, 4, 8)),
        max_num_batched_tokens=rng.choice((3, 8, 16, 16, 48, 64)) if rng.random() < 0.95 else 1,
        max_model_len=longest,
        num_blocks=num_blocks,
        block_size=block_size,
        enable_prefix_caching=rng.random() < 0.9,
        stages=of_group.choice((1, 1, 1, 1, 1, 2, 4)),
    )
    policy = of_group.choice(("chunked", "chunked", "balanced", "phased"))
    if speculates:  # phased is refused
        policy = "chunked" if policy == "phased" else policy
    limits = replace(limits, leaves_rows_out=policy != "phased" and of_masks.random() < 0.6, loads_blocks=tier)
    if policy == "phased":  # chunks are whole blocks
        limits = replace(limits, max_num_batched_tokens=-(-limits.max_num_batched_tokens // block_size) * block_size)
    if not tier:
        limits = with_groups(limits, policy, Random(f"block tables/{seed}"), speculates)
    longest = limits.max_model_len
    vocab = rng.choice((6, 16, 64, 500))
    shared = [[rng.randrange(vocab) for _ in range(longest)] for _ in range(2)]
    calm = rng.random() < 0.3
    arrivals = [_arrival(rng, shared, longest, vocab) for _ in range(rng.randint(3, 10))]
    of_parameters = Random(f"parameters/{seed}")
    if of_parameters.random() < 0.4:
        arrivals = [_asking(arrival, of_parameters, vocab) for arrival in arrivals]
    if limits.leaves_rows_out:
        arrivals = [_constrained(arrival, of_masks) for arrival in arrivals]
    of_adapters = Random(f"adapters/{seed}")
    if of_adapters.random() < 0.3 and policy != "phased":  # refused
        limits = replace(limits, max_loras=of_adapters.choice((1, 2)))
        arrivals = [replace(arrival, lora=of_adapters.choice((None, *ADAPTERS))) for arrival in arrivals]
    of_pooling = Random(f"pooling/{seed}")
    pools = not (speculates or tier or policy == "phased" or limits.groups != ONE_GROUP)
    if pools := pools and of_pooling.random() < 0.15:
        limits = with_pooler(limits, of_pooling.random() < 0.7)
        arrivals = [_pooled(arrival) for arrival in arrivals]
    of_media = Random(f"media/{seed}")
    if of_media.random() < 0.3 and policy != "phased" and not pools:  # refused
        limits = replace(limits, encoder_budget=of_media.choice((1, 4, 9, 24)))
        arrivals = [_with_media(arrival, limits.encoder_budget, of_media) for arrival in arrivals]
    return Workload(
        limits=limits,
        threshold=rng.choice((0, 0, 0, 3, 5)),
        policy="random" if rng.random() < 0.15 and not pools else policy,
        vocab=vocab,
        use_priority=contended or rng.random() < 0.4,
        arrivals=arrivals,
        burst=rng.choice((0.0, 0.2) if contended else (0.2, 0.6, 1.0)),
        abort=0.0 if calm else 0.08,
        reset=0.0 if calm else 0.02,
        noise=0.0 if calm else 0.03,
        shuffle=rng.random() < 0.3,
        epochs=of_group.choice((0.0, 0.0, 0.02, 0.08)),
        uneven=of_group.random() < 0.3,
        mask_speed=of_masks.choice((1, 1, 0.8, 0.5, 0.2)),
        speculating=speculating(seed) if speculates else None,
        failing=0.0 if tier else of_adapters.choice((0.0, 0.1, 0.4)),  # vLLM's workers have no tier
    )


def with_pooler(limits: Limits, whole_prompts: bool) -> Limits:
    """Return the sizes of a model that generates no text."""
    if not whole_prompts:
        return replace(limits, pools_only=True)
    fitting = max(limits.max_num_batched_tokens, limits.max_model_len - 1)
    return replace(
        limits, max_num_batched_tokens=fitting, pools_only=True, whole_prompts=True, enable_prefix_caching=False
    )


def _pooled(arrival: Arrival) -> Arrival:
    return replace(arrival, params=params(1, eos=False), replayed=0.0, grammar=None, pooling=Pooling.MODEL, lora=None)


def _with_media(arrival: Arrival, longest: int, rng: Random) -> Arrival:
    """Return the request with images of two contents, anywhere in its prompt, in most cases."""
    items: list[MediaItem] = []
    at = rng.randint(0, 12)
    while (length := rng.randint(1, longest)) <= len(arrival.prompt) - at:
        items.append(MediaItem(at, length, rng.choice("xy")))
        at += length + rng.choice((0, 1, 7))
    if not items or arrival.pooling is not Pooling.NONE or arrival.params.prompt_logprobs is not None:
        return arrival
    return replace(arrival, media=Media(items))


def with_groups(limits: Limits, policy: str, rng: Random, speculates: bool) -> Limits:
    """Return the sizes of a model with several groups of KV cache, in some cases."""
    if rng.random() < 0.6 or policy == "phased":  # which pads prompts to lengths that a window may not serve
        return limits
    span = rng.choice((1, 3, 4, 7, 12, 16, 20))
    window, chunk = KVGroup("sliding_window", span), KVGroup("chunked_local_attention", span)
    groups: tuple[KVGroup, ...] = rng.choice(
        (
            (KVGroup(), window),
            (KVGroup(), window, window, window),
            (window,),
            (KVGroup(), chunk),
            (window, KVGroup("sliding_window", rng.choice((5, 24))), KVGroup()),
        )
    )
    if not speculates and (of_states := Random(f"states/{rng.random()}")).random() < 0.5:
        groups = of_states.choice(((STATE, KVGroup()), (KVGroup(), STATE, STATE), (STATE, *groups)))
        limits = replace(limits, leaves_rows_out=limits.leaves_rows_out and limits.stages == 1)
    blocks = max(2, round(limits.num_blocks * len(groups) * rng.choice((0.5, 0.7, 1.0))))
    grouped = replace(limits, groups=groups, num_blocks=blocks)
    while grouped.kv_capacity < min(limits.max_model_len, 16):
        grouped = replace(grouped, num_blocks=grouped.num_blocks + 1)
    return replace(grouped, max_model_len=min(limits.max_model_len, grouped.kv_capacity))


def _constrained(arrival: Arrival, rng: Random) -> Arrival:
    """Return the request, with a grammar in one of three cases."""
    if rng.random() < 2 / 3 or arrival.grammar is not None or arrival.pooling is not Pooling.NONE:
        return arrival
    return replace(arrival, grammar=structured(rng.randrange(2**32)))


def _arrival(rng: Random, shared: list[list[int]], longest: int, vocab: int) -> Arrival:
    length = rng.randint(1, longest - 1 if rng.random() < 0.2 else longest // 2)
    kept = rng.choice((0, length, length, rng.randint(0, length)))
    prompt = rng.choice(shared)[:kept] + [rng.randrange(vocab) for _ in range(length - kept)]
    return Arrival(
        prompt=prompt,
        params=params(
            rng.choice((1, 2, 3, 5, rng.randint(4, 20), 100)),
            *rng.sample(range(vocab), rng.choice((0, 0, 1, 3))),
            eos=rng.random() < 0.6,
            min_tokens=rng.choice((0, 0, 0, 2, 6)),
            seed=rng.choice((None, None, rng.randrange(2**63))),
        ),
        frontend=rng.choice((0, 0, 1, 2)),
        priority=rng.choice((0, 0, -1, 1, 5)),
        salt=rng.choice(("", "", "", "a")),
        replayed=rng.choice((0.0, 0.0, 0.0, 0.5, 0.9)),
    )


def _asking(arrival: Arrival, rng: Random, vocab: int) -> Arrival:
    """Return the request, mostly with pooling, a grammar or sampling parameters."""
    match rng.choice(("nothing", "pooling", "a grammar that fails", "parameters", "parameters", "parameters")):
        case "pooling":
            pooling = rng.choice((Pooling.LAST, Pooling.MEAN))
            return replace(arrival, params=params(1, eos=False), replayed=0.0, pooling=pooling)
        case "a grammar that fails":
            grammar = structured(rng.randrange(2**32), rng.choice((0, 1, 2, 5)))
            if rng.random() < 0.2:
                grammar = StructuredOutputParams(grammar.kind, REFUSED)
            return replace(arrival, grammar=grammar)
        case "parameters":
            name = rng.choice((*MATRIX, *OTHERS, STRUCTURED, f"{STRUCTURED} + penalties + logprobs"))
            sampling, grammar = with_parameters(name, arrival.params, rng, vocab)
            return replace(arrival, params=sampling, grammar=grammar)
    return arrival
