"""A scripted agent for deep search that errs as people do, for warm starts and for tests.

It knows what its context says and nothing else: it parses the question, reads the tools'
answers, and keeps a belief (where it stands, which relations are left). Errors change the belief
or the action; it goes on from wherever they lead, so demonstrations show recovery as well.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator, Sequence

from focus.tasks import world as worlds
from focus.tasks.base import Demonstration, Task
from focus.tasks.deep_search import DeepSearch, make_deep_search
from focus.tasks.facts import COUNTRY_RELATIONS

_RESULT = re.compile(r"(?:(?P<number>\d+) )?(?P<title>[^:]+): (?P<text>.+)")
_OUTER = re.compile(rf"(?:the )?({'|'.join(COUNTRY_RELATIONS)}) of (.+)")
_STARTS = {
    relation: re.compile(re.escape(wording).replace(r"\{\}", "(.+)"))
    for relation, wording in worlds.START_PHRASES.items()
}
# How a sentence of a page begins -> the relation it states. The longer beginnings come first.
_SENTENCES = {
    **{f"{relation} ": relation for relation in worlds.START_PHRASES},
    **{f"{kind} ": "located in" for kind in worlds.DISTRACTOR_KINDS},
    "country in ": "region",
    **{f"{statement} ": relation for relation, statement in worlds.STATEMENTS.items()},
}


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorRates:
    """How often each error is made where it can be made.

    Attributes:
      early_answer: per turn; answers with an entity from the middle of the chain.
      wrong_relation: per fact read from a country; takes another fact of the page.
      near_duplicate: per choice among results; takes a look-alike.
      wrong_search: per turn; searches for something that does not help.
      malformed: per turn; writes something that is no call.
      repeat: per turn; does the same again.
    """

    early_answer: float = 0.12
    wrong_relation: float = 0.25
    near_duplicate: float = 0.3
    wrong_search: float = 0.08
    malformed: float = 0.06
    repeat: float = 0.06

    def __post_init__(self):
        for field in dataclasses.fields(self):
            rate = getattr(self, field.name)
            if not 0 <= rate <= 1:
                raise ValueError(f"error rate {field.name} must be in [0, 1], got {rate}")
        per_turn = self.early_answer + self.wrong_search + self.malformed + self.repeat
        if per_turn > 1:
            raise ValueError(f"the four rates per turn must sum to at most 1, got {per_turn}")

    def scaled(self, factor: float) -> ErrorRates:
        """All rates times `factor`."""
        return ErrorRates(
            **{name: factor * rate for name, rate in dataclasses.asdict(self).items()}
        )


NO_ERRORS = ErrorRates(0, 0, 0, 0, 0, 0)


def parse_question(text: str) -> tuple[str, tuple[str, ...]]:
    """The entity a question starts from and the relations to follow; inverse of `world.phrase`."""
    text, outward = text.removesuffix("?"), []
    while match := _OUTER.fullmatch(text):
        outward.append(match.group(1))
        text = match.group(2)
    for relation, pattern in _STARTS.items():
        if match := pattern.fullmatch(text):
            return match.group(1), (relation, *reversed(outward))
    return text, tuple(reversed(outward))


class ScriptedAgent:
    """Searches for the entity it stands at, reads the relation it needs, moves on, answers.

    Args:
      rng: source of the errors; consumed.
      error_rates: how often it errs; `NO_ERRORS` solves every task.
    """

    def __init__(self, rng: random.Random, error_rates: ErrorRates = ErrorRates()):
        self._rng = rng
        self._rates = error_rates

    def reset(self, question: str) -> None:
        """Starts an episode."""
        self._question = parse_question(question)
        self._entity, self._relations = self._question
        self._facts: dict[tuple[str, str], str] = {}
        self._numbers: dict[str, int] = {}
        self._opened: set[str] = set()
        self._last_call: str | None = None
        self._thoughts: list[str] = []
        self._restarted = False
        self._turn = -1  # of the latest call
        self._read_on: dict[tuple[str, str], int] = {}  # turn that showed a fact
        self._listed_on = -1  # turn that listed `_numbers`
        self._sources: set[int] = set()

    def act(self, observation: str) -> str:
        """The next action: a line for every relation followed, right or wrong, and a call.

        Args:
          observation: the answer to the previous action; "" on the first turn.
        """
        self._thoughts = []
        self._read(observation)
        self._turn += 1
        self._advance()
        self._last_call = self._wrong_call() or self._right_call()
        return "\n".join([*self._thoughts, self._last_call])

    def notes(self) -> str:
        """What it would write down just before its latest call: belief and intention."""
        left = "".join(f", {relation}" for relation in self._relations)
        return f"{self._entity}{left}; {self._last_call}"

    def sources(self) -> tuple[int, ...]:
        """Turns that its belief rests on, counted from 0: facts followed, lists chosen from."""
        return tuple(sorted(self._sources))

    def _read(self, observation: str) -> None:
        entries = [_RESULT.fullmatch(line) for line in observation.splitlines()]
        entries = [entry for entry in entries if entry and entry["title"] != "error"]
        if any(entry["number"] for entry in entries):
            self._numbers = {entry["title"]: int(entry["number"]) for entry in entries}
            self._listed_on = self._turn
        for entry in entries:
            if not entry["number"]:
                self._opened.add(entry["title"])
            if not entry["text"].endswith("..."):
                self._read_facts(entry["title"], entry["text"])

    def _read_facts(self, title: str, text: str) -> None:
        for sentence in text.removesuffix(".").split(". "):
            for beginning, relation in _SENTENCES.items():
                if sentence.startswith(beginning):
                    value = sentence.removeprefix(beginning).split(", ")[0]
                    self._facts[title, relation] = value
                    self._read_on.setdefault((title, relation), self._turn)
                    break

    def _advance(self) -> None:
        """Follows the relations as far as what was read goes, now and then a wrong one."""
        while self._relations and (self._entity, self._relations[0]) in self._facts:
            relation, *rest = self._relations
            self._sources.add(self._read_on[self._entity, relation])
            target = self._facts[self._entity, relation]
            if relation in worlds.START_PHRASES:
                others = [
                    self._facts[title, "located in"]
                    for title in self._numbers
                    if (title, "located in") in self._facts
                ]
                rate = self._rates.near_duplicate
            else:
                similar = worlds.NEIGHBOUR_RELATIONS if rest else COUNTRY_RELATIONS
                others = [
                    self._facts[self._entity, other]
                    for other in similar
                    if other != relation and (self._entity, other) in self._facts
                ]
                rate = self._rates.wrong_relation
            if others and self._rng.random() < rate:
                target = self._rng.choice(others)
            statement = worlds.STATEMENTS.get(relation, relation)
            self._thoughts.append(f"{statement.removeprefix('neighbours ')} {target}")
            self._entity, self._relations = target, tuple(rest)

    def _right_call(self) -> str:
        if not self._relations:
            return f"answer({self._entity})"
        if self._entity in self._opened:
            # The page does not have the relation, so an earlier turn was wrong: read again
            # from the start what is known by now.
            if self._restarted:
                return f"answer({self._entity})"
            self._restarted = True
            self._entity, self._relations = self._question
            self._advance()
            return self._right_call()
        if self._entity in self._numbers:
            number = self._numbers[self._entity]
            self._sources.add(self._listed_on)
            others = [other for other in self._numbers.values() if other != number]
            if others and self._rng.random() < self._rates.near_duplicate:
                number = self._rng.choice(others)
            return f"open({number})"
        if self._entity in self._linked():
            return f"open({self._entity})"
        return f"search({self._entity})"

    def _linked(self) -> set[str]:
        return {value for (title, _), value in self._facts.items() if title in self._opened}

    def _wrong_call(self) -> str | None:
        """A call that is not the right one, or None: most often, or where none is tempting."""
        rates = self._rates
        kind = self._rng.choices(
            ("none", "early_answer", "wrong_search", "malformed", "repeat"),
            weights=(
                1 - rates.early_answer - rates.wrong_search - rates.malformed - rates.repeat,
                rates.early_answer,
                rates.wrong_search,
                rates.malformed,
                rates.repeat,
            ),
        )[0]
        start = self._question[0]
        if kind == "early_answer" and self._relations and self._entity != start:
            return f"answer({self._entity})"
        if kind == "wrong_search":
            wanted = self._relations[0] if self._relations else ""
            return f"search({self._rng.choice([f'{wanted} {self._entity}'.strip(), start])})"
        if kind == "malformed":
            return self._rng.choice(
                (f"search {self._entity}", f"find({self._entity})", f"open({self._entity}")
            )
        if kind == "repeat":
            return self._last_call
        return None


def demonstrate(env: DeepSearch, task: Task, agent: ScriptedAgent) -> Demonstration:
    """Plays one episode."""
    agent.reset(task.prompt)
    state, observation = env.reset(task), ""
    actions, observations, notes, sources = [], [], [], []
    while True:
        actions.append(agent.act(observation))
        notes.append(agent.notes())
        sources.append(agent.sources())
        result = env.step(state, actions[-1])
        state, observation = result.state, result.observation
        observations.append(observation)
        if result.done:
            return Demonstration(
                task,
                tuple(actions),
                tuple(observations),
                result.outcome,
                tuple(notes),
                tuple(sources),
            )


def demonstrations(
    envs: Sequence[DeepSearch],
    num: int,
    seed: int,
    *,
    weights: Sequence[float] | None = None,
    error_rates: ErrorRates = ErrorRates(),
) -> Iterator[Demonstration]:
    """Episodes of the scripted agent on train tasks.

    Args:
      envs: where to play; mix the environment to be learnt with `invented_envs`, so that
        copying names is learnt rather than the names.
      num: how many episodes.
      seed: decides tasks and errors.
      weights: how often each environment is drawn, default equally.
      error_rates: how often the agent errs.

    Returns:
      An iterator over `Demonstration`s, solved or not.

    Raises:
      ValueError: no environments, or one without train tasks.
    """
    if not envs or not all(env.tasks("train") for env in envs):
        raise ValueError(f"need environments with train tasks, got {len(envs)} environments")
    rng = random.Random(f"demonstrations/{seed}")
    agent = ScriptedAgent(rng, error_rates)
    return (
        demonstrate(env, rng.choice(env.tasks("train")), agent)
        for env in rng.choices(envs, weights=weights, k=num)
    )


def invented_envs(
    num: int, seed: int, *, world: str = "fictional", **config
) -> tuple[DeepSearch, ...]:
    """`num` invented worlds, each another one, all heldout questions left out.

    Args:
      num: how many worlds.
      seed: which worlds; those of two seeds share none.
      world: "fictional" or "shuffled", see `make_deep_search`.
      **config: further arguments of `make_deep_search`, e.g. `hops`, `num_train`.
    """
    config = {"num_heldout": 0, "num_train": 200} | config
    return tuple(
        make_deep_search(world=world, seed=f"{seed}.{number}", **config) for number in range(num)
    )
