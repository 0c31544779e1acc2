"""Where tokens come from: one protocol, an engine in this process, and servers over HTTP."""

from focus.engine.protocol import (
    Engine,
    EngineError,
    EngineInfo,
    FinishReason,
    FleetDead,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
)

__all__ = [
    "Engine",
    "EngineError",
    "EngineInfo",
    "FinishReason",
    "FleetDead",
    "GenerateRequest",
    "GenerateResult",
    "SamplingParams",
]
