"""Deep search: facts, pages, questions, transitions, and the scripted agent."""

import collections
import dataclasses
import json
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from focus.tasks import facts, scripted, world
from focus.tasks.base import Environment, Task
from focus.tasks.deep_search import NUM_RESULTS, SearchIndex, make_deep_search


@pytest.fixture(scope="module")
def real():
    return make_deep_search(world="real", seed=0, num_train=3000, num_heldout=300)


@pytest.fixture(scope="module")
def fictional():
    return make_deep_search(world="fictional", seed=0)


@pytest.fixture(scope="module", params=["real", "fictional"])
def env(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def tiny():
    """Four countries in a row, by hand: what follows from them can be read off."""
    countries = (
        facts.Country("Aland", "North", "Abad", ("Ant",), ("Aric",), ("Bland",), ("Aprov",)),
        facts.Country("Bland", "North", "Bbad", ("Bnt",), ("Bric", "Cric"), ("Cland", "Aland")),
        facts.Country("Cland", "South", "Cbad", ("Cnt",), ("Cric",), ("Dland", "Bland")),
        facts.Country("Dland", "South", "", ("Cnt",), ("Dric",), ("Cland",)),
    )
    return countries


def play(env, task, *actions):
    state, results = env.reset(task), []
    for action in actions:
        results.append(env.step(state, action))
        state = results[-1].state
    return results


# Facts and pages.


def test_real_facts_are_clean_and_true():
    countries = {country.name: country for country in facts.real_countries(0)}
    assert len(countries) > 150
    assert countries["Chile"].follow("currency") == "CLP"  # the fund code CLF is left out
    assert countries["Chile"].follow("capital") == "Santiago"
    assert countries["Portugal"].neighbours == ("Spain",)
    assert countries["Chile"].follow("largest neighbour") == "Argentina"
    assert countries["Bolivia"].follow("language") is None  # it has three
    assert "Serbia and Montenegro" not in countries
    names = [
        name
        for c in countries.values()
        for name in (c.name, c.region, c.capital, *c.provinces, *c.neighbours)
    ]
    assert all(re.fullmatch(r"[A-Za-z' -]*", name) for name in names)


def test_fictional_worlds_are_reproducible_and_differ_by_seed():
    first, again, other = (facts.fictional_countries(seed, 30) for seed in (1, 1, 2))
    assert first == again
    shared = {c.name for c in first} & {c.name for c in other}
    assert len(shared) <= 3
    assert make_deep_search(world="fictional", seed=1).world == (
        make_deep_search(world="fictional", seed=1).world
    )


def test_every_title_is_unique_and_every_entity_has_lookalikes(env):
    titles = collections.Counter(world.normalise(page.title) for page in env.world.pages)
    assert max(titles.values()) == 1
    distractors = sum(page.distractor for page in env.world.pages)
    assert distractors >= 1.8 * (len(env.world.pages) - distractors)


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "cannot read"),
        ("{nonsense", "cannot read"),
        ("[]", "empty"),
        ('{"name": "A"}', "no list"),
        ('[{"region": "R"}]', "name is required"),
        ('[{"name": "A", "currencies": "EUR"}]', "lists of strings"),
        ('[{"name": "A", "population": 3}]', "bad country"),
        ('[{"name": "A (old)"}]', "no usable name"),
        ('[{"name": "A", "capital": "a"}]', "names two things"),
        ('[{"name": "A", "neighbours": ["B"]}]', "no country of this world"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_a_value_error(tmp_path, content, message):
    path = tmp_path / "facts.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        make_deep_search(world=str(path), num_train=0, num_heldout=0)


def test_bad_settings_are_value_errors():
    with pytest.raises(ValueError, match="real"):
        make_deep_search(world="imaginary")
    with pytest.raises(ValueError, match=r"num_train=1000000, but the world has only \d+"):
        make_deep_search(world="fictional", num_train=1_000_000)
    with pytest.raises(ValueError, match="hops"):
        make_deep_search(world="fictional", hops=(3, 2))
    with pytest.raises(ValueError, match="max_turns must be >= 1, got 0"):
        make_deep_search(world="fictional", max_turns=0)
    with pytest.raises(ValueError, match="corpus is empty"):
        SearchIndex(())
    with pytest.raises(ValueError, match="no countries"):
        world.build_world("void", (), 0)
    with pytest.raises(ValueError, match="no split 'test'"):
        make_deep_search(world="fictional").tasks("test")


def test_facts_round_trip_through_a_file(tmp_path, tiny):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps([dataclasses.asdict(country) for country in tiny]))
    assert facts.read_countries(path) == tiny
    env = make_deep_search(world=str(path), num_train=5, num_heldout=0)
    assert env.tasks("train")[0].id == "train/tiny/00000"


