"""Deep search in miniature: multi-hop questions over a small corpus, BM25 search, one answer.

The agent calls one tool a turn, as plain text:

    search(query)   up to five results, each with a title and a snippet
    open(doc)       a page: the number of a result, or a title listed or linked before
    answer(text)    ends the episode: 1 if it equals the gold answer, else 0

A model that was trained on tool calls may call the same tools by `DeepSearch.call` instead.

Nothing else is rewarded. What makes it hard is what makes search hard: titles that nearly equal
the one that is meant, several relations on every page, and knowing when the chain is at its end.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from focus.tasks import facts
from focus.tasks import world as worlds
from focus.tasks.base import StepResult, Task

NUM_RESULTS = 5
MIN_RELATIVE_SCORE = 0.5
USAGE = "error: use search(), open() or answer()"
INSTRUCTIONS = (
    "Answer the question. Call one tool a turn: search(query) lists pages, open(doc) shows a "
    "result by its number or a page by its title, answer(text) ends with the short answer. "
    "The call is the last line of a turn; lines before it may be thoughts."
)
# The one parameter of each tool, and what tool and parameter mean.
_TOOLS = {
    "search": ("query", "Lists pages that match a query.", "What to look for."),
    "open": ("doc", "Shows a page.", "Number of a result, or title of a page."),
    "answer": ("text", "Ends the search with the answer.", "The short answer."),
}
_CALL = re.compile(r"\s*(search|open|answer)\s*\(([^()\n]*)\)\s*")
_QUOTED = re.compile(r"^([\"'])(.*)\1$")
# Longer queries only cost time: no title has this many letters.
_MAX_QUERY_CHARS = 200


class SearchIndex:
    """BM25 over pages, by words and by the letter trigrams of titles.

    Trigrams make a misspelt name findable, and make names that look alike compete.

    Args:
      pages: what to index.

    Raises:
      ValueError: there is nothing to index.
    """

    def __init__(self, pages: Sequence[worlds.Page]):
        if not pages:
            raise ValueError("the corpus is empty: give at least one page to index")
        # Not at the top of the module: where JAX is installed, importing bm25s starts a device
        # backend, after which nobody can configure devices any more.
        import bm25s

        logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG
        self._bm25 = bm25s.BM25(k1=1.2, b=0.5, backend="numpy")
        documents = [_terms(page.title) + _words(page.text) for page in pages]
        self._bm25.index(documents, show_progress=False)

    def search(self, query: str, num_results: int) -> tuple[int, ...]:
        """The best pages for `query`, in the order of the corpus.

        Not in the order of their scores: rank would give the right page away, and the task is
        to know it by its title. Pages that score less than `MIN_RELATIVE_SCORE` of the best
        are left out: they would cost tokens and mislead nobody.

        Args:
          query: free text.
          num_results: the most to return.

        Returns:
          Indices into `pages`; () if no word or trigram of the query occurs.
        """
        known = [term for term in _terms(query) if term in self._bm25.vocab_dict]
        if not known:
            return ()
        scores = self._bm25.get_scores(known)
        best = np.argsort(-scores, kind="stable")[:num_results]
        worst_score = MIN_RELATIVE_SCORE * scores[best[0]]
        return tuple(sorted(int(i) for i in best if scores[i] >= worst_score))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _terms(text: str) -> list[str]:
    """Words, their trigrams, and the whole: the term that only the very same title has."""
    words = _words(text)
    padded = [f"<{word}>" for word in words]
    trigrams = [word[i : i + 3] for word in padded for i in range(len(word) - 2)]
    return [*words, *trigrams, "=" + " ".join(words)]


@dataclasses.dataclass(frozen=True, slots=True)
class DeepSearchState:
    """Everything a continuation depends on.

    Attributes:
      task_id: which task.
      answer: its gold answer.
      turn: turns taken.
      results: page indices of the latest search, in the order listed.
      reachable: sorted indices of the pages that may be opened by title.
      outcome: None until the end.
    """

    task_id: str
    answer: str
    turn: int = 0
    results: tuple[int, ...] = ()
    reachable: tuple[int, ...] = ()
    outcome: float | None = None


class DeepSearch:
    """The environment: pure transitions over `DeepSearchState`.

    Args:
      world: facts and pages.
      train: questions of the train split.
      heldout: questions of the heldout split.
      max_turns: the step that takes this turn ends the episode, with outcome 0 unless it is
        the right answer.
      snippet_words: words of a page shown in a result list.
      instructions: whether `system_prompt` explains the tools; a model that was trained on
        demonstrations needs none.

    Raises:
      ValueError: a number is not positive, or the world has no pages.
    """

    name = "deep_search"
    branchable = True

    def __init__(
        self,
        world: worlds.World,
        train: Sequence[worlds.Question],
        heldout: Sequence[worlds.Question],
        *,
        max_turns: int = 7,
        snippet_words: int = 5,
        instructions: bool = False,
    ):
        for field, value in (("max_turns", max_turns), ("snippet_words", snippet_words)):
            if value < 1:
                raise ValueError(f"{field} must be >= 1, got {value}")
        self.world = world
        self.max_turns = max_turns
        self._instructions = instructions
        self._tasks = {
            split: tuple(
                _make_task(f"{split}/{world.name}/{number:05d}", question)
                for number, question in enumerate(questions)
            )
            for split, questions in (("train", train), ("heldout", heldout))
        }
        self._index = SearchIndex(world.pages)
        self._page_of = {worlds.normalise(page.title): i for i, page in enumerate(world.pages)}
        self._links = [
            tuple(self._page_of[worlds.normalise(title)] for title in page.links)
            for page in world.pages
        ]
        self._lines = [_result_line(page, snippet_words) for page in world.pages]

    def tasks(self, split: str) -> tuple[Task, ...]:
        """The tasks of "train" or "heldout", in a fixed order.

        Raises:
          ValueError: there is no such split.
        """
        if split not in self._tasks:
            raise ValueError(f"no split {split!r}: there are {', '.join(self._tasks)}")
        return self._tasks[split]

    def system_prompt(self) -> str:
        """How to call the tools, or "" without `instructions`."""
        return INSTRUCTIONS if self._instructions else ""

    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """JSON schemas of the tools that `call` knows."""
        return tuple(_schema(tool, *of_tool) for tool, of_tool in _TOOLS.items())

    def reset(self, task: Task) -> DeepSearchState:
        """The state before the first turn."""
        return DeepSearchState(task_id=task.id, answer=task.data["answer"])

    def state_key(self, state: DeepSearchState) -> tuple:
        """A hashable identity: states with equal keys have the same futures.

        The same in every process, so it may be stored.
        """
        return dataclasses.astuple(state)

    def step(self, state: DeepSearchState, action: str) -> StepResult:
        """Applies one call. Pure; an action that is no call is answered with an error.

        Args:
          state: any state, never changed.
          action: the policy's text; its last line must be one call, lines before it are thoughts.

        Returns:
          `StepResult` whose `info` has "tool", and where they apply "argument", "documents"
          (titles listed), "opened" (title), "error" ("usage", "page", "result" or "over") and
          "turn_limit".
        """
        call = _CALL.fullmatch(action.rstrip().rpartition("\n")[2])
        if call is None:
            return self.reject(state, USAGE)
        tool, argument = call.group(1), _QUOTED.sub(r"\2", call.group(2).strip())
        return self.call(state, tool, {_TOOLS[tool][0]: argument})

    def reject(self, state: DeepSearchState, reason: str) -> StepResult:
        """A turn that is no call: `reason` is its observation."""
        if state.outcome is not None:
            return self._over(state)
        return self._finish_turn(state, reason, {"tool": None, "error": "usage"})

    def call(self, state: DeepSearchState, name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Calls one tool; as `step`, for an action that has been read already.

        Args:
          state: any state, never changed.
          name: of the tool.
          arguments: values by parameter; a tool or parameters that do not exist are answered
            with an error.
        """
        if state.outcome is not None:
            return self._over(state)
        if name not in _TOOLS:
            return self.reject(state, USAGE)
        parameter = _TOOLS[name][0]
        if set(arguments) != {parameter}:
            return self.reject(state, f"error: {name} has one parameter, {parameter}")
        value = arguments[parameter]
        if not isinstance(value, str | int) or isinstance(value, bool):
            return self.reject(state, f"error: {parameter} must be a string")
        argument = str(value)
        info = {"tool": name, "argument": argument}
        if not argument.strip():
            return self._finish_turn(state, USAGE, info | {"error": "usage"})
        if name == "answer":
            outcome = float(worlds.normalise(argument) == worlds.normalise(state.answer))
            state = dataclasses.replace(state, turn=state.turn + 1, outcome=outcome)
            return StepResult(state, "", done=True, outcome=outcome, info=info)
        if name == "search":
            return self._search(state, argument, info)
        return self._open(state, argument, info)

    def _over(self, state: DeepSearchState) -> StepResult:
        info = {"tool": None, "error": "over"}
        return StepResult(state, "", done=True, outcome=state.outcome, info=info)

    def _search(self, state: DeepSearchState, query: str, info: dict[str, Any]) -> StepResult:
        results = self._index.search(query[:_MAX_QUERY_CHARS], NUM_RESULTS)
        if not results:
            state = dataclasses.replace(state, results=())
            return self._finish_turn(state, "no results", info | {"documents": ()})
        titles = tuple(self.world.pages[i].title for i in results)
        if results == state.results:
            return self._finish_turn(state, "same results", info | {"documents": titles})
        lines = [f"{number} {self._lines[i]}" for number, i in enumerate(results, start=1)]
        state = dataclasses.replace(
            state, results=results, reachable=_union(state.reachable, results)
        )
        return self._finish_turn(state, "\n".join(lines), info | {"documents": titles})

    def _open(self, state: DeepSearchState, document: str, info: dict[str, Any]) -> StepResult:
        number = int(document) if re.fullmatch(r"[0-9]{1,3}", document) else None
        if number is None:
            page_index = self._page_of.get(worlds.normalise(document))
            if page_index not in state.reachable:
                observation = "error: no such page, search first"
                return self._finish_turn(state, observation, info | {"error": "page"})
        elif 1 <= number <= len(state.results):
            page_index = state.results[number - 1]
        else:
            observation = f"error: no result {number}"
            return self._finish_turn(state, observation, info | {"error": "result"})
        page = self.world.pages[page_index]
        state = dataclasses.replace(
            state, reachable=_union(state.reachable, (page_index, *self._links[page_index]))
        )
        return self._finish_turn(state, f"{page.title}: {page.text}", info | {"opened": page.title})

    def _finish_turn(
        self, state: DeepSearchState, observation: str, info: dict[str, Any]
    ) -> StepResult:
        turn = state.turn + 1
        if turn < self.max_turns:
            return StepResult(dataclasses.replace(state, turn=turn), observation, info=info)
        state = dataclasses.replace(state, turn=turn, outcome=0.0)
        info = info | {"turn_limit": True}
        return StepResult(state, observation, done=True, outcome=0.0, info=info)


