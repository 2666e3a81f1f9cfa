"""What the prefix cache saves and costs, cold and warm in turn in one process.

    PYTHONPATH=.:kernels:storage python bench/prefix_cache.py [MODEL]

Time to first token of a 2,048-token prompt whose first 1,984 tokens are cached, against cold; and of prompts that share
nothing, and their decoding, with the cache on against off. Also the tree alone at 100,000 blocks.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable

from metrale_async.cache import BlockPool, RadixPrefixCache, block_hashes, root_hash
from metrale_async.engine import AsyncEngine, SamplingParams

ROUNDS = 7
PROMPT_TOKENS, CACHED_TOKENS = 2048, 1984


async def first_token_s(engine: AsyncEngine, prompt: list[int]) -> float:
    started = time.perf_counter()
    await engine.complete(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    return time.perf_counter() - started


async def decode_s(engine: AsyncEngine, prompt: list[int]) -> float:
    """Seconds of 64 tokens after the first."""
    first = last = 0.0
    async for _ in engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=65, ignore_eos=True)):
        last = time.perf_counter()
        first = first or last
    return last - first


async def engines(model: str) -> None:
    rng = random.Random(0)

    def draw(count: int) -> list[int]:
        return [rng.randrange(10, 4000) for _ in range(count)]

    figures: dict[str, list[float]] = {}
    async with (
        AsyncEngine(model=model, kv_cache_gb=1.0) as plain,
        AsyncEngine(model=model, kv_cache_gb=1.0, enable_prefix_caching=True) as cached,
    ):
        for _ in range(ROUNDS):
            prompt = draw(PROMPT_TOKENS)
            figures.setdefault("cold", []).append(await first_token_s(cached, prompt))
            ending = prompt[:CACHED_TOKENS] + draw(PROMPT_TOKENS - CACHED_TOKENS)
            figures.setdefault("hit", []).append(await first_token_s(cached, ending))
            for name, engine in (("off", plain), ("on", cached)):
                figures.setdefault(f"no reuse {name}", []).append(await first_token_s(engine, draw(PROMPT_TOKENS)))
                figures.setdefault(f"decode {name}", []).append(await decode_s(engine, draw(128)))
    median = {name: statistics.median(values) for name, values in figures.items()}
    print(
        f"hit / cold: {median['hit'] / median['cold']:.1%} ({median['hit'] * 1e3:.0f} / {median['cold'] * 1e3:.0f} ms)"
    )
    for what in ("no reuse", "decode"):
        ratios = [on / off for on, off in zip(figures[f"{what} on"], figures[f"{what} off"], strict=True)]
        print(f"{what}, cache on / off: {statistics.median(ratios):.3f} (each pair side by side, {ROUNDS} pairs)")


def tree() -> None:
    size, blocks, per_prompt = 16, 100_000, 128
    rng = random.Random(0)
    pool = BlockPool(blocks + 60_000)
    cache = RadixPrefixCache(pool, size)
    root = root_hash("model")

    def draw() -> list[int]:
        return [rng.randrange(49_000) for _ in range(per_prompt * size)]

    def insert(prompt: list[int]) -> list[bytes]:
        names = block_hashes(root, prompt, size)
        held = pool.allocate(per_prompt)
        cache.insert(names, prompt, held, 0)
        cache.release(held)
        return names

    known = [(prompt, insert(prompt)) for prompt in (draw() for _ in range(blocks // per_prompt + 1))]
    fresh = [draw() for _ in range(200)]

    def microseconds(work: Callable[[int], object]) -> float:
        times = []
        for index in range(200):
            started = time.perf_counter()
            work(index)
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e6

    print(f"tree of {len(cache.held_blocks())} blocks, prompts of {per_prompt} blocks, medians in microseconds:")
    print(f"  look-up {microseconds(lambda i: cache.match(known[i][1], known[i][0])):.0f}, ", end="")
    print(f"naming the blocks {microseconds(lambda i: block_hashes(root, fresh[i], size)):.0f}, ", end="")
    print(f"insert, names and release included {microseconds(lambda i: insert(fresh[i])):.0f}, ", end="")
    print(f"evicting {per_prompt} {microseconds(lambda i: cache.evict(per_prompt)):.0f}")


if __name__ == "__main__":
    tree()
    asyncio.run(engines(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"))