# Questions.


def test_questions_of_a_world_small_enough_to_enumerate(tiny):
    asked = {q.text: q.answer for q in world.all_questions(tiny, (2, 3))}
    assert asked["currency of the country whose capital is Abad?"] == "Ant"
    assert asked["currency of the largest neighbour of Bland?"] == "Cnt"
    assert asked["capital of the largest neighbour of the country with province Aprov?"] == "Bbad"
    assert asked["largest neighbour of the largest neighbour of Aland?"] == "Cland"
    # Two countries use Cnt and speak Cric; Bland speaks two languages; Dland has no capital.
    text = "\n".join(asked)
    assert "uses Cnt" not in text and "speaks Cric" not in text
    assert "language of the largest neighbour of Aland?" not in asked
    assert "capital of the largest neighbour of Cland?" not in asked
    assert all(len(set(q.chain)) == len(q.chain) for q in world.all_questions(tiny, (2, 4)))


# The wording of a country's page, written out: what the pages say is not asked of their writer.
SENTENCES = {
    "country in": "region",
    "capital": "capital",
    "currency": "currency",
    "language": "language",
    "neighbours largest": "largest neighbour",
    "smallest": "smallest neighbour",
}


def facts_on_pages(pages):
    """(subject, relation) -> objects, read from the text of the pages alone."""
    triples = collections.defaultdict(set)
    for page in pages:
        for sentence in page.text.rstrip(".").split(". "):
            for beginning, relation in SENTENCES.items():
                if match := re.fullmatch(rf"{beginning} (?!of )(.+)", sentence):
                    triples[page.title, relation] |= set(match.group(1).split(", "))
    for (subject, relation), objects in list(triples.items()):
        for thing in objects if relation in ("capital", "currency", "language") else ():
            triples[thing, f"{relation} of"].add(subject)
    for page in pages:
        if match := re.fullmatch(r"province of (.+)\.", page.text):
            triples[page.title, "province of"].add(match.group(1))
    return triples


def test_every_hop_of_every_question_has_exactly_one_continuation_on_the_pages():
    countries = facts.fictional_countries(3, 10)
    triples = facts_on_pages(world.build_world("w", countries, 3).pages)
    questions = world.all_questions(countries, (2, 4))
    assert len(questions) > 500
    for question in questions:
        reached = {question.chain[0]}
        for relation, expected in zip(question.relations, question.chain[1:]):
            reached = {thing for place in reached for thing in triples[place, relation]}
            assert reached == {expected}, question
        assert reached == {question.answer}


def test_no_question_is_put_in_two_ways_with_two_answers(env):
    answers = collections.defaultdict(set)
    for split in ("train", "heldout"):
        for task in env.tasks(split):
            answers[task.prompt].add(task.data["answer"])
    assert max(map(len, answers.values())) == 1


def test_splits_share_no_chain_nor_a_part_of_one(env):
    train = [task.data["chain"] for task in env.tasks("train")]
    heldout = [task.data["chain"] for task in env.tasks("heldout")]
    assert len(train) >= 2000 and len(heldout) >= 200
    heldout_parts = {part for chain in heldout for part in world.subchains(chain)}
    assert heldout_parts.isdisjoint(train)
    train_parts = {part for chain in train for part in world.subchains(chain)}
    assert train_parts.isdisjoint(heldout)
    ids = [task.id for split in ("train", "heldout") for task in env.tasks(split)]
    assert len(set(ids)) == len(ids)


def test_split_depends_on_the_seed_alone():
    prompts = [
        [task.prompt for task in make_deep_search(world="real", seed=seed).tasks("heldout")]
        for seed in (5, 5, 6)
    ]
    assert prompts[0] == prompts[1] != prompts[2]


