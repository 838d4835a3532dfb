"""The rule of SGLang's router, to compare with. Importing this module makes it a policy named `cache_aware`."""

from services.frontend.placement import PlacementView
from services.frontend.placement.policies import BUILT_IN


class CacheAwarePolicy:
    """The rule of SGLang's router (`cache_aware`), with the defaults of its documentation: the least
    loaded engine while loads are unequal; otherwise the one with the longest match, if it is long enough.

    https://github.com/lightseekorg/smg/blob/main/docs/concepts/routing/cache-aware.md
    """

    uses_prefixes = True
    CACHE_THRESHOLD = 0.3
    BALANCE_ABS_THRESHOLD = 64
    BALANCE_REL_THRESHOLD = 1.5

    def choose(self, view: PlacementView) -> int:
        streams = view.streams
        least, most = streams.min(), streams.max()
        is_even = most - least <= self.BALANCE_ABS_THRESHOLD or most <= self.BALANCE_REL_THRESHOLD * least
        longest = view.hits.max()
        if is_even and longest > self.CACHE_THRESHOLD * view.num_tokens:
            return view.pick(view.hits == longest)
        return view.pick(streams == least)


BUILT_IN["cache_aware"] = CacheAwarePolicy
