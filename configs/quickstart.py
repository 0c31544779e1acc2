"""Train a one-million-parameter search agent on a laptop, in less than ten minutes.

The agent answers two- to four-hop questions about countries by calling a search engine. It is
warm-started on episodes of an error-prone scripted agent and then trained from outcomes alone.

    python scripts/train.py --config configs/quickstart.py --workdir runs/focus
    python scripts/train.py --config configs/quickstart.py:grpo --workdir runs/grpo

Expected on two cores: eight to nine minutes in all, of which three and a half are the warm start
(once, then kept) and four to five are training; held-out success from 0.24 to 0.57, give or take
the 0.05 by which runs differ (see docs/quickstart.md). self_credit imitates for longer and ends
lower.

The argument names the method: focus (default), focus_summarize (FOCUS with a context that the
policy itself has to compact), grpo, vineppo, ppo, self_credit (summaries cite turns, and cited
turns are weighted by how the group's citations agree). All of them get the same number of
generated tokens per step.
"""

import ml_collections

METHODS = ("focus", "focus_summarize", "grpo", "vineppo", "ppo", "self_credit")


def get_config(method: str = "focus") -> ml_collections.ConfigDict:
    """The configuration of `method`; every key that can be set is here."""
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
    c = ml_collections.ConfigDict()
    c.method = method
    c.seed = 0
    c.steps = 70
    c.budget = 3000  # tokens that the policy may generate in a step, however they are spent
    c.cache_dir = ""  # where warm starts are kept; "" is $FOCUS_CACHE or ~/.cache/focus

    c.task = ml_collections.ConfigDict()
    c.task.name = "deep_search"
    c.task.world = "real"  # real: countryinfo's tables; shuffled, fictional; or a JSON file
    c.task.seed = 0
    c.task.num_countries = 40  # of a fictional world
    c.task.hops = (2, 4)
    c.task.max_turns = 7
    c.task.num_train = 2000
    c.task.num_heldout = 200
    c.task.snippet_words = 5
    c.task.provinces = False
    c.task.lookalikes = 2  # most distractor pages an entity has

    c.model = ml_collections.ConfigDict()
    c.model.vocab_size = 768
    c.model.d_model = 192
    c.model.num_layers = 2
    c.model.num_heads = 6
    c.model.num_kv_heads = 2
    c.model.head_dim = 32
    c.model.d_ff = 512
    c.model.max_context = 384
    c.model.rope_theta = 1e4
    c.model.scan_unroll = 2
    c.model.chat_format = "compact"

    c.warm_start = ml_collections.ConfigDict()
    c.warm_start.seed = 0  # runs of different seeds start from the same policy; None: the run's
    c.warm_start.episodes = 14000
    c.warm_start.error_scale = 0.4  # of the scripted agent; imitation adds errors of its own
    c.warm_start.worlds = 30  # invented worlds beside the real one: reading, not remembering
    c.warm_start.world = "shuffled"
    c.warm_start.real_fraction = 0.2
    c.warm_start.steps = 1800
    c.warm_start.batch_rows = 4
    c.warm_start.row_length = 384
    c.warm_start.learning_rate = 6e-3
    c.warm_start.products = "bfloat16"  # what operands are rounded to; sums stay in float32
    c.warm_start.observation_weight = 0.3  # loss weight of tokens that the policy only reads

    c.rollout = ml_collections.ConfigDict()
    c.rollout.engine = "embedded"  # embedded: in this process; sglang: servers at these URLs,
    c.rollout.urls = ()  # one of every worker,
    c.rollout.router_url = ""  # and where generations go, if not to the workers themselves
    c.rollout.weights_dtype = "float32"  # of the weights that servers are given
    # weights: all of them in every step, adapters merged; adapter: the base once, then only what
    c.rollout.push = "weights"  # learner.lora trains, to servers with --enable-lora
    c.rollout.async_depth = 0  # steps whose base rollouts may be played while the learner works
    c.rollout.mixed_versions = "keep"  # keep or drop rollouts during which the weights changed
    c.rollout.devices = -1  # local devices that the embedded engine spreads over; -1: all
    c.rollout.max_running = 64
    c.rollout.retained = 192  # finished sequences whose keys and values wait for a branch
    c.rollout.decode_steps = 8  # tokens that a slot may gain in one call of the engine
    c.rollout.cache_buckets = (192, 288, 384)  # shapes that the engine compiles: cache columns,
    c.rollout.prefill_buckets = (48,)  # tokens of a prefill chunk,
    c.rollout.batch_buckets = (16, 32, 64)  # and rows of a call
    c.rollout.temperature = 1.0
    c.rollout.top_p = 1.0  # what is trained is sampled from all of the distribution:
    c.rollout.top_k = -1  # neither can be another
    c.rollout.stop = ()  # strings that end a turn, besides the chat's own end of turn
    c.rollout.max_turn_tokens = 32
    c.rollout.max_summary_tokens = 32
    c.rollout.episode_tokens = 60  # expected of one episode before the first is played
    c.rollout.group_size = 1  # base rollouts of one task; the critic is the baseline
    c.rollout.attempts = 3  # tries of a request before its rollout counts as failed
    c.rollout.timeout_s = 120.0
    c.rollout.on_failure = "wait"  # for all attempts; or proceed without rollouts that failed once
    c.rollout.proceed_fraction = 0.9  # this share of a step has ended well
    c.rollout.max_logp_difference = 1.0  # mean of a step, engine to trainer; above, the run stops
    c.rollout.dead_after_s = 300.0  # without a server the run saves itself and stops

    c.context = ml_collections.ConfigDict()
    # full; summarize: the policy compacts what passes the limit; cite_summary: and cites turns
    c.context.manager = "full"
    c.context.limit = 140
    c.context.citations = (2, 5)  # fewest and most turns that a summary cites

    c.branching = ml_collections.ConfigDict()
    c.branching.rule = "expected_error_reduction"
    c.branching.base_fraction = 0.5  # share of the budget that base rollouts are launched for
    c.branching.rounds = 2
    c.branching.ks = (1, 2, 4)
    c.branching.max_per_state = 4

    c.critic = ml_collections.ConfigDict()
    c.critic.enabled = True
    c.critic.backbone = (
        "policy"  # policy: reads the policy's hidden states; own: a model of its own
    )
    c.critic.backbone_learning_rate = 1e-3  # of a backbone of its own
    c.critic.uncertainty = "ensemble"  # ensemble, or posterior over a last linear layer
    c.critic.value = "bernoulli"  # bernoulli, or hl_gauss for rewards other than 0/1
    c.critic.members = 8
    c.critic.width = 64
    c.critic.prior_scale = 1.0
    c.critic.learning_rate = 1e-3
    c.critic.epochs = 4
    c.critic.capacity = 2048  # states that are remembered
    c.critic.evidence_bucket = 1024
    c.critic.replay_steps = 4
    c.critic.warmup_steps = 3  # steps in which the critic learns and the policy does not
    c.critic.lambda_ = 1.0
    c.critic.values_from = "before"  # before, crossfit, after: whose outcomes a baseline may know
    c.critic.refine = "joint"  # none, local, joint: how branches enter the values

    c.credit = ml_collections.ConfigDict()
    c.credit.estimator = "focus"
    c.credit.options = ""  # "name=value ...": hyperparameters of the estimator by their names
    c.credit.discount = 1.0  # this and the next three: of focus and ppo
    c.credit.lambda_ = 0.95
    c.credit.lambda_mode = "fixed"
    c.credit.truncation = "bootstrap"
    c.credit.whiten = method not in ("grpo", "vineppo", "self_credit")
    c.credit.train_on_branches = True
    c.credit.branch_weight = 1.0

    c.learner = ml_collections.ConfigDict()
    c.learner.learning_rate = 5e-4
    c.learner.schedule = "wsd"  # constant, cosine, or wsd: the last third of the steps goes down
    c.learner.schedule_steps = 70
    c.learner.warmup_steps = 6
    c.learner.weight_decay = 0.0
    c.learner.max_grad_norm = 1.0
    c.learner.clip_low = 0.2
    c.learner.clip_high = 0.28
    # Tokens are weighted for having been sampled by another program, or with older weights.
    c.learner.importance_level = "token"  # token, sequence (product), geometric (mean)
    c.learner.importance_cap = 2.0
    c.learner.importance_range = ()  # (low, high): ratios outside get weight 0
    # tokens outside: count (they stay in the loss's denominator) or drop (they leave it)
    c.learner.importance_rejected = "count"
    c.learner.kl_coefficient = 0.0
    c.learner.entropy_coefficient = 0.0
    c.learner.minibatches = 3
    c.learner.epochs = 1
    c.learner.micro_rows = 4
    c.learner.row_length = 512
    c.learner.logprob_chunk = 0  # tokens of a row whose logits exist at a time; 0: by size
    c.learner.max_nodes = 32
    c.learner.max_states = 64
    c.learner.row_buckets = (256, 512, 1024)  # trajectories of a step, padded
    c.learner.state_bucket = 512
    c.learner.lora = ml_collections.ConfigDict()
    c.learner.lora.rank = 0  # of adapters that are trained in place of the model; 0: none
    c.learner.lora.alpha = 16.0  # their output is multiplied by alpha / rank
    c.learner.lora.targets = ("all-linear",)  # or names: ("q_proj", "v_proj")

    c.mesh = ml_collections.ConfigDict()
    c.mesh.data = -1
    c.mesh.fsdp = 1
    c.mesh.tensor = 1
    c.mesh.sequence = 1  # tokens of a row cut up: for rows that one device cannot hold

    c.evaluate = ml_collections.ConfigDict()
    c.evaluate.every = 30  # steps; 0: only before the first and after the last
    c.evaluate.num_tasks = 200
    c.evaluate.temperature = 1.0

    c.checkpoint = ml_collections.ConfigDict()
    c.checkpoint.every = 10
    c.checkpoint.keep_last = 2
    c.checkpoint.keep_best = 1

    c.log = ml_collections.ConfigDict()
    c.log.tensorboard = False
    c.log.wandb = ""  # W&B project; "" is off
    c.log.tree_tasks = 2  # tasks of a step whose trajectories go into the report

    if method == "focus_summarize":
        c.context.manager = "summarize"
    elif method == "vineppo":
        c.branching.rule = "uniform"
        c.branching.base_fraction = 0.15
        c.branching.rounds = 1
        c.branching.ks = (3,)
        c.branching.max_per_state = 3
        c.critic.enabled = False
        c.credit.estimator = "vineppo"
        c.credit.train_on_branches = False
    elif method in ("grpo", "ppo", "self_credit"):
        c.branching.rule = "none"
        c.branching.base_fraction = 1.0
        c.critic.enabled = method == "ppo"
        c.credit.estimator = method
        c.rollout.group_size = 1 if method == "ppo" else 8
    if method == "self_credit":
        c.context.manager = "cite_summary"
        c.context.limit = 220  # most episodes close with their one summary, long ones have two
        c.rollout.max_summary_tokens = 48
        c.warm_start.steps = 3000  # notes and citations are to be learnt beside everything else
    return c