@pytest.mark.parametrize("hops", [(2, 4), (2, 2), (3, 4)])
def test_hop_counts_are_those_asked_for_and_balanced(hops):
    env = make_deep_search(world="fictional", hops=hops, num_train=300, num_heldout=30)
    for split in ("train", "heldout"):
        tasks = env.tasks(split)
        counts = collections.Counter(len(task.data["relations"]) for task in tasks)
        assert set(counts) == set(range(hops[0], hops[1] + 1))
        assert max(counts.values()) - min(counts.values()) <= 1
        assert all(len(task.data["chain"]) == task.data["hops"] + 1 for task in tasks)


def test_parsing_a_question_inverts_phrasing_it(env):
    for task in env.tasks("train"):
        expected = (task.data["chain"][0], task.data["relations"])
        assert scripted.parse_question(task.prompt) == expected


# Transitions.


def test_env_is_an_environment(env):
    assert isinstance(env, Environment)
    assert env.system_prompt() == ""
    assert "search(query)" in make_deep_search(world="fictional", instructions=True).system_prompt()


def test_search_lists_the_page_meant_at_no_telling_rank(env):
    task = env.tasks("train")[0]
    ranks = collections.Counter()
    for page in env.world.pages:
        if not page.distractor:
            (result,) = play(env, task, f"search({page.title})")
            documents = result.info["documents"]
            assert len(documents) <= NUM_RESULTS
            assert result.observation.count("\n") == len(documents) - 1
            ranks[documents.index(page.title)] += 1
    assert max(ranks.values()) < 0.45 * sum(ranks.values())


def test_a_misspelt_name_is_found(fictional):
    found = 0
    countries = fictional.world.countries
    for country in countries:
        query = country.name[:-2] + "x" + country.name[-1]
        (result,) = play(fictional, fictional.tasks("train")[0], f"search({query})")
        found += country.name in result.info["documents"]
    assert found > 0.4 * len(countries)


def test_stepping_twice_from_one_state_is_the_same_and_leaves_it_alone(env):
    task = env.tasks("train")[1]
    start = task.data["chain"][0]
    for result in play(env, task, f"search({start})", "open(1)", "foo"):
        state, key = result.state, env.state_key(result.state)
        first = [env.step(state, a) for a in ("open(2)", f"search({task.data['answer']})", "x")]
        again = [env.step(state, a) for a in ("open(2)", f"search({task.data['answer']})", "x")]
        assert first == again
        assert env.state_key(state) == key and hash(state) == hash(result.state)


def test_state_key_tells_states_with_different_futures_apart(env):
    task, other = env.tasks("train")[:2]
    start = task.data["chain"][0]
    keys = {
        env.state_key(env.reset(task)),
        env.state_key(env.reset(other)),
        env.state_key(play(env, task, f"search({start})")[-1].state),
        env.state_key(play(env, task, "foo")[-1].state),
        env.state_key(play(env, task, "foo", f"search({start})")[-1].state),
        env.state_key(play(env, task, "answer(foo)")[-1].state),
    }
    assert len(keys) == 6
    one, two = (play(env, task, action)[-1].state for action in ("foo", "bar"))
    assert env.state_key(one) == env.state_key(two)


def test_open_takes_result_numbers_and_titles_listed_or_linked_and_nothing_else(fictional):
    countries = {c.name: c for c in fictional.world.countries}
    country = next(c for c in countries.values() if len(c.neighbours) >= 2)
    task, neighbour = fictional.tasks("train")[0], country.neighbours[0]
    searched = play(fictional, task, f"search({country.name})")[-1]
    number = searched.info["documents"].index(country.name) + 1
    by_number = fictional.step(searched.state, f"open({number})")
    by_title = fictional.step(searched.state, f"open( '{country.name.upper()}' )")
    assert by_number.observation == by_title.observation
    assert by_number.info["opened"] == country.name
    assert f"neighbours largest {neighbour}." in by_number.observation
    assert fictional.step(by_number.state, f"open({neighbour})").info["opened"] == neighbour
    early = play(fictional, task, f"open({country.name})")[-1]
    assert early.info["error"] == "page"
    assert fictional.step(searched.state, "open(6)").info["error"] == "result"
    nothing = fictional.step(searched.state, "search(???)")
    assert nothing.observation == "no results"
    assert fictional.step(nothing.state, "open(1)").info["error"] == "result"
    assert fictional.step(searched.state, f"search({country.name})").observation == "same results"


