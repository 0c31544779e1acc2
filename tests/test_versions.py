"""Which weights sampled a token: names, spans, and how far behind they are."""

import dataclasses

import numpy as np
import pytest

from focus.learner.batches import credit_batch, token_versions
from focus.types import (
    Generation,
    Segment,
    State,
    Trajectory,
    merged_spans,
    version_name,
    version_step,
)


def generation(*spans, count=None):
    """A generation with `(version, tokens)` one after the other."""
    versions, end = [], 0
    for version, tokens in spans:
        versions.append((version, end, end + tokens))
        end += tokens
    count = end if count is None else count
    return Generation("act", (1,), (5,) * count, (-0.5,) * count, "stop", tuple(versions))


def trajectory(*generations, **changes):
    fields = dict(outcome=1.0, success=True, end="terminal") | changes
    segments = tuple(Segment((g,), "", "") for g in generations)
    states = (State(None, None, (1,), 0),) * (len(segments) + 1)
    return Trajectory("0/0.0", "train/0", 0, states, segments, **fields)


def batch(*trajectories, **options):
    sizes = dict(num_segments=4, num_tokens=16, num_rows=4)
    return credit_batch(trajectories, **sizes, **options)


def test_a_name_says_the_step_and_whose_it_is():
    assert version_name(12) == "v12" and version_name(12, run="5f0c") == "v12-5f0c"
    assert [version_step(name) for name in ("v0", "v12", "v12-5f0c")] == [0, 12, 12]
    for name in ("default", "12", "v12-", "v-1", "xv3", "v3.5"):
        with pytest.raises(ValueError, match="push the run's weights"):
            version_step(name)


def test_spans_are_joined_over_generations_and_cover_all_tokens():
    mixed = trajectory(generation(("v3", 4)), generation(("v3", 2), ("v4", 3)), generation())
    assert mixed.weight_versions == (("v3", 0, 6), ("v4", 6, 9))
    np.testing.assert_array_equal(token_versions(mixed), [3] * 6 + [4] * 3)
    assert merged_spans([("v1", 0, 2), ("v1", 3, 4)]) == (("v1", 0, 2), ("v1", 3, 4))
    # Back to weights of before, as a fleet of several versions may go.
    back = trajectory(generation(("v4", 1), ("v3", 1), ("v4", 1)))
    np.testing.assert_array_equal(token_versions(back), [4, 3, 4])


@pytest.mark.parametrize("spans", [(("v1", 2),), (("v1", 4),)])
def test_spans_that_do_not_cover_the_tokens_are_refused(spans):
    with pytest.raises(ValueError, match="do not cover 3 tokens"):
        generation(*spans, count=3)
    with pytest.raises(ValueError, match="do not cover"):
        dataclasses.replace(generation(("v1", 3)), weight_versions=(("v1", 0, 1), ("v2", 2, 3)))


def test_a_batch_says_how_stale_each_token_is():
    fresh, mixed = trajectory(generation(("v5", 2))), trajectory(generation(("v3", 1), ("v5-1", 2)))
    result = batch(fresh, mixed, version=5)
    want = np.zeros((4, 16), np.int32)
    want[1, 0] = 2
    np.testing.assert_array_equal(result.staleness, want)
    assert batch(fresh).staleness is None


def test_a_token_is_never_trained_with_weights_it_was_not_sampled_from():
    with pytest.raises(ValueError, match="weights v6 came to a learner that has only v5"):
        batch(trajectory(generation(("v6", 2))), version=5)
    with pytest.raises(ValueError, match="whose weights are not known"):
        batch(trajectory(generation(count=2)), version=5)
    with pytest.raises(ValueError, match="'default'"):
        batch(trajectory(generation(("default", 2))), version=5)
