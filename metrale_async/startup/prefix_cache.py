"""Whether prefixes are cached: what was asked for, and what the model allows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from metrale_async.cache import BlockPool, NoPrefixCaching, PrefixCache, RadixPrefixCache
from metrale_async.engine import EngineArgs
from metrale_async.models import LayerState, PagedState

logger = logging.getLogger(__name__)


def build_prefix_cache(
    args: EngineArgs, model_type: str, states: Sequence[Sequence[LayerState]]
) -> Callable[[BlockPool, int], PrefixCache]:
    """How an engine makes its prefix cache from its block pool and block size.

    A model whose state does not lie in KV blocks alone gets none, with a warning, whatever was asked for.
    """
    if not args.enable_prefix_caching:
        return lambda pool, block_size: NoPrefixCaching(pool)
    others = {type(state).__name__ for layer in states for state in layer if not isinstance(state, PagedState)}
    if others:
        logger.warning(
            "--enable-prefix-caching has no effect: layers of %s keep %s outside the KV blocks",
            model_type,
            " and ".join(sorted(others)),
        )
        return lambda pool, block_size: NoPrefixCaching(pool)
    return RadixPrefixCache