@pytest.mark.parametrize(
    "action, error",
    [
        ("", "usage"),
        ("find(Chile)", "usage"),
        ("search(Chile", "usage"),
        ("search Chile", "usage"),
        ("search()", "usage"),
        ("open(' ')", "usage"),
        ("I think: search(Chile)", "usage"),
        ("answer(a) answer(b)", "usage"),
        ("open(0)", "result"),
        ("open(1)", "result"),
        ("open(-1)", "page"),
        ("open(Nowhere)", "page"),
        ("open(\u0663)", "page"),
    ],
)
def test_a_bad_action_is_answered_with_an_error_and_costs_its_turn(env, action, error):
    before = env.reset(env.tasks("train")[0])
    result = env.step(before, action)
    assert result.observation.startswith("error: ")
    assert result.info["error"] == error
    assert (result.done, result.outcome, result.reward) == (False, None, 0.0)
    assert result.state == dataclasses.replace(before, turn=1)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.text(max_size=40) | st.from_regex(r"(search|open)\(.{0,12}\)"), max_size=8))
def test_no_action_raises_or_scores(actions):
    env = _FUZZED
    state = env.reset(env.tasks("train")[0])
    for action in actions:
        result = env.step(state, action)
        state = result.state
        assert result.outcome in (None, 0.0)
        assert result.done == (result.outcome is not None)
        assert state.turn <= env.max_turns


_FUZZED = make_deep_search(world="fictional", num_countries=8, num_train=10, num_heldout=0)


def test_calls_with_arguments_do_what_the_same_calls_as_text_do(fictional):
    task = fictional.tasks("train")[0]
    name, _ = scripted.parse_question(task.prompt)
    calls = [("search", "query", name), ("open", "doc", 1), ("answer", "text", task.data["answer"])]
    assert [call[:2] for call in calls] == [
        (tool["function"]["name"], *tool["function"]["parameters"]["required"])
        for tool in fictional.tools()
    ]
    state = fictional.reset(task)
    for tool, parameter, value in calls:
        result = fictional.call(state, tool, {parameter: value})
        assert result == fictional.step(state, f"{tool}({value})")
        state = result.state
    assert result.outcome == 1.0
    # Text has no parentheses to escape here.
    quoted = fictional.call(fictional.reset(task), "search", {"query": f"({name})"})
    assert quoted.info["documents"]


@pytest.mark.parametrize(
    ("tool", "arguments", "reason"),
    [
        ("find", {"query": "x"}, r"use search\(\), open\(\) or answer\(\)"),
        ("search", {}, "search has one parameter, query"),
        ("search", {"query": "x", "k": 3}, "search has one parameter, query"),
        ("open", {"doc": ["x"]}, "doc must be a string"),
        ("answer", {"text": True}, "text must be a string"),
        ("answer", {"text": " "}, "use search"),
    ],
)
def test_a_bad_call_is_answered_with_an_error_and_costs_its_turn(
    fictional, tool, arguments, reason
):
    state = fictional.reset(fictional.tasks("train")[0])
    result = fictional.call(state, tool, arguments)
    assert re.search(reason, result.observation) and not result.done
    assert (result.state.turn, result.info["error"]) == (1, "usage")


def test_the_answer_must_match_up_to_case_and_spacing(env):
    task = next(task for task in env.tasks("train") if len(task.data["answer"]) > 4)
    gold = task.data["answer"]
    for right in (gold, gold.upper(), f"  {gold} ", f'"{gold}"', f"\n{gold}\n".strip()):
        (result,) = play(env, task, f"answer({right})")
        assert (result.done, result.outcome, result.observation) == (True, 1.0, "")
    for wrong in (gold[:-1], f"{gold} {gold}", f"the {gold}", task.data["chain"][-2]):
        (result,) = play(env, task, f"answer({wrong})")
        assert (result.done, result.outcome) == (True, 0.0)


def test_text_that_a_tool_printed_is_never_scored(env):
    """Pitfall 6: the gold answer in an observation, or in a query, is worth nothing."""
    task = env.tasks("train")[0]
    gold = task.data["answer"]
    results = play(env, task, f"search({gold})", f"open({gold})", f"search(answer {gold})")
    assert any(gold in result.observation for result in results)
    assert all(result.outcome is None and result.reward == 0 for result in results)
    results = play(env, task, *[f"search({gold} {i})" for i in range(env.max_turns)])
    assert results[-1].outcome == 0.0


