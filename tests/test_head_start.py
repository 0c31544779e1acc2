"""What the critic knows before the first step: the warm start's episodes and their outcomes."""

import numpy as np
import pytest
import tiny

from focus.critic.losses import evidence_id
from focus.run import experiment, head_start
from focus.run.trainer import Trainer
from focus.terminal import Start


@pytest.fixture(scope="module")
def parts(prepare):
    config = tiny.get_config("focus")
    config.critic.update(pretrain_episodes=120, pretrain_epochs=30)
    env, warm = prepare(config)
    return config, env, warm, head_start.load_or_make(config, env, warm, Start(quiet=True))


def test_every_state_of_an_episode_shares_its_outcome(parts):
    config, env, warm, evidence = parts
    episodes, first = np.unique(evidence["episode"], return_index=True)
    assert len(episodes) == 120
    assert set(np.unique(evidence["outcome"])) == {0.0, 1.0}
    for episode in episodes[:20]:
        own = evidence["episode"] == episode
        assert len(set(evidence["outcome"][own])) == 1
        np.testing.assert_allclose(evidence["share"][own].sum(), 1.0, rtol=1e-6)
        left = evidence["segments_left"][own]
        np.testing.assert_array_equal(left, np.arange(len(left), 0, -1))
        assert np.all(np.diff(evidence["cost"][own]) < 0)
    # The world that is to be learnt comes first, and there are enough of its episodes.
    known = {evidence_id(task.id) for task in env.tasks("train")}
    assert set(evidence["task"].tolist()) <= known
    assert evidence["features"].shape == (len(evidence["cost"]), config.model.d_model)
    assert np.isfinite(evidence["features"]).all() and evidence["features"].std() > 0


def test_it_is_made_once_and_found_again(parts, monkeypatch):
    config, env, warm, evidence = parts

    def fail(*_):
        raise AssertionError("made again")

    with monkeypatch.context() as patch:
        patch.setattr(head_start, "state_evidence", fail)
        again = head_start.load_or_make(config, env, warm, Start(quiet=True))
    for name, column in evidence.items():
        np.testing.assert_array_equal(again[name], column)
    (kept,) = warm.directory.glob(f"evidence-{head_start._fingerprint(config)}*")
    content = kept.read_bytes()
    kept.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read .* delete it and it is made again"):
        head_start.load_or_make(config, env, warm, Start(quiet=True))
    kept.write_bytes(content)


def test_a_critic_knows_more_after_it_and_remembers_no_row(parts):
    config, env, warm, evidence = parts
    trainer = Trainer(config, env, warm)
    state = trainer.init_state()
    hidden, outcome = evidence["features"][:, None], evidence["outcome"]

    def error(state):
        value = trainer.valuation.critic.belief(state.critic, hidden).mean[:, 0]
        return np.mean((value - outcome) ** 2)

    after = trainer.valuation.pretrain(state, evidence)
    assert error(after) < np.var(outcome) < error(state)
    assert not np.asarray(after.critic.buffer.evidence.mask).any()
    cost = trainer.valuation.critic.belief(after.critic, hidden).cost[:, 0]
    assert np.corrcoef(cost, evidence["cost"])[0, 1] > 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"critic.backbone": "own"}, "cannot be pretrained"),
        ({"critic.pretrain_episodes": -1}, "critic.pretrain_episodes must be a whole number >= 0"),
        ({"critic.pretrain_epochs": 0}, "critic.pretrain_epochs must be a whole number >= 1"),
        ({"critic.covariance": "fited"}, "critic.covariance must be one of fitted, ensemble"),
        ({"branching.weight": "length"}, "branching.weight must be one of score_norm, tokens"),
        ({"branching.rule": "patr"}, "'patr' reads 'score' of a process reward model"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(changes, message):
    config = tiny.get_config("focus")
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=message):
        experiment.validate(config)


def test_a_model_directory_has_no_episodes():
    config = tiny.get_config("focus")
    del config.warm_start
    with pytest.raises(ValueError, match="this run has none; set critic.pretrain_episodes=0"):
        experiment._check_pretraining(config)
