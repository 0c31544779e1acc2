"""Facts about countries: real, shuffled, invented, and read from a file.

The real ones come from the PyPI package `countryinfo` (MIT licence). Invented worlds have the
same shape and any number of them exists, so that what is learnt cannot be a memory of names.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import pathlib
import random
import re
import unicodedata
from collections.abc import Callable

# Relations that lead from a country to one thing.
COUNTRY_RELATIONS = (
    "capital",
    "currency",
    "language",
    "region",
    "largest neighbour",
    "smallest neighbour",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Country:
    """The facts about one country.

    Attributes:
      name: unique in its world, and no other entity's name.
      region: the region it lies in, "" if unknown.
      capital: its capital, "" if unknown or if another entity has that name.
      currencies: what is paid with; more than one is ambiguous and never asked for.
      languages: likewise.
      neighbours: bordering countries, largest first; () if unknown or none.
      provinces: some of its provinces, each name unique in the world.
    """

    name: str
    region: str = ""
    capital: str = ""
    currencies: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    neighbours: tuple[str, ...] = ()
    provinces: tuple[str, ...] = ()

    def follow(self, relation: str) -> str | None:
        """The one thing `relation` leads to, None if there is none or more than one."""
        values = {
            "capital": (self.capital,) if self.capital else (),
            "currency": self.currencies,
            "language": self.languages,
            "region": (self.region,) if self.region else (),
            "largest neighbour": self.neighbours[:1],
            "smallest neighbour": self.neighbours[-1:],
        }[relation]
        return values[0] if len(values) == 1 else None


def fictional_countries(seed: int | str, num_countries: int) -> tuple[Country, ...]:
    """Invents countries: places on a map, pronounceable names, one sound per world.

    Raises:
      ValueError: fewer than 4 countries, too few for chains of neighbours.
    """
    if num_countries < 4:
        raise ValueError(f"num_countries must be >= 4, got {num_countries}")
    rng = random.Random(f"fictional/{seed}")
    new_name = _namer(rng)
    names = [new_name() for _ in range(num_countries)]
    regions = [new_name() for _ in range(max(2, num_countries // 6))]
    shared_currency, shared_language = new_name(), new_name()
    positions = [(rng.random(), rng.random()) for _ in names]
    centres = [(rng.random(), rng.random()) for _ in regions]
    areas = [rng.random() for _ in names]

    def distance(a, b):
        return (a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2

    borders = [set() for _ in names]
    for i, here in enumerate(positions):
        others = sorted(range(num_countries), key=lambda j: distance(here, positions[j]))
        for j in others[1 : rng.choice((2, 3, 4))]:
            borders[i].add(j)
            borders[j].add(i)
    countries = []
    for i, name in enumerate(names):
        nearest = min(range(len(regions)), key=lambda r: distance(positions[i], centres[r]))
        own_currency, own_language = new_name(), new_name()
        countries.append(
            Country(
                name=name,
                region=regions[nearest],
                capital=new_name(),
                currencies=(shared_currency,) if rng.random() < 0.2 else (own_currency,),
                languages=_languages(own_language, shared_language, rng),
                neighbours=tuple(names[j] for j in sorted(borders[i], key=lambda j: -areas[j])),
                provinces=tuple(new_name() for _ in range(rng.choice((1, 2, 3)))),
            )
        )
    return tuple(countries)


def shuffled_countries(countries: tuple[Country, ...], seed: int | str) -> tuple[Country, ...]:
    """The same names with other facts: every kind of name is permuted among its own.

    Who has learnt to read answers questions about such a world as well as about the real one;
    who has learnt facts by heart does not.

    Args:
      countries: whose names and map to take.
      seed: which permutation.
    """
    rng = random.Random(f"shuffled/{seed}")

    def permutation(names: set[str]) -> dict[str, str]:
        ordered = sorted(names)
        return dict(zip(ordered, rng.sample(ordered, len(ordered)), strict=True))

    country = permutation({c.name for c in countries})
    capital = permutation({c.capital for c in countries} - {""}) | {"": ""}
    region = permutation({c.region for c in countries} - {""}) | {"": ""}
    currency = permutation(set(itertools.chain(*(c.currencies for c in countries))))
    language = permutation(set(itertools.chain(*(c.languages for c in countries))))
    province = permutation(set(itertools.chain(*(c.provinces for c in countries))))
    return tuple(
        Country(
            name=country[c.name],
            region=region[c.region],
            capital=capital[c.capital],
            currencies=tuple(currency[x] for x in c.currencies),
            languages=tuple(language[x] for x in c.languages),
            neighbours=tuple(country[x] for x in c.neighbours),
            provinces=tuple(province[x] for x in c.provinces),
        )
        for c in countries
    )


def _languages(own: str, shared: str, rng: random.Random) -> tuple[str, ...]:
    return rng.choices([(own,), (shared,), (own, shared)], weights=(6, 2, 2))[0]


def _namer(rng: random.Random) -> Callable[[], str]:
    """A source of unique names that share a few consonants and vowels, as a language does."""
    onsets = rng.sample("b c d f g h j k l m n p r s t v w z br dr kr st th tr".split(), 10)
    vowels = rng.sample("aeiou", 4)
    codas = rng.sample("l m n r s t nd ng rk sh".split(), 4) + [""] * 8
    taken = set()

    def new_name() -> str:
        while True:
            syllables = rng.choice((2, 2, 3))
            name = "".join(rng.choice(onsets) + rng.choice(vowels) for _ in range(syllables))
            name = (name + rng.choice(codas)).title()
            if name not in taken:
                taken.add(name)
                return name

    return new_name


MAX_NAME_CHARS = 18
MAX_CITY_CHARS = 13
MAX_PROVINCE_CHARS = 10
PROVINCES_PER_COUNTRY = 4

# ISO 4217 codes in the table that are units of account or fund codes: nobody pays with them.
_NOT_MONEY = {"CLF", "UYI", "USN", "USS", "CHE", "CHW", "BOV", "MXV"}
_EVERYDAY_NAMES = {
    "Democratic Republic of the Congo": "DR Congo",
    "Republic of the Congo": "Congo",
    "Republic of Macedonia": "Macedonia",
    "Bosnia and Herzegovina": "Bosnia",
    "Central African Republic": "Central Africa",
    "United Arab Emirates": "Emirates",
    "Trinidad and Tobago": "Trinidad",
    "Antigua and Barbuda": "Antigua",
    "Vatican City State": "Vatican",
    "The Bahamas": "Bahamas",
    "The Gambia": "Gambia",
    "Latin America and the Caribbean": "Latin America",
    "Australia and New Zealand": "Australasia",
    "South-Eastern Asia": "South-eastern Asia",
}
_DISSOLVED = {"Serbia and Montenegro"}
# Codes that the table uses against ISO 639-1 are read as the table means them (rs: Serbian).
_LANGUAGE_NAMES = dict(
    pair.split("=")
    for pair in """
    af=Afrikaans am=Amharic ar=Arabic ay=Aymara az=Azerbaijani be=Belarusian bg=Bulgarian
    bi=Bislama bn=Bengali bs=Bosnian ca=Catalan ch=Chamorro cnr=Montenegrin cs=Czech da=Danish
    de=German dv=Dhivehi dz=Dzongkha el=Greek en=English es=Spanish et=Estonian fa=Persian
    ff=Fula fi=Finnish fj=Fijian fo=Faroese fr=French ga=Irish gn=Guarani gv=Manx he=Hebrew
    hi=Hindi hr=Croatian ht=Haitian hu=Hungarian hy=Armenian id=Indonesian is=Icelandic
    it=Italian ja=Japanese ka=Georgian kg=Kongo kk=Kazakh kl=Greenlandic km=Khmer ko=Korean
    ku=Kurdish ky=Kyrgyz la=Latin lb=Luxembourgish ln=Lingala lo=Lao lt=Lithuanian lu=Luba
    lv=Latvian mg=Malagasy mh=Marshallese mi=Maori mk=Macedonian mn=Mongolian ms=Malay
    mt=Maltese my=Burmese na=Nauruan nb=Bokmal nd=Ndebele ne=Nepali nl=Dutch nn=Nynorsk
    no=Norwegian nr=Ndebele ny=Chichewa oc=Occitan pa=Papiamento pl=Polish ps=Pashto
    pt=Portuguese qu=Quechua rn=Kirundi ro=Romanian rs=Serbian ru=Russian rw=Kinyarwanda
    sg=Sango si=Sinhala sk=Slovak sl=Slovene sm=Samoan sn=Shona so=Somali sq=Albanian sr=Serbian
    ss=Swazi st=Sotho sv=Swedish sw=Swahili ta=Tamil tg=Tajik th=Thai ti=Tigrinya tk=Turkmen
    tn=Tswana to=Tongan tr=Turkish ts=Tsonga uk=Ukrainian ur=Urdu uz=Uzbek ve=Venda
    vi=Vietnamese xh=Xhosa zh=Chinese zu=Zulu
    """.split()
)


def real_countries(seed: int | str) -> tuple[Country, ...]:
    """The world's countries, cleaned, from the package `countryinfo` (MIT licence).

    Left out: entries without currency, language, region or area, dissolved states, and names
    that are long or name two things. Borders count where both sides list them; a country with
    a neighbour that was left out has no neighbours here, because its largest is not known.

    Args:
      seed: which of the many provinces are taken.

    Raises:
      ValueError: the package is missing or holds no countries.
    """
    try:
        import countryinfo
    except ImportError as error:
        raise ValueError(
            "the real world needs the package countryinfo: `pip install countryinfo`, "
            'or use world="fictional"'
        ) from error
    rng = random.Random(f"real/{seed}")
    records = {}
    for entry in countryinfo.all_countries():
        name = _clean(entry.name())
        complete = entry.currencies() and entry.languages() and entry.subregion() and entry.area()
        if name and complete and entry.name() not in _DISSOLVED:
            records[entry.iso(3)] = (name, entry)
    capitals = {
        code: _clean(entry.capital(), MAX_CITY_CHARS) for code, (_, entry) in records.items()
    }
    provinces = {
        code: sorted({_clean(p, MAX_PROVINCE_CHARS) for p in entry.provinces()} - {""})
        for code, (_, entry) in records.items()
    }
    # A name that denotes two things makes a question ambiguous: the lesser of the two goes.
    uses = collections.Counter(capital.casefold() for capital in capitals.values())
    uses.update(name.casefold() for name, _ in records.values())
    uses.update(language.casefold() for language in _LANGUAGE_NAMES.values())
    uses.update({_clean(entry.subregion()).casefold() for _, entry in records.values()})
    uses.update({code.casefold() for _, entry in records.values() for code in entry.currencies()})
    province_uses = uses + collections.Counter(
        province.casefold() for province in itertools.chain(*provinces.values())
    )
    countries = []
    for code, (name, entry) in records.items():
        pool = [province for province in provinces[code] if province_uses[province.casefold()] == 1]
        capital = capitals[code] if uses[capitals[code].casefold()] == 1 else ""
        countries.append(
            Country(
                name=name,
                region=_clean(entry.subregion()),
                capital=capital,
                currencies=tuple(c for c in entry.currencies() if c not in _NOT_MONEY),
                languages=_language_names(entry.languages()),
                neighbours=_real_neighbours(code, records),
                provinces=tuple(rng.sample(pool, min(PROVINCES_PER_COUNTRY, len(pool)))),
            )
        )
    if not countries:
        raise ValueError("countryinfo holds no countries: reinstall it, or use world='fictional'")
    return tuple(countries)


def _language_names(codes: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_LANGUAGE_NAMES.get(code, code) for code in codes))


def _real_neighbours(code: str, records) -> tuple[str, ...]:
    borders = records[code][1].borders()
    if any(other not in records or code not in records[other][1].borders() for other in borders):
        return ()
    ordered = sorted(borders, key=lambda other: -records[other][1].area())
    return tuple(records[other][0] for other in ordered)


def _clean(name: str | None, max_chars: int = MAX_NAME_CHARS) -> str:
    """Plain ASCII, no full stops; "" for names too long, listed, bracketed or not Latin."""
    if not isinstance(name, str):
        return ""
    name = _EVERYDAY_NAMES.get(name, name)
    name = name.replace("St. ", "Saint ").replace(" D.C.", "").replace("ı", "i")
    name = unicodedata.normalize("NFKD", name)
    name = "".join(letter for letter in name if not unicodedata.combining(letter)).strip()
    if not re.fullmatch(r"[A-Za-z][A-Za-z' -]*", name):
        return ""
    return name if len(name) <= max_chars and len(name.split()) <= 3 else ""


def read_countries(path: str | pathlib.Path) -> tuple[Country, ...]:
    """Reads facts from a JSON file: a list of objects with the fields of `Country`.

    Raises:
      ValueError: the file cannot be read, is no such list, or is empty.
    """
    try:
        rows = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot read facts from {str(path)!r} ({error}): give a JSON list of countries"
        ) from error
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{str(path)!r} holds no list of countries, or an empty one")
    return tuple(_read_country(row, path) for row in rows)


def _read_country(row, path: str | pathlib.Path) -> Country:
    texts = {field.name for field in dataclasses.fields(Country) if field.type == "str"}
    lists = {field.name for field in dataclasses.fields(Country)} - texts
    if not (
        isinstance(row, dict)
        and "name" in row
        and row.keys() <= texts | lists
        and all(isinstance(row[key], str) for key in row.keys() & texts)
        and all(isinstance(row[key], list) for key in row.keys() & lists)
        and all(isinstance(item, str) for key in row.keys() & lists for item in row[key])
    ):
        raise ValueError(
            f"bad country {row!r} in {str(path)!r}: name is required; strings are "
            f"{', '.join(sorted(texts))}; lists of strings are {', '.join(sorted(lists))}"
        )
    return Country(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})
