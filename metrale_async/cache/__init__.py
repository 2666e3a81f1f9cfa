"""Memory that outlives a step: KV blocks, who refers to them, and the prefix cache. Pure bookkeeping; imports nothing
else of the package."""

from metrale_async.cache.block_hash import block_hashes, root_hash
from metrale_async.cache.block_pool import BlockPool, BlockPoolStatistics
from metrale_async.cache.prefix_cache import NoPrefixCaching, PrefixCache, PrefixCacheStatistics, PrefixMatch
from metrale_async.cache.radix_cache import RadixPrefixCache, SnapshotLimits

__all__ = [
    "BlockPool",
    "BlockPoolStatistics",
    "NoPrefixCaching",
    "PrefixCache",
    "PrefixCacheStatistics",
    "PrefixMatch",
    "RadixPrefixCache",
    "SnapshotLimits",
    "block_hashes",
    "root_hash",
]
