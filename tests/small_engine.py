"""What tests of the embedded engine ask of small models, and how."""

import asyncio

import numpy as np

from focus.engine import GenerateRequest, SamplingParams


def text_of(ids):
    return "".join(f"<{i}>" for i in ids)


OPTIONS = dict(
    decode=text_of,
    max_running=4,
    retained=4,
    cache_buckets=(24,),
    prefill_buckets=(4, 8),
    batch_buckets=(2,),
    decode_steps=5,
)


def request(rid, prompt, max_new_tokens=8, seed=0, **sampling):
    sampling = {"ignore_eos": True} | sampling
    params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)
    return GenerateRequest(rid, tuple(prompt), params, seed=seed)


def run(engine, *requests):
    async def main():
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    return asyncio.run(main())


def prompt_of(seed, length):
    """Random tokens of a vocabulary of 23."""
    return tuple(int(i) for i in np.random.default_rng(seed).integers(0, 23, length))
