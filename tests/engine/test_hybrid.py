"""The trained hybrid through the whole engine: sensible text, the tokens of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from metrale_async.engine import AsyncEngine, SamplingParams

ANSWER_TOKENS = 40


async def test_greedy_answers_are_those_of_transformers(tiny_hybrid: Path) -> None:
    held_out = json.loads((tiny_hybrid / "texts.json").read_text())["held_out"]
    reference = AutoModelForCausalLM.from_pretrained(tiny_hybrid, dtype=torch.float32)
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    async with AsyncEngine(model=str(tiny_hybrid), dtype="float32", kv_cache_gb=0.1) as engine:
        for text in held_out[:6]:
            output = await engine.complete(text[:400], params)
            tokens = list(output.choices[0].token_ids)
            sequence = torch.tensor([[*output.prompt_token_ids, *tokens]])
            with torch.inference_mode():
                logits = reference(sequence, use_cache=False).logits[0, len(output.prompt_token_ids) - 1 : -1]
            assert logits.argmax(dim=-1).tolist() == tokens


async def test_it_writes_docstring_english(tiny_hybrid: Path) -> None:
    async with AsyncEngine(model=str(tiny_hybrid), kv_cache_gb=0.1) as engine:
        question = [{"role": "user", "content": "What does os.path.join do?"}]
        output = await engine.complete(question, SamplingParams(temperature=0.0, max_tokens=60))
    words = output.choices[0].text.lower().split()
    assert len(words) > 20
    assert len(set(words) & {"the", "a", "to", "of", "is", "and", "return", "path", "file"}) >= 4
