"""Whatever the servers do: every completion is whole, within its budget, and of current weights."""

from __future__ import annotations

import pytest
from fake_server import EOS, VOCAB, fake_fleet, logp_of, next_token, text_of

from focus.rollout.engine import GenerateRequest, SamplingParams
from focus.rollout.fleet import Limits
from focus.rollout.sglang import SGLangEngine

FAST = dict(
    connect_timeout_s=1.0,
    request_timeout_s=0.5,
    control_timeout_s=0.5,
    update_timeout_s=0.5,
    probe_every_s=0.02,
    probe_timeout_s=0.2,
    backoff_s=0.01,
    break_s=0.02,
    dead_after_s=5.0,
)


def client(servers, *, router=None, max_context=256, **limits):
    return SGLangEngine(
        [server.url for server in servers],
        router_url=router,
        vocab_size=VOCAB,
        max_context=max_context,
        decode=text_of,
        eos_token_ids=(EOS,),
        limits=Limits(**(FAST | limits)),
    )


def request(rid="r", prompt=(5, 6, 7), count=8, **options):
    session = options.pop("session", "")
    options = {"temperature": 1.0, "ignore_eos": True} | options
    return GenerateRequest(
        rid, tuple(prompt), SamplingParams(max_new_tokens=count, **options), session=session
    )


def check(result, asked, version="default"):
    """Token for token what this version says, from wherever it came."""
    ids = list(asked.input_ids)
    for i, (token, logp) in enumerate(zip(result.output_ids, result.output_logp, strict=True)):
        current = version if isinstance(version, str) else version(result, i)
        assert token == next_token(current, ids)
        assert logp == logp_of(current, ids, token, asked.sampling.temperature)
        ids.append(token)
    assert len(result.output_ids) <= asked.sampling.max_new_tokens
    assert result.rid == asked.rid and result.prompt_tokens == len(asked.input_ids)
    if result.weight_versions:
        assert result.weight_versions[0][1] == 0
        assert result.weight_versions[-1][2] == len(result.output_ids)


@pytest.mark.parametrize(
    "fault",
    [
        "reset",
        "hang",
        "slow",
        "500",
        "503",
        "truncated",
        "invalid",
        "count",
        "logprobs",
        "version",
        "too_long",
    ],
)
async def test_a_fault_costs_another_try_and_nothing_else(fault):
    async with fake_fleet(2) as servers, client(servers) as engine:
        await engine.load_weights("/tmp", "v1")
        for server in servers:
            server.faults.append(fault)
        asked = request()
        check(await engine.generate(asked), asked, "v1")
        sent = [body for server in servers for body in server.generations()]
        assert len(sent) > 1 and len({body["rid"] for body in sent}) == len(sent)
        if fault == "503":
            assert engine.stats.busy and not engine.stats.failures
        else:
            assert engine.stats.failures
        garbled = fault in ("count", "logprobs", "version", "too_long")
        assert bool(engine.stats.discarded_tokens) == garbled
