"""The update: exact under every split, compiled once, safe against NaN."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import FAMILIES, make_params
from random_trajectories import VOCAB, make_forest

from focus.learner import losses, scoring, sharding, state, update
from focus.learner.packing import pack_trajectories
from focus.policy import lora, transformer
from focus.policy import model as models

CONFIG = transformer.ModelConfig(
    vocab_size=VOCAB,
    d_model=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    d_ff=24,
    max_context=64,
)
MODEL = scoring.policy_model(CONFIG)
MESH = sharding.make_mesh(devices=jax.devices()[:1])
OPTIMIZER = state.make_optimizer(state.OptimizerConfig(learning_rate=1e-2))
INIT = functools.partial(transformer.init_params, CONFIG)


def new_state(optimizer=OPTIMIZER):
    return sharding.init_sharded(
        lambda key: state.init_state(INIT(key), optimizer), jax.random.key(0), mesh=MESH
    )


def packed_forest(seed=0, bases=5, branches=5):
    return pack_trajectories(
        make_forest(seed, bases, branches),
        row_length=32,
        max_nodes=6,
        max_states=12,
        rows_multiple=2,
    )


def policy_batch(packed, seed=0):
    """A batch whose old log-probs are near the truth; NaN wherever nothing is trained."""
    rng, rows = np.random.default_rng(seed), packed.rows
    mask = rows.generated_mask & (rng.random(rows.tokens.shape) < 0.9)

    def kept(x):
        return np.where(mask, x, np.nan).astype(np.float32)

    old = np.log(1 / VOCAB) + 0.1 * rng.normal(size=mask.shape)
    return update.PolicyBatch(
        rows,
        mask,
        advantages=kept(rng.normal(size=mask.shape)),
        old_logp=kept(old),
        behaviour_logp=kept(old + 0.1 * rng.normal(size=mask.shape)),
    )


def copy(tree):
    return jax.tree.map(np.array, tree)


def counting_model():
    """The model, and a list that grows whenever its forward pass is traced."""
    traces = []

    def hidden(params, rows):
        traces.append(rows.tokens.shape)
        return MODEL.hidden(params, rows)

    return dataclasses.replace(MODEL, hidden=hidden), traces


def test_scores_do_not_depend_on_micro_batches_and_compile_once():
    packed, fewer = packed_forest(), packed_forest(1, 2, 1)
    params = jax.jit(INIT)(jax.random.key(0))
    model, traces = counting_model()
    score = scoring.make_score_fn(model, mesh=MESH, micro_rows=2, temperature=0.7)
    scores = score(params, packed.rows)
    score(params, fewer.rows)
    assert packed.rows.num_rows != fewer.rows.num_rows and len(traces) == 1
    other = scoring.make_score_fn(MODEL, mesh=MESH, micro_rows=3, temperature=0.7)(
        params, packed.rows
    )
    mask, at_states = packed.rows.generated_mask, packed.rows.state_pos >= 0
    np.testing.assert_allclose(scores.logp[mask], other.logp[mask], atol=1e-5)
    np.testing.assert_allclose(scores.entropy[mask], other.entropy[mask], atol=1e-5)
    hidden = np.asarray(jax.jit(MODEL.hidden)(params, packed.rows))
    row, place = np.nonzero(at_states)
    want = hidden[row, packed.rows.state_pos[row, place]]
    np.testing.assert_allclose(scores.state_hidden[row, place], want, atol=1e-5)
    # The log-prob of a token is read at its parent, not at the row index before it.
    logits = np.asarray(transformer.unembed(CONFIG, params, hidden))
    row, at = np.nonzero(mask)
    logp = jax.nn.log_softmax(logits[row, packed.rows.parent[row, at]] / 0.7)
    want = logp[np.arange(len(row)), packed.rows.tokens[row, at]]
    np.testing.assert_allclose(scores.logp[row, at], want, atol=1e-5)


def test_prefix_trees_are_refused_where_a_model_knows_documents_only():
    packed = packed_forest()
    params = jax.jit(INIT)(jax.random.key(0))
    train_state, shardings = new_state()
    model = dataclasses.replace(MODEL, shares_prefixes=False)
    score = scoring.make_score_fn(model, mesh=MESH, micro_rows=2)
    step = update.make_policy_update(
        model,
        OPTIMIZER,
        losses.PolicyLossConfig(),
        update.UpdateConfig(micro_rows=2),
        mesh=MESH,
        shardings=shardings,
    )
    message = r"row \d+ is a prefix tree, .* share_prefixes=False"
    with pytest.raises(ValueError, match=message):
        score(params, packed.rows)
    with pytest.raises(ValueError, match=message):
        step(train_state, policy_batch(packed))
    whole = pack_trajectories(
        make_forest(0), row_length=32, max_nodes=6, max_states=12, share_prefixes=False
    )
    scoring.check_rows(model, whole.rows)


def test_gradients_do_not_depend_on_micro_batches():
    """Pitfall 11 through the whole path: rows carry very different numbers of tokens."""
    batch = policy_batch(packed_forest())
    batch.mask[0, :] &= np.cumsum(batch.mask[0]) <= 1  # one row with a single kept token
    train_state, shardings = new_state()

    def loss(params, micro, denominator):
        hidden = MODEL.hidden(params, micro.rows)
        logp, entropy = scoring.row_logprobs(MODEL, params, micro.rows, hidden, micro.mask)
        return losses.policy_loss(
            logp,
            micro.old_logp,
            micro.behaviour_logp,
            micro.advantages,
            micro.mask,
            denominator=denominator,
            entropy=entropy,
            config=losses.PolicyLossConfig(entropy_coefficient=0.01),
        )

    index = np.arange(batch.rows.num_rows)
    results = [
        update.make_gradient_fn(loss, MESH, micro_rows, shardings.params)(
            train_state.params, batch, order
        )
        for micro_rows, order in ((1, index), (3, index[::-1]))
    ]
    whole = jax.jit(jax.value_and_grad(lambda p: loss(p, batch, batch.mask.sum())[0]))(
        train_state.params
    )
    for grads, value, metrics in results:
        np.testing.assert_allclose(value, whole[0], rtol=1e-5)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-4), grads, whole[1]
        )
        assert metrics["tokens"] == batch.mask.sum()


def test_policy_update_compiles_once_and_counts_its_steps():
    model, traces = counting_model()
    train_state, shardings = new_state()
    run = update.make_policy_update(
        model,
        OPTIMIZER,
        losses.PolicyLossConfig(),
        update.UpdateConfig(micro_rows=2, minibatches=2, epochs=2),
        mesh=MESH,
        shardings=shardings,
    )
    batch = policy_batch(packed_forest())
    before = copy(train_state.params)
    train_state, metrics = run(train_state, batch)
    assert metrics["optimizer_steps"] == 4 and metrics["tokens"] == 2 * batch.mask.sum()
    assert metrics["grad_norm"] > 0 and np.isfinite(list(metrics.values())).all()
    for seed in (1, 2):
        train_state, _ = run(train_state, policy_batch(packed_forest(seed, 3, 2), seed))
    assert len(traces) == 1
    assert int(train_state.step) == 3
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max() > 0, before, copy(train_state.params))
    assert all(jax.tree.leaves(moved))
    # Nothing to train on: no optimiser step, not even a decayed moment.
    before = copy((train_state.params, train_state.opt_state))
    empty = dataclasses.replace(batch, mask=np.zeros_like(batch.mask))
    train_state, metrics = run(train_state, empty)
    assert metrics == {"optimizer_steps": 0.0, "idle_steps": 0.0, "tokens": 0.0}
    jax.tree.map(
        np.testing.assert_array_equal, before, copy((train_state.params, train_state.opt_state))
    )


def test_pitfall_47_a_minibatch_without_an_opinion_takes_no_step():
    """After a step that leaves momentum, with weight decay: all advantages 0, tokens kept."""
    setting = state.OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)
    optimizer = state.make_optimizer(setting, models.logical_axes(CONFIG))
    train_state, shardings = new_state(optimizer)
    plan = update.UpdateConfig(micro_rows=2, minibatches=2)
    common = {"mesh": MESH, "shardings": shardings}
    run = update.make_policy_update(MODEL, optimizer, losses.PolicyLossConfig(), plan, **common)
    batch = policy_batch(packed_forest())
    train_state, metrics = run(train_state, batch)
    assert (metrics["optimizer_steps"], metrics["idle_steps"]) == (2, 0)
    before = copy((train_state.params, train_state.opt_state))
    nothing = dataclasses.replace(batch, advantages=np.where(batch.mask, 0.0, np.nan))
    train_state, metrics = run(train_state, nothing)
    assert (metrics["optimizer_steps"], metrics["idle_steps"], metrics["grad_norm"]) == (0, 2, 0)
    assert metrics["tokens"] == batch.mask.sum() and int(train_state.step) == 2
    jax.tree.map(
        np.testing.assert_array_equal, before, copy((train_state.params, train_state.opt_state))
    )
    # A bonus in the loss is an opinion.
    bonus = losses.PolicyLossConfig(entropy_coefficient=0.1)
    run = update.make_policy_update(MODEL, optimizer, bonus, plan, **common)
    assert run(train_state, nothing)[1]["optimizer_steps"] == 2


@pytest.mark.parametrize("level", ["token", "geometric"])
def test_pitfall_46_rejected_tokens_count_or_leave_as_the_config_says(level):
    """Dropped, they are as if they had never been there; counted, the step is smaller by them."""
    train_state, shardings = new_state()
    batch = policy_batch(packed_forest())
    rejected = batch.mask & (np.arange(batch.mask.shape[1]) % 3 == 0)
    ratio = np.where(rejected, 5.0, 0.0)
    if level == "token":
        batch = dataclasses.replace(batch, behaviour_logp=batch.old_logp - ratio)
    else:
        batch = dataclasses.replace(batch, importance_log_ratio=ratio)
    assert 0 < rejected.sum() < batch.mask.sum()

    def metrics_of(rejects, batch):
        config = losses.PolicyLossConfig(
            importance_level=level,
            importance_cap=None,
            importance_range=(0.5, 2.0),
            importance_rejected=rejects,
        )
        run = update.make_policy_update(
            MODEL, OPTIMIZER, config, update.UpdateConfig(micro_rows=2), mesh=MESH,
            shardings=shardings,
        )  # fmt: skip
        return run(jax.tree.map(jnp.copy, train_state), batch)[1]

    without = dataclasses.replace(batch, mask=batch.mask & ~rejected)
    count, drop, never = (
        metrics_of(*x) for x in (("count", batch), ("drop", batch), ("drop", without))
    )
    share = rejected.sum() / batch.mask.sum()
    for name in ("loss", "grad_norm", "tokens", "entropy"):
        np.testing.assert_allclose(drop[name], never[name], rtol=1e-5)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(count[name], (1 - share) * drop[name], rtol=1e-5)
    np.testing.assert_allclose([count["importance_masked"], drop["importance_masked"]], share)
    assert count["tokens"] == batch.mask.sum()
    with pytest.raises(ValueError, match="importance_rejected .* count, drop; got 'keep'"):
        losses.PolicyLossConfig(importance_rejected="keep")


def test_an_update_raises_good_tokens_and_lowers_bad_ones():
    packed = packed_forest()
    train_state, shardings = new_state()
    score = scoring.make_score_fn(MODEL, mesh=MESH, micro_rows=2)
    old = score(train_state.params, packed.rows).logp
    mask = packed.rows.generated_mask
    sign = np.where(packed.rows.tokens % 2, 1.0, -1.0).astype(np.float32)
    batch = update.PolicyBatch(packed.rows, mask, sign, old, old)
    run = update.make_policy_update(
        MODEL,
        OPTIMIZER,
        losses.PolicyLossConfig(),
        update.UpdateConfig(micro_rows=2),
        mesh=MESH,
        shardings=shardings,
    )
    train_state, metrics = run(train_state, batch)
    np.testing.assert_allclose(metrics["ratio"], 1.0, atol=1e-5)
    np.testing.assert_allclose(metrics["engine_kl"], 0.0, atol=1e-6)
    change = (score(train_state.params, packed.rows).logp - old)[mask]
    assert change[sign[mask] > 0].mean() > 0 > change[sign[mask] < 0].mean()


def test_a_loss_that_is_not_finite_leaves_the_parameters_alone():
    train_state, shardings = new_state()
    run = update.make_policy_update(
        MODEL,
        OPTIMIZER,
        losses.PolicyLossConfig(),
        update.UpdateConfig(micro_rows=2),
        mesh=MESH,
        shardings=shardings,
    )
    batch = policy_batch(packed_forest())
    before = copy(train_state)
    bad = batch.advantages.copy()
    bad[tuple(np.argwhere(batch.mask)[0])] = np.nan
    with pytest.raises(FloatingPointError, match="step 0: loss nan"):
        run(train_state, dataclasses.replace(batch, advantages=bad))
    jax.tree.map(np.testing.assert_array_equal, before, copy(train_state))
    train_state, _ = run(train_state, batch)
    assert int(train_state.step) == 1


def test_supervised_update_learns_a_small_batch_by_heart():
    packed = packed_forest(0, 2, 0)
    rows = packed.rows
    optimizer = state.make_optimizer(state.OptimizerConfig(learning_rate=3e-2))
    train_state, shardings = new_state(optimizer)
    run = update.make_supervised_update(
        MODEL, optimizer, update.UpdateConfig(micro_rows=2), mesh=MESH, shardings=shardings
    )
    weights = np.ones(rows.tokens.shape, np.float32)
    batch = update.SupervisedBatch(rows, rows.generated_mask, weights)
    first = None
    for _ in range(60):
        train_state, metrics = run(train_state, batch)
        first = first or metrics["nll"]
    assert first > 2.0 and metrics["nll"] < 0.1
    np.testing.assert_allclose(metrics["nll"], metrics["loss"], rtol=1e-5)


def test_sorting_tokens_out_changes_no_supervised_gradient():
    rows = packed_forest(0, 2, 0).rows
    batch = update.SupervisedBatch(
        rows, rows.generated_mask, np.ones(rows.tokens.shape, np.float32)
    )
    norms = []
    for most_tokens in (False, True):
        train_state, shardings = new_state()
        run = update.make_supervised_update(
            MODEL,
            OPTIMIZER,
            update.UpdateConfig(micro_rows=2),
            mesh=MESH,
            shardings=shardings,
            most_tokens=most_tokens,
        )
        _, metrics = run(train_state, batch)
        norms.append((metrics["loss"], metrics["grad_norm"]))
    np.testing.assert_allclose(*norms, rtol=1e-5)


def test_rows_are_shuffled_by_seed_and_step_alone():
    mask = np.ones((8, 4), bool)
    mask[5] = False
    config = update.UpdateConfig(micro_rows=1, minibatches=3, epochs=2, seed=1)

    def order(step, config=config):
        return [index.tolist() for index in update._minibatches(mask, config, step)]

    assert order(0) == order(0) != order(1)
    assert order(0) != order(0, dataclasses.replace(config, seed=2))
    for epoch in (order(0)[:3], order(0)[3:]):
        assert sorted(sum(epoch, [])) == [0, 1, 2, 3, 4, 6, 7]
    assert order(0)[:3] != order(0)[3:]
    many = update.UpdateConfig(micro_rows=1, minibatches=20)
    assert len(order(0, many)) == 7


def decayed_names(axes):
    flags = jax.tree_util.tree_leaves_with_path(state.decays(axes))
    return {sharding.path_name(path) for path, decayed in flags if decayed}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_pitfall_33_vectors_do_not_decay_whatever_their_rank_in_the_stack(family):
    """At zero gradient matrices shrink; norms, biases, rates and offsets of memories stay."""
    config = FAMILIES[family]
    setting = state.OptimizerConfig(learning_rate=0.1, weight_decay=0.5)
    optimizer = state.make_optimizer(setting, models.logical_axes(config))
    params = make_params(config)
    updates, _ = optimizer.update(
        jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
    )
    vectors = ("norm", "bias", "A_log")
    for path, change in jax.tree_util.tree_leaves_with_path(updates):
        name = sharding.path_name(path)
        assert np.any(change != 0) != name.endswith(vectors), name
    assert family != "qwen3_5" or updates["linear_layers"]["A_log"].ndim == 2


def test_pitfall_33_adapters_are_matrices():
    config, setting = FAMILIES["qwen3_5"], lora.LoraConfig(rank=2, targets=("in_proj_a", "q_proj"))
    names = decayed_names(lora.adapter_axes(config, setting))
    assert len(names) == 4  # two factors of each


def test_optimizer_warms_up_clips_and_decays_matrices_only():
    config = state.OptimizerConfig(
        learning_rate=1.0, schedule="cosine", warmup_steps=2, total_steps=10, final_fraction=0.1
    )
    schedule = state.make_schedule(config)
    np.testing.assert_allclose([schedule(i) for i in (0, 1, 2, 10)], [0, 0.5, 1, 0.1], atol=1e-6)
    schedule = state.make_schedule(state.OptimizerConfig(learning_rate=1.0, warmup_steps=4))
    np.testing.assert_allclose([schedule(i) for i in (1, 4, 99)], [0.25, 1, 1])
    schedule = state.make_schedule(dataclasses.replace(config, schedule="wsd", total_steps=11))
    want = [0.5, 1, 1, 0.55, 0.1, 0.1]  # the last third begins at step 7
    np.testing.assert_allclose([schedule(i) for i in (1, 2, 7, 9, 11, 99)], want, atol=1e-6)
    decayed = decayed_names(models.logical_axes(CONFIG))
    assert decayed == {"embed"} | {
        f"layers/{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down")
    }
    decaying = state.OptimizerConfig(learning_rate=0.1, weight_decay=0.5)
    axes = {"w_proj": ("embed", "mlp"), "attn_norm": ("layers", "embed")}
    optimizer = state.make_optimizer(decaying, axes)
    with pytest.raises(ValueError, match=r"weight_decay 0.5 .* pass the logical axes"):
        state.make_optimizer(decaying)
    params = {"w_proj": jnp.ones((2, 2)), "attn_norm": jnp.ones((2, 2))}
    updates, _ = optimizer.update(
        jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
    )
    np.testing.assert_allclose(updates["w_proj"], -0.05)
    np.testing.assert_allclose(updates["attn_norm"], 0.0)
    huge = jax.tree.map(lambda p: p * 1e6, params)
    clipped, _ = optax.clip_by_global_norm(1.0).update(huge, optax.EmptyState())
    got = optimizer.update(huge, optimizer.init(params), params)[1][1][0].mu
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 0.1 * b, rtol=1e-5), got, clipped)
    with pytest.raises(ValueError, match="total_steps > warmup_steps, got 5 and 5"):
        state.OptimizerConfig(schedule="cosine", warmup_steps=5, total_steps=5)
