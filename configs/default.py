"""Every key of a run, what it means, and its value where an experiment sets nothing else.

The other files here call this one and set what makes them an experiment. A file of your own does
the same:

    import runpy

    def get_config(method="focus"):
        c = runpy.run_path("configs/default.py")["get_config"](method)
        c.task.hops = (2, 3)
        return c

    python scripts/train.py --config my_config.py --workdir runs/mine

The argument names the method: focus (default), focus_summarize (FOCUS with a context that the
policy itself has to compact), grpo, vineppo, ppo, self_credit (summaries cite turns, and cited
turns are weighted by how the group's citations agree). All of them get the same number of
generated tokens per step.

Sizes are those of a policy of some million parameters on one machine. `model` takes every field
of the family's config besides those that are here (`focus.policy.transformer.ModelConfig`,
`focus.policy.qwen3_5.Qwen3_5Config`), `task` those of the task's factory.
"""

import ml_collections

METHODS = ("focus", "focus_summarize", "grpo", "vineppo", "ppo", "self_credit")
STARTS = ("warm_start", "directory")


def get_config(method: str = "focus", *, start: str = "warm_start") -> ml_collections.ConfigDict:
    """The defaults of `method`.

    Args:
      method: one of `METHODS`.
      start: what training begins with: "warm_start", a small policy that has imitated a scripted
        agent, or "directory", a pretrained model in the layout of Hugging Face.

    Raises:
      ValueError: no such method, or start.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
    if start not in STARTS:
        raise ValueError(f"unknown start {start!r}: choose one of {', '.join(STARTS)}")
    c = ml_collections.ConfigDict()
    c.method = method  # what the run is about; it is named after estimator, rule and manager
    c.seed = 0
    c.steps = 100
    c.budget = 3000  # tokens that the policy may generate in a step, however they are spent
    c.cache_dir = ""  # where warm starts are kept; "" is $FOCUS_CACHE or ~/.cache/focus
    # Python files or modules that register tasks, estimators, rules and context managers of yours:
    c.plugins = ()  # docs/extending.md. The run keeps a copy of each.

    c.task = ml_collections.ConfigDict()
    c.task.name = "deep_search"  # key of focus.tasks.registry.TASKS; the others are its options
    c.task.world = "real"  # real: countryinfo's tables; shuffled, fictional; or a JSON file
    c.task.seed = 0  # of an invented world, and of the questions
    c.task.num_countries = 40  # of a fictional world
    c.task.hops = (2, 4)  # fewest and most facts that a question chains
    c.task.max_turns = 7
    c.task.num_train = 2000
    c.task.num_heldout = 200
    c.task.snippet_words = 5  # of a page, in a list of results
    c.task.provinces = False  # whether places within countries have pages, too
    c.task.lookalikes = 2  # most distractor pages an entity has
    if start == "directory":
        c.task.instructions = True  # the tools are explained in a system message

    c.model = ml_collections.ConfigDict()
    if start == "directory":
        c.model.path = ""  # what the model is stands there; here, how it is run
        c.model.max_context = 1024
        c.model.dtype = "float32"  # of the computation; parameters are float32
        c.model.remat = "full"  # what the backward pass computes again: less memory, more work
        c.chat = ml_collections.ConfigDict()
        c.chat.tool_calls = ""  # format of calls: "" is the environment's own text; hermes, qwen
        c.chat.observation_role = "tool"  # of a tool's answer; user for templates without tools
        c.chat.keep_thinking = False  # for templates that would strip it from earlier turns
        c.chat.pad_token = ""  # "" is that of tokenizer_config.json
    else:
        c.model.vocab_size = 1024  # most tokens that are trained on the demonstrations
        c.model.d_model = 256
        c.model.num_layers = 4
        c.model.num_heads = 8
        c.model.num_kv_heads = 2
        c.model.head_dim = 32
        c.model.d_ff = 768
        c.model.max_context = 384  # tokens that the policy reads and writes at most
        c.model.rope_theta = 1e4
        c.model.scan_unroll = 1  # layers per turn of the loop over them
        c.model.chat_format = "compact"  # key of focus.chat.tokens.CHAT_FORMATS

        c.warm_start = ml_collections.ConfigDict()
        c.warm_start.seed = 0  # runs of different seeds start from the same policy; None: the run's
        c.warm_start.episodes = 14000
        c.warm_start.error_scale = 0.4  # of the scripted agent; imitation adds errors of its own
        c.warm_start.worlds = 30  # invented worlds beside the real one: reading, not remembering
        c.warm_start.world = "shuffled"
        c.warm_start.real_fraction = 0.2  # of the episodes
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
    c.rollout.max_running = 32  # episodes at a time
    c.rollout.retained = 192  # finished sequences whose keys and values wait for a branch
    c.rollout.decode_steps = 8  # tokens that a slot may gain in one call of the engine
    c.rollout.cache_buckets = (192, 288, 384)  # shapes that the engine compiles: cache columns,
    c.rollout.prefill_buckets = (48,)  # tokens of a prefill chunk,
    c.rollout.batch_buckets = (16, 32, 64)  # and rows of a call
    c.rollout.temperature = 1.0
    c.rollout.top_p = 1.0  # what is trained is sampled from all of the distribution:
    c.rollout.top_k = -1  # neither can be another
    c.rollout.stop = ()  # strings that end a turn, besides the chat's own end of turn
    c.rollout.max_turn_tokens = 64
    c.rollout.max_summary_tokens = 64
    c.rollout.episode_tokens = 100  # expected of one episode before the first is played
    c.rollout.group_size = 1  # base rollouts of one task; the critic is the baseline
    c.rollout.attempts = 3  # tries of a request before its rollout counts as failed
    c.rollout.timeout_s = 120.0
    c.rollout.on_failure = "wait"  # for all attempts; or proceed without rollouts that failed once
    c.rollout.proceed_fraction = 0.9  # this share of a step has ended well
    c.rollout.max_logp_difference = 1.0  # mean of a step, engine to trainer; above, the run stops
    c.rollout.dead_after_s = 300.0  # without a server the run saves itself and stops
    # Calls of the environment; see focus/rollout/tools.py for what an environment says of itself.
    c.rollout.tools = ml_collections.ConfigDict()
    c.rollout.tools.attempts = 3  # tries of a call before its rollout counts as failed
    c.rollout.tools.backoff_s = 1.0  # before the second try; doubled before each further one
    c.rollout.tools.timeout_s = 60.0  # of a try; for environments that say they may wait
    c.rollout.tools.at_once = 64  # calls that may wait at a time

    c.context = ml_collections.ConfigDict()
    # full; summarize: the policy compacts what passes the limit; cite_summary: and cites turns
    c.context.manager = "full"  # key of focus.context.CONTEXT_MANAGERS
    c.context.limit = 256  # tokens
    c.context.citations = (2, 5)  # fewest and most turns that a summary cites

    c.branching = ml_collections.ConfigDict()
    c.branching.rule = "expected_error_reduction"  # key of focus.branching.RULES, or none
    c.branching.weight = "score_norm"  # what an error of V matters by; tokens: those it reaches
    c.branching.base_fraction = 0.5  # share of the budget that base rollouts are launched for
    c.branching.rounds = 2  # of branches; each plans with what the one before has found
    c.branching.ks = (1, 2, 4)  # continuations that one choice may add to a state
    c.branching.max_per_state = 4

    c.critic = ml_collections.ConfigDict()
    c.critic.enabled = True
    c.critic.backbone = "policy"  # whose hidden states it reads; own: those of a model of its own
    c.critic.backbone_learning_rate = 1e-3  # of a backbone of its own
    c.critic.uncertainty = "ensemble"  # ensemble, or posterior over a last linear layer
    c.critic.value = "bernoulli"  # bernoulli, or hl_gauss for rewards other than 0/1
    c.critic.members = 8  # of the ensemble
    c.critic.width = 64  # of their hidden layer
    c.critic.prior_scale = 1.0  # of the fixed random function that each member adds
    c.critic.learning_rate = 1e-3
    c.critic.epochs = 4  # passes over what is remembered, a step
    c.critic.capacity = 2048  # states that are remembered
    c.critic.evidence_bucket = 1024  # states of a step, padded
    c.critic.replay_steps = 4  # steps whose states are remembered
    # Episodes of the warm start that the critic learns from before the first step, 0 for none,
    c.critic.pretrain_episodes = 3000 if start == "warm_start" else 0
    c.critic.pretrain_epochs = 8  # and passes over them
    # Steps in which the critic learns and the policy does not.
    c.critic.warmup_steps = 0 if start == "warm_start" else 3
    c.critic.lambda_ = 1.0  # of the critic's targets; 1: the outcome
    c.critic.values_from = "before"  # before, crossfit, after: whose outcomes a baseline may know
    c.critic.refine = "joint"  # none, local, joint: how branches enter the values
    # fitted: errors of tasks, episodes and states, scaled to recent misses; ensemble: as it says
    c.critic.covariance = "fitted"
    c.critic.siblings = True  # rollouts of one task are evidence about each other's values
    c.critic.gate = True  # where the critic explains nothing, other rollouts are the baseline

    c.credit = ml_collections.ConfigDict()
    c.credit.estimator = "focus"  # key of focus.credit.ESTIMATORS: python -m focus.credit
    c.credit.options = ""  # "name=value ...": hyperparameters of the estimator by their names
    c.credit.discount = 1.0  # this and the next three: of focus and ppo
    c.credit.lambda_ = 0.95
    c.credit.lambda_mode = "fixed"  # fixed, or trust: lower where the next value is known well
    c.credit.truncation = "bootstrap"  # bootstrap, fail, mask: what a rollout that was cut earns
    c.credit.whiten = method not in ("grpo", "vineppo", "self_credit")  # over a step's tokens
    c.credit.train_on_branches = True
    c.credit.branch_weight = 1.0  # of their tokens in the loss

    c.learner = ml_collections.ConfigDict()
    c.learner.learning_rate = 1e-4
    c.learner.schedule = "wsd"  # constant, cosine, or wsd: the last third of the steps goes down
    c.learner.schedule_steps = 100  # that the schedule is laid out for; `steps`, as a rule
    c.learner.warmup_steps = 6  # optimiser steps in which the rate rises
    c.learner.weight_decay = 0.0
    c.learner.max_grad_norm = 1.0
    c.learner.clip_low = 0.2  # ratios below 1 - clip_low and
    c.learner.clip_high = 0.28  # above 1 + clip_high earn nothing more
    # Tokens are weighted for having been sampled by another program, or with older weights.
    c.learner.importance_level = "token"  # token, sequence (product), geometric (mean)
    c.learner.importance_cap = 2.0
    c.learner.importance_range = ()  # (low, high): ratios outside get weight 0
    # tokens outside: count (they stay in the loss's denominator) or drop (they leave it)
    c.learner.importance_rejected = "count"
    c.learner.kl_coefficient = 0.0  # of the divergence from the policy that training began with
    c.learner.entropy_coefficient = 0.0
    c.learner.minibatches = 3  # optimiser steps of a step
    c.learner.epochs = 1  # passes over its rows
    c.learner.micro_rows = 4  # rows that go through the model at a time
    c.learner.row_length = 512  # tokens of a row; rollouts are packed into rows
    c.learner.logprob_chunk = 0  # tokens of a row whose logits exist at a time; 0: by size
    c.learner.max_nodes = 32  # parts of a row: prefixes that rollouts share, and what follows
    c.learner.max_states = 64  # of a row
    c.learner.row_buckets = (256, 512, 1024)  # trajectories of a step, padded
    c.learner.state_bucket = 512  # states that are planned over, padded to this times 2^n
    c.learner.lora = ml_collections.ConfigDict()
    c.learner.lora.rank = 0  # of adapters that are trained in place of the model; 0: none
    c.learner.lora.alpha = 16.0  # their output is multiplied by alpha / rank
    c.learner.lora.targets = ("all-linear",)  # or names: ("q_proj", "v_proj")

    c.mesh = ml_collections.ConfigDict()  # devices along each axis; -1: what is left
    c.mesh.data = -1  # copies of the model
    c.mesh.fsdp = 1  # parameters cut up, gathered layer by layer
    c.mesh.tensor = 1  # matrix products cut up
    c.mesh.sequence = 1  # tokens of a row cut up: for rows that one device cannot hold

    c.evaluate = ml_collections.ConfigDict()
    c.evaluate.every = 30  # steps; 0: only before the first and after the last
    c.evaluate.num_tasks = 200
    c.evaluate.temperature = 1.0

    c.checkpoint = ml_collections.ConfigDict()
    c.checkpoint.every = 10  # steps
    c.checkpoint.keep_last = 2
    c.checkpoint.keep_best = 1

    c.log = ml_collections.ConfigDict()
    c.log.tensorboard = False
    c.log.wandb = ""  # W&B project; "" is off
    c.log.tree_tasks = 2  # tasks of a step whose trajectories go into the report

    _set_method(c, method)
    return c


def _set_method(c: ml_collections.ConfigDict, method: str) -> None:
    """What makes a method: whom it compares, where it samples again, and who says what it earns."""
    if method == "focus_summarize":
        c.context.manager = "summarize"
    elif method == "vineppo":
        c.branching.rule = "uniform"
        c.branching.weight = "tokens"
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
