"""Small closed worlds: the pages written about some facts, and multi-hop questions on them.

A world is built in three steps: facts (`facts.Country` records) -> pages (one per entity, plus
invented distractors whose titles nearly equal an entity's) -> questions (chains of relations,
each with exactly one continuation).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import re
from collections.abc import Iterable, Iterator, Sequence

from focus.tasks.facts import COUNTRY_RELATIONS, Country

# Pages and questions use the same words, but for the region ("country in") and for neighbours,
# where "largest" or "smallest" stands right before the name: a short-sighted reader can tell.
NEIGHBOUR_RELATIONS = ("largest neighbour", "smallest neighbour")
STATEMENTS = {relation: relation for relation in COUNTRY_RELATIONS} | {
    "largest neighbour": "neighbours largest",
    "smallest neighbour": "smallest",
}
START_PHRASES = {
    "capital of": "the country whose capital is {}",
    "province of": "the country with province {}",
    "currency of": "the country that uses {}",
    "language of": "the country that speaks {}",
}
DISTRACTOR_KINDS = ("town in", "river in", "lake in", "harbour in", "club in")


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """One document.

    Attributes:
      title: unique in its world.
      text: the body; its first words are the snippet.
      links: titles of the pages that the body names.
      distractor: whether it is invented to be mistaken for another page.
    """

    title: str
    text: str
    links: tuple[str, ...] = ()
    distractor: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A chain of relations to follow.

    Attributes:
      text: as put to the agent.
      chain: the entities, from the one the question names to the answer: hops + 1 of them.
      relations: `relations[i]` leads from `chain[i]` to `chain[i + 1]`.
    """

    text: str
    chain: tuple[str, ...]
    relations: tuple[str, ...]

    @property
    def answer(self) -> str:
        """The last entity of the chain."""
        return self.chain[-1]

    @property
    def hops(self) -> int:
        """Number of relations to follow."""
        return len(self.relations)


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """Facts and the pages written about them."""

    name: str
    countries: tuple[Country, ...]
    pages: tuple[Page, ...]


def normalise(text: str) -> str:
    """What is left of a name when case and spacing don't count."""
    return " ".join(text.casefold().split())


def build_world(
    name: str, countries: Sequence[Country], seed: int | str, *, lookalikes: int = 3
) -> World:
    """Writes the pages of a world.

    Args:
      name: what to call it.
      countries: the facts.
      seed: decides the distractors and the order of the pages.
      lookalikes: most distractors an entity has; it has those or one less.

    Raises:
      ValueError: no countries, a name that is unusable or names two things, or a neighbour
        that is no country of the world.
    """
    if not countries:
        raise ValueError(f"world {name!r} has no countries: give at least one Country record")
    pages = [*_country_pages(countries), *_entity_pages(countries)]
    _check_titles(name, pages)
    rng = random.Random(f"pages/{name}/{seed}")
    pages += _distractor_pages(pages, countries, rng, lookalikes)
    rng.shuffle(pages)
    return World(name=name, countries=tuple(countries), pages=tuple(pages))


def _check_titles(name: str, pages: Sequence[Page]) -> None:
    seen = set()
    for page in pages:
        # These signs are the syntax of pages, result lists and calls.
        if not re.fullmatch(r"[^\W\d_][^():,.\n]*", page.title):
            raise ValueError(
                f"world {name!r}: {page.title!r} is no usable name: it must begin with a letter "
                "and have no brackets, colons, commas, full stops or line breaks"
            )
        if normalise(page.title) in seen:
            raise ValueError(f"world {name!r}: {page.title!r} names two things: rename one")
        seen.add(normalise(page.title))
    for page in pages:
        for title in page.links:
            if normalise(title) not in seen:
                raise ValueError(
                    f"world {name!r}: {page.title!r} has the neighbour {title!r}, which is no "
                    "country of this world: add it or leave it out"
                )


def _country_pages(countries: Sequence[Country]) -> Iterator[Page]:
    for country in countries:
        facts = [f"country in {country.region}" if country.region else "country"]
        if country.capital:
            facts.append(f"capital {country.capital}")
        if country.currencies:
            facts.append(f"currency {', '.join(country.currencies)}")
        if country.languages:
            # Two are enough to show that there is more than one; pages must stay short.
            facts.append(f"language {', '.join(country.languages[:2])}")
        for relation in NEIGHBOUR_RELATIONS:
            if neighbour := country.follow(relation):
                facts.append(f"{STATEMENTS[relation]} {neighbour}")
        links = dict.fromkeys(
            name for relation in COUNTRY_RELATIONS if (name := country.follow(relation)) is not None
        )
        yield Page(country.name, ". ".join(facts) + ".", tuple(links))


def _entity_pages(countries: Sequence[Country]) -> Iterator[Page]:
    for country in countries:
        if country.capital:
            yield Page(country.capital, f"capital of {country.name}.", (country.name,))
        for province in country.provinces:
            yield Page(province, f"province of {country.name}.", (country.name,))
    for kind, users in (("currency", users_of_currency), ("language", users_of_language)):
        for thing, names in users(countries).items():
            if len(names) == 1:
                yield Page(thing, f"{kind} of {names[0]}.", names)
            else:
                yield Page(thing, f"{kind} of {len(names)} countries.")
    for region, number in collections.Counter(c.region for c in countries if c.region).items():
        yield Page(region, f"region of {number} countries.")