def test_the_turn_limit_ends_the_episode_and_an_answer_on_the_last_turn_counts(env):
    task = env.tasks("train")[0]
    *earlier, last = play(env, task, *["foo"] * env.max_turns)
    assert not any(result.done for result in earlier)
    assert (last.done, last.outcome) == (True, 0.0)
    assert last.info["turn_limit"]
    answer = f"answer({task.data['answer']})"
    late = env.step(earlier[-1].state, answer)
    assert late.outcome == 1.0 and "turn_limit" not in late.info
    over = env.step(last.state, answer)
    assert (over.done, over.outcome, over.info["error"]) == (True, 0.0, "over")
    assert over.state == last.state


# The scripted agent.


@pytest.mark.parametrize("snippet_words, max_turns", [(3, 8), (5, 7)])
@pytest.mark.parametrize("kind", ["real", "fictional"])
def test_without_errors_every_task_is_solved(kind, snippet_words, max_turns):
    env = make_deep_search(world=kind, snippet_words=snippet_words, max_turns=max_turns)
    agent = scripted.ScriptedAgent(random.Random(0), scripted.NO_ERRORS)
    for split in ("train", "heldout"):
        for task in env.tasks(split):
            assert scripted.demonstrate(env, task, agent).outcome == 1.0, task


def test_with_default_errors_a_quarter_is_solved_and_longer_chains_less_often(env):
    episodes = list(scripted.demonstrations([env], 1500, 0))
    assert 0.2 <= np.mean([episode.outcome for episode in episodes]) <= 0.35
    by_hops = [
        np.mean([e.outcome for e in episodes if e.task.data["hops"] == hops]) for hops in (2, 3, 4)
    ]
    assert by_hops[0] > by_hops[1] > by_hops[2] > 0.03


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(scripted.ErrorRates)])
def test_each_error_alone_is_made_and_costs_success_or_turns(field, fictional):
    rates = dataclasses.replace(scripted.NO_ERRORS, **{field: 0.3})
    erring = list(scripted.demonstrations([fictional], 300, 0, error_rates=rates))
    clean = list(scripted.demonstrations([fictional], 300, 0, error_rates=scripted.NO_ERRORS))
    turns = [np.mean([len(e.actions) for e in episodes]) for episodes in (erring, clean)]
    outcome = np.mean([episode.outcome for episode in erring])
    assert outcome < 0.9 or turns[0] > 1.15 * turns[1]
    assert outcome > 0.1  # it recovers often enough to be worth imitating


def test_a_dead_end_sends_the_agent_back_to_where_it_went_wrong():
    class ErrsAtFirst(random.Random):
        calls = 0

        def random(self):
            self.calls += 1
            return 0.0 if self.calls <= 3 else 0.9

    rates = dataclasses.replace(scripted.NO_ERRORS, wrong_relation=0.5)
    agent = scripted.ScriptedAgent(ErrsAtFirst(), rates)
    agent.reset("capital of the largest neighbour of Aland?")
    page = "Aland: country in North. neighbours largest Bland. smallest Cland."
    assert agent.act("") == "search(Aland)"
    assert agent.act(page) == "largest Cland\nopen(Cland)"
    dead_end = "Cland: country in South. currency Cnt."
    assert agent.act(dead_end) == "largest Bland\nopen(Bland)"
    assert agent.act("Bland: country in South. capital Bbad.") == "capital Bbad\nanswer(Bbad)"


def test_the_agent_never_looks_at_the_gold_data(fictional):
    for number, task in enumerate(fictional.tasks("train")[:50]):
        blind = Task(task.id, task.prompt, {"answer": "unknowable"})
        agents = [scripted.ScriptedAgent(random.Random(number)) for _ in range(2)]
        seen, unseen = (
            scripted.demonstrate(fictional, t, agent) for t, agent in zip((task, blind), agents)
        )
        assert seen.actions == unseen.actions
        assert unseen.outcome == 0.0


def test_every_name_an_agent_uses_was_in_its_context(env):
    for episode in scripted.demonstrations([env], 300, 1):
        context = episode.task.prompt
        for action, observation in zip(episode.actions, episode.observations):
            names = re.findall(r"\b[A-Z][\w'-]*", action)
            assert all(name in context for name in names), (context, action)
            context += "\n" + observation


