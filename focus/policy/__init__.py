"""The language model: parameters, forward passes, log-probabilities, tokens."""

from focus.policy.logprobs import chunked_logprobs, token_logprobs

__all__ = ["chunked_logprobs", "token_logprobs"]
