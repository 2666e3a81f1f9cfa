"""Memory that outlives a step: KV blocks and who refers to them. Pure bookkeeping; imports nothing of the package."""

from metrale_async.cache.block_pool import BlockPool, BlockPoolStatistics

__all__ = ["BlockPool", "BlockPoolStatistics"]