def test_demonstrations_are_reproducible_and_mix_worlds(fictional):
    worlds = scripted.invented_envs(3, seed=0, num_countries=12, num_train=50)
    assert len({env.world.name for env in worlds}) == 3
    draws = [list(scripted.demonstrations([fictional, *worlds], 60, s)) for s in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert len({episode.task.id.split("/")[1] for episode in draws[0]}) == 4
    assert all(episode.task.id.startswith("train/") for episode in draws[0])
    only = scripted.demonstrations([fictional, *worlds], 20, 0, weights=[1, 0, 0, 0])
    assert {episode.task.id.split("/")[1] for episode in only} == {fictional.world.name}
    with pytest.raises(ValueError, match="train tasks"):
        scripted.demonstrations([], 1, 0)
    with pytest.raises(ValueError, match="repeat must be in"):
        scripted.ErrorRates(repeat=1.5)


def as_text(episode):
    turns = zip(episode.actions, episode.observations)
    return episode.task.prompt + "\n" + "".join(f"{a}\n{o}\n" for a, o in turns)


def test_episodes_fit_a_small_context(env):
    erring = [as_text(e) for e in scripted.demonstrations([env], 1500, 0)]
    clean = scripted.demonstrations([env], 500, 0, error_rates=scripted.NO_ERRORS)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=768, show_progress=False)
    tokenizer.train_from_iterator(erring, trainer)
    lengths, clean_lengths = (
        np.array([len(tokenizer.encode(text).ids) for text in texts])
        for texts in (erring, map(as_text, clean))
    )
    assert 100 < lengths.mean() < 230
    assert np.mean(lengths > 384) < 0.01
    assert clean_lengths.max() <= 352


def test_shuffled_world_keeps_the_names_and_changes_the_facts():
    real = facts.real_countries(0)
    shuffled = facts.shuffled_countries(real, 1)
    assert facts.shuffled_countries(real, 1) == shuffled
    assert facts.shuffled_countries(real, 2) != shuffled
    for kind in ("name", "capital", "region"):
        assert {getattr(c, kind) for c in shuffled} == {getattr(c, kind) for c in real}
    capital_of = {c.name: c.capital for c in real}
    kept = np.mean([capital_of[c.name] == c.capital for c in shuffled if c.capital])
    assert kept < 0.05
    world.build_world("shuffled", shuffled, 0)  # titles stay unique, neighbours exist


def test_world_without_provinces_has_no_page_and_no_question_about_one():
    env = make_deep_search(provinces=False, num_train=300, num_heldout=50)
    assert not any("province" in page.text for page in env.world.pages)
    assert not any("province" in task.prompt for task in env.tasks("train"))


def test_lookalikes_bounds_the_distractors_of_an_entity():
    few = make_deep_search(world="fictional", num_train=20, num_heldout=0, lookalikes=1)
    many = make_deep_search(world="fictional", num_train=20, num_heldout=0, lookalikes=4)
    count = [sum(page.distractor for page in env.world.pages) for env in (few, many)]
    assert 0 < count[0] < count[1] / 2
    with pytest.raises(ValueError, match="lookalikes must be 1 to 4, got 0"):
        make_deep_search(world="fictional", num_train=20, num_heldout=0, lookalikes=0)


def test_thoughts_stand_before_the_call_and_are_not_scored():
    env = make_deep_search(world="fictional", num_train=20, num_heldout=0)
    task = env.tasks("train")[0]
    gold = task.data["answer"]
    thought = env.step(env.reset(task), f"language {gold}\nanswer({gold})")
    assert thought.done and thought.outcome == 1.0
    only_thought = env.step(env.reset(task), f"answer({gold})\nthat was it")
    assert not only_thought.done and only_thought.info["error"] == "usage"
    wrong = env.step(env.reset(task), f"answer({gold})\nanswer(nonsense)")
    assert wrong.outcome == 0.0


def test_scaled_error_rates_err_less_often():
    rates = scripted.ErrorRates().scaled(0.5)
    assert rates.near_duplicate == 0.5 * scripted.ErrorRates().near_duplicate
    with pytest.raises(ValueError, match="must be in"):
        scripted.ErrorRates().scaled(5.0)
