"""Dense credit without a trained critic: worked numbers and laws."""

import numpy as np
from test_estimators import make_batch, run

f32 = np.float32


def check(got, want):
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_spo_chain_worked_numbers():
    logp = np.log(np.array([[0.5, 0.95, 0.5, 0.5, 0.95, 0.5]], f32))
    channels = {"behaviour_logp": logp, "cut": np.array([[0, 3]]), "cut_value": f32([[0.25, 0.75]])}
    for first, want in ((True, [0.5, 0, 0.5, 0.25, 0, 0.25]), (False, [0, 0, 0, 0.25, 0, 0.25])):
        batch = make_batch(
            [1], num_segments=[1], tokens_per_segment=6, cut_mask=np.array([[first, True]]),
            **channels,
        )  # fmt: skip
        check(run("spo_chain", batch).advantages[0], want)


def test_spo_tree_worked_numbers():
    batch = make_batch(
        [1, 1, 1, 0], parent=np.array([-1, 0, 0, 1, 1, 2, 2]),
        leaf_traj=np.array([-1, -1, -1, 0, 1, 2, 3]),
        node_of_segment=np.array([[1, 3], [1, 4], [2, 5], [2, 6]]),
    )  # fmt: skip
    credit = run("spo_tree", batch)
    check(credit.aux["node_value"], [0.75, 1, 0.5, 1, 1, 1, 0])
    check(credit.segment_advantages, [[0.25, 0], [0.25, 0], [-0.25, 0.5], [-0.25, -0.5]])
    assert not credit.mask[0, 2:].any() and credit.mask[2:].all()
    assert run("spo_tree", batch, drop_zero=False).mask.all()


def test_grpo_lambda_profiles_run_in_opposite_directions():
    batch = make_batch([1, 0], num_segments=[1, 1], tokens_per_segment=3)  # +-1 at ddof 0
    for profile, want in (("recent", [1.75, 1.5, 1]), ("terminal", [0.25, 0.5, 1])):
        credit = run("grpo_lambda", batch, profile=profile, lambda_=0.5, ddof=0)
        check(credit.advantages[0], want)


def test_grpo_lambda_both_equals_a_loop():
    batch = make_batch([1, 0], num_segments=[1, 1], tokens_per_segment=7)
    got = run("grpo_lambda", batch, profile="both", lambda_=0.6, trace_floor=0.1, ddof=0)
    want = [sum(max(0.6 ** (t - j), 0.6**j, 0.1) for t in range(j, 7)) for j in range(7)]
    check(got.advantages[0], want)


def test_tempo_worked_numbers():
    keys = np.array([[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 5, 6], [0, 7, 8, 9]])
    batch = make_batch([1, 1, 0, 0], num_segments=[1] * 4, tokens_per_segment=3, prefix_key=keys)
    want = [[4 / 3, 5 / 3, 1], [4 / 3, 5 / 3, 1], [-2 / 3, -7 / 3, -1], [-2, -1, -1]]
    check(run("tempo", batch).advantages, want)


def test_scar_worked_numbers():
    batch = make_batch([1], coalition=f32([[0, 0.2, 0.4, 1]]), segment_id=np.array([[0, 0, 1, 1]]))
    credit = run("scar", batch)
    check(credit.aux["shapley"][0], [0.4, 0.6])
    check(credit.advantages[0], [1, 1, 0.6, 0.6])
    check(run("scar", batch, alpha=0.0).advantages[0], [1, 1, 1, 1])


def test_spro_worked_numbers_and_law():
    batch = make_batch(
        [1, 0], num_segments=[1, 1], behaviour_logp=f32([[0.1, 0.2], [0, -0.1]]),
        ref_logp=np.zeros((2, 2), f32),
    )  # fmt: skip
    check(run("spro", batch, ddof=0).advantages, [[1.05, 1.2], [-1.05, -1.2]])
    check(run("spro", batch, beta=0.0).advantages, run("grpo", batch).advantages)


def test_pure_worked_numbers():
    batch = make_batch(
        [0, 1], num_segments=[3, 1], score=f32([[0.8, -0.6, 0.4], [0.5, np.nan, np.nan]])
    )
    got = run("pure", batch).segment_advantages
    check(got[0], [-3.099953, -2.599954, -1.499982])
    check(got[1], [1.699984, 0, 0])
    plain = {"baseline": "none", "outcome_coef": 0.0}
    check(run("pure", batch, **plain).segment_advantages[0], [-0.599953, -0.599954, 1.8e-5])
    exact = run("pure", batch, form="min", **plain)
    check(exact.segment_advantages[0], [-0.6, -0.6, 0.4])
