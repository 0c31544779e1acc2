"""Credit from learned evaluators: worked numbers and laws."""

import numpy as np
from test_estimators import make_batch, run

from focus.credit import learned

f32 = np.float32


def check(got, want):
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_archer():
    batch = make_batch(
        [1], q=f32([[0.5, 0.8]]), q2=f32([[0.6, 0.7]]), value=f32([[0.4, 0.9, np.nan]]),
        v2=f32([[0.5, 0.6, np.nan]]),
    )  # fmt: skip
    credit = run("archer", batch)
    check(credit.segment_advantages[0], [0.1, 0.1])
    check(credit.targets["q"][0], [0.57, 1])


def test_step_agent():
    batch = make_batch(
        [0], num_segments=[1], expert_score=f32([[0.5]]), behaviour_logp=f32([[-0.1, -0.2]]),
        ref_logp=np.zeros((1, 2), f32),
    )  # fmt: skip
    check(run("step_agent", batch).aux["reward"], [[-0.08]])
    batch = make_batch([0], num_segments=[1], expert_score=f32([[0.8]]))
    check(run("step_agent", batch, form="irl").segment_advantages, [[1.386294]])


def test_sweet_rl():
    batch = make_batch(
        [1], tokens_per_segment=3, token_segment=np.array([[0, 0, -1, 1, 1, 1]], np.int32),
        token_mask=np.array([[1, 1, 0, 1, 1, 1]], bool),
        priv_logp=f32([[0.2, 0.4, np.nan, -0.1, 0.1, 0.3]]), ref_logp=np.zeros((1, 6), f32),
    )  # fmt: skip
    check(run("sweet_rl", batch).segment_advantages[0], [0.3, 0.1])


def test_spa_rl():
    batch = make_batch(
        [1], num_segments=[3], score=f32([[0.2, 0.3, 0.4]]), valid=np.array([[1, 0, 1]], bool)
    )
    credit = run("spa_rl", batch)
    check(credit.aux["reward"][0], [0.7, 0.3, 0.9])
    check(credit.segment_advantages[0], [1.9, 1.2, 0.9])
    check(credit.aux["progress_loss"], [0.01])


def test_agent_prm():
    credit = run("agent_prm", make_batch([1], q=f32([[0.4, 0.7]])), lambda_=0.5)
    check(credit.segment_advantages[0], [0.45, 0.3])
    check(credit.targets["q"][0], [0.85, 1])


def test_critic_search():
    batch = make_batch([1, 0], score=f32([[1, 1], [0, 1]]))
    got = run("critic_search", batch).segment_advantages
    check(got, [[0.655329, 0.655329], [-0.905329, -0.405330]])
    judged = run("critic_search", batch, weight=1.0).segment_advantages
    check(judged, [[0.5, 0.5], [-1.5, 0.5]])
    got = run("critic_search", batch, mix="add").segment_advantages
    check(got, [[0.832106, 0.832106], [-1.082105, -0.582106]])


def test_swe_trace():
    batch = make_batch([1, 1, 0], score=f32([[np.nan, 0.9], [np.nan, 0.1], [np.nan, 1]]))
    credit = run("swe_trace", batch)
    check(credit.aux["reward"], [0.96, 0.64, 0.4])
    check(credit.segment_advantages[:, 0], [1.044070, -0.094915, -0.949155])
    pure = run("swe_trace", batch, outcome_weight=1.0)
    check(pure.advantages, run("grpo", batch).advantages)


def test_pro_cua():
    batch = make_batch(
        [0] * 6, num_segments=[1] * 6, score=f32([[1], [0], [0], [0], [1], [1]]),
        state_key=np.array([[0], [0], [0], [0], [1], [1]]),
    )  # fmt: skip
    check(run("pro_cua", batch).segment_advantages[:, 0], [1.5, -0.5, -0.5, -0.5, 0, 0])


def test_vis_critic_heads():
    got = learned.vis_critic_score(f32([0.9, 0.2]), f32([0.5, 0]), f32([0.1, 0.6]))
    check(got, [1.3, -0.4])


def test_hygae():
    batch = make_batch([1], token_value=f32([[0.2, 0.3, 0.4, 0.5]]))
    for weight, want in (
        (1.0, [0.45, 0.45, 0.5, 0.5]),
        (0.0, [0.2375, 0.275, 0.35, 0.5]),
        (0.5, [0.34375, 0.3625, 0.425, 0.5]),
    ):
        check(run("hygae", batch, weight=weight, lambda_=0.5).advantages[0], want)


def test_sapo_2608_19842():
    check(learned.sapo_value(f32([0.8, 2, 9]), np.zeros(3, f32)), [0.2, 0.5, 1])
    batch = make_batch([1], value=f32([[0.2, 0.5, np.nan]]), q=f32([[0.3, 0.6]]))
    credit = run("sapo_2608_19842", batch, lambda_=0.5, whiten=False)
    check(credit.segment_advantages[0], [0.55, 0.5])
    check(credit.targets["value"][0], [0.75, 1])
    check(credit.targets["q"][0], [0.6, 1])
    np.testing.assert_allclose(
        run("sapo_2608_19842", batch, lambda_=0.5).segment_advantages[0], [1, -1], atol=1e-4
    )
