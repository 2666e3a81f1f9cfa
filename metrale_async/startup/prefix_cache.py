"""Whether prefixes are cached: what was asked for, and what the model allows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from metrale_async.cache import BlockPool, NoPrefixCaching, PrefixCache, RadixPrefixCache, SnapshotLimits
from metrale_async.engine import EngineArgs
from metrale_async.models import LayerState, OpaqueState, RecurrentState

logger = logging.getLogger(__name__)


def build_prefix_cache(
    args: EngineArgs, model_type: str, states: Sequence[Sequence[LayerState]]
) -> Callable[[BlockPool, int], PrefixCache]:
    """How an engine makes its prefix cache from its block pool and block size.

    A model with a state that cannot be saved gets none, with a warning, whatever was asked for. Recurrent states are
    kept as snapshots, which bound where a hit can end.
    """
    if not args.enable_prefix_caching:
        return lambda pool, block_size: NoPrefixCaching(pool)
    opaque = [state.reason for layer in states for state in layer if isinstance(state, OpaqueState)]
    if opaque:
        logger.warning("--enable-prefix-caching has no effect: layers of %s keep %s", model_type, opaque[0])
        return lambda pool, block_size: NoPrefixCaching(pool)
    if not any(isinstance(state, RecurrentState) for layer in states for state in layer):
        return RadixPrefixCache
    logger.info(
        "prefix cache of %s: a hit ends at one of up to %d snapshots of its recurrent states, after %d tokens or more",
        model_type,
        args.ssm_cache_slots,
        args.marconi_min_tokens,
    )
    snapshots = SnapshotLimits(places=args.ssm_cache_slots, min_tokens=args.marconi_min_tokens)
    return lambda pool, block_size: RadixPrefixCache(pool, block_size, snapshots)