def _group(pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    groups: dict[str, tuple[str, ...]] = {}
    for key, value in pairs:
        groups[key] = (*groups.get(key, ()), value)
    return groups


def users_of_currency(countries: Sequence[Country]) -> dict[str, tuple[str, ...]]:
    """Currency -> the countries that pay with it."""
    return _group((currency, c.name) for c in countries for currency in c.currencies)


def users_of_language(countries: Sequence[Country]) -> dict[str, tuple[str, ...]]:
    """Language -> the countries that speak it."""
    return _group((language, c.name) for c in countries for language in c.languages)


def _distractor_pages(
    pages: Sequence[Page], countries: Sequence[Country], rng: random.Random, most: int
) -> list[Page]:
    """Invented pages whose titles nearly equal an entity's: `most` or one less for each."""
    taken = {normalise(page.title) for page in pages}
    distractors = []
    for page in pages:
        for title in rng.sample(_lookalikes(page.title, rng), k=rng.choice((most - 1, most))):
            if normalise(title) in taken:
                continue
            taken.add(normalise(title))
            place = rng.choice(countries).name
            text = f"{rng.choice(DISTRACTOR_KINDS)} {place}."
            distractors.append(Page(title, text, (place,), distractor=True))
    return distractors


def _lookalikes(name: str, rng: random.Random) -> list[str]:
    letters = "aeiou" if not name.isupper() else "BDGKLMNPRSTVXZ"
    spots = [i for i, letter in enumerate(name) if letter in letters]
    respelt = name + "a"
    if spots:
        i = spots[-1]
        other = rng.choice([letter for letter in letters if letter != name[i]])
        respelt = name[:i] + other + name[i + 1 :]
    return [f"New {name}", f"Port {name}", f"{name} {rng.choice(('Bay', 'Falls'))}", respelt]


def all_questions(countries: Sequence[Country], hops: tuple[int, int]) -> list[Question]:
    """Every question with `hops[0]` to `hops[1]` hops that the facts answer uniquely.

    A chain starts at a country, or at a capital, province, currency or language that belongs to
    one country only; it goes over neighbours and ends in any relation. No entity comes twice.

    Raises:
      ValueError: `hops` is not an interval within 1..6.
    """
    low, high = hops
    if not 1 <= low <= high <= 6:
        raise ValueError(f"hops must be (min, max) with 1 <= min <= max <= 6, got {hops}")
    by_name = {country.name: country for country in countries}

    def walk(chain: tuple[str, ...], relations: tuple[str, ...]) -> Iterator[Question]:
        if len(relations) >= low:
            yield Question(phrase(chain[0], relations), chain, relations)
        if len(relations) == high or chain[-1] not in by_name:
            return
        for relation in COUNTRY_RELATIONS:
            target = by_name[chain[-1]].follow(relation)
            if target is not None and target not in chain:
                yield from walk((*chain, target), (*relations, relation))

    questions = []
    for country in countries:
        questions += walk((country.name,), ())
    for thing, relation, country_name in _starts(countries):
        questions += walk((thing, country_name), (relation,))
    # Where both neighbours are one country, two questions have one chain: keep the first.
    return list({question.chain: question for question in reversed(questions)}.values())[::-1]


def _starts(countries: Sequence[Country]) -> Iterator[tuple[str, str, str]]:
    for country in countries:
        if country.capital:
            yield country.capital, "capital of", country.name
        for province in country.provinces:
            yield province, "province of", country.name
    for relation, users in (
        ("currency of", users_of_currency(countries)),
        ("language of", users_of_language(countries)),
    ):
        for thing, names in users.items():
            if len(names) == 1:
                yield thing, relation, names[0]


def phrase(start: str, relations: Sequence[str]) -> str:
    """The question as text, e.g. "currency of the country whose capital is Santiago?"."""
    text, outward = start, relations
    if relations[0] in START_PHRASES:
        text, outward = START_PHRASES[relations[0]].format(start), relations[1:]
    for i, relation in enumerate(outward):
        text = f"{relation} of {'the ' if i else ''}{text}"
    return text + "?"


def split_questions(
    questions: Sequence[Question], num_train: int, num_heldout: int, seed: int | str
) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Draws disjoint train and heldout questions, balanced over hop counts.

    A train question goes if its chain contains a heldout chain or is contained in one, so no
    heldout chain was ever walked in training, not even as a part of a longer walk.

    Returns:
      `(train, heldout)` of the sizes asked for, in a fixed random order.

    Raises:
      ValueError: there are fewer such questions than asked for.
    """
    rng = random.Random(f"split/{seed}")
    heldout = _balanced(questions, num_heldout, rng)
    heldout_chains = {question.chain for question in heldout}
    heldout_parts = {part for chain in heldout_chains for part in subchains(chain)}
    candidates = [
        question
        for question in questions
        if question.chain not in heldout_parts
        and heldout_chains.isdisjoint(subchains(question.chain))
    ]
    train = _balanced(candidates, num_train, rng)
    for name, got, wanted in (("train", train, num_train), ("heldout", heldout, num_heldout)):
        if len(got) < wanted:
            raise ValueError(
                f"num_{name}={wanted}, but the world has only {len(got)} such questions: "
                f"lower num_{name}, allow more hops, or take a world with more countries"
            )
    return tuple(train), tuple(heldout)


def subchains(chain: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The contiguous parts of a chain with two hops or more, the chain itself included."""
    for length in range(3, len(chain) + 1):
        for first in range(len(chain) - length + 1):
            yield chain[first : first + length]


def _balanced(questions: Sequence[Question], num: int, rng: random.Random) -> list[Question]:
    """Up to `num` questions, taken from the hop counts in turn."""
    piles = [
        rng.sample(group, len(group))
        for hops in sorted({question.hops for question in questions})
        if (group := [question for question in questions if question.hops == hops])
    ]
    dealt = [q for layer in itertools.zip_longest(*piles) for q in layer if q is not None]
    chosen = dealt[:num]
    rng.shuffle(chosen)
    return chosen