def _make_task(task_id: str, question: worlds.Question) -> Task:
    data = {
        "answer": question.answer,
        "chain": question.chain,
        "relations": question.relations,
        "hops": question.hops,
    }
    return Task(id=task_id, prompt=question.text, data=data)


def _schema(tool: str, parameter: str, what: str, meaning: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {parameter: {"type": "string", "description": meaning}},
        "required": [parameter],
    }
    function = {"name": tool, "description": what, "parameters": parameters}
    return {"type": "function", "function": function}


def _union(known: tuple[int, ...], new: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({*known, *new}))


def _result_line(page: worlds.Page, snippet_words: int) -> str:
    """The title and the first words of the first sentence; a cut one ends in three dots."""
    words = page.text.split(".")[0].split()
    cut = "..." if len(words) > snippet_words else ""
    return f"{page.title}: {' '.join(words[:snippet_words])}{cut}"


def make_deep_search(
    *,
    world: str = "real",
    seed: int | str = 0,
    num_countries: int = 40,
    hops: tuple[int, int] = (2, 4),
    max_turns: int = 7,
    num_train: int = 2000,
    num_heldout: int = 200,
    snippet_words: int = 5,
    provinces: bool = True,
    lookalikes: int = 3,
    instructions: bool = False,
) -> DeepSearch:
    """Builds a world, draws its questions and returns the environment.

    Args:
      world: "real"; "shuffled", the real names with permuted facts; "fictional"; or the path of
        a JSON file (`facts.read_countries`).
      seed: names, map, distractors and split. Two seeds of "fictional" or
        "shuffled" are two worlds.
      num_countries: size of a fictional world; the others have what their tables have.
      hops: fewest and most relations to follow.
      max_turns: see `DeepSearch`.
      num_train: number of train questions.
      num_heldout: number of heldout questions.
      snippet_words: see `DeepSearch`.
      provinces: whether the world has provinces. Their names are the rarest, and the hardest to
        copy for a small model.
      lookalikes: most distractor pages with a similar title for each entity, 1 to 4.
      instructions: see `DeepSearch`.

    Raises:
      ValueError: facts that cannot be read, or fewer questions than asked for.
    """
    if world == "real":
        name, countries = "real", facts.real_countries(seed)
    elif world == "shuffled":
        real = facts.real_countries(0)
        name, countries = f"shuffled{seed}", facts.shuffled_countries(real, seed)
    elif world == "fictional":
        name, countries = f"fictional{seed}", facts.fictional_countries(seed, num_countries)
    elif world.endswith(".json"):
        name, countries = pathlib.Path(world).stem, facts.read_countries(world)
    else:
        raise ValueError(
            f'world must be "real", "shuffled", "fictional" or a path to .json, got {world!r}'
        )
    if not 1 <= lookalikes <= 4:
        raise ValueError(f"lookalikes must be 1 to 4, got {lookalikes}")
    if not provinces:
        countries = tuple(dataclasses.replace(country, provinces=()) for country in countries)
    questions = worlds.all_questions(countries, hops)
    train, heldout = worlds.split_questions(questions, num_train, num_heldout, seed)
    return DeepSearch(
        worlds.build_world(name, countries, seed, lookalikes=lookalikes),
        train,
        heldout,
        max_turns=max_turns,
        snippet_words=snippet_words,
        instructions=instructions,
    )
